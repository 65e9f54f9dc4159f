"""`merge-models` as a user runs it, against mergekit and against definitions."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import make_app
from milepost.errors import FormatError, InvalidInputError
from milepost.tools.merge_models import merge_models
from milepost.tools.merging.recipe import recipe_from_yaml
from milepost.tools.rewrite.options import Mode, RewriteOptions
from milepost.tools.rewrite.report import RewriteReport
from tests.tools.merge_models.merging import FAST, command, weights, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("models")
    return [write_model(place / f"m{seed}", seed, dtype=torch.float32) for seed in range(4)]


def by_mergekit(document: dict[str, Any], out: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own affair
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge
        from mergekit.options import MergeOptions

        full = {**document, "dtype": "float32", "out_dtype": "bfloat16"}
        options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
        run_merge(MergeConfiguration.model_validate(full), str(out), options)
    found: dict[str, Tensor] = {}
    for part in out.glob("*.safetensors"):
        found |= load_file(part)
    return found


def merged(document: dict[str, Any], place: Path) -> RewriteReport:
    (place / "merge.yaml").write_text(yaml.safe_dump(document))
    recipe = recipe_from_yaml(place / "merge.yaml")
    return merge_models(recipe, place / "ours", options=FAST)


def documents(models: list[Path]) -> dict[str, dict[str, Any]]:
    m0, m1, m2, m3 = (str(path) for path in models)
    three = [
        {"model": m, "parameters": {"weight": w}} for m, w in ((m1, 0.6), (m2, 0.3), (m3, 0.4))
    ]
    dense = [{**m, "parameters": {**m["parameters"], "density": 0.4}} for m in three]  # type: ignore[dict-item]
    depth = {
        "t": [
            {"filter": "self_attn", "value": [0, 0.5, 1]},
            {"filter": "mlp", "value": [1, 0.2]},
            {"value": 0.5},
        ]
    }
    return {
        "linear": {"merge_method": "linear", "models": three},
        "slerp": {
            "merge_method": "slerp",
            "base_model": m0,
            "models": [{"model": m0}, {"model": m1}],
            "parameters": depth,
        },
        "task_arithmetic": {
            "merge_method": "task_arithmetic",
            "base_model": m0,
            "models": three,
            "parameters": {"lambda": 0.7},
        },
        "ties": {"merge_method": "ties", "base_model": m0, "models": dense},
        "breadcrumbs": {"merge_method": "breadcrumbs", "base_model": m0, "models": dense},
        "breadcrumbs_ties": {"merge_method": "breadcrumbs_ties", "base_model": m0, "models": dense},
        "model_stock": {
            "merge_method": "model_stock",
            "base_model": m0,
            "models": [{"model": m} for m in (m1, m2, m3)],
        },
        "nuslerp": {"merge_method": "nuslerp", "models": three[:2]},
        "multislerp": {"merge_method": "multislerp", "models": three},
        "karcher": {"merge_method": "karcher", "models": [{"model": m} for m in (m1, m2, m3)]},
        "sce": {
            "merge_method": "sce",
            "base_model": m0,
            "models": [{"model": m} for m in (m1, m2, m3)],
            "parameters": {"select_topk": 0.5},
        },
        "passthrough": {
            "merge_method": "passthrough",
            "slices": [
                {"sources": [{"model": m0, "layer_range": [0, 2]}]},
                {"sources": [{"model": m1, "layer_range": [1, 3]}]},
            ],
        },
        "layers": {
            "merge_method": "linear",
            "slices": [
                {
                    "sources": [
                        {"model": m1, "layer_range": [0, 3], "parameters": {"weight": [1, 0]}},
                        {"model": m2, "layer_range": [0, 3], "parameters": {"weight": [0, 1]}},
                    ]
                }
            ],
        },
    }


EXACT = ("linear", "task_arithmetic", "ties", "breadcrumbs", "breadcrumbs_ties", "passthrough")


@pytest.mark.parametrize(
    "name",
    [
        *("linear", "slerp", "task_arithmetic", "ties", "breadcrumbs", "breadcrumbs_ties"),
        *("model_stock", "nuslerp", "multislerp", "karcher", "sce", "passthrough", "layers"),
    ],
)
def test_a_merge_is_that_of_mergekit_in_fp32(name: str, models: list[Path], tmp_path: Path) -> None:
    document = documents(models)[name]
    expected = by_mergekit(document, tmp_path / "theirs")
    report = merged({**document, "out_dtype": "bfloat16"}, tmp_path)
    found = weights(report.path)
    assert found.keys() == expected.keys()
    differing = sum(int((found[n] != expected[n]).sum()) for n in found)
    allowed = 0 if name in EXACT else sum(t.numel() for t in found.values()) // 1000
    assert differing <= allowed, f"{differing} elements"
    for each in found:
        torch.testing.assert_close(found[each], expected[each], rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("method", ["dare_ties", "dare_linear", "della", "della_linear"])
def test_a_random_merge_can_be_repeated_and_loads(
    method: str, models: list[Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    def run(name: str, seed: int) -> dict[str, Tensor]:
        recipe = command(
            models[1:], method=method, base=models[0], knobs={"density": 0.5}, seed=seed
        )
        return weights(merge_models(recipe, tmp_path / name, options=FAST).path)

    first, again, other = run("a", 1), run("b", 1), run("c", 2)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not all(torch.equal(first[n], other[n]) for n in first)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(model.lm_head.weight, first["lm_head.weight"])


MERGE = """
from pathlib import Path
from milepost.tools.merge_models import Tokenizers, merge_models
from tests.tools.merge_models.merging import FAST, command
"""
RUN = """
place, method = Path(sys.argv[1]), sys.argv[2]
paths = [place / str(number) for number in range(3)]
base, knobs = (paths[0], {"density": 0.5}) if method != "slerp" else (None, {})
models = paths[1:]
recipe = command(models, method=method, base=base, knobs=knobs)
merge_models(recipe, place / method, tokenizers=Tokenizers.ALLOW_MISSING, options=FAST)
"""


@pytest.mark.parametrize("method", ["slerp", "ties", "dare_ties", "della"])
def test_no_tensor_is_whole_in_memory(
    method: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tools.rewrite.memory import peak_anon_nbytes

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    peak = peak_anon_nbytes(MERGE, RUN, large, method)
    assert peak < 40 * 2**20, f"{peak / 2**20:.1f} MiB with a tensor of 64 MiB in three models"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of one tensor of 64 MiB."""
    from safetensors.torch import save_file

    place = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2**14, 2**11, generator=generator).mul_(0.02)
    for number in range(3):
        (place / str(number)).mkdir()
        (place / str(number) / "config.json").write_text('{"model_type": "llama"}')
        drifted = values.add(values.roll(number, 1), alpha=0.1 * number).bfloat16()
        save_file({"lm_head.weight": drifted}, place / str(number) / "model.safetensors")
    return place


def test_layers_that_are_stacked_make_a_deeper_model_that_loads(
    models: list[Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    merged(documents(models)["passthrough"], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert len(model.model.layers) == 4
    second = weights(models[1])["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(model.model.layers[2].mlp.up_proj.weight, second)


# ---- refusals


@pytest.mark.case("V60")
def test_all_gaps_are_told_at_once_and_nothing_is_written(
    models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    other = write_model(tmp_path / "other", 9)
    tensors = weights(other)
    tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(65, 32, dtype=torch.bfloat16)
    tensors["extra"] = torch.zeros(())
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInputError) as raised:
        merge_models(command([models[0], other]), tmp_path / "out", options=FAST)
    text = str(raised.value)
    assert "no tensor model.norm.weight" in text
    assert "no tensor extra" in text
    assert "model.layers.0.mlp.up_proj.weight: shape [64, 32]" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"method": "linea"}, "not known"),
        ({"knobs": {"density": 0.5}}, "does not read density"),
        ({"method": "ties"}, "--base-model"),
        ({"base": Path("x")}, "no use for a base"),
        ({"method": "nuslerp"}, "merges 2 models"),
        ({"settings": ["normalize"]}, "NAME=VALUE"),
        ({"dtype": "int9"}, "int9"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    more: dict[str, Any], message: str, models: list[Path]
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        command(models[:1] if more.get("method") == "nuslerp" else models, **more)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_knob_out_of_its_range_is_refused(
    value: float, models: list[Path], tmp_path: Path
) -> None:
    recipe = command(models[1:], method="ties", base=models[0], knobs={"density": value})
    with pytest.raises(InvalidInputError, match="density="):
        merge_models(recipe, tmp_path / "out", options=FAST)


@pytest.mark.parametrize(
    "document",
    [
        {"merge_method": "linear"},
        {"merge_method": "linear", "models": [], "slices": []},
        {"merge_method": "linear", "modules": {}},
        {"merge_method": "linear", "models": [{"path": "x"}]},
        {"merge_method": "linear", "models": [{"model": "x", "layer_range": [3, 1]}]},
        {"models": [{"model": "x"}]},
        [],
    ],
)
def test_yaml_that_says_something_else_is_refused(document: Any, tmp_path: Path) -> None:
    (tmp_path / "merge.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(FormatError, match=r"merge\.yaml"):
        recipe_from_yaml(tmp_path / "merge.yaml")


# ---- as a command


def test_the_command_merges_weighs_and_tells(models: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        *("merge-models", "--models", f"{models[0]}:3", f"{models[1]}:1"),
        *("--method", "linear", "--output_dir", str(out), "--dtype", "float32", "--check"),
    ]
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 0, result.output
    one, two = (weights(p)["lm_head.weight"].float() for p in models[:2])
    torch.testing.assert_close(weights(out)["lm_head.weight"], (3 * one + two) / 4)
    assert mp.Checkpoint.open(out).verify().ok
    made = json.loads((out / "milepost.json").read_text())["provenance"]["made_by"]
    assert made["verb"] == "merge-models" and len(made["inputs"]) == 2


def test_a_dry_run_writes_nothing(models: list[Path], tmp_path: Path) -> None:
    options = RewriteOptions(mode=Mode.DRY_RUN)
    report = merge_models(command(models), tmp_path / "out", options=options)
    assert report.ok and report.nbytes > 0 and not (tmp_path / "out").exists()

"""Adapters as inputs of `merge-models`: each stands for its base with it folded in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Checkpoint
from milepost.tools.merge_models import Tokenizers, merge_models
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.merging.recipe import recipe_from_command_line, recipe_from_yaml
from milepost.tools.rewrite.options import RewriteOptions
from tests.tools.adapters.peft_oracle import qwen3_moe, write_adapter, write_base

QUICK = RewriteOptions(is_durable=False, threads=2)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def run(recipe: object, output: Path) -> dict[str, torch.Tensor]:
    missing = Tokenizers.ALLOW_MISSING
    merge_models(recipe, output, tokenizers=missing, options=QUICK)  # type: ignore[arg-type]
    tensors: dict[str, torch.Tensor] = load_file(output / "model.safetensors")
    return tensors


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    base = write_base(root / "base", qwen3_moe(), torch.bfloat16)
    common = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "embed_tokens"]}
    for seed, name in enumerate(("one", "two"), 3):
        adapter = write_adapter(root / name, base, seed=seed, target_parameters=EXPERTS, **common)
        merge_peft_adapters([adapter], root / f"{name}-merged", options=QUICK)
    return root


def linear(names: list[str]) -> object:
    return recipe_from_command_line(
        [f"{name}:0.5" for name in names],
        method="linear",
        base=None,
        dtype=None,
        knobs={},
        settings=[],
        tokenizer=None,
        seed=0,
    )


def test_a_merge_of_adapters_is_that_of_the_merged_models(models: Path, tmp_path: Path) -> None:
    wanted = run(linear([f"{models}/one-merged", f"{models}/two-merged"]), tmp_path / "whole")
    found = run(linear([f"{models}/one", f"{models}/base+{models}/two"]), tmp_path / "adapters")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    made = Checkpoint.open(tmp_path / "adapters").info.extra["provenance"]["made_by"]
    assert [entry["adapter"]["name"] for entry in made["inputs"]] == ["one", "two"]


def test_the_notation_of_mergekit_names_base_and_adapter(models: Path, tmp_path: Path) -> None:
    document = (
        "merge_method: task_arithmetic\nbase_model: {root}/base\nmodels:\n"
        "  - model: {root}/{one}\n    parameters: {{weight: 0.4}}\n"
        "  - model: {root}/{two}\n    parameters: {{weight: 0.3}}\n"
    )
    results = []
    for number, names in enumerate((("one-merged", "two-merged"), ("base+{r}/one", "two"))):
        one, two = (name.format(r=models) for name in names)
        place = tmp_path / f"{number}.yaml"
        place.write_text(document.format(root=models, one=one, two=two))
        results.append(run(recipe_from_yaml(place), tmp_path / f"out{number}"))
    assert all(torch.equal(results[1][name], value) for name, value in results[0].items())


def test_an_adapter_of_another_model_keeps_the_merge_from_starting(
    models: Path, tmp_path: Path
) -> None:
    other = write_base(tmp_path / "other", qwen3_moe(hidden_size=32))
    with pytest.raises(InvalidInputError, match="another model"):
        run(linear([f"{other}+{models}/one", f"{models}/two"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()

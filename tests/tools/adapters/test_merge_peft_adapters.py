"""`merge-peft-adapters` against what peft itself merges, and against what adapters compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Checkpoint
from milepost.tools.merge_peft import Compare, merge_peft_adapters
from tests.tools.adapters.peft_oracle import (
    ALL_LINEAR,
    EXPERTS,
    PLAIN,
    QUICK,
    llama,
    load,
    merged_by_peft,
    outputs,
    state,
    tensors_of,
    write_adapter,
    write_base,
)
from tests.tools.rewrite.hub import write_hub

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice


def closest(merged: Path, wanted: Any) -> float:
    found, expected = state(load(merged)), state(wanted)
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).abs().max()) for n in expected)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": ALL_LINEAR}),
    "rank and alpha patterns": (
        "llama",
        {
            "target_modules": ALL_LINEAR,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "up_proj": 3},
            "alpha_pattern": {"k_proj": 3},
            "use_rslora": True,
        },
    ),
    "dora": ("llama", {"use_dora": True}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "tied embedding": ("tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "modules to save": ("llama", {"modules_to_save": ["lm_head", "norm"]}),
    "rows of tokens": ("llama", {"trainable_token_indices": [3, 7]}),
    "transposed": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "lora_bias": True},
    ),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "experts one by one": ("qwen3_moe", {"target_parameters": EXPERTS}),
    "transposed banks": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_merge_is_that_of_peft(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    key, changes = CASES[name]
    base = bases[key]
    settings = {**PLAIN, **changes}
    if "target_parameters" in settings:
        settings |= {"target_modules": changes.get("target_modules", ["q_proj"])}
    adapter = write_adapter(tmp_path / "adapter", base, **settings)
    report = merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert closest(tmp_path / "out", merged_by_peft(base, adapter)) < 1e-6
    before, after = tensors_of(base), tensors_of(tmp_path / "out")
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    assert changed == {n for n, each in report.differences.items() if each.changed}
    for n in changed:
        wanted = float((after[n] - before[n]).norm())
        assert report.differences[n].square ** 0.5 == pytest.approx(wanted, rel=1e-4)
    assert report.counts == {"changed": len(changed)} and changed < after.keys()
    assert Checkpoint.open(tmp_path / "out").verify().ok


@pytest.mark.case("V47")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_merges_to_what_the_adapter_computes(
    family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    square, wide = (["o_proj"], ["up_proj"]) if family == "llama" else (["attn.c_proj"], ["c_fc"])
    transposed: dict[str, Any] = {"fan_in_fan_out": True} if family == "gpt2" else {}
    for number, modules in enumerate((square, wide)):
        adapter = write_adapter(
            tmp_path / f"a{number}",
            bases[family],
            **{**PLAIN, "target_modules": modules, "use_dora": True, **transposed},
        )
        out = tmp_path / f"out{number}"
        merge_peft_adapters([adapter], out, compare=Compare.OUTPUTS, options=QUICK)
        wanted = outputs(PeftModel.from_pretrained(load(bases[family]), str(adapter)))
        assert torch.allclose(outputs(load(out)), wanted, atol=1e-5)


UNMERGED: dict[str, tuple[str, dict[str, Any]]] = {
    "square": ("llama", {"target_modules": ["o_proj"], "use_dora": True}),
    "wide": ("llama", {"target_modules": ["up_proj"], "use_dora": True}),
    "square-transposed": (
        "gpt2",
        {"target_modules": ["attn.c_proj"], "use_dora": True, "fan_in_fan_out": True},
    ),
    "wide-transposed": (
        "gpt2",
        {"target_modules": ["c_fc"], "use_dora": True, "fan_in_fan_out": True},
    ),
    "embedding": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "lora": ("llama", {"target_modules": ALL_LINEAR}),
}


@pytest.mark.case("V47")
@pytest.mark.parametrize("name", UNMERGED)
def test_what_peft_takes_out_of_merged_weights_again_is_the_base(
    name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """The base in its files is as it was, and peft's own `unmerge` of our weights gives it."""
    family, changes = UNMERGED[name]
    base = bases[family]
    adapter = write_adapter(tmp_path / "a", base, **{**PLAIN, **changes})
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == files
    model: Any = PeftModel.from_pretrained(load(base), str(adapter))
    model.merge_adapter()
    merged = state(load(tmp_path / "out"))
    with torch.no_grad():
        for path, tensor in model.base_model.model.state_dict().items():
            plain = path.replace("base_layer.", "")
            if plain in merged:
                tensor.copy_(merged.pop(plain))
    assert not merged
    model.unmerge_adapter()
    found = {
        path.replace("base_layer.", ""): tensor
        for path, tensor in model.base_model.model.state_dict().items()
    }
    for path, tensor in state(load(base)).items():
        torch.testing.assert_close(found[path], tensor, rtol=0, atol=1e-6)


@pytest.mark.case("V46")
@pytest.mark.parametrize(("flag", "scale"), [(True, 4.0), (False, 2.0)])
def test_the_scale_is_that_of_the_flag_by_hand(
    flag: bool, scale: float, bases: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**PLAIN, "target_modules": ["o_proj"], "use_rslora": flag}
    adapter = write_adapter(tmp_path / "a", bases["llama"], **settings)
    file = adapter / "adapter_model.safetensors"
    save_file({n: torch.ones_like(t).bfloat16() for n, t in load_file(file).items()}, file)
    merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    name = "model.layers.0.self_attn.o_proj.weight"
    wanted = tensors_of(bases["llama"])[name] + scale * 4
    assert torch.equal(tensors_of(tmp_path / "out")[name], wanted)


@pytest.mark.case("V49")
def test_a_bf16_base_is_rounded_once_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", llama(), torch.bfloat16)
    name = "model.layers.0.self_attn.o_proj.weight"
    file = base / "model.safetensors"
    save_file(tensors_of(base) | {name: torch.ones(16, 16).bfloat16()}, file, {"format": "pt"})
    settings: dict[str, Any] = {
        "r": 1,
        "lora_alpha": 1,
        "target_modules": ["layers.0.self_attn.o_proj"],
    }
    adapter = write_adapter(tmp_path / "a", base, **settings)
    delta = torch.full((16, 1), 1e-3)
    delta[:8] = 5e-3
    prefix = "base_model.model.model.layers.0.self_attn.o_proj"
    factors = {f"{prefix}.lora_A.weight": torch.ones(1, 16), f"{prefix}.lora_B.weight": delta}
    save_file(factors, adapter / "adapter_model.safetensors")
    report = merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    wanted = (torch.ones(16, 16) + delta).bfloat16()
    assert torch.equal(tensors_of(tmp_path / "out")[name], wanted)
    assert any("128 of 256 elements" in note for note in report.notes)
    merge_peft_adapters([adapter], tmp_path / "wide", dtype="float32", options=QUICK)
    assert torch.equal(tensors_of(tmp_path / "wide")[name], torch.ones(16, 16) + delta)
    save_file({n: t * 0.01 for n, t in factors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(InvalidInputError, match="change no stored value"):
        merge_peft_adapters([adapter], tmp_path / "none", options=QUICK)
    assert not (tmp_path / "none").exists()


@pytest.mark.case("V48")
def test_an_adapter_is_not_folded_in_twice(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["llama"]
    adapter = write_adapter(tmp_path / "a", base, **PLAIN)
    other = write_adapter(tmp_path / "b", base, seed=5, **PLAIN)
    merge_peft_adapters([adapter], tmp_path / "one", options=QUICK)
    with pytest.raises(InvalidInputError, match="folded into these weights already"):
        merge_peft_adapters([adapter], tmp_path / "two", base=tmp_path / "one", options=QUICK)
    merge_peft_adapters([other], tmp_path / "two", base=tmp_path / "one", options=QUICK)
    made = Checkpoint.open(tmp_path / "two").info.extra["provenance"]
    assert [entry["name"] for entry in made["adapters"]] == ["a", "b"]
    with pytest.raises(InvalidInputError, match="folded into these weights already"):
        merge_peft_adapters([adapter], tmp_path / "x", base=tmp_path / "two", options=QUICK)
    with pytest.raises(InvalidInputError, match="more than once"):
        merge_peft_adapters([adapter, adapter], tmp_path / "x", options=QUICK)
    assert json.loads((tmp_path / "one/original_adapter_config/adapter_config.json").read_bytes())


@pytest.mark.case("V50")
@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.",
        "base_model.model.model.model.",
        "base_model.model.language_model.model.",
        "base_model.model.model.language_model.",
        "model.",
    ],
)
def test_prefixes_of_other_writers_find_their_tensors(
    prefix: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    merge_peft_adapters([adapter], tmp_path / "plain", options=QUICK)
    file = adapter / "adapter_model.safetensors"
    renamed = {n.replace("base_model.model.model.", prefix): t for n, t in load_file(file).items()}
    save_file(renamed, file)
    merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    found, wanted = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "plain")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.case("V50")
def test_a_tensor_without_a_place_refuses_the_merge_and_both_sides_are_listed(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    one_more = {n.replace("layers.1", "layers.7"): t.clone() for n, t in factors.items()}
    save_file(factors | one_more, file)
    with pytest.raises(InvalidInputError, match=r"layers\.7.*the base .* has") as caught:
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert "4 of its 12 tensors" in str(caught.value)
    half = {n: t for n, t in factors.items() if "layers.0.self_attn.q_proj.lora_B" not in n}
    save_file(half, file)
    with pytest.raises(InvalidInputError, match="no lora_B"):
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()


@pytest.mark.case("V51")
@pytest.mark.parametrize("multiple", [None, 8])
def test_new_tokens_come_along_with_their_rows_and_their_tokenizer(
    multiple: int | None, bases: dict[str, Path], tmp_path: Path
) -> None:

    model = load(bases["llama"])
    model.resize_token_embeddings(44, pad_to_multiple_of=multiple)
    rows = 48 if multiple else 44
    adapted = get_peft_model(
        model, LoraConfig(**PLAIN, modules_to_save=["embed_tokens", "lm_head"])
    )
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "a")
    (tmp_path / "a/tokenizer.json").write_text("{}")
    report = merge_peft_adapters([tmp_path / "a"], tmp_path / "out", options=QUICK)
    assert torch.allclose(outputs(load(tmp_path / "out")), outputs(adapted), atol=1e-5)
    assert load(tmp_path / "out").config.vocab_size == rows
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert any("vocab_size: 40 became" in note for note in report.notes)


def test_several_adapters_add_up_with_their_weights(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["llama"]
    one = write_adapter(tmp_path / "a", base, **PLAIN)
    two = write_adapter(tmp_path / "b", base, seed=3, **{**PLAIN, "r": 2, "use_dora": True})
    merge_peft_adapters([f"{one}:0.5", f"{two}:0.25"], tmp_path / "out", options=QUICK)
    start = state(load(base))
    parts = [(state(merged_by_peft(base, each)), w) for each, w in ((one, 0.5), (two, 0.25))]
    found = state(load(tmp_path / "out"))
    for name, value in start.items():
        wanted = value + sum(w * (merged[name] - value) for merged, w in parts)
        assert torch.allclose(found[name], wanted, atol=1e-5), name


def test_sidecars_beside_the_adapter_are_applied_and_come_along(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(
        tmp_path / "a", bases["gpt_oss"], **{**PLAIN, "target_modules": ["q_proj"]}
    )
    (adapter / "training_provenance.json").write_text('{"gpt_oss_attention_sinks": "neutralized"}')
    report = merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    found = tensors_of(tmp_path / "out")
    assert bool((found["model.layers.0.self_attn.sinks"] == -1e4).all())
    assert any("sinks neutralised" in note for note in report.notes)
    assert (tmp_path / "out/training_provenance.json").is_file()
    assert Checkpoint.open(tmp_path / "out").manifest.needs == ["training_provenance.json"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["by rows", "transposed"])
def test_a_matrix_of_several_bands_and_chunks_is_summed_wide_and_counted_whole(
    way: str, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    is_transposed = way == "transposed"
    module, rows, columns = "model.layers.0.mlp.up_proj", 1100, 1500  # three chunks and a rest
    weight = (torch.randn(rows, columns) * 0.02).bfloat16()
    base = write_hub(tmp_path / "base", {f"{module}.weight": weight})
    wanted = weight.double()
    ins, outs = (rows, columns) if is_transposed else (columns, rows)
    for name, share in (("a", 0.5), ("b", 0.25)):
        pair = {"A": torch.randn(4, ins) * 0.03, "B": torch.randn(outs, 4) * 0.03}
        (tmp_path / name).mkdir()
        save_file(
            {f"base_model.model.{module}.lora_{key}.weight": v for key, v in pair.items()},
            tmp_path / name / "adapter_model.safetensors",
        )
        settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "fan_in_fan_out": is_transposed}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
        product = 2.0 * share * (pair["B"].double() @ pair["A"].double())
        wanted += product.T if is_transposed else product
    report = merge_peft_adapters(
        [f"{tmp_path}/a:0.5", f"{tmp_path}/b:0.25"], tmp_path / "out", base=base, options=QUICK
    )
    found = tensors_of(tmp_path / "out")[f"{module}.weight"]
    assert float((found != wanted.bfloat16()).double().mean()) < 1e-3  # ties of the rounding
    assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=1e-7)
    told = report.differences[f"{module}.weight"]
    delta = found.double() - weight.double()
    assert told.numel == weight.numel() and told.changed == int(delta.count_nonzero())
    moved = int((wanted.float() != weight.float()).count_nonzero())
    assert told.changed < told.moved and abs(told.moved - moved) < 10
    assert told.square**0.5 == pytest.approx(float(delta.norm()), rel=1e-4)

"""`merge-peft-adapters` at the edges: names that adapters share, strides, NaN and overflow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.merge_peft_edits import Differences, WholeEdit, edited_group
from milepost.tools.rewrite.source import open_source
from tests.tools.adapters.peft_oracle import (
    EXPERTS,
    PLAIN,
    QUICK,
    load,
    merged_by_peft,
    outputs,
    state,
    tensors_of,
    write_adapter,
)
from tests.tools.rewrite.hub import write_hub

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice

MODULE = "model.layers.0.mlp.up_proj"
INF, NAN = float("inf"), float("nan")


def write_pair(place: Path, a: Tensor, b: Tensor, module: str = MODULE) -> Path:
    """An adapter of rank `len(a)` on one matrix, scaled by one."""
    place.mkdir()
    pair = {"A": a, "B": b}
    named = {f"base_model.model.{module}.lora_{key}.weight": value for key, value in pair.items()}
    save_file(named, place / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": len(a), "lora_alpha": len(a), "target_modules": [module]}
    (place / "adapter_config.json").write_text(json.dumps(settings))
    return place


@pytest.mark.parametrize("target", [EXPERTS, EXPERTS[1:]])
def test_two_adapters_of_experts_that_lie_one_by_one_both_count(
    target: list[str], bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases["qwen3_moe"]
    settings = {**PLAIN, "target_modules": [], "target_parameters": target}
    one = write_adapter(tmp_path / "a", base, seed=2, **settings)
    two = write_adapter(tmp_path / "b", base, seed=3, **settings)
    merge_peft_adapters([one, f"{two}:0.5"], tmp_path / "out", options=QUICK)
    start, found = state(load(base)), state(load(tmp_path / "out"))
    first, second = (state(merged_by_peft(base, each)) for each in (one, two))
    banks = [name for name in start if any(name.endswith(each) for each in target)]
    assert len(banks) == 2 * len(target)
    for name in banks:
        assert float((first[name] - second[name]).abs().max()) > 0.1
        wanted = first[name] + 0.5 * (second[name] - start[name])
        assert torch.allclose(found[name], wanted, atol=1e-5), name
    merge_peft_adapters([one, two], tmp_path / "sum", options=QUICK)
    in_turn = PeftModel.from_pretrained(merged_by_peft(base, one), str(two)).merge_and_unload()
    assert torch.allclose(outputs(load(tmp_path / "sum")), outputs(in_turn), atol=1e-4)


def test_factors_that_experts_share_are_read_once_for_all_of_them(tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{n}.down_proj.weight" for n in range(3)]
    base = open_source(write_hub(tmp_path / "base", {name: torch.ones(4, 6) for name in names}))
    adapters = [
        open_source(write_hub(tmp_path / key, {"value": torch.full((4, 6), value)}))
        for key, value in (("a", 2.0), ("b", 3.0))
    ]
    edits = [WholeEdit(inputs={"value": a.tensors["value"]}, weight=1.0) for a in adapters]
    group = edited_group(
        base.tensors, dict.fromkeys(names, edits), dict.fromkeys(names, "F32"), Differences()
    )
    assert len(group.inputs) == 3 + 2
    made = group.make({key: tensor.read() for key, tensor in group.inputs.items()})
    assert all(torch.equal(made[name], torch.full((4, 6), 4.0)) for name in names)  # 2 + (3 - 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_base_that_was_saved_as_a_transpose_merges_like_one_that_was_not(
    dtype: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    plain = bases["llama"]
    adapter = write_adapter(
        tmp_path / "a", plain, **{**PLAIN, "target_modules": ["embed_tokens", "q_proj"]}
    )
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)  # without the base's embedding, which peft stores beside its factors
    save_file({n: t for n, t in factors.items() if "base_layer" not in n}, file)
    tensors = tensors_of(plain)
    strided = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in tensors.items()}
    (tmp_path / "pt").mkdir()
    torch.save(strided, tmp_path / "pt/model.pt")
    (tmp_path / "pt/config.json").write_bytes((plain / "config.json").read_bytes())
    wanted = merge_peft_adapters([adapter], tmp_path / "wanted", dtype=dtype, options=QUICK)
    report = merge_peft_adapters(
        [adapter], tmp_path / "out", base=tmp_path / "pt/model.pt", dtype=dtype, options=QUICK
    )
    found, expected = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "wanted")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    name = "model.embed_tokens.weight"
    ours, theirs = report.differences[name], wanted.differences[name]
    assert (ours.moved, ours.changed) == (theirs.moved, theirs.changed)
    assert ours.square == pytest.approx(theirs.square)


SPOILT: Mapping[str, tuple[float, float]] = {
    "NaN": (NAN, 1.0),
    "infinite": (INF, 1.0),
    "too large for a product": (1e30, 1e30),
}


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_factors_that_would_spoil_finite_weights_are_refused_naming_the_tensor(
    spoilt: str, dtype: str | None, tmp_path: Path
) -> None:
    base = write_hub(tmp_path / "base", {f"{MODULE}.weight": torch.ones(6, 8)})
    left, right = SPOILT[spoilt]
    a, b = torch.ones(2, 8), torch.ones(6, 2)
    a[:, 3], b[4] = right, left
    adapter = write_pair(tmp_path / "a", a, b)
    count = 1 if left == 1e30 else 8
    wanted = rf"up_proj\.weight: {count} values become infinite or NaN .* float32.*nothing was"
    with pytest.raises(InvalidInputError, match=wanted):
        merge_peft_adapters([adapter], tmp_path / "out", base=base, dtype=dtype, options=QUICK)
    assert not (tmp_path / "out").exists()


def test_two_adapters_that_overflow_both_ways_are_refused_though_a_sum_of_theirs_is_no_number(
    tmp_path: Path,
) -> None:
    base = write_hub(tmp_path / "base", {f"{MODULE}.weight": torch.ones(6, 8)})
    large = torch.full((1, 8), 1e30)
    one = write_pair(tmp_path / "a", large, torch.full((6, 1), 1e30))
    two = write_pair(tmp_path / "b", large, torch.full((6, 1), -1e30))
    with pytest.raises(InvalidInputError, match=r"up_proj\.weight: 48 values become infinite"):
        merge_peft_adapters([one, two], tmp_path / "out", base=base, options=QUICK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_that_holds_infinite_values_and_nan_keeps_them_and_they_count_as_unchanged(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    weight = torch.ones(6, 8)
    weight[0, :3] = torch.tensor([INF, -INF, NAN])
    base = write_hub(tmp_path / "base", {f"{MODULE}.weight": weight.to(dtype)})
    a = torch.ones(1, 8)
    a[0, 7] = 0
    adapter = write_pair(tmp_path / "a", a, torch.full((6, 1), 0.5))
    report = merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)
    found = tensors_of(tmp_path / "out")[f"{MODULE}.weight"]
    wanted = weight + 0.5 * a
    assert torch.equal(found.isnan(), wanted.isnan()) and int(found.isnan().sum()) == 1
    assert torch.equal(found.float().nan_to_num(), wanted.nan_to_num())
    told = report.differences[f"{MODULE}.weight"]
    assert told.numel == 48 and told.moved == told.changed == 48 - 6 - 3
    assert told.square == pytest.approx(39 * 0.25)


def test_an_infinite_value_of_the_base_that_would_become_nan_is_refused(tmp_path: Path) -> None:
    weight = torch.ones(6, 8)
    weight[2, 5] = INF
    base = write_hub(tmp_path / "base", {f"{MODULE}.weight": weight})
    a, b = torch.zeros(1, 8), torch.zeros(6, 1)
    a[0, 5], b[2] = 1e30, -1e30
    adapter = write_pair(tmp_path / "a", a, b)
    with pytest.raises(InvalidInputError, match=r"up_proj\.weight: 1 values become"):
        merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)


def test_differences_whose_squares_are_too_large_are_counted_and_measured(tmp_path: Path) -> None:
    base = write_hub(tmp_path / "base", {f"{MODULE}.weight": torch.ones(6, 8)})
    adapter = write_pair(tmp_path / "a", torch.full((1, 8), 1e12), torch.full((6, 1), 1e13))
    report = merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)
    told = report.differences[f"{MODULE}.weight"]
    assert told.changed == told.moved == 48
    assert told.square == pytest.approx(48 * 1e50, rel=1e-5)

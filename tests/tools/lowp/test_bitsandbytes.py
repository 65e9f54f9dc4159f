"""Codes of bitsandbytes become the floats that it makes of them, without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.cast import cast
from milepost.tools.convert_to_bf16 import convert_to_bf16
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.targets import Format
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rewrite.options import Mode, RewriteOptions
from tests.tools.lowp.coded_tensors import written
from tests.tools.lowp.four_bits import METHOD, blob, eight_bits, quantised
from tests.tools.rewrite.hub import QUICK, content, read_hub, same_bits, write_hub
from tests.tools.rewrite.memory import peak_anon_nbytes

GOLDEN = Path(__file__).parents[2] / "golden/bitsandbytes.safetensors"
UP = "model.layers.0.mlp.up_proj.weight"
NORM, HEAD = "model.norm.weight", "lm_head.weight"
EXPECTED = "expected."


def test_what_bitsandbytes_wrote_is_what_it_read(tmp_path: Path) -> None:
    held = load_file(GOLDEN)
    expected = {name.removeprefix(EXPECTED): t for name, t in held.items() if EXPECTED in name}
    tensors = {name: tensor for name, tensor in held.items() if EXPECTED not in name}
    assert {t.dtype for t in expected.values()} == {torch.bfloat16, torch.float16, torch.float32}
    source = written(tmp_path / "in", tensors, METHOD, parts=3)
    for dtype in (torch.float32, torch.bfloat16):
        place = tmp_path / str(dtype)
        report = dequantize(source, place, dtype=str(dtype), options=QUICK)
        assert same_bits(read_hub(place), {name: t.to(dtype) for name, t in expected.items()})
        assert report.counts == {"dequantised": len(expected)} and len(expected) == 5
        assert "quantization_config" not in json.loads((place / "config.json").read_bytes())


CASES: dict[str, dict[str, Any]] = {
    "nf4": {"shape": (64, 96)},
    "nf4, blocks that run on over rows": {"shape": (33, 70)},
    "nf4, an odd number": {"shape": (7, 13)},
    "nf4 in bands, absmax quantised": {"shape": (700, 500), "nested": 256},
    "fp4": {"shape": (33, 70), "kind": "fp4", "dtype": "float16"},
    "fp4, absmax quantised": {"shape": (70, 300), "kind": "fp4", "nested": 256, "block": 32},
    "nf4 of fp32, large blocks": {"shape": (40, 300), "block": 4096, "dtype": "float32"},
    "nf4 kept in bf16": {"shape": (36, 70), "storage": torch.bfloat16, "nested": 256},
    "nf4 kept in fp32": {"shape": (36, 70), "storage": torch.float32},
    "a bank": {"shape": (3, 40, 48), "nested": 256},
    "nothing": {"shape": (0, 16)},
}


@pytest.mark.parametrize("case", CASES)
def test_four_bits_are_what_the_tables_say_and_the_rest_keeps_its_bytes(
    case: str, tmp_path: Path
) -> None:
    codes, expected = quantised(UP, **CASES[case])
    rest = {NORM: torch.randn(16), HEAD: torch.randn(8, 4).half(), "steps": torch.tensor(3)}
    source = written(tmp_path / "in", {**codes, **rest}, METHOD, parts=3)
    dequantize(source, tmp_path / "out", options=QUICK)
    assert same_bits(read_hub(tmp_path / "out"), {UP: expected.bfloat16(), **rest})
    dequantize(source, tmp_path / "wide", dtype="float32", options=QUICK)
    assert same_bits(read_hub(tmp_path / "wide"), {UP: expected.float(), **rest})


def test_eight_bits_have_a_scale_for_each_row_and_one_step(tmp_path: Path) -> None:
    codes, expected = eight_bits("a", 600, 500)
    bare = {name: t for name, t in eight_bits("b", 3, 5)[0].items() if "format" not in name}
    source = written(tmp_path / "in", {**codes, **bare}, {"load_in_8bit": True})
    dequantize(source, tmp_path / "out", dtype="float32", options=QUICK)
    made = read_hub(tmp_path / "out")
    assert same_bits(made, {"a.weight": expected, "b.weight": eight_bits("b", 3, 5)[1]})


def test_an_archive_and_a_directory_without_a_configuration_are_known_by_their_states(
    tmp_path: Path,
) -> None:
    codes, expected = quantised(UP, (300, 20), nested=256)
    eight, of_eight = eight_bits("a", 6, 5)
    torch.save({**codes, **eight}, tmp_path / "model.pt")
    bare = write_hub(tmp_path / "bare", {**codes, **eight})
    for number, source in enumerate((tmp_path / "model.pt", bare)):
        with pytest.raises(InvalidInputError, match=r"quantised \(bitsandbytes\)"):
            cast(source, tmp_path / "cast", dtype="float16", options=QUICK)
        dequantize(source, tmp_path / f"{number}", dtype="float32", options=QUICK)
        made = read_hub(tmp_path / f"{number}")
        assert same_bits(made, {UP: expected.float(), "a.weight": of_eight})


def test_a_dry_run_says_the_sizes_and_writes_nothing(tmp_path: Path) -> None:
    codes, _ = quantised(UP, (33, 70), nested=256)
    source = written(tmp_path / "in", {**codes, NORM: torch.randn(16)}, METHOD)
    dry = RewriteOptions(mode=Mode.DRY_RUN)
    planned = dequantize(source, tmp_path / "out", options=dry)
    assert not planned.problems and planned.counts == {"dequantised": 1}
    assert not (tmp_path / "out").exists()
    dequantize(source, tmp_path / "out", options=QUICK)
    sizes = {name: (tmp_path / "out" / name).stat().st_size for name in planned.files}
    assert sizes == dict(planned.files)


def test_other_verbs_take_the_same_values(tmp_path: Path) -> None:
    codes, expected = quantised(UP, (128, 64), nested=256, storage=torch.bfloat16)
    tensors = {**codes, NORM: torch.randn(64)}
    source = written(tmp_path / "in", tensors, METHOD)
    convert_to_bf16(source, tmp_path / "bf16", options=QUICK)
    assert same_bits(read_hub(tmp_path / "bf16"), {UP: expected, NORM: tensors[NORM]})
    dequantize(source, tmp_path / "wide", dtype="float32", options=QUICK)
    found = []
    for place in (source, tmp_path / "wide"):
        output = tmp_path / f"{place.name}-fp8"
        report = quantize_to_lowp(place, output, format=Format.FP8, options=QUICK)
        assert report.counts["quantised"] == 1
        found.append(content(output)["model.safetensors"])
    assert found[0] == found[1]


Tensors = dict[str, Tensor]


def without(part: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[f"{UP}{part}"]

    return edit


def cut(part: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{UP}{part}"] = tensors[f"{UP}{part}"][:-1].clone()

    return edit


def stating(**changes: Any) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        state = json.loads(bytes(tensors[STATE].tolist()))
        tensors[STATE] = blob({**state, **changes})

    return edit


def renamed(tensors: Tensors) -> None:
    tensors[STATE.replace("nf4", "af4")] = tensors.pop(STATE)


def torn(tensors: Tensors) -> None:
    tensors[STATE] = tensors[STATE][:-4].clone()


def other_map(tensors: Tensors) -> None:
    tensors[f"{UP}.quant_map"] = tensors[f"{UP}.quant_map"] * 1.01


STATE = f"{UP}.quant_state.bitsandbytes__nf4"
DAMAGE: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "no absmax": (without(".absmax"), r"without .*up_proj\.weight\.absmax"),
    "no map": (without(".quant_map"), r"without .*\.quant_map"),
    "no nested absmax": (without(".nested_absmax"), r"without .*\.nested_absmax"),
    "no nested map": (without(".nested_quant_map"), r"without .*\.nested_quant_map"),
    "no codes": (without(""), r"5 parts .* belong to no weight.*\.absmax"),
    "no state": (without(STATE.removeprefix(UP)), r"1 weights .* no state .*up_proj\.weight"),
    "cut absmax": (cut(".absmax"), r"\.absmax: U8 \(36,\), expected U8 \(37,\)"),
    "cut nested absmax": (cut(".nested_absmax"), r"expected F32 \(1,\)"),
    "cut codes": (cut(""), r"U8 \(1154, 1\), expected a column of 1155 bytes"),
    "cut state": (torn, "is no quant_state"),
    "no JSON object": (lambda t: t.update({STATE: blob([1])}), "is no quant_state"),  # type: ignore[arg-type]
    "another type": (renamed, "as af4; expected one of nf4 and fp4"),
    "another type inside": (stating(quant_type="fp4"), "expected quant_type nf4"),
    "another block": (stating(blocksize=48), "a blocksize of 32"),
    "another dtype": (stating(dtype="float64"), "a dtype of float32"),
    "another shape": (stating(shape=[33, 72]), r"weight \(33, 72\)"),
    "a negative shape": (stating(shape=[-33, -70]), "a shape"),
    "nested of bf16": (stating(nested_dtype="bfloat16"), "absmax quantised from float32"),
    "an endless block": (stating(blocksize=float("inf")), "is no quant_state"),
    "a shape of no end": (stating(shape=[10**400]), "expected U8"),
    "not nested": (stating(nested_offset=None), r"nested_absmax: is there.* says nothing of it"),
    "another map": (other_map, "other values than those of nf4"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_torn_states_are_refused_by_name_and_nothing_is_written(kind: str, tmp_path: Path) -> None:
    tensors, _ = quantised(UP, (33, 70), nested=256)
    damage, message = DAMAGE[kind]
    damage(tensors)
    source = written(tmp_path / "in", tensors, METHOD)
    with pytest.raises(InvalidInputError, match=message):
        dequantize(source, tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()


def test_codes_of_eight_bits_without_scales_or_in_tiles_are_refused(tmp_path: Path) -> None:
    method = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors, _ = eight_bits("a", 6, 5)
    tiles = {**tensors, "a.weight_format": torch.tensor(2, dtype=torch.uint8)}
    short = {**tensors, "a.SCB": torch.ones(5)}
    bare = {"a.weight": tensors["a.weight"]}
    lost = {"a.SCB": tensors["a.SCB"]}
    messages = ["codes in tiles", r"expected F32 \(6,\)", "no state.*a.weight", "belong to no.*SCB"]
    for number, (held, message) in enumerate(
        zip((tiles, short, bare, lost), messages, strict=True)
    ):
        source = written(tmp_path / f"{number}", held, method)
        with pytest.raises(InvalidInputError, match=message):
            dequantize(source, tmp_path / "out", options=QUICK)
    plain = written(tmp_path / "plain", {"a.weight": torch.ones(2, 2)}, method)
    with pytest.raises(InvalidInputError, match="no quantised weights"):
        dequantize(plain, tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()


def test_families_whose_layers_are_stored_transposed_are_refused(tmp_path: Path) -> None:
    codes, _ = quantised("transformer.h.0.attn.c_proj.weight", (32, 32))
    config = {"model_type": "gpt2", "quantization_config": METHOD}
    source = write_hub(tmp_path / "in", codes, config=config)
    with pytest.raises(InvalidInputError, match="gpt2 has its linear layers stored transposed"):
        dequantize(source, tmp_path / "out", options=QUICK)


def test_a_matrix_larger_than_all_memory_goes_through_in_bands(tmp_path: Path) -> None:
    codes, _ = quantised(UP, (64, 8192), nested=256)
    state = json.loads(bytes(codes[STATE].tolist()))
    times = 129
    for part in ("", ".absmax", ".nested_absmax"):
        codes[f"{UP}{part}"] = codes[f"{UP}{part}"].repeat(times, *[1] * (part == ""))
    codes[STATE] = blob({**state, "shape": [64 * times, 8192]})
    source = written(tmp_path / "in", codes, METHOD)
    imports = (
        "from milepost.tools.dequantize import dequantize\n"
        "from milepost.tools.rewrite.options import RewriteOptions\n"
        "options = RewriteOptions(is_durable=False, threads=2)"
    )
    run = "dequantize(sys.argv[1], sys.argv[2], options=options)"
    assert peak_anon_nbytes(imports, run, source, tmp_path / "out") < 64 * 2**20

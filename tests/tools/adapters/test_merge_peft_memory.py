"""The memory of `merge-peft-adapters` does not grow with the base, nor with its largest matrix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tools.rewrite.hub import write_hub
from tests.tools.rewrite.memory import peak_anon_nbytes

MIB = 2**20
IMPORTS = """
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.rewrite.options import RewriteOptions
"""
WORK = """
options = RewriteOptions(is_durable=False, threads=2)
merge_peft_adapters([sys.argv[1]], sys.argv[2], options=options)
"""
RANK = 8


def write_pair(root: Path, count: int, rows: int, columns: int) -> Path:
    """A base of `count` matrices [rows, columns] in bf16, and an adapter of all of them."""
    names = [f"model.layers.{number}.mlp.up_proj" for number in range(count)]
    one = torch.full((rows, columns), 0.02).bfloat16()
    tensors = {f"{name}.weight": one.clone() for name in names}
    base = write_hub(root / "base", tensors, config={"model_type": "llama"}, parts=2)
    del tensors
    factors = {}
    for name in names:
        factors[f"base_model.model.{name}.lora_A.weight"] = torch.full((RANK, columns), 0.1)
        factors[f"base_model.model.{name}.lora_B.weight"] = torch.full((rows, RANK), 0.1)
    (root / "adapter").mkdir()
    save_file(factors, root / "adapter/adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["up_proj"],
        "base_model_name_or_path": str(base),
    }
    (root / "adapter/adapter_config.json").write_text(json.dumps(config))
    return root / "adapter"


def peaks_of(root: Path, megabytes: tuple[int, ...], size: int) -> list[int]:
    """Peaks over bases of so many MiB, of square matrices of `size`."""
    peaks = []
    for total in megabytes:
        place = root / f"{total}"
        place.mkdir()
        adapter = write_pair(place, total * MIB // (2 * size**2), size, size)
        peaks.append(peak_anon_nbytes(IMPORTS, WORK, adapter, place / "out"))
        shutil.rmtree(place)
    return peaks


def test_memory_does_not_grow_with_the_base(tmp_path: Path) -> None:
    peaks = peaks_of(tmp_path, (32, 128), 2048)
    assert max(peaks) <= 2 * 8 * MIB + 64 * MIB
    assert peaks[1] - peaks[0] <= 16 * MIB, peaks


def test_one_matrix_that_is_larger_than_all_that_a_merge_takes_goes_through_in_bands(
    tmp_path: Path,
) -> None:
    adapter = write_pair(tmp_path, 1, 8192 + 64, 8192)  # 129 MiB
    assert peak_anon_nbytes(IMPORTS, WORK, adapter, tmp_path / "out") < 64 * MIB

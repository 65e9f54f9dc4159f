"""Small hub directories for tests of after-training verbs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from milepost.tools.rewrite.options import RewriteOptions

QUICK = RewriteOptions(is_durable=False, threads=2)


def write_hub(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    parts: int = 1,
) -> Path:
    """A hub directory with these tensors, dealt out to `parts` files in turn."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    meta = {"format": "pt"}
    if parts == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata=meta)
        return directory
    names = [f"model-{n + 1:05d}-of-{parts:05d}.safetensors" for n in range(parts)]
    where = {name: names[number % parts] for number, name in enumerate(tensors)}
    for part in names:
        held = {name: tensors[name] for name, place in where.items() if place == part}
        save_file(held, directory / part, metadata=meta)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read_hub(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files at the top, read by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        held = load_file(path)
        assert not found.keys() & held.keys(), "a tensor lies in two files"
        found |= held
    return found


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape and bytes: equal where tensors are the same to the last bit."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def same_bits(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same names with the same bits."""
    return first.keys() == second.keys() and all(
        bits(tensor) == bits(second[name]) for name, tensor in first.items()
    )


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }

"""Rules of docs/spec/v1.md about parameters that lie on disk under other names, read without us."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import milepost as mp
from tests.hf.hub_families import make_model

FAMILIES = ["Mixtral", "Qwen3Moe", "GraniteMoe", "Lfm2Moe"]


def saved(family: str, run: Path) -> tuple[Any, torch.optim.Optimizer, Path]:
    model = make_model(family)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    return model, optimizer, mp.save(run / "checkpoint-1", state, step=1).path


def stored_parts(path: Path, shapes: dict[str, torch.Size]) -> Iterator[tuple[str, str, Any]]:
    """(stored name, runtime name, index into the runtime tensor), as the text says it."""
    manifest = json.loads((path / "milepost.json").read_bytes())
    for entry in manifest["models"]["model"]["views"]:
        pattern = re.escape(entry["runtime"]).replace(r"\*", r"(\d+)")
        for runtime, shape in shapes.items():
            match = re.fullmatch(pattern, runtime)
            if match is None or list(shape) != entry["shape"]:
                continue
            name = entry["stored"]
            for number in match.groups():
                name = name.replace("*", number, 1)
            fixed_dims = [n for n in range(len(shape)) if n not in [d[0] for d in entry["dims"]]]
            counts = range(shape[fixed_dims[0]]) if "#" in name else [None]
            for count in counts:
                fixed = [*([] if count is None else [count]), *entry["fixed"]]
                index: list[Any] = [slice(None)] * len(shape)
                for dim, at in zip(fixed_dims, fixed, strict=True):
                    index[dim] = at
                for dim, offset, step, length in entry["dims"]:
                    if dim >= 0:
                        index[dim] = slice(offset, offset + step * (length - 1) + 1, step)
                yield name.replace("#", str(count)), runtime, (tuple(index), entry["dims"])


def take(tensor: Tensor, place: Any) -> Tensor:
    index, dims = place
    kept = sorted(d[0] for d in dims if d[0] >= 0)
    part = tensor[index].permute([kept.index(d[0]) for d in dims if d[0] >= 0])
    return part.reshape([d[3] for d in dims])


@pytest.mark.spec("v1#views-1")
@pytest.mark.parametrize("family", FAMILIES)
def test_entries_say_of_every_other_name_and_shape_what_it_is(family: str, tmp_path: Path) -> None:
    model, _, path = saved(family, tmp_path)
    live = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in live.items()}
    stored = load_file(path / "model.safetensors")
    used: Counter[str] = Counter()
    listed = set()
    for name, runtime, place in stored_parts(path, shapes):
        assert torch.equal(stored[name], take(live[runtime], place)), name
        used[runtime] += stored[name].numel()
        listed.add(name)
    assert used and all(count == shapes[name].numel() for name, count in used.items())
    assert {n for n in stored if n not in listed} <= set(live) - set(used)


@pytest.mark.spec("v1#views-2")
def test_moments_of_a_stored_tensor_are_a_part_of_those_of_its_parameter(tmp_path: Path) -> None:
    model, optimizer, path = saved("Mixtral", tmp_path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    moments = load_file(path / "training" / "optimizer.safetensors")
    named = dict(model.named_parameters())
    wanted = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    ((runtime, place),) = [(r, p) for n, r, p in stored_parts(path, shapes) if n == wanted]
    found = take(moments[f"{runtime}.exp_avg"], place)
    fused = optimizer.state[named["model.layers.1.mlp.experts.gate_up_proj"]]["exp_avg"]
    assert torch.equal(found, fused[2, 24:])

"""What the Lightning integration makes of modules, tensors and files."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from milepost.errors import DamagedError
from milepost.hf.live import unwrap
from milepost.layouts.checkpoint import Checkpoint


def as_file(checkpoint: Mapping[str, Any]) -> io.BytesIO:
    """What Lightning would have written of a checkpoint, in memory: what its own loaders read."""
    file = io.BytesIO()
    torch.save(dict(checkpoint), file)
    file.seek(0)
    return file


def models_of(module: nn.Module) -> dict[str, nn.Module]:
    """The one transformers model inside and the rest, or the module as a whole."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    children = dict(module.named_children())
    found = [n for n, child in children.items() if kind and isinstance(unwrap(child), kind)]
    if len(found) != 1:
        return {"model": module}
    rest = nn.Module()
    rest._modules.update({name: child for name, child in children.items() if name not in found})
    rest._parameters.update(module._parameters)
    rest._buffers.update(module._buffers)
    rest._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    model = {"model": children[found[0]]}
    return {**model, "module": rest} if rest.state_dict() else model


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Modules whose buffers are `tensors`, under the same names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module._modules[part] = nn.Module()
            inner = module._modules[part]
            assert inner is not None
            module = inner
        module._buffers[last] = tensor
    return root


def moved(value: Any, device: torch.device) -> Any:
    """The same with all tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device) for part in value)
    return value


def require_ok(opened: Checkpoint) -> None:
    """`DamagedError` unless every byte of a checkpoint is what was written."""
    report = opened.verify()
    if not report.ok:
        raise DamagedError(
            f"{opened.path}: {'; '.join(p.message for p in report.problems[:3])}; nothing was "
            "loaded: resume from another checkpoint",
            path=opened.path,
        )

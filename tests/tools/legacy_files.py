"""Files of older programs, written by plain `torch.save`, for the tests of migrations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from milepost.engine.write import WriteOptions
from milepost.tools.migrate import Migration, migrate

ONE_THREAD = WriteOptions(threads=1)
CONFIG = {"hidden_size": 4, "num_layers": 1, "use_glu": False}


def weights(prefix: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    return {prefix + name: tensor for name, tensor in module.state_dict().items()}


def optimizer_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.125)
    module(torch.arange(5)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def legacy(**changes: Any) -> dict[str, Any]:
    """The dict of the last one-file generation."""
    payload = {
        "epoch": 3,
        "loss": 0.5,
        "best_loss": 0.25,
        "model_state": weights(),
        "optimizer_state": optimizer_state(),
        "scheduler_state": {"last_epoch": 3, "_last_lr": [0.125]},
        "scaler_state": None,
        "model_config": CONFIG,
        "extra_state": {"global_step": 400, "stream_data": {"shards": {"0": {"line_index": 7}}}},
    }
    return payload | changes


def write(path: Path, payload: Any = None, **changes: Any) -> Path:
    """A legacy file, by default that of `legacy(**changes)`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(legacy(**changes) if payload is None else payload, path)
    return path


def trio_files(stem: Path) -> list[Path]:
    suffixes = (".safetensors", ".meta.json", ".extra_state.pt")
    return [stem.with_name(stem.name + suffix) for suffix in suffixes]


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def hidden(directory: Path) -> list[str]:
    """What is left over: hidden files but the lock."""
    names = {path.name for path in directory.iterdir() if path.name.startswith(".")}
    return sorted(names - {".milepost.lock"})


def only(*paths: Path | str, **request: Any) -> Migration:
    """What a migration of these paths, which find one source, says of it."""
    (one,) = migrate([*paths], **request).migrations
    return one


class Marker:
    """Its pickle makes the file `path` when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)

"""What the manifest says about where a checkpoint comes from and what its exactness rests on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from milepost.state.optimizer import inner_optimizers

_PACKAGES = (
    "milepost",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "numpy",
    "trl",
)
_GIT_TIMEOUT_S = 2.0
_MAX_ARGUMENT_CHARS = 400


@cache
def package_versions() -> dict[str, str]:
    """Installed versions of what shapes a run, as far as they are there."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def writer() -> dict[str, str | None]:
    """The versions that wrote the checkpoint."""
    versions = package_versions()
    return {
        "milepost": versions.get("milepost"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "transformers": versions.get("transformers"),
    }


@cache
def _git(directory: str) -> dict[str, Any] | None:
    """Commit of the working directory and whether it has changes; asked once per process."""

    def ask(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", directory, *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**_ENVIRONMENT, "GIT_OPTIONAL_LOCKS": "0"},
        ).stdout.strip()

    try:
        found: dict[str, Any] = {"commit": ask("rev-parse", "HEAD"), "dirty": None}
    except (OSError, subprocess.SubprocessError):
        return None
    with suppress(OSError, subprocess.SubprocessError):  # a large tree may take too long
        found["dirty"] = bool(ask("status", "--porcelain", "-uno"))
    return found


_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C"}


def provenance() -> dict[str, Any]:
    """Command line, git commit, packages, host and the seeds as torch knows them."""
    return {
        "command": [_text(argument) for argument in (sys.orig_argv or sys.argv)],
        "git": _git(os.path.curdir),
        "packages": package_versions(),
        "host": platform.node(),
        "seeds": {"torch": torch.initial_seed()},
    }


def _text(argument: str) -> str:
    """A part of the command line, cut, with bytes that are no UTF-8 replaced."""
    return argument[:_MAX_ARGUMENT_CHARS].encode(errors="surrogateescape").decode(errors="replace")


def exactness(state: Mapping[str, Any]) -> dict[str, Any]:
    """What can break bits between two runs of one program, as it is now.

    A continuation is bit-identical wherever two uninterrupted runs are; these values tell whether
    the machine and settings are still those.
    """
    device = torch.accelerator.current_accelerator() if _has_accelerator() else None
    name = torch.cuda.get_device_name() if device is not None and device.type == "cuda" else None
    return {
        "torch": str(torch.__version__),
        "device": device.type if device is not None else "cpu",
        "device_name": name or platform.machine(),
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "autocast": torch.is_autocast_enabled("cpu"),
        "optimizers": {
            key: [_implementation(group) for group in optimizer.param_groups]
            for outer, value in state.items()
            for key, optimizer in _named_optimizers(outer, value)
        },
    }


def _named_optimizers(outer: str, value: Any) -> list[tuple[str, torch.optim.Optimizer]]:
    inner = inner_optimizers(value)
    return [(f"{outer}.{sub}" if sub else outer, found) for sub, found in inner.items()]


def _has_accelerator() -> bool:
    accelerator = getattr(torch, "accelerator", None)
    return accelerator is not None and bool(accelerator.is_available())


def _implementation(group: Mapping[str, Any]) -> str:
    if group.get("fused"):
        return "fused"
    return {True: "foreach", False: "single", None: "default"}[group.get("foreach")]


def exactness_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each value that both sides know and that is not the same."""
    lines = []
    for key, before in saved.items():
        if key == "optimizers" or key not in now:
            continue
        if before != now[key]:
            lines.append(f"{key}: saved with {before}, now {now[key]}")
    saved_optimizers, live = saved.get("optimizers", {}), now.get("optimizers", {})
    for key in saved_optimizers:
        if key in live and saved_optimizers[key] != live[key]:
            lines.append(f"{key}: saved with {saved_optimizers[key]}, now {live[key]}")
    return lines

"""20,000 tensors: parsing and planning their header, and saving and loading them at 1 KB each.

`--nbytes` is the bytes of all tensors together in the save. Bars: parse and plan each well under a
second (0.5 s), a save under 1.5 s.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import milepost as mp
from _common import Contender, Report, find, parse_options, run_rounds, work_directory
from _state import fill
from milepost.format.header import parse_header, read_header
from milepost.plan.parts import plan_parts

COUNT = 20_000


def names() -> list[str]:
    """As in a mixture of experts: long names with much in common."""
    return [
        f"model.layers.{n // 400}.mlp.experts.{n // 4 % 100}.{'wxyz'[n % 4]}_proj.weight"
        for n in range(COUNT)
    ]


class ManyTensors(torch.nn.Module):
    """A model of 20,000 small parameters with the names above."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        for number, name in enumerate(names()):
            *parents, leaf = name.split(".")
            owner: torch.nn.Module = self
            for parent in parents:
                if not hasattr(owner, parent):
                    owner.add_module(parent, torch.nn.Module())
                owner = getattr(owner, parent)
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
            if number < 100:
                fill(parameter, number)
            owner.register_parameter(leaf, parameter)


def header_contenders(path: Path) -> list[Contender]:
    raw = path.read_bytes()
    data_start = read_header(path).data_start
    head, nbytes = raw[:data_start], path.stat().st_size
    items = [(name, "BF16", (4096, 14336)) for name in names()]
    calls: dict[str, Callable[[], object]] = {
        "parse_header": lambda: parse_header(head, file_nbytes=nbytes, where="bench"),
        "read_header, from its file": lambda: read_header(path),
        "plan_parts of 2.3 TB, 5 GB a part": lambda: plan_parts(items, stem="model"),
        "json.loads alone": lambda: json.loads(head[8:]),
        "safe_open and all shapes": lambda: _shapes(path),
    }
    return [
        Contender(name=name, run=partial(_call, call), is_baseline=name.startswith("json"))
        for name, call in calls.items()
    ]


def _call(call: Callable[[], object], place: Path) -> object:
    return call()


def _shapes(path: Path) -> list[object]:
    with safe_open(path, framework="pt") as file:
        return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118


def state_contenders(model: ManyTensors, saved: Path) -> list[Contender]:
    return [
        Contender(
            name="mp.save",
            run=lambda place: mp.save(place / "checkpoint-1", {"model": model}, step=1),
        ),
        Contender(
            name="safetensors.save_file, no fsync",
            run=lambda place: save_file(model.state_dict(), place / "model.safetensors"),
            is_baseline=True,
        ),
        Contender(name="mp.load", run=lambda place: mp.load(saved, {"model": model})),
        Contender(
            name="Checkpoint.open and all shapes",
            run=lambda place: mp.Checkpoint.open(saved).tensors(),
        ),
        Contender(
            name="verify, 2 threads", run=lambda place: mp.Checkpoint.open(saved).verify(threads=2)
        ),
    ]


def main() -> int:
    options = parse_options(__doc__ or "", nbytes=f"{COUNT}KiB")
    report = Report(title="20,000 tensors", options=options)
    model = ManyTensors((max(1, options.nbytes // COUNT // 2),))
    with work_directory(options) as directory:
        saved = directory / "saved" / "checkpoint-1"
        mp.save(saved, {"model": model}, step=1)
        headers = run_rounds(
            header_contenders(saved / "model.safetensors"), directory, rounds=options.rounds
        )
        report.times("header", headers)
        states = run_rounds(state_contenders(model, saved), directory, rounds=options.rounds)
        report.times("state", states, nbytes=options.nbytes)
    limits = {"parse_header": 0.5, "plan_parts of 2.3 TB, 5 GB a part": 0.5, "mp.save": 1.5}
    for name, limit in limits.items():
        found = find([*headers, *states], name).median
        report.bar(f"{name}, seconds", found=found, limit=limit, higher_is_better=False)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

"""Loading in one process: whole, weights only, one tensor, metadata only; and the bytes read.

`--nbytes` counts weights and AdamW moments together: a third is weights. Every load ends with the
bytes in memory: what is mapped lazily is copied into the live model, or touched. The script fails
when a weights-only load reads a byte of the optimizer, or metadata a byte of tensor data.
"""

from __future__ import annotations

import mmap
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import milepost as mp
from _common import (
    MIB,
    Contender,
    Options,
    Report,
    Result,
    answer,
    bytes_read_by,
    can_drop_caches,
    child,
    parse_options,
    peak_extra_nbytes,
    progress,
    run_rounds,
    settle,
    work_directory,
)
from _reads import BytesRead, bytes_read_under_strace, has_strace
from _state import adamw, llama, nbytes_of
from milepost.format.header import read_header

WHOLE, WEIGHTS, ONE, METADATA = "whole", "weights only", "one tensor", "metadata only"
GROUPS = (WHOLE, WEIGHTS, ONE, METADATA)
TENSOR = "model.layers.3.mlp.up_proj.weight"
WARM_UP_NBYTES = 4 * MIB
OWN_WHOLE = "mp.load, model and optimizer"
OWN_WEIGHTS = "mp.load, model"
OWN_METADATA = "Checkpoint.open, tensors, info"


class Stored:
    """Where each format lies below a directory."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.milepost = base / "checkpoint-1"
        self.safetensors = base / "model.safetensors"
        self.pt = base / "all.pt"
        self.hf = base / "hf"
        self.dcp = base / "dcp"

    def write(self, nbytes: int) -> int:
        """Save everything once in each format; the bytes of the weights."""
        model = llama(nbytes // 3)
        optimizer = adamw(model)
        mp.save(self.milepost, {"model": model, "optimizer": optimizer}, step=1)
        save_file(model.state_dict(), self.safetensors, metadata={"format": "pt"})
        model.save_pretrained(self.hf)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, self.pt)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(self.dcp), no_dist=True)
        return nbytes_of(model.state_dict())


def contenders(stored: Stored, model: Any, optimizer: Any) -> list[Contender]:
    """Everybody, ready to fill `model` and `optimizer` or to return what was asked for."""
    groups: dict[str, dict[str, Callable[[], object]]] = {
        WHOLE: {
            OWN_WHOLE: lambda: mp.load(stored.milepost, {"model": model, "optimizer": optimizer}),
            "mp.load, digests verified first": lambda: mp.load(
                stored.milepost, {"model": model, "optimizer": optimizer}, verify=mp_digests()
            ),
            "torch.load + load_state_dict": partial(_torch_whole, stored, model, optimizer, False),
            "torch.load(mmap) + load_state_dict": partial(
                _torch_whole, stored, model, optimizer, True
            ),
            "dcp.load + load_state_dict": partial(_dcp, stored, model, optimizer),
        },
        WEIGHTS: {
            OWN_WEIGHTS: lambda: mp.load(stored.milepost, {"model": model}),
            "Checkpoint.read_weights": lambda: mp.Checkpoint.open(stored.milepost).read_weights(),
            "safetensors load_file + load_state_dict": lambda: model.load_state_dict(
                load_file(stored.safetensors)
            ),
            "safetensors load_file(pread) + load_state_dict": lambda: model.load_state_dict(
                load_file(stored.safetensors, backend="pread")
            ),
            "torch.load + load_state_dict (weights)": partial(_torch_weights, stored, model, False),
            "torch.load(mmap) + load_state_dict (weights)": partial(
                _torch_weights, stored, model, True
            ),
            "from_pretrained, touched": partial(_from_pretrained, stored, type(model)),
            "dcp.load, model": partial(_dcp, stored, model, None),
        },
        ONE: {
            "Checkpoint.read": lambda: mp.Checkpoint.open(stored.milepost).read(TENSOR),
            "safe_open.get_tensor, copied": partial(_safe_open_one, stored),
            "torch.load(mmap), copied": lambda: _torch_load(stored, True)["model"][TENSOR].clone(),
            "torch.load, one": lambda: _torch_load(stored, False)["model"][TENSOR],
        },
        METADATA: {
            OWN_METADATA: partial(_own_metadata, stored),
            "safe_open, shapes": partial(_safe_open_shapes, stored),
            "torch.load(mmap), shapes": lambda: _torch_load(stored, True)["model"],
            "dcp read_metadata": lambda: dcp.FileSystemReader(stored.dcp).read_metadata(),
        },
    }
    return [
        Contender(name=name, group=group, run=partial(_ignoring_place, call), is_baseline=not n)
        for group, calls in groups.items()
        for n, (name, call) in enumerate(calls.items())
    ]


def _ignoring_place(call: Callable[[], object], place: Path) -> object:
    return call()


def mp_digests() -> Any:
    from milepost.checkpointing.load import Verify

    return Verify.DIGESTS


def _torch_load(stored: Stored, is_mapped: bool) -> Any:
    return torch.load(stored.pt, weights_only=True, mmap=is_mapped)


def _torch_whole(stored: Stored, model: Any, optimizer: Any, is_mapped: bool) -> None:
    loaded = _torch_load(stored, is_mapped)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if is_mapped:  # the moments are the mapped ones now
        for state in optimizer.state.values():
            _touch(state["exp_avg"], state["exp_avg_sq"])


def _torch_weights(stored: Stored, model: Any, is_mapped: bool) -> None:
    model.load_state_dict(_torch_load(stored, is_mapped)["model"])


def _dcp(stored: Stored, model: Any, optimizer: Any) -> None:
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    dcp.load(state, storage_reader=dcp.FileSystemReader(stored.dcp), no_dist=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def _from_pretrained(stored: Stored, kind: Any) -> Any:
    model = kind.from_pretrained(stored.hf, dtype=torch.bfloat16)
    _touch(*model.parameters())
    return model


def _touch(*tensors: torch.Tensor) -> None:
    """Read one byte of every page."""
    for tensor in tensors:
        step = mmap.PAGESIZE // tensor.element_size()
        tensor.detach().reshape(-1).view(torch.int16)[::step].sum()


def _safe_open_one(stored: Stored) -> torch.Tensor:
    with safe_open(stored.safetensors, framework="pt") as file:
        return file.get_tensor(TENSOR).clone()


def _safe_open_shapes(stored: Stored) -> dict[str, Any]:
    with safe_open(stored.safetensors, framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _own_metadata(stored: Stored) -> object:
    checkpoint = mp.Checkpoint.open(stored.milepost)
    return checkpoint.info, checkpoint.tensors(), checkpoint.state_tensors(), checkpoint.files()


# ------------------------------------------------------------------------ memory and bytes read


def measure(options: Options, what: str) -> None:
    """In a process of its own: peak memory and bytes read of one contender."""
    name, how, base = what.split("@")
    big = Stored(Path(base))
    small = Stored(big.base / "small")
    runs = []
    for stored, nbytes in ((small, WARM_UP_NBYTES), (big, options.nbytes)):
        model = llama(nbytes // 3)
        contender = _named(name, contenders(stored, model, None))
        if contender.group == WHOLE:
            contender = _named(name, contenders(stored, model, adamw(model)))
        runs.append(partial(contender.run, stored.base))
    warm_up, run = runs
    warm_up()
    if how == "once":
        run()
        answer({})
        return
    peak = peak_extra_nbytes(run)
    answer({"peak": peak, "read": bytes_read_by(run)})


def _named(name: str, known: list[Contender]) -> Contender:
    return next(contender for contender in known if contender.name == name)


def add_memory_and_reads(results: list[Result], options: Options, stored: Stored) -> None:
    for result in results:
        progress(f"memory and bytes read of {result.name}")
        found = child(options, f"{result.name}@counted@{stored.base}")
        result.more["extra MiB"] = round(found["peak"] / MIB, 1)
        result.more["read MiB"] = round(found["read"] / MIB, 3)


def check_reads(report: Report, options: Options, stored: Stored) -> None:
    """Which bytes of which file: by strace where there is one, else by the kernel's counter."""
    weights, moments = (
        stored.milepost / "model.safetensors",
        stored.milepost / "training" / "optimizer.safetensors",
    )
    headers = {path: read_header(path).data_start for path in (weights, moments)}
    if not has_strace():
        _check_counters(report, options, stored)
        return
    rows = []
    for name in (OWN_WEIGHTS, OWN_METADATA):
        seen = bytes_read_under_strace(
            lambda *prefix, name=name: child(options, f"{name}@once@{stored.base}", *prefix)
        )
        for path in sorted(stored.milepost.rglob("*")):
            if path.is_file():
                rows.append(_row(name, path, stored, headers.get(path), seen))
        data = {path: seen.beyond(path, start) for path, start in headers.items()}
        _bar(report, f"{name}: bytes of moments read", data[moments])
        if name == OWN_METADATA:
            _bar(report, f"{name}: bytes of weights read", data[weights])
        else:
            whole = weights.stat().st_size - headers[weights]
            _bar(report, f"{name}: bytes of weights read twice", data[weights] - whole)
    report.rows("bytes read of a checkpoint, by file (strace)", rows)


def _check_counters(report: Report, options: Options, stored: Stored) -> None:
    """Without strace: no more bytes than the files that may be read, and the small ones."""
    most = 8 * MIB
    limits = {
        OWN_WEIGHTS: (stored.milepost / "model.safetensors").stat().st_size + most,
        OWN_METADATA: most,
    }
    for name, limit in limits.items():
        found = child(options, f"{name}@counted@{stored.base}")["read"]
        report.bar(f"{name}: bytes of all read", found=found, limit=limit, higher_is_better=False)


def _row(
    name: str, path: Path, stored: Stored, data_start: int | None, seen: BytesRead
) -> dict[str, Any]:
    return {
        "what": name,
        "file": str(path.relative_to(stored.milepost)),
        "bytes": path.stat().st_size,
        "read": seen.total(path),
        "of these tensor data": "-" if data_start is None else seen.beyond(path, data_start),
        "mapped": seen.mapped(path),
    }


def _bar(report: Report, text: str, found: int) -> None:
    report.bar(text, found=found, limit=0, higher_is_better=False)


def main() -> int:
    options = parse_options(__doc__ or "")
    if options.child:
        measure(options, options.child)
        return 0
    report = Report(title="load, one process", options=options)
    with work_directory(options) as directory:
        stored = Stored(directory)
        weights_nbytes = stored.write(options.nbytes)
        Stored(directory / "small").write(WARM_UP_NBYTES)
        model = llama(options.nbytes // 3)
        optimizer = adamw(model)
        everybody = contenders(stored, model, optimizer)
        sizes = {WHOLE: 3 * weights_nbytes, WEIGHTS: weights_nbytes}
        warm = run_rounds(everybody, directory, rounds=options.rounds)
        cold = []
        if can_drop_caches():
            cold = run_rounds(everybody, directory, rounds=options.rounds, cold=True)
        del model, optimizer, everybody
        settle()
        if options.memory:
            add_memory_and_reads(warm, options, stored)
        for state, results in (("warm", warm), ("cold", cold)):
            for group in GROUPS:
                chosen = [result for result in results if result.group == group]
                if chosen:
                    report.times(f"{group}, {state}", chosen, nbytes=sizes.get(group))
        check_reads(report, options, stored)
        shutil.rmtree(stored.base / "small")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

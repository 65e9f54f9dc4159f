"""Worlds of real gloo ranks for tests, started in a fraction of a second.

A fork server imports torch once; each rank is a fork of it with a TCP store on localhost (a file
store hides the traps of the real one). A test passes a module-level function, called as
`function(rank, world_size, *arguments)`; what it returns comes back in order of rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from random import SystemRandom
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "peft",
    "milepost.manager.manager",
    "milepost_trainer.training",
    "tests.worlds",
]
DEADLINE_S = 120.0
PARTING_S = 4.0
_LIMIT = "MILEPOST_RANK_TIMEOUT_S"

_context: Any = None


def _server() -> Any:
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOAD)
    return _context


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended: its value, or the text and class name of what it raised, or a signal."""

    value: Any = None
    error: str | None = None
    error_class: str | None = None
    exit_code: int | None = 0


def run_world(
    world_size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """The value of every rank; fails with the first rank's traceback when one raises or dies."""
    outcomes = run_outcomes(world_size, function, *arguments, deadline_s=deadline_s)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None and outcome.exit_code == 0, (
            f"rank {rank} ended with code {outcome.exit_code}:\n{outcome.error}"
        )
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    world_size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S
) -> list[Outcome]:
    """How every rank ended. A rank that is not done by the deadline is killed and says so."""
    context = _server()
    port = _free_port()
    ends: list[tuple[Any, Connection]] = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(theirs, rank, world_size, port, function, arguments), daemon=True
        )
        process.start()
        theirs.close()
        ends.append((process, ours))
    return [_collect(process, pipe, deadline_s) for process, pipe in ends]


@contextmanager
def silence_of(seconds: int) -> Iterator[None]:
    """Calls in this block wait so long for a silent rank, on a busy machine too.

    For the one call that must end so: around others a stall of some seconds would end those.
    """
    before = os.environ.get(_LIMIT)
    os.environ[_LIMIT] = str(seconds)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LIMIT]
        else:
            os.environ[_LIMIT] = before


def _collect(process: Any, pipe: Connection, deadline_s: float) -> Outcome:
    try:
        outcome = pickle.loads(pipe.recv_bytes()) if pipe.poll(deadline_s) else None
    except EOFError:
        outcome = None
    process.join(5 if outcome is not None else 0.5)
    if process.is_alive():
        process.kill()
        process.join()
        if outcome is None:
            return Outcome(error=f"not done after {deadline_s} s", exit_code=None)
    if outcome is None:
        return Outcome(error="died without a word", exit_code=process.exitcode)
    return outcome  # type: ignore[no-any-return]


def _part(rank: int, world_size: int, dist: Any) -> None:
    """Rank 0 holds the store: it leaves last, or a while after a rank died on purpose."""
    store = dist.distributed_c10d._get_default_store()
    others = [f"parting/{other}" for other in range(world_size)] if rank == 0 else []
    with suppress(RuntimeError):  # rank 0 may be dead, and its store with it
        store.set(f"parting/{rank}", b"1")
        store.wait(others, timedelta(seconds=PARTING_S))


def _free_port() -> int:
    """A port below those that the kernel gives to sockets without one, as gloo's are: one of these
    would be taken again before the store listens on it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = SystemRandom().randrange(first // 2, first)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def _rank(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    gc.freeze()  # what all ranks imported is never freed: no collection goes through it
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group("gloo")
        outcome = Outcome(value=function(rank, world_size, *arguments))
        _part(rank, world_size, dist)
    except BaseException as error:
        text = f"{error}\n{traceback.format_exc()}"
        outcome = Outcome(error=text, error_class=type(error).__name__)
        if dist.is_initialized():  # the others may still be reading what became of it
            _part(rank, world_size, dist)
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)

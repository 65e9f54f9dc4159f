"""How a rewrite is carried out, whatever it does. Values only: importing this costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from milepost._env import env_int

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called as `on_progress(done, total)`, in bytes of the output, from any thread."""


class Mode(Enum):
    """Whether the output is made."""

    WRITE = "write"
    DRY_RUN = "dry-run"
    """From headers alone: output files and sizes, memory, and every problem, all at once."""


class Check(Enum):
    """What is done with the output before it gets its name."""

    NONE = "none"
    LOAD = "load"
    """Its headers are read again, its parameters counted, its names compared with those that
    transformers and servers look for. What is wrong keeps the output from being published."""


class Untouched(Enum):
    """How a part of which no byte changes gets into the output."""

    COPY = "copy"
    LINK = "link"
    """A hard link where the file system allows it: no bytes, and two names for one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteOptions:
    """`max_shard_size` as Hugging Face spells sizes (decimal units); None leaves it to the verb.

    `memory_nbytes` is what groups may take together; by default as much as the largest needs, and
    no less than 32 MiB. A group that needs more runs alone. `is_durable` False leaves out fsync.
    """

    max_shard_size: int | str | None = None
    mode: Mode = Mode.WRITE
    check: Check = Check.NONE
    threads: int = field(default_factory=lambda: env_int("MILEPOST_IO_THREADS"))
    memory_nbytes: int | None = None
    is_durable: bool = True
    on_progress: OnProgress | None = None

"""Environment variables that change how Milepost works: one table; nobody else reads `os.environ`.

`MILEPOST_IO_THREADS`      threads that write or read tensor data, per process; unless said up to 4,
                           and no more than there are cores for each rank of this host (torchrun's
                           `LOCAL_WORLD_SIZE`)
`MILEPOST_WRITE_MODE`      `auto`, `direct` (O_DIRECT through a bounce buffer) or `buffered`
`MILEPOST_VERIFY_THREADS`  threads of `milepost verify`
`MILEPOST_RANK_TIMEOUT_S`  how long a silent rank is waited for
`MILEPOST_VISIBLE_S`       how long a rank waits for a checkpoint that rank 0 sees already
`MILEPOST_INNER_DIM`       `exchange` or `mapped`: how shards that cut rows become whole rows
`MILEPOST_AGGREGATE_BELOW` pieces of fewer bytes are joined by one writer for each domain of a file
`MILEPOST_STRIPE_NBYTES`   what two hosts never both write into: a page, or a stripe of the storage
`MILEPOST_CHECK_STAGING`   1: compare live tensors and their copies with what was there at the call
`MILEPOST_HOST_ID`         name of this host, where host name and boot id do not tell hosts apart
"""

from __future__ import annotations

import os

from milepost.errors import InvalidInputError

_MOST_IO_THREADS = 4


def _io_threads() -> int:
    """A rank's share of the cores, 1 to 4: ranks of one host read and write at the same time."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = (os.cpu_count() or 1) // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
    return max(1, min(_MOST_IO_THREADS, cores))


_DEFAULTS: dict[str, int | str] = {
    "MILEPOST_WRITE_MODE": "auto",
    "MILEPOST_VERIFY_THREADS": os.cpu_count() or 1,
    "MILEPOST_RANK_TIMEOUT_S": 600,
    "MILEPOST_VISIBLE_S": 60,
    "MILEPOST_INNER_DIM": "exchange",
    "MILEPOST_AGGREGATE_BELOW": "",
    "MILEPOST_STRIPE_NBYTES": 4096,
    "MILEPOST_CHECK_STAGING": "0",
    "MILEPOST_HOST_ID": "",
}


def env_int(name: str) -> int:
    """The value of a variable of the table, at least 1."""
    raw = os.environ.get(name)
    if raw is None:
        return _io_threads() if name == "MILEPOST_IO_THREADS" else int(_DEFAULTS[name])
    if not raw.isdecimal() or int(raw) < 1:
        raise InvalidInputError(f"environment variable {name}={raw!r}: expected a number from 1 up")
    return int(raw)


def env_int_or_none(name: str) -> int | None:
    """The value of a variable of the table, at least 1; None when it is not set."""
    return env_int(name) if name in os.environ else None


def env_choice(name: str, choices: tuple[str, ...]) -> str:
    """The value of a variable of the table, one of `choices`."""
    raw = os.environ.get(name, str(_DEFAULTS[name]))
    if raw not in choices:
        raise InvalidInputError(
            f"environment variable {name}={raw!r}: expected one of {', '.join(choices)}"
        )
    return raw


def env_text(name: str) -> str:
    """The value of a variable of the table, any text."""
    return os.environ.get(name, str(_DEFAULTS[name]))

"""Environment variables that change how Milepost works: one table; nobody else reads `os.environ`.

`MILEPOST_IO_THREADS`      threads that write or read tensor data, per process
`MILEPOST_WRITE_MODE`      `auto`, `direct` (O_DIRECT through a bounce buffer) or `buffered`
`MILEPOST_VERIFY_THREADS`  threads of `milepost verify`
`MILEPOST_RANK_TIMEOUT_S`  how long a silent rank is waited for
"""

from __future__ import annotations

import os

from milepost.errors import InvalidInputError

_DEFAULTS: dict[str, int | str] = {
    "MILEPOST_IO_THREADS": min(4, os.cpu_count() or 1),
    "MILEPOST_WRITE_MODE": "auto",
    "MILEPOST_VERIFY_THREADS": os.cpu_count() or 1,
    "MILEPOST_RANK_TIMEOUT_S": 600,
}


def env_int(name: str) -> int:
    """The value of a variable of the table, at least 1."""
    raw = os.environ.get(name)
    if raw is None:
        return int(_DEFAULTS[name])
    if not raw.isdecimal() or int(raw) < 1:
        raise InvalidInputError(f"environment variable {name}={raw!r}: expected a number from 1 up")
    return int(raw)


def env_choice(name: str, choices: tuple[str, ...]) -> str:
    """The value of a variable of the table, one of `choices`."""
    raw = os.environ.get(name, str(_DEFAULTS[name]))
    if raw not in choices:
        raise InvalidInputError(
            f"environment variable {name}={raw!r}: expected one of {', '.join(choices)}"
        )
    return raw

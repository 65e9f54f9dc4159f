"""Exit codes of `milepost`: one table. They are append-only; scripts depend on them.

| code | when |
|---|---|
| 0 | done; nothing found, nothing differs |
| 1 | a finding: `verify` found damage, `diff` found a difference |
| 2 | wrong usage of the command line |
| 3 | nothing is there, or no save of it was ever committed |
| 4 | damaged: malformed, incomplete or not the bytes that were saved |
| 5 | refused: an argument, a state or a target that cannot be right |
| 6 | the file system said no, or is full |
| 7 | another process is writing into the run |
| 8 | this installation cannot: a newer format, or an optional package is missing |
| 9 | a fault of milepost itself |
| 130 | interrupted |
"""

from __future__ import annotations

from enum import IntEnum

from milepost import errors


class ExitCode(IntEnum):
    OK = 0
    FINDING = 1
    USAGE = 2
    NOT_FOUND = 3
    DAMAGED = 4
    REFUSED = 5
    STORAGE = 6
    IN_USE = 7
    UNSUPPORTED = 8
    INTERNAL = 9
    INTERRUPTED = 130


# The first row that fits; `OSError` stands last because many of ours are one too.
ROWS: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (errors.NotFoundError, ExitCode.NOT_FOUND),
    (errors.DamagedError, ExitCode.DAMAGED),
    (errors.UnsupportedVersionError, ExitCode.UNSUPPORTED),
    (errors.MissingExtraError, ExitCode.UNSUPPORTED),
    (errors.RunInUseError, ExitCode.IN_USE),
    (errors.StorageError, ExitCode.STORAGE),
    (errors.CheckpointError, ExitCode.REFUSED),
    (FileNotFoundError, ExitCode.NOT_FOUND),
    (OSError, ExitCode.STORAGE),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code for an error that ends a command."""
    return next((code for kind, code in ROWS if isinstance(error, kind)), ExitCode.INTERNAL)

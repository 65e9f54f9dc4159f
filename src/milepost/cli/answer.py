"""What a command answers, given once as data and shown as text or as one JSON document."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from milepost.cli.exit_codes import ExitCode, exit_code_of
from milepost.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console


class Output(Enum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`document` is for `--json`, `show` prints the same for people."""

    document: Mapping[str, Any]
    show: Callable[[Console], None]
    exit_code: ExitCode = ExitCode.OK


def give(answer_of: Callable[[], Answer], output: Output) -> None:
    """Run a command's body and print what it answers, or its error; ends with `typer.Exit`.

    An error is one `error: ...` line on stderr and, with JSON, `{"error": ...}` on stdout.
    """
    try:
        answer = answer_of()
        _print(answer, output)
    except BrokenPipeError:
        raise  # the reader of our output went away; typer ends quietly
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(fail(error, output)) from error
    raise typer.Exit(answer.exit_code)


def fail(error: BaseException, output: Output) -> ExitCode:
    """Print an error and return its exit code."""
    message = _message(error)
    print(f"error: {message}", file=sys.stderr)
    code = exit_code_of(error)
    if output is Output.JSON:
        write_json({"error": error_document(error, message), "exit_code": int(code)})
    return code


def error_document(error: BaseException, message: str | None = None) -> dict[str, Any]:
    """An error as data: the stable code, the text, the file concerned."""
    if isinstance(error, CheckpointError):
        code, path = error.code, error.path
    else:
        code, path = exit_code_of(error).name.lower(), getattr(error, "filename", None)
    text = _message(error) if message is None else message
    return {"code": code, "message": text, "path": path}


def write_json(document: Mapping[str, Any]) -> None:
    """Print one strict JSON document; what is not finite is text (`nan`, `inf`, `-inf`)."""
    from milepost.format.strictjson import dumps

    print(dumps(plain(document), indent=2).decode())


def plain(value: Any) -> Any:
    """`value` as something that strict JSON knows."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [plain(item) for item in items]
    return str(value)


def _print(answer: Answer, output: Output) -> None:
    if output is Output.JSON:
        write_json(answer.document)
        return
    from rich.console import Console

    # Nothing is marked up by accident: names hold brackets, and colours are asked for by style.
    answer.show(Console(markup=False, emoji=False, highlight=False))


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, CheckpointError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    return f"a fault of milepost, please report it: {type(error).__name__}: {text}{place}"

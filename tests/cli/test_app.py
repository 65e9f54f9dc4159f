"""The application as a whole: what it imports, how it ends, what it prints where."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from milepost import errors
from milepost.cli.answer import Answer, Output, give
from milepost.cli.exit_codes import ROWS, ExitCode, exit_code_of
from tests.cli.conftest import Make, Milepost

HEAVY = ("torch", "transformers", "numpy", "asyncio", "rich.progress", "safetensors")
LOADED = """
import sys
from milepost.cli import main
sys.argv = ["milepost", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code
print(code, *sorted(sys.modules), file=sys.stderr)
"""


def modules_after(*arguments: object) -> tuple[int, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    code, *names = done.stderr.split()
    return int(code), set(names)


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "diff"])
def test_the_verbs_that_look_never_import_torch(make: Make, tmp_path: Path, verb: str) -> None:
    first, second = make(1, loss=1.0), make(2, loss=2.0)
    paths: dict[str, list[object]] = {
        "ls": [tmp_path / "run", "--best", "loss"],
        "diff": [first, second],
    }
    code, names = modules_after(verb, *paths.get(verb, [first]))
    assert code == 0
    assert names.isdisjoint(HEAVY)


def test_the_help_imports_no_body(tmp_path: Path) -> None:
    code, names = modules_after("--help")
    assert code == 0
    assert names.isdisjoint({*HEAVY, "milepost.layouts.run", "milepost.cli.ls", "msgspec"})


def test_the_module_runs_as_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "milepost", "show", tmp_path / "nothing", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.startswith(f"error: {tmp_path}/nothing: nothing is there")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["error"]["code"] == "not-found"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("lss",), "No such command 'lss'. Did you mean 'ls'?"),
        (("ls",), "Missing argument"),
        (("ls", "--wrong", "x"), "No such option: --wrong"),
        (("export", "a", "b", "--to", "zip"), "'zip' is not one of"),
    ],
)
def test_wrong_usage_is_one_line_on_stderr(
    milepost: Milepost, arguments: tuple[str, ...], text: str
) -> None:
    result = milepost(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert text in result.err
    assert result.err.count("\n") == 1


def test_without_arguments_the_help_is_shown_as_wrong_usage(milepost: Milepost) -> None:
    result = milepost()
    assert result.code == 2
    assert "Commands:" in result.err


def test_the_version_is_said(milepost: Milepost) -> None:
    result = milepost("--version")
    assert (result.code, result.out.split()[0]) == (0, "milepost")


def kinds(kind: type[errors.CheckpointError]) -> Iterator[type[errors.CheckpointError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


def test_every_error_of_milepost_has_an_exit_code_that_is_not_a_fault() -> None:
    for kind in kinds(errors.CheckpointError):
        code = next(code for base, code in ROWS if issubclass(kind, base))
        assert code not in (ExitCode.OK, ExitCode.FINDING, ExitCode.USAGE, ExitCode.INTERNAL), kind
    assert exit_code_of(errors.NotCommittedError("x")) is ExitCode.NOT_FOUND
    assert exit_code_of(errors.FormatError("x")) is ExitCode.DAMAGED
    assert exit_code_of(errors.NoSpaceError("x")) is ExitCode.STORAGE
    assert exit_code_of(errors.MissingExtraError("x")) is ExitCode.UNSUPPORTED
    assert exit_code_of(PermissionError(13, "no")) is ExitCode.STORAGE


def test_exit_codes_are_append_only() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FINDING": 1,
        "USAGE": 2,
        "NOT_FOUND": 3,
        "DAMAGED": 4,
        "REFUSED": 5,
        "STORAGE": 6,
        "IN_USE": 7,
        "UNSUPPORTED": 8,
        "INTERNAL": 9,
        "INTERRUPTED": 130,
    }


def test_a_fault_of_ours_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> Answer:
        raise RuntimeError("planner\nlost a tensor")

    with pytest.raises(typer.Exit) as end:
        give(body, Output.JSON)
    assert end.value.exit_code == ExitCode.INTERNAL
    out, err = capsys.readouterr()
    assert err.startswith(
        "error: a fault of milepost, please report it: RuntimeError: planner lost"
    )
    assert json.loads(out)["exit_code"] == 9


def test_json_holds_no_token_that_strict_readers_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"a": float("nan"), "b": [float("-inf")], Path("c"): {1, 2}, "d": ExitCode.OK}
    with pytest.raises(typer.Exit):
        give(lambda: Answer(document=document, show=print), Output.JSON)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out) == {"a": "nan", "b": ["-inf"], "c": [1, 2], "d": 0}


def test_a_module_brings_commands_by_registering_them() -> None:
    from milepost.cli.app import COMMAND_MODULES, make_app

    assert "milepost.cli.commands_read" in COMMAND_MODULES
    result = CliRunner().invoke(make_app(["milepost.cli.commands_write"]), ["--help"])
    assert "prune" in result.stdout
    assert "verify" not in result.stdout

"""`milepost migrate` and `llm-migrate-ckpt`, as people call them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.llm_migrate import make_llm_app
from tests.cli.conftest import Milepost, Result
from tests.tools.legacy_files import (
    Marker,
    hidden,
    legacy,
    trio_files,
    visible,
    weights,
    write,
)

Llm: TypeAlias = Callable[..., Result]
CHECK = "\u2713"


@pytest.fixture
def llm() -> Llm:
    """Run `llm-migrate-ckpt` with these arguments."""
    app = make_llm_app()

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(code=result.exit_code, out=result.stdout, err=result.stderr)

    return run


@pytest.fixture
def latest(tmp_path: Path) -> Path:
    return write(tmp_path / "latest.pt")


def tamper(latest: Path) -> None:
    """Another trio where the one of this file would be."""
    raw = latest.read_bytes()
    mp.convert_legacy_checkpoint_to_split(write(latest, loss=0.75))
    latest.write_bytes(raw)


# ---- llm-migrate-ckpt: the flags and exit codes of the first source document


def test_the_lines_of_a_success_begin_with_a_check_mark_and_list_the_files(
    llm: Llm, latest: Path
) -> None:
    done = llm(latest)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert all(line.startswith(f"{CHECK} ") for line in lines)
    for word, path in zip(
        ("legacy", "weights", "meta", "extra_state"),
        (latest, *trio_files(latest.with_suffix(""))),
        strict=True,
    ):
        assert any(line.split()[1:] == [word, str(path)] for line in lines), word
        assert path.exists()
    assert lines[-1].endswith("keep the legacy file")


@pytest.mark.parametrize("flags", [(), ("--verify",)])
def test_in_place_deletes_after_it_was_proven(
    llm: Llm, latest: Path, flags: tuple[str, ...]
) -> None:
    done = llm(latest.with_suffix(""), "--in-place", *flags)
    assert done.code == 0
    assert "every bit is the same" in done.out
    assert done.out.splitlines()[-1].endswith("delete the legacy file")
    assert not latest.exists()
    again = llm(latest)
    assert (again.code, again.out) == (1, "")
    assert again.err == f"error: {latest}: there is no legacy file, only the split one\n"


def test_verify_of_a_trio_that_is_there_converts_nothing(llm: Llm, latest: Path) -> None:
    llm(latest)
    before = [path.stat().st_ino for path in trio_files(latest.with_suffix(""))]
    done = llm(latest, "--verify")
    assert done.code == 0
    assert "(exists)" in done.out and "every bit is the same" in done.out
    assert before == [path.stat().st_ino for path in trio_files(latest.with_suffix(""))]


@pytest.mark.case("C5.24")
@pytest.mark.parametrize("flags", [(), ("--in-place",)])
def test_a_tampered_trio_is_exit_code_2_with_a_hint_and_the_legacy_file_stays(
    llm: Llm, latest: Path, flags: tuple[str, ...]
) -> None:
    tamper(latest)
    done = llm(latest, "--verify", *flags)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error.startswith(f"error: {latest}: verification failed: loss: 0.5 became 0.75")
    assert hint.startswith("hint: the legacy file is kept; --overwrite")
    assert latest.exists()


@pytest.mark.case("C5.25")
def test_overwrite_with_verify_writes_anew(llm: Llm, latest: Path) -> None:
    tamper(latest)
    assert llm(latest).code == 1
    done = llm(latest, "--overwrite", "--verify")
    assert done.code == 0
    assert mp.load_checkpoint(latest.with_suffix(""))["loss"] == 0.5


@pytest.mark.case("C5.24")
def test_nan_weights_tuples_and_absent_losses_are_no_false_alarm(llm: Llm, tmp_path: Path) -> None:
    payload = legacy(
        loss=float("nan"),
        model_config={"sizes": (1, 2)},
        model_state={"w": torch.tensor([float("nan"), float("inf")]), "e": torch.empty(0)},
    )
    del payload["best_loss"], payload["epoch"]
    assert llm(write(tmp_path / "x.pt", payload), "--verify", "--in-place").code == 0


@pytest.mark.case("C5.25")
def test_a_dry_run_prints_the_plan_and_writes_nothing(llm: Llm, latest: Path) -> None:
    done = llm(latest, "--dry-run", "--in-place")
    assert done.code == 0
    assert all(line.startswith("plan: ") for line in done.out.splitlines())
    assert "delete the legacy file" in done.out
    assert visible(latest.parent) == ["latest.pt"]


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "nothing is there"),
    "a directory": (lambda path: path.mkdir(), "a directory, not a regular file"),
    "garbage": (lambda path: path.write_bytes(b"garbage"), "not an archive of torch.save"),
    "empty": (lambda path: path.write_bytes(b""), "the file is empty"),
    "no checkpoint": (lambda path: write(path, {"tokens": 1}), "no weights"),
    "no dict": (lambda path: write(path, [1]), "expected the dict of a training checkpoint"),
    "unsafe": (
        lambda path: write(path, legacy(run=Marker(path.with_name("ran")))),
        "the pickle wants posix.mkdir",
    ),
    "partly there": (
        lambda path: (write(path), path.with_name("x.meta.json").write_text("{}")),
        "x.meta.json exist already",
    ),
}


@pytest.mark.case("C5.25")
@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--verify",)])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_one_line_and_exit_code_1(
    llm: Llm, tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    make, text = REFUSED[name]
    make(tmp_path / "x.pt")
    before = visible(tmp_path)
    done = llm(tmp_path / "x.pt", *flags)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert text in done.err
    assert visible(tmp_path) == before
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("arguments", [(), ("a", "b"), ("a", "--nonsense")])
def test_wrong_usage_is_exit_code_2(llm: Llm, arguments: tuple[str, ...]) -> None:
    done = llm(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1


def test_the_help_names_the_flags_of_the_document(llm: Llm) -> None:
    done = llm("--help")
    assert done.code == 0
    for flag in ("PATH", "--in-place", "--verify", "--dry-run", "--overwrite"):
        assert flag in done.out


def test_the_script_runs_where_the_terminal_knows_no_check_mark(latest: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("llm-migrate-ckpt"), latest],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONWARNINGS": "error"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"? legacy")


# ---- milepost migrate


def test_a_directory_is_migrated_with_a_table_and_a_summary(
    milepost: Milepost, tmp_path: Path
) -> None:
    write(tmp_path / "best.pt")
    write(tmp_path / "latest.pt", model_state=weights("_orig_mod."))
    done = milepost("migrate", tmp_path, "--verify")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^2 migrated, .* KiB written$", done.out, re.MULTILINE)
    assert "_orig_mod taken off 3 names" in " ".join(done.out.split())
    again = milepost("migrate", tmp_path)
    assert again.code == 0
    assert "2 skipped" in again.out and "it was migrated before" in " ".join(again.out.split())


def test_the_document_says_everything(milepost: Milepost, tmp_path: Path) -> None:
    write(tmp_path / "run.v2.ckpt")
    done = milepost("migrate", tmp_path, "--in-place", "--backup", "--json").json()
    assert (done["ok"], done["dry_run"], done["counts"]["migrated"]) == (True, False, 1)
    (one,) = done["migrations"]
    assert one["source"].endswith("run.v2.ckpt")
    assert [Path(name) for name in one["files"]] == trio_files(tmp_path / "run.v2")
    assert (one["dialect"], one["verified"], one["source_removed"]) == ("llm-v0.0.5", True, True)
    assert [Path(name).name for name in one["backups"]] == ["run.v2.ckpt.bak"]
    assert one["nbytes"] == sum(path.stat().st_size for path in trio_files(tmp_path / "run.v2"))


CASES: dict[str, tuple[Callable[[Path], object], int]] = {
    "sound": (lambda path: write(path), 0),
    "missing": (lambda path: None, 3),
    "damaged": (lambda path: path.write_bytes(b"PK cut"), 4),
    "unsafe": (lambda path: write(path, legacy(run=Marker(path.with_name("ran")))), 5),
    "taken": (lambda path: (write(path), path.with_name("x.meta.json").write_text("{}")), 5),
    "another trio": (lambda path: tamper(write(path)), 1),
}


@pytest.mark.case("C5.25")
@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_has_the_exit_code_and_the_errors_of_the_real_run(
    milepost: Milepost, tmp_path: Path, name: str
) -> None:
    make, code = CASES[name]
    make(tmp_path / "x.pt")
    before = visible(tmp_path)
    dry = milepost("migrate", tmp_path / "x.pt", "--dry-run", "--json")
    assert visible(tmp_path) == before
    real = milepost("migrate", tmp_path / "x.pt", "--json")
    assert (dry.code, real.code) == (code, code)
    assert dry.err == real.err
    assert dry.err.count("error: ") == (code != 0)
    assert dry.json()["dry_run"] is True


def test_one_bad_file_keeps_no_other_from_being_migrated(
    milepost: Milepost, tmp_path: Path
) -> None:
    write(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"PK cut")
    write(tmp_path / "c.pt")
    done = milepost("migrate", tmp_path, "--jobs", "2")
    assert done.code == 4
    assert done.err.startswith(f"error: {tmp_path}/b.pt: ")
    assert "2 migrated, 1 failed" in done.out
    assert trio_files(tmp_path / "c")[0].exists()


def test_the_flags_do_what_they_say(milepost: Milepost, tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in weights().items()}
    write(tmp_path / "runs" / "deep" / "x.pth", model_state=state)
    assert milepost("migrate", tmp_path / "runs").code == 3
    flags = ("--recursive", "--out", tmp_path / "new", "--strip-prefix", "module")
    assert milepost("migrate", tmp_path / "runs", *flags).code == 0
    loaded = mp.load_checkpoint(tmp_path / "new" / "deep" / "x")
    assert set(loaded["model_state"]) == set(weights())
    back = milepost("migrate", tmp_path / "new" / "deep" / "x", "--to", "single-file", "--in-place")
    assert back.code == 0
    assert visible(tmp_path / "new" / "deep") == ["x.pt"]
    into = ("--to", "directory", "--out", tmp_path / "dirs")
    assert milepost("migrate", tmp_path / "new" / "deep" / "x.pt", *into).code == 0
    assert milepost("verify", tmp_path / "dirs" / "x").code == 0
    refused = milepost("migrate", tmp_path / "runs", "--backup")
    assert refused.code == 5
    assert "a backup is of what is removed or replaced" in refused.err


class Options:
    """A class of a program that is not here any more."""

    def __init__(self) -> None:
        self.lr = 0.1


def test_a_class_is_taken_as_inert_fields_where_it_is_allowed(
    milepost: Milepost, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.pt", model_config=Options())
    name = f"{__name__}.Options"
    refused = milepost("migrate", path)
    assert refused.code == 5 and name in refused.err
    assert milepost("migrate", path, "--allow", name, "--verify").code == 0
    document: Any = json.loads((tmp_path / "x.meta.json").read_text())
    assert document["model_config"] == {"lr": 0.1}


# ---- the warning that names the command (C5.27)


@pytest.mark.case("C5.27")
def test_a_legacy_load_warns_once_at_the_users_line_with_a_command_that_then_works(
    llm: Llm, latest: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))

    def by_the_manager() -> None:
        with mp.CheckpointManager(latest.parent, layout=mp.Layout.TRIO) as manager:
            manager.load_checkpoint(model)

    def by_the_function() -> None:
        mp.load_checkpoint(latest)

    for load in (by_the_function, by_the_manager):
        with pytest.warns(DeprecationWarning) as told:
            load()
        (warning,) = told
        assert warning.filename == __file__, "Python hides it anywhere else"
        text = str(warning.message)
        assert f"llm-migrate-ckpt {latest}" in text
    assert llm(*text.partition("llm-migrate-ckpt ")[2].split()).code == 0
    by_the_function()
    by_the_manager()

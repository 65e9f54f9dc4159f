"""Files of old layouts become trios: what is found, written, passed over, refused and removed."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import (
    CheckpointMigrationError,
    DamagedError,
    ExistsError,
    InvalidInputError,
    NotFoundError,
    RunInUseError,
    UnsafePickleError,
)
from milepost.layouts.trio import TrioContent, write_trio
from milepost.state.tensors import same_bits
from milepost.storage.lease import RunLease
from milepost.testing.forked import standing_still
from milepost.tools.migrate import (
    Backup,
    Existing,
    MigrateMode,
    MigrateTarget,
    Original,
    Outcome,
    Proof,
    convert_legacy_checkpoint_to_split,
    migrate,
)
from tests.tools.legacy_files import (
    CONFIG,
    Marker,
    hidden,
    legacy,
    only,
    trio_files,
    visible,
    weights,
    write,
)

GOLDEN = Path(__file__).parent.parent / "golden"


# ---- the function of the first source document


@pytest.mark.parametrize("spelled", ["latest.pt", "latest"])
def test_a_legacy_file_becomes_three_files_with_all_it_held(tmp_path: Path, spelled: str) -> None:
    write(tmp_path / "latest.pt")
    made = convert_legacy_checkpoint_to_split(tmp_path / spelled)
    assert list(made) == ["weights", "meta", "extra_state"]
    assert list(made.values()) == trio_files(tmp_path / "latest")
    assert (tmp_path / "latest.pt").exists(), "it is kept unless asked otherwise"
    old = legacy()
    loaded = mp.load_checkpoint(tmp_path / "latest")
    for name, tensor in weights().items():
        assert same_bits(loaded["model_state"][name], tensor)
    assert loaded["optimizer"]["param_groups"] == old["optimizer_state"]["param_groups"]
    for number, slots in old["optimizer_state"]["state"].items():
        for slot, tensor in slots.items():
            assert same_bits(loaded["optimizer"]["state"][number][slot], tensor)
    for name in ("scheduler_state", "extra_state"):
        assert loaded[name] == old[name]
    for name in ("epoch", "loss", "best_loss", "model_config"):
        assert loaded[name] == old[name]
    document = json.loads(made["meta"].read_text())
    assert (document["format_version"], document["epoch"]) == ("2.0", 3)
    assert hidden(tmp_path) == []


def test_in_place_removes_the_legacy_file(tmp_path: Path) -> None:
    write(tmp_path / "latest.pt")
    convert_legacy_checkpoint_to_split(tmp_path / "latest.pt", in_place=True)
    assert visible(tmp_path) == sorted(path.name for path in trio_files(tmp_path / "latest"))


def test_nothing_there_is_said_with_what_is(tmp_path: Path) -> None:
    write(tmp_path / "best.pt")
    with pytest.raises(CheckpointMigrationError, match=r"latest: nothing is there.*best\.pt"):
        convert_legacy_checkpoint_to_split(tmp_path / "latest")
    (tmp_path / "dir.pt").mkdir()
    with pytest.raises(CheckpointMigrationError, match="a directory, not a file"):
        convert_legacy_checkpoint_to_split(tmp_path / "dir.pt")


@pytest.mark.parametrize("number", range(3))
def test_one_file_of_a_trio_there_is_refused_and_left_untouched(
    tmp_path: Path, number: int
) -> None:
    write(tmp_path / "latest.pt")
    sidecar = trio_files(tmp_path / "latest")[number]
    sidecar.write_bytes(b"mine")
    with pytest.raises(CheckpointMigrationError, match=f"{sidecar.name} exist already"):
        convert_legacy_checkpoint_to_split(tmp_path / "latest.pt")
    assert sidecar.read_bytes() == b"mine"
    convert_legacy_checkpoint_to_split(tmp_path / "latest.pt", overwrite=True)
    assert mp.load_checkpoint(tmp_path / "latest")["epoch"] == 3


@pytest.mark.parametrize("payload", [{"tokens": [1, 2]}, [1, 2], torch.ones(2)])
def test_a_file_that_is_no_training_checkpoint_is_refused(tmp_path: Path, payload: Any) -> None:
    write(tmp_path / "blob.pt", payload)
    with pytest.raises(CheckpointMigrationError) as caught:
        convert_legacy_checkpoint_to_split(tmp_path / "blob.pt")
    assert isinstance(caught.value.__cause__, DamagedError)
    assert visible(tmp_path) == ["blob.pt"]


# ---- rerun, dry run, existing


@pytest.mark.parametrize("proof", list(Proof))
def test_a_second_call_passes_over_what_is_done(tmp_path: Path, proof: Proof) -> None:
    write(tmp_path / "latest.pt")
    migrate([tmp_path])
    before = [path.read_bytes() for path in trio_files(tmp_path / "latest")]
    done = only(tmp_path, proof=proof)
    assert (done.outcome, done.notes) == (Outcome.SKIPPED, ("it was migrated before",))
    assert done.proven is (proof is Proof.ALWAYS)
    assert before == [path.read_bytes() for path in trio_files(tmp_path / "latest")]


def test_a_second_call_in_place_proves_the_trio_and_then_removes_the_file(tmp_path: Path) -> None:
    write(tmp_path / "latest.pt")
    migrate([tmp_path])
    done = only(tmp_path, original=Original.REMOVE, backup=Backup.KEEP)
    assert (done.outcome, done.proven, done.removed) == (Outcome.SKIPPED, True, True)
    assert "latest.pt" not in visible(tmp_path)
    assert done.backups == (tmp_path / "latest.pt.bak",)
    assert only(tmp_path / "latest").notes == ("it is a trio already",)


def test_a_newer_trio_is_reported_and_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "latest.pt")
    content = TrioContent(model_state=weights(seed=1), epoch=9)
    shutil.move(tmp_path / "latest.pt", tmp_path / "kept")
    write_trio(tmp_path, ["latest"], content)
    shutil.move(tmp_path / "kept", tmp_path / "latest.pt")
    done = only(tmp_path / "latest.pt", original=Original.REMOVE)
    assert done.outcome is Outcome.MISMATCH
    assert any("epoch: 3 became 9" in text for text in done.differences)
    assert (tmp_path / "latest.pt").exists()
    assert mp.load_checkpoint(tmp_path / "latest")["epoch"] == 9


@pytest.mark.case("C5.25")
def test_overwrite_with_proof_writes_anew_and_proves_that(tmp_path: Path) -> None:
    write(tmp_path / "latest.pt", epoch=1)
    migrate([tmp_path])
    write(tmp_path / "latest.pt", epoch=2)
    done = only(tmp_path, existing=Existing.OVERWRITE, proof=Proof.ALWAYS)
    assert (done.outcome, done.proven) == (Outcome.MIGRATED, True)
    assert mp.load_checkpoint(tmp_path / "latest")["epoch"] == 2


def test_a_backup_keeps_what_is_replaced_and_what_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "latest.pt", epoch=1)
    migrate([tmp_path])
    write(tmp_path / "latest.pt", epoch=2)
    done = only(tmp_path, existing=Existing.OVERWRITE, original=Original.REMOVE, backup=Backup.KEEP)
    kept = sorted(path.name for path in done.backups)
    assert kept == [name for name in visible(tmp_path) if name.endswith(".bak")]
    assert len(kept) == 4
    for path in done.backups:
        path.rename(path.with_name(path.name.removesuffix(".bak").replace("latest", "old")))
    assert mp.load_checkpoint(tmp_path / "latest")["epoch"] == 2
    assert mp.load_checkpoint(tmp_path / "old")["epoch"] == 1
    with pytest.raises(InvalidInputError, match="a backup is of what is removed"):
        migrate([tmp_path], backup=Backup.KEEP)


DRY_CASES: dict[str, Any] = {
    "sound": lambda path: write(path),
    "garbage": lambda path: path.write_bytes(b"PK\3\4 nothing"),
    "empty": lambda path: path.write_bytes(b""),
    "no checkpoint": lambda path: write(path, {"tokens": 1}),
    "unsafe": lambda path: write(path, {**legacy(), "run": Marker(path.with_name("ran"))}),
    "not storable": lambda path: write(
        path, model_state={"w": torch.ones(2, dtype=torch.complex128)}
    ),
    "taken": lambda path: (write(path), path.with_name("x.meta.json").write_text("{}")),
    "done": lambda path: (write(path), migrate([path])),
    "another trio": lambda path: (write(path), migrate([path]), write(path, epoch=7)),
    "flipped byte": lambda path: flip(write(path)),
    "hidden": lambda path: None,
}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    place = raw.find(weights()["1.bias"].numpy().tobytes())
    raw[place] ^= 1
    path.write_bytes(raw)


@pytest.mark.case("C5.25")
@pytest.mark.parametrize("name", DRY_CASES)
def test_a_dry_run_says_what_the_real_run_does_and_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    DRY_CASES[name](tmp_path / "x.pt")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    planned = only(tmp_path / "x.pt", mode=MigrateMode.DRY_RUN)
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    done = only(tmp_path / "x.pt")
    expected = Outcome.PLANNED if done.outcome is Outcome.MIGRATED else done.outcome
    assert planned.outcome is expected
    assert (str(planned.error), planned.differences) == (str(done.error), done.differences)
    assert (planned.notes, planned.files) == (done.notes, done.files)
    if done.outcome is Outcome.MIGRATED:
        assert abs(planned.nbytes - done.nbytes) < 2**14


def test_a_dry_run_sees_another_job_and_a_closed_directory(tmp_path: Path) -> None:
    write(tmp_path / "x.pt")

    def other() -> None:
        with RunLease.of(tmp_path):
            migrate([tmp_path])

    with standing_still(other, 4):
        assert isinstance(only(tmp_path, mode=MigrateMode.DRY_RUN).error, RunInUseError)
        assert isinstance(only(tmp_path).error, RunInUseError)
    assert only(tmp_path, mode=MigrateMode.DRY_RUN).outcome is Outcome.PLANNED
    (tmp_path / "file").write_bytes(b"")
    for mode in MigrateMode:
        done = only(tmp_path, out=tmp_path / "file" / "sub", mode=mode)
        assert done.outcome is Outcome.FAILED


# ---- safety


@pytest.mark.case("C5.25")
@pytest.mark.parametrize("mode", list(MigrateMode))
def test_an_unsafe_pickle_is_refused_by_name_and_nothing_is_run(
    tmp_path: Path, mode: MigrateMode
) -> None:
    write(tmp_path / "x.pt", {**legacy(), "run": Marker(tmp_path / "ran")})
    error = only(tmp_path / "x.pt", mode=mode).error
    assert isinstance(error, UnsafePickleError)
    assert error.global_name == "posix.mkdir"
    assert visible(tmp_path) == ["x.pt"]
    allowed = only(tmp_path / "x.pt", mode=mode, allow=["posix.mkdir"])
    assert isinstance(allowed.error, CheckpointMigrationError)
    assert "run: an instance of posix.mkdir was made from arguments" in str(allowed.error)
    assert visible(tmp_path) == ["x.pt"]


def test_a_legacy_file_is_converted_without_a_deprecation_warning(tmp_path: Path) -> None:
    write(tmp_path / "x.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert only(tmp_path / "x.pt").outcome is Outcome.MIGRATED


@pytest.mark.case("C5.25")
def test_mode_and_time_of_the_source_are_those_of_the_new_files(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt")
    path.chmod(0o640)
    os.utime(path, ns=(1_500_000_000_000_000_000, 1_600_000_000_123_456_789))
    for to in MigrateTarget:
        done = only(path, to=to, out=tmp_path / to, original=Original.KEEP)
        assert done.target is not None
        files = [f for f in done.files if f.is_file()] or [
            f for f in done.target.rglob("*") if f.is_file()
        ]
        for file in files:
            assert file.stat().st_mode & 0o777 == 0o640
            assert file.stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert mp.Checkpoint.open(tmp_path / "trio" / "x").info.created == "2020-09-13T12:26:40.123Z"


def test_the_source_is_removed_only_after_the_written_files_were_read_again(
    tmp_path: Path,
) -> None:
    """A disk that gives back other bytes than it took is found before anything is removed."""
    from milepost.storage import fileops

    path = write(tmp_path / "x.pt")

    def hook(name: str, target: str, function: Any, arguments: Any) -> Any:
        if name == "write" and target.endswith(".safetensors") and len(arguments[1]) > 8:
            descriptor, data, offset = arguments
            bad = bytearray(data)
            bad[-1] ^= 1
            return function(descriptor, memoryview(bad), offset)
        return function(*arguments)

    with fileops.hooked(hook):
        done = only(path, original=Original.REMOVE)
    assert done.outcome is not Outcome.MIGRATED
    assert visible(tmp_path) == ["x.pt"]
    assert hidden(tmp_path) == []


# ---- back into one file


def test_a_trio_goes_back_into_one_file_in_place(tmp_path: Path) -> None:
    write(tmp_path / "latest.pt")
    migrate([tmp_path], original=Original.REMOVE)
    shadowed = only(tmp_path / "latest", to=MigrateTarget.SINGLE_FILE)
    assert isinstance(shadowed.error, InvalidInputError)
    done = only(tmp_path, to=MigrateTarget.SINGLE_FILE, original=Original.REMOVE)
    assert (done.outcome, done.proven) == (Outcome.MIGRATED, True)
    assert visible(tmp_path) == ["latest.pt"]
    assert torch.load(tmp_path / "latest.pt", weights_only=True)["epoch"] == 3
    loaded = mp.load_checkpoint(tmp_path / "latest.pt")
    assert loaded["scheduler_state"] == legacy()["scheduler_state"]
    assert loaded["model_config"] == CONFIG
    again = only(tmp_path, to=MigrateTarget.SINGLE_FILE, original=Original.REMOVE)
    assert again.outcome is Outcome.SKIPPED


def test_an_existing_directory_is_compared_and_never_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt")
    assert only(path, to=MigrateTarget.DIRECTORY, out=tmp_path / "d").outcome is Outcome.MIGRATED
    write(path, epoch=8)
    done = only(path, to=MigrateTarget.DIRECTORY, out=tmp_path / "d")
    assert done.outcome is Outcome.MISMATCH
    with pytest.raises(InvalidInputError, match="never replaced"):
        migrate([path], to=MigrateTarget.DIRECTORY, existing=Existing.OVERWRITE)
    (tmp_path / "e" / "x").mkdir(parents=True)
    done = only(path, to=MigrateTarget.DIRECTORY, out=tmp_path / "e")
    assert done.outcome is Outcome.FAILED


def test_threads_do_the_same_as_one(tmp_path: Path) -> None:
    for number in range(6):
        write(tmp_path / f"epoch_{number}.pt", epoch=number, model_state=weights(seed=number))
    (tmp_path / "torn.pt").write_bytes(b"PK")
    report = migrate([tmp_path], jobs=4, original=Original.REMOVE)
    assert [one.source.name for one in report.migrations][-1] == "torn.pt"
    assert len(report.of(Outcome.MIGRATED)) == 6
    for number in range(6):
        loaded = mp.load_checkpoint(tmp_path / f"epoch_{number}")
        assert same_bits(loaded["model_state"]["1.bias"], weights(seed=number)["1.bias"])
    assert hidden(tmp_path) == []


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="expected a list of paths"):
        migrate(str(tmp_path))
    with pytest.raises(InvalidInputError, match="jobs=0"):
        migrate([tmp_path], jobs=0)
    assert isinstance(only(tmp_path).error, NotFoundError)
    assert isinstance(only(tmp_path / "*.pt").error, NotFoundError)
    write(tmp_path / "x.pt")
    existing = only(tmp_path, existing=Existing.ERROR)
    assert existing.outcome is Outcome.MIGRATED
    assert isinstance(only(tmp_path, existing=Existing.ERROR).error, ExistsError)

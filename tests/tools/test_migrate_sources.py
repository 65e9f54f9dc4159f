"""Which files a migration finds, what it calls them, and where it writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import milepost as mp
from milepost.errors import (
    DamagedError,
    InvalidInputError,
    NotFoundError,
)
from milepost.tools.migrate import (
    MigrateMode,
    MigrateTarget,
    Original,
    Outcome,
    Proof,
    Search,
    migrate,
)
from tests.tools.legacy_files import (
    only,
    trio_files,
    visible,
    weights,
    write,
)

GOLDEN = Path(__file__).parent.parent / "golden"


def outcomes(*paths: Path | str, **request: Any) -> dict[str, Outcome]:
    report = migrate([*paths], **request)
    return {one.source.name: one.outcome for one in report.migrations}


# ---- names (C5.23)


@pytest.mark.case("C5.23")
@pytest.mark.parametrize("stem", ["run.v2", "epoch_3", "a.b.c"])
@pytest.mark.parametrize("suffix", ["", ".pt"])
@pytest.mark.parametrize("mode", list(MigrateMode))
def test_a_dotted_stem_is_kept_whole_and_the_plan_names_the_real_files(
    tmp_path: Path, stem: str, suffix: str, mode: MigrateMode
) -> None:
    write(tmp_path / f"{stem}.pt")
    done = only(tmp_path / f"{stem}{suffix}", mode=mode)
    assert list(done.files) == trio_files(tmp_path / stem)
    assert all(path.exists() == (mode is MigrateMode.WRITE) for path in done.files)
    if mode is MigrateMode.WRITE:
        for path in (stem, f"{stem}.pt", *(file.name for file in done.files)):
            assert mp.load_checkpoint(tmp_path / path)["epoch"] == 3
        assert only(tmp_path / f"{stem}{suffix}").outcome is Outcome.SKIPPED


@pytest.mark.case("C5.23")
@pytest.mark.parametrize("suffix", [".safetensors", ".meta.json", ".extra_state.pt"])
def test_any_file_of_the_trio_names_the_source(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "run.v2.pt")
    migrate([tmp_path / "run.v2.pt"])
    done = only(tmp_path / f"run.v2{suffix}", proof=Proof.ALWAYS)
    assert done.source == tmp_path / "run.v2.pt"
    assert done.proven


# ---- sources


@pytest.mark.case("C5.25")
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_all_suffixes_are_sources_and_a_bare_stem_finds_them(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"x{suffix}")
    done = only(tmp_path / "x", original=Original.REMOVE)
    assert (done.outcome, done.source.name) == (Outcome.MIGRATED, f"x{suffix}")
    assert visible(tmp_path) == sorted(path.name for path in trio_files(tmp_path / "x"))


@pytest.mark.filterwarnings("ignore:.*legacy layout:DeprecationWarning")
@pytest.mark.case("C5.26")
@pytest.mark.parametrize("to", list(MigrateTarget))
def test_every_dialect_goes_into_every_layout_bit_by_bit(tmp_path: Path, to: MigrateTarget) -> None:
    old_files = [p for p in GOLDEN.glob("*.pt") if not p.name.endswith(".extra_state.pt")]
    for path in old_files:
        shutil.copy(path, tmp_path)
    out = tmp_path / "out"
    report = migrate([tmp_path], to=to, out=out, proof=Proof.ALWAYS)
    assert len(report.migrations) == len(old_files) >= 10
    assert report.ok
    for one in report.of(Outcome.MIGRATED):
        assert one.proven and one.target is not None
        old, new = mp.load_checkpoint(one.source), mp.load_checkpoint(one.target)
        assert old["model_state"].keys() == new["model_state"].keys()
    again = migrate([tmp_path], to=to, out=out, proof=Proof.ALWAYS)
    assert {one.outcome for one in again.migrations} == {Outcome.SKIPPED}


@pytest.mark.filterwarnings("ignore:.*legacy layout:DeprecationWarning")
@pytest.mark.case("C5.26")
def test_metadata_that_has_no_field_is_kept_under_its_own_names(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "modern_llm_fork.pt", tmp_path / "x.pt")
    old = mp.load_checkpoint(tmp_path / "x.pt")
    migrate([tmp_path / "x.pt"], original=Original.REMOVE)
    new = mp.load_checkpoint(tmp_path / "x")
    for key in ("step", "loss", "run_name", "config", "quantization"):
        assert new["metadata"][key] == old["metadata"][key]
    shutil.copy(GOLDEN / "demo_step_200.pt", tmp_path / "y.pt")
    migrate([tmp_path / "y.pt"], original=Original.REMOVE)
    assert mp.load_checkpoint(tmp_path / "y")["global_step"] == 200
    assert mp.Checkpoint.open(tmp_path / "y").info.step == 200


@pytest.mark.case("C5.25")
def test_directories_patterns_and_several_paths_are_taken(tmp_path: Path) -> None:
    for name in ("a/latest.pt", "a/deep/best.pt", "b/epoch_1.pt", "b/epoch_2.pt", "c.pt"):
        write(tmp_path / name)
    found = outcomes(tmp_path / "a", tmp_path / "b" / "epoch_*.pt", tmp_path / "c")
    assert set(found) == {"latest.pt", "epoch_1.pt", "epoch_2.pt", "c.pt"}
    assert set(found.values()) == {Outcome.MIGRATED}
    found = outcomes(tmp_path, search=Search.RECURSIVE)
    assert found["best.pt"] is Outcome.MIGRATED
    assert [one for one in found.values() if one is Outcome.SKIPPED] == [Outcome.SKIPPED] * 4


def test_out_keeps_the_directories_below_the_one_that_was_given(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a" / "latest.pt")
    write(tmp_path / "runs" / "b" / "latest.pt")
    report = migrate([tmp_path / "runs"], search=Search.RECURSIVE, out=tmp_path / "new")
    assert [one.target for one in report.migrations] == [
        tmp_path / "new" / "a" / "latest",
        tmp_path / "new" / "b" / "latest",
    ]
    assert visible(tmp_path / "runs" / "a") == ["latest.pt"]
    assert mp.load_checkpoint(tmp_path / "new" / "b" / "latest")["epoch"] == 3


def test_what_lies_in_a_directory_and_is_no_checkpoint_is_passed_over_with_the_reason(
    tmp_path: Path,
) -> None:
    write(tmp_path / "latest.pt")
    write(tmp_path / "adapter.bin", {"format_version": "1.0", "state_dict": {}})
    (tmp_path / "train.bin").write_bytes(b"\0\1" * 100)
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", ".hidden.pt"):
        (tmp_path / name).write_bytes(b"PK")
    report = migrate([tmp_path])
    assert report.ok
    skipped = {one.source.name: one.notes[0] for one in report.of(Outcome.SKIPPED)}
    assert set(skipped) == {"adapter.bin", "train.bin"}
    assert "no weights" in skipped["adapter.bin"]
    named = only(tmp_path / "adapter.bin")
    assert named.outcome is Outcome.FAILED, "who names a file means it"


def test_a_damaged_file_in_a_directory_is_an_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.pt").read_bytes()
    (tmp_path / "torn.pt").write_bytes(whole[:-100])
    (tmp_path / "empty.pt").write_bytes(b"")
    report = migrate([tmp_path])
    assert {one.source.name: type(one.error) for one in report.of(Outcome.FAILED)}.keys() == {
        "torn.pt",
        "empty.pt",
    }
    assert all(isinstance(one.error, DamagedError) for one in report.of(Outcome.FAILED))


def test_two_files_of_one_stem_are_not_written_over_each_other(tmp_path: Path) -> None:
    write(tmp_path / "x.pt")
    write(tmp_path / "x.ckpt", epoch=9)
    found = {one.source.name: one for one in migrate([tmp_path]).migrations}
    assert found["x.ckpt"].outcome is Outcome.MIGRATED
    assert isinstance(found["x.pt"].error, InvalidInputError)
    assert "would become" in str(found["x.pt"].error)


def test_what_is_a_checkpoint_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    write(tmp_path / "hub" / "pytorch_model.bin", weights())
    assert isinstance(only(tmp_path / "hub").error, InvalidInputError)
    assert isinstance(only(tmp_path, search=Search.RECURSIVE).error, NotFoundError)

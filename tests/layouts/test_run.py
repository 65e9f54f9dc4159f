"""Discovery: which checkpoints of a run count, in which order, and why the others do not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import milepost as mp
from milepost.errors import FormatError, NotFoundError
from milepost.format.manifest import FileEntry, Manifest, encode_manifest
from milepost.layouts.run import RunListing, list_run, newest
from milepost.storage.intent import INTENT_NAME, Intent
from tests.directories import reseal
from tests.states import flip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "checkpoint-0"
    mp.save(path, {"model": torch.nn.Linear(2, 2)}, step=0)
    return path


def put(made: Path, run: Path, step: int, **changes: object) -> Path:
    """A committed checkpoint of `step`: a copy whose manifest is changed and sealed again."""
    path = shutil.copytree(made, run / f"checkpoint-{step}")
    reseal(path, lambda document: document.update(step=step, **changes))
    return path


def steps(listing: RunListing) -> list[int]:
    return [entry.step for entry in listing.committed]


@pytest.mark.case("V21")
def test_newest_is_by_number_and_not_by_text_or_time(made: Path, tmp_path: Path) -> None:
    for step in (10000, 9000, 1, 100, 2, 10, 9):
        put(made, tmp_path, step)
    os.utime(tmp_path / "checkpoint-9", (2**31, 2**31))
    listing = list_run(tmp_path)
    assert steps(listing) == [1, 2, 9, 10, 100, 9000, 10000]
    assert listing.newest is not None and listing.newest.step == 10000
    found = newest(tmp_path)
    assert found is not None and found.path == tmp_path / "checkpoint-10000"
    assert listing.torn == ()


@pytest.mark.case("V21")
@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-10-old",
        "checkpoint-",
        "checkpoint-010",
        "checkpoint--5",
        "checkpoint-5.tmp",
        "checkpoint-1e3",
        "checkpoint-\u0663",
        "old-checkpoint-5",
        ".checkpoint-5",
        "Checkpoint-5",
        "checkpoint-5\n",
        "step_5",
        "latest",
    ],
)
def test_a_name_that_does_not_match_in_full_is_not_looked_at(
    name: str, made: Path, tmp_path: Path
) -> None:
    put(made, tmp_path, 3)
    shutil.copytree(made, tmp_path / name)
    listing = list_run(tmp_path)
    assert steps(listing) == [3]
    assert listing.torn == ()


@pytest.mark.case("V16")
def test_a_directory_cut_off_at_any_file_is_torn_and_never_newest(
    made: Path, tmp_path: Path
) -> None:
    put(made, tmp_path, 10)
    files = sorted(p.relative_to(made) for p in made.rglob("*") if p.is_file())
    assert Path("milepost.json") in files
    for count in range(len(files)):
        torn = tmp_path / "checkpoint-20"
        for file in [f for f in files if f != Path("milepost.json")][:count]:
            (torn / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(made / file, torn / file)
        torn.mkdir(exist_ok=True)
        listing = list_run(tmp_path)
        assert steps(listing) == [10]
        ((name, reason),) = [(entry.name, entry.reason) for entry in listing.torn]
        assert name == "checkpoint-20" and "no manifest" in reason
        shutil.rmtree(torn)


@pytest.mark.case("V16")
def test_a_committed_directory_that_lost_or_shortened_a_file_is_torn_and_says_which(
    made: Path, tmp_path: Path
) -> None:
    put(made, tmp_path, 10)
    path = put(made, tmp_path, 20)
    (path / "model.safetensors").unlink()
    put(made, tmp_path, 30)
    os.truncate(tmp_path / "checkpoint-30" / "training" / "state.json", 3)
    listing = list_run(tmp_path)
    assert steps(listing) == [10]
    reasons = {entry.name: entry.reason for entry in listing.torn}
    assert reasons["checkpoint-20"] == "model.safetensors is missing"
    assert "training/state.json has 3 bytes" in reasons["checkpoint-30"]


def test_a_file_that_only_informs_does_not_uncommit(made: Path, tmp_path: Path) -> None:
    (put(made, tmp_path, 10) / "trainer_state.json").unlink()
    assert steps(list_run(tmp_path)) == [10]


def test_what_is_no_committed_checkpoint_is_listed_with_its_reason(
    made: Path, tmp_path: Path
) -> None:
    put(made, tmp_path, 1)
    flip(put(made, tmp_path, 2) / "milepost.json", 100)
    put(made, tmp_path, 3).rename(tmp_path / "checkpoint-4")
    put(made, tmp_path, 5, format_version="3.1")
    (tmp_path / "checkpoint-6").touch()
    shutil.copytree(made, tmp_path / "elsewhere")
    (tmp_path / "checkpoint-7").symlink_to("elsewhere")
    (tmp_path / "checkpoint-8").symlink_to("nowhere")
    listing = list_run(tmp_path)
    assert steps(listing) == [1]
    reasons = {entry.name: entry.reason for entry in listing.torn}
    assert "milepost.json" in reasons["checkpoint-2"]
    assert reasons["checkpoint-4"] == "its manifest says step 3"
    assert "format version 3.1" in reasons["checkpoint-5"]
    for step in (6, 7, 8):
        assert reasons[f"checkpoint-{step}"] == "not a directory"


def test_people_may_keep_links_to_checkpoints(made: Path, tmp_path: Path) -> None:
    put(made, tmp_path, 4)
    (tmp_path / "latest").symlink_to("checkpoint-4")
    (tmp_path / "best").symlink_to("checkpoint-4")
    assert steps(list_run(tmp_path)) == [4]
    assert mp.Checkpoint.open(tmp_path / "latest").info.step == 4


def test_unfinished_saves_are_named_and_do_not_count(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / ".milepost-staging-abc-checkpoint-7")
    listing = list_run(tmp_path)
    assert listing.committed == () and listing.newest is None
    assert listing.unfinished == (".milepost-staging-abc-checkpoint-7",)


def test_an_empty_run_and_a_missing_one_are_told_apart(tmp_path: Path) -> None:
    assert list_run(tmp_path).committed == ()
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None
    with pytest.raises(NotFoundError, match=r"no such run directory"):
        list_run(tmp_path / "missing")


# Generations.


def test_a_later_generation_is_newest_and_supersedes_what_lies_beyond_its_branch(
    made: Path, tmp_path: Path
) -> None:
    for step in (100, 200, 300, 400):
        put(made, tmp_path, step)
    put(made, tmp_path, 250, generation=1, branch_step=200)
    listing = list_run(tmp_path)
    assert steps(listing) == [100, 200, 300, 400, 250]
    assert [entry.step for entry in listing.current] == [100, 200, 250]
    assert listing.newest is not None and listing.newest.step == 250
    assert [entry.step for entry in listing.committed if entry.superseded] == [300, 400]


def test_a_generation_from_scratch_supersedes_everything_before_it(
    made: Path, tmp_path: Path
) -> None:
    put(made, tmp_path, 100)
    put(made, tmp_path, 10, generation=1, branch_step=None)
    assert [entry.step for entry in list_run(tmp_path).current] == [10]


Saved = tuple[int, int, int | None]  # generation, step, step of the branch


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(-1, 5)), max_size=8))
def test_of_any_history_the_newest_is_current_and_has_the_highest_rank(
    history: list[tuple[int, int, int]],
) -> None:
    saved = {step: (generation, step, branch) for generation, step, branch in history}
    entries = ordered(list(saved.values()))
    ranks = [(generation, step) for generation, step, _ in entries]
    assert ranks == sorted(ranks)
    if entries:
        assert not entries[-1][2], "the newest is never superseded"
    for number, (generation, step, superseded) in enumerate(entries):
        beyond = [
            branch for later, _, branch in saved.values() if later > generation and step > branch
        ]
        assert superseded == bool(beyond), (number, entries)


def ordered(saved: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, bool]]:
    from milepost.layouts.run import in_order

    found = [
        (
            f"checkpoint-{step}",
            Path(),
            Manifest(
                checkpoint_id=str(step),
                created="",
                step=step,
                generation=generation,
                branch_step=None if branch < 0 else branch,
            ),
        )
        for generation, step, branch in saved
    ]
    return [(e.manifest.generation, e.step, e.superseded) for e in in_order(found)]


# Intent records and pins.


def test_a_run_is_seen_through_its_intent_record(made: Path, tmp_path: Path) -> None:
    put(made, tmp_path, 5, metrics={"loss": 1.0})
    new = put(made, tmp_path / "other", 5, metrics={"loss": 2.0})
    staged = ".milepost-staging-x"
    new.rename(tmp_path / staged)
    intent = Intent(removes=("checkpoint-5",), renames=((staged, "checkpoint-5"),))
    (tmp_path / INTENT_NAME).write_bytes(intent.to_bytes())
    for _ in range(2):
        (entry,) = list_run(tmp_path).committed
        assert (entry.name, entry.path.name) == ("checkpoint-5", staged)
        assert entry.manifest.metrics == {"loss": 2.0}
        assert mp.Checkpoint.open(tmp_path / "checkpoint-5").info.metrics == {"loss": 2.0}
        shutil.rmtree(tmp_path / "checkpoint-5", ignore_errors=True)


def test_a_name_that_a_record_removes_is_gone(made: Path, tmp_path: Path) -> None:
    put(made, tmp_path, 5)
    put(made, tmp_path, 6)
    intent = Intent(removes=("checkpoint-6",), renames=())
    (tmp_path / INTENT_NAME).write_bytes(intent.to_bytes())
    assert steps(list_run(tmp_path)) == [5]
    (tmp_path / INTENT_NAME).write_bytes(b"garbage")
    with pytest.raises(FormatError, match=r"not an intent record"):
        list_run(tmp_path)


def test_pins_are_read_from_the_disk(made: Path, tmp_path: Path) -> None:
    put(made, tmp_path, 5)
    assert list_run(tmp_path).pinned == frozenset()
    (tmp_path / "milepost-pins.json").write_text(json.dumps({"steps": [5, 7]}))
    assert list_run(tmp_path).pinned == {5, 7}


def test_a_run_of_thousands_of_files_is_listed_by_documents_and_sizes_alone(
    tmp_path: Path,
) -> None:
    """No file of the checkpoints is opened but their manifests: the others may be unreadable."""
    path = tmp_path / "checkpoint-1"
    path.mkdir()
    entries = []
    for number in range(300):
        name = f"model-{number:05d}.safetensors"
        (path / name).touch()
        (path / name).chmod(0)
        entries.append(FileEntry(name=name, nbytes=0, role="weights", digest="0" * 32))
    manifest = Manifest(checkpoint_id="x", created="", step=1, files=entries)
    (path / "milepost.json").write_bytes(encode_manifest(manifest))
    assert steps(list_run(tmp_path)) == [1]

"""Rules of docs/spec/v1.md about the run directory: what counts, who writes, how a save appears."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import milepost as mp
from milepost.errors import FormatError, RunInUseError
from milepost.manager.pins import pin_steps
from milepost.manager.prune import prune_run
from milepost.manager.retention import KeepLast
from milepost.storage import intent
from milepost.storage.lease import Owner, RunLease

Edit: TypeAlias = Callable[[Path, Callable[[dict[str, Any]], None]], None]
Save: TypeAlias = Callable[..., Path]
Operations: TypeAlias = Callable[[Callable[[], object]], list[tuple[str, str]]]

ELSEWHERE = Owner(host="elsewhere", boot_id="b", pid=1, start="1")


def committed(run: Path) -> list[int]:
    return [entry.step for entry in mp.list_run(run).committed]


# ---- discovery


@pytest.mark.spec("v1#run-1", "v1#run-2")
@pytest.mark.parametrize(
    "name", ["checkpoint-03", "checkpoint-3x", "checkpoint-", "checkpoint--3", "checkpoint-3.tmp"]
)
def test_a_name_that_is_not_exactly_a_step_does_not_count(saved: Path, name: str) -> None:
    saved.rename(saved.with_name(name))
    listing = mp.list_run(saved.parent)
    assert listing.newest is None
    assert listing.torn == ()


@pytest.mark.spec("v1#run-1", "v1#run-2")
@pytest.mark.parametrize(
    "harm", ["no manifest", "another step", "short file", "missing file", "symlink", "a file"]
)
def test_what_is_not_whole_does_not_count(save: Save, saved: Path, edit: Edit, harm: str) -> None:
    save(2)
    match harm:
        case "no manifest":
            (saved / "milepost.json").unlink()
        case "another step":
            edit(saved / "milepost.json", lambda m: m.update(step=4))
        case "short file":
            os.truncate(saved / "training/state.safetensors", 100)
        case "missing file":
            (saved / "model.safetensors").unlink()
        case "symlink":
            saved.rename(saved.with_name("elsewhere"))
            saved.symlink_to("elsewhere")
        case _:
            shutil.rmtree(saved)
            saved.write_bytes(b"")
    listing = mp.list_run(saved.parent)
    assert [entry.step for entry in listing.committed] == [2]
    assert [entry.name for entry in listing.torn] == ["checkpoint-3"]
    assert listing.torn[0].reason


@pytest.mark.spec("v1#run-1")
def test_a_file_that_only_informs_may_be_gone(saved: Path) -> None:
    (saved / "trainer_state.json").unlink()
    assert committed(saved.parent) == [3]


@pytest.mark.spec("v1#run-3")
def test_hidden_names_are_not_looked_at(saved: Path) -> None:
    shutil.copytree(saved, saved.with_name(".milepost-staging-0-checkpoint-9"))
    shutil.copytree(saved, saved.with_name(".checkpoint-9"))
    assert committed(saved.parent) == [3]


@pytest.mark.spec("v1#run-4", "v1#gen-2")
def test_newest_is_by_number_whatever_time_and_links_say(save: Save, run: Path) -> None:
    for step in (10, 9):
        save(step)
    os.utime(run / "checkpoint-10", (1, 1))
    (run / "latest").symlink_to("checkpoint-9")
    newest = mp.newest(run)
    assert newest is not None and newest.step == 10


# ---- generations and pins


@pytest.mark.spec("v1#gen-1", "v1#gen-2")
def test_what_lies_beyond_the_branch_is_superseded(save: Save, run: Path, edit: Edit) -> None:
    for step in (100, 200, 300):
        save(step)
    change = {"generation": 1, "branch_step": 100}
    edit(run / "checkpoint-200" / "milepost.json", lambda m: m.update(change))
    listing = mp.list_run(run)
    assert {entry.step: entry.superseded for entry in listing.committed} == {
        100: False,
        200: False,
        300: True,
    }
    assert listing.newest is not None and listing.newest.step == 200


@pytest.mark.spec("v1#gen-1")
def test_without_a_branch_step_all_older_generations_are_superseded(
    save: Save, run: Path, edit: Edit
) -> None:
    for step in (0, 1):
        save(step)
    edit(run / "checkpoint-1" / "milepost.json", lambda m: m.update(generation=1))
    assert [entry.step for entry in mp.list_run(run).current] == [1]


@pytest.mark.spec("v1#gen-3")
def test_a_save_after_the_newest_carries_its_lineage_over(
    save: Save, saved: Path, edit: Edit
) -> None:
    edit(saved / "milepost.json", lambda m: m.update(generation=2, branch_step=1))
    first = json.loads((saved / "milepost.json").read_bytes())
    second = json.loads((save(4) / "milepost.json").read_bytes())
    assert (second["generation"], second["branch_step"]) == (2, 1)
    assert second["parent_id"] == first["checkpoint_id"]


@pytest.mark.spec("v1#gen-4", "v1#gen-5")
def test_a_run_that_goes_back_begins_a_new_generation(
    save: Save, run: Path, state: dict[str, Any]
) -> None:
    for step in (100, 200, 300):
        save(step)
    with mp.CheckpointManager(run, resume=run / "checkpoint-100") as manager:
        manager.resume(state)
        manager.save(200, state)
    manifest = json.loads((run / "checkpoint-200" / "milepost.json").read_bytes())
    assert (manifest["generation"], manifest["branch_step"]) == (1, 100)
    assert (run / "_superseded_checkpoints" / "checkpoint-200" / "milepost.json").exists()
    newest = mp.newest(run)
    assert newest is not None and newest.step == 200


@pytest.mark.spec("v1#pin-1")
def test_pinned_steps_and_the_newest_are_never_removed(save: Save, run: Path) -> None:
    for step in (1, 2, 3):
        save(step)
    pin_steps(run, [1])
    assert json.loads((run / "milepost-pins.json").read_bytes()) == {"steps": [1]}
    prune_run(run, [KeepLast(1)])
    assert committed(run) == [1, 3]
    (run / "milepost-pins.json").write_bytes(b"[")
    with pytest.raises(FormatError, match="not a list of pinned steps"):
        prune_run(run, [KeepLast(1)])
    assert committed(run) == [1, 3]


# ---- lease


@pytest.mark.spec("v1#lease-1")
def test_a_run_that_another_process_holds_is_left_alone(save: Save, run: Path) -> None:
    run.mkdir()
    with open(run / ".milepost.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another descriptor: as good as another process
        with pytest.raises(RunInUseError):
            save(1)
    assert os.listdir(run) == [".milepost.lock"]
    save(1)


@pytest.mark.spec("v1#lease-2")
def test_the_lease_says_who_holds_it_and_is_empty_afterwards(run: Path) -> None:
    with RunLease.of(run):
        document = json.loads((run / ".milepost.lock").read_bytes())
        assert set(document) == {"host", "boot_id", "pid", "start"}
        assert document["pid"] == os.getpid()
        assert isinstance(document["start"], str)
    assert (run / ".milepost.lock").read_bytes() == b""


@pytest.mark.spec("v1#lease-3")
def test_a_lease_of_another_host_holds_for_a_day(save: Save, run: Path) -> None:
    run.mkdir()
    lock = run / ".milepost.lock"
    lock.write_bytes(ELSEWHERE.to_bytes())
    with pytest.raises(RunInUseError, match="process 1 on elsewhere"):
        save(1)
    a_day_ago = time.time() - 25 * 3600
    os.utime(lock, (a_day_ago, a_day_ago))
    save(1)


# ---- intent record


@pytest.mark.spec("v1#intent-1", "v1#run-3")
def test_names_are_seen_through_the_record(saved: Path) -> None:
    run = saved.parent
    saved.rename(run / ".hidden")
    (run / "gone.pt").write_bytes(b"")
    record = {
        "milepost_intent": 1,
        "removes": ["gone.pt", "checkpoint-3"],
        "renames": [[".hidden", "checkpoint-3"]],
    }
    (run / ".milepost-intent.json").write_bytes(json.dumps(record).encode())
    assert committed(run) == [3]
    assert mp.Checkpoint.open(saved).info.step == 3
    assert not intent.resolve_name(run, "gone.pt").exists()
    (run / ".hidden").rename(saved)
    assert committed(run) == [3]


@pytest.mark.spec("v1#intent-2")
@pytest.mark.parametrize(
    "record",
    [
        b"{",
        b'{"milepost_intent": 2, "removes": [], "renames": []}',
        b'{"milepost_intent": 1, "removes": [".."], "renames": []}',
        b'{"milepost_intent": 1, "removes": [], "renames": [["a/b", "c"]]}',
        b'{"milepost_intent": 1, "removes": [""], "renames": []}',
    ],
)
def test_a_record_that_cannot_be_understood_stops_everything(saved: Path, record: bytes) -> None:
    (saved.parent / ".milepost-intent.json").write_bytes(record)
    with pytest.raises(FormatError):
        mp.list_run(saved.parent)


@pytest.mark.spec("v1#intent-3")
def test_a_record_is_written_after_its_sources_are_durable(
    trio: Path, operations: Operations
) -> None:
    state = {"w": torch.ones(1)}
    from milepost.layouts.trio import TrioContent, write_trio

    done = operations(lambda: write_trio(trio.parent, ["latest"], TrioContent(model_state=state)))
    targets = [f"{kind} {target}" for kind, target in done]
    record = next(i for i, t in enumerate(targets) if t.endswith(f"-> {trio.parent}/{NAME}"))
    written = [i for i, t in enumerate(targets) if t.startswith("write") and ".milepost-trio-" in t]
    synced = [i for i, t in enumerate(targets) if t.startswith("fsync ") and "-trio-" in t]
    listed = [i for i, t in enumerate(targets) if t == f"fsync-directory {trio.parent}"]
    assert max(written) < max(synced) < listed[-4] < record < listed[-3]
    assert f"unlink {trio.parent}/{NAME}" in targets[listed[-2] :]


NAME = ".milepost-intent.json"


@pytest.mark.spec("v1#intent-4")
def test_the_next_writer_carries_the_record_out(save: Save, saved: Path) -> None:
    run = saved.parent
    saved.rename(run / ".hidden")
    (run / "old.pt").write_bytes(b"")
    (run / "one").write_bytes(b"")
    os.link(run / "one", run / "two")
    renames = [[".hidden", "checkpoint-3"], ["one", "two"]]
    record = {"milepost_intent": 1, "removes": ["old.pt"], "renames": renames}
    (run / NAME).write_bytes(json.dumps(record).encode())
    save(4)
    assert sorted(os.listdir(run)) == [".milepost.lock", "checkpoint-3", "checkpoint-4", "two"]

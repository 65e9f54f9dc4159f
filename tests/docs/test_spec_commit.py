"""Rules of docs/spec/v1.md about how a save appears, and what a checkpoint directory holds."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import milepost as mp
from milepost.errors import ExistsError, StorageError
from milepost.manager.prune import prune_run
from milepost.manager.retention import KeepLast
from milepost.storage import fileops
from milepost.storage.lease import Owner, RunLease
from milepost.storage.staging import StagingDirectory, remove_leftovers

Save: TypeAlias = Callable[..., Path]
Operations: TypeAlias = Callable[[Callable[[], object]], list[tuple[str, str]]]

ELSEWHERE = Owner(host="elsewhere", boot_id="b", pid=1, start="1")


@pytest.mark.spec("v1#commit-1", "v1#commit-2", "v1#commit-3", "v1#commit-4")
def test_a_checkpoint_appears_whole_and_durable_with_one_rename(
    save: Save, run: Path, operations: Operations
) -> None:
    done = operations(lambda: save(3))
    kinds = [kind for kind, _ in done]
    rename = kinds.index("rename")
    assert kinds.count("rename") == 1
    source, _, target = done[rename][1].partition(" -> ")
    assert Path(source).name.startswith(".milepost-staging-")
    assert Path(target) == run / "checkpoint-3"
    before = done[:rename]
    written = [target for kind, target in before if kind == "write" and target.startswith(source)]
    assert list(dict.fromkeys(written))[-1] == f"{source}/milepost.json"
    last_write = max(i for i, (kind, _) in enumerate(before) if kind == "write")
    synced = {target: i for i, (kind, target) in enumerate(before) if kind == "fsync"}
    assert set(written) <= set(synced)
    directories = {target: i for i, (k, target) in enumerate(before) if k == "fsync-directory"}
    for directory in (source, f"{source}/training"):
        assert directories[directory] > last_write
    assert ("fsync-directory", str(run)) in done[rename:]
    assert not (run / "checkpoint-3" / ".owner.json").exists()


@pytest.mark.spec("v1#commit-4")
def test_a_failed_fsync_is_not_repeated_and_nothing_appears(save: Save, run: Path) -> None:
    tried = []

    def fail(kind: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if kind == "fsync" and target.endswith("/model.safetensors"):
            tried.append(target)
            raise OSError(5, "Input/output error", target)
        return function(*arguments)

    with fileops.hooked(fail), pytest.raises(StorageError):
        save(3)
    assert len(tried) == 1
    assert os.listdir(run) == [".milepost.lock"]


@pytest.mark.spec("v1#commit-5")
def test_a_name_taken_meanwhile_is_not_replaced(run: Path) -> None:
    staging = StagingDirectory(run / "checkpoint-1", unique="x", owns=lambda path: False)
    with staging:
        (run / "checkpoint-1").mkdir()
        with pytest.raises(ExistsError, match="nothing was replaced"):
            staging.commit()


@pytest.mark.spec("v1#commit-5", "v1#commit-9")
def test_replacing_exchanges_the_directories(
    save: Save, saved: Path, operations: Operations
) -> None:
    with open(saved / "trainer_state.json", "rb") as old:
        inode = os.fstat(old.fileno()).st_ino
        done = operations(lambda: save(3, on_existing=mp.OnExisting.REPLACE))
        assert "exchange" in [kind for kind, _ in done]
        assert not any(kind == "open" and target.startswith(str(saved)) for kind, target in done)
        assert json.loads(old.read())["global_step"] == 3
    assert (saved / "trainer_state.json").stat().st_ino != inode


@pytest.mark.spec("v1#commit-6")
def test_torn_data_in_the_way_is_kept(save: Save, run: Path) -> None:
    for number in range(2):
        (run / "checkpoint-1").mkdir(parents=True)
        (run / "checkpoint-1" / "precious").write_bytes(b"%d" % number)
        save(1)
        shutil.rmtree(run / "checkpoint-1")
    kept = run / "_incomplete_checkpoints"
    assert (kept / "checkpoint-1" / "precious").read_bytes() == b"0"
    assert (kept / "checkpoint-1.1" / "precious").read_bytes() == b"1"


@pytest.mark.spec("v1#commit-7")
def test_left_overs_go_unless_another_host_may_be_writing(run: Path) -> None:
    owners = {"mine": Owner.this_process(), "nobody": None, "fresh": ELSEWHERE, "old": ELSEWHERE}
    for name, owner in owners.items():
        staging = run / f".milepost-staging-{name}"
        staging.mkdir(parents=True)
        if owner is not None:
            (staging / ".owner.json").write_bytes(owner.to_bytes())
    a_day_ago = time.time() - 25 * 3600
    os.utime(run / ".milepost-staging-old" / ".owner.json", (a_day_ago, a_day_ago))
    with RunLease.of(run):
        remove_leftovers(run)
    assert sorted(os.listdir(run)) == [".milepost-staging-fresh", ".milepost.lock"]


@pytest.mark.spec("v1#commit-8")
def test_a_checkpoint_is_renamed_before_it_is_removed(
    save: Save, run: Path, operations: Operations
) -> None:
    for step in (1, 2):
        save(step)
    done = operations(lambda: prune_run(run, [KeepLast(1)]))
    first = next(i for i, (kind, _) in enumerate(done) if kind in ("rename", "unlink", "rmdir"))
    source, _, target = done[first][1].partition(" -> ")
    assert done[first][0] == "rename"
    assert Path(source) == run / "checkpoint-1"
    assert Path(target).name.startswith(".milepost-aside-")


# ---- the directory


@pytest.mark.spec("v1#dir-1")
def test_the_manifest_lists_every_file_and_verify_reports_others(saved: Path) -> None:
    manifest = json.loads((saved / "milepost.json").read_bytes())
    there = {p.relative_to(saved).as_posix() for p in saved.rglob("*") if p.is_file()}
    assert there == {entry["name"] for entry in manifest["files"]} | {"milepost.json"}
    (saved / "notes.txt").write_bytes(b"")
    assert mp.Checkpoint.open(saved).verify().ok
    (saved / "model-2.safetensors").write_bytes(b"")
    report = mp.Checkpoint.open(saved).verify()
    assert not report.ok
    assert {p.file for p in report.problems} == {"notes.txt", "model-2.safetensors"}


@pytest.mark.spec("v1#dir-2")
def test_the_glob_of_servers_finds_the_weights_and_nothing_else(save: Save) -> None:
    path = save(3, max_shard_size=64)
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    assert {p.name for p in path.glob("*.safetensors")} == set(index["weight_map"].values())


@pytest.mark.spec("v1#dir-3")
def test_a_symlink_in_place_of_a_file_is_damage(saved: Path) -> None:
    part = saved / "model.safetensors"
    part.rename(saved.parent / "weights")
    part.symlink_to(saved.parent / "weights")
    report = mp.Checkpoint.open(saved).verify()
    assert "lies behind a symlink" in report.problems[0].message
    assert not report.ok

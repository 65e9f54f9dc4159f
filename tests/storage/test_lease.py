"""The lease: one process writes into a run, shown with real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from milepost.errors import RunInUseError
from milepost.storage import lease
from milepost.storage.lease import LOCK_NAME, STALE_AFTER_S, Owner, RunLease, process_start

HOLDER = """
import sys
from pathlib import Path
from milepost.storage.lease import RunLease

with RunLease.of(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease of `run` until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        if process.poll() is None:
            process.kill()


def foreign_owner() -> Owner:
    return Owner(host="another-host", boot_id="x", pid=1, start="1")


def test_a_run_under_the_lease_of_a_live_process_is_refused_and_the_process_named(
    tmp_path: Path,
) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(RunInUseError, match=rf"process {process.pid} on ") as caught:
            RunLease.of(tmp_path).__enter__()
        assert caught.value.path == str(tmp_path)
        process.communicate("")
    with RunLease.of(tmp_path):
        pass


def test_the_lease_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert Owner.from_bytes((tmp_path / LOCK_NAME).read_bytes()) is not None
        with RunLease.of(tmp_path):
            owner = Owner.from_bytes((tmp_path / LOCK_NAME).read_bytes())
            assert owner == Owner.this_process()


def test_the_lease_is_reentrant_and_ends_with_its_last_holder(tmp_path: Path) -> None:
    with RunLease.of(tmp_path):
        with RunLease.of(tmp_path / ".." / tmp_path.name):
            pass
        assert is_refused_elsewhere(tmp_path)
    assert not is_refused_elsewhere(tmp_path)
    assert (tmp_path / LOCK_NAME).read_bytes() == b""


def is_refused_elsewhere(run: Path) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, str(run)], input="", capture_output=True, text=True
    )
    assert done.returncode == 0 or "RunInUseError" in done.stderr, done.stderr
    return done.returncode != 0


def test_threads_of_one_process_share_the_lease(tmp_path: Path) -> None:
    entered = []

    def enter() -> None:
        with RunLease.of(tmp_path):
            entered.append(1)

    with RunLease.of(tmp_path):
        threads = [threading.Thread(target=enter) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert is_refused_elsewhere(tmp_path)
    assert len(entered) == 8


def test_taking_the_lease_makes_the_run_directory(tmp_path: Path) -> None:
    with RunLease.of(tmp_path / "a" / "run"):
        assert (tmp_path / "a" / "run" / LOCK_NAME).exists()


def test_a_process_that_changes_its_directory_keeps_its_runs_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunLease.of(Path("run")):
        pass
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with RunLease.of(tmp_path / "run"):
        pass
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_failed_acquisition_leaves_no_lease_behind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        RunLease.of(tmp_path / "file").__enter__()
    (tmp_path / "file").unlink()
    with RunLease.of(tmp_path / "file"):
        pass


def test_a_fresh_lease_of_another_host_is_refused_and_says_how_old_it_is(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_bytes(foreign_owner().to_bytes())
    with pytest.raises(RunInUseError, match=r"process 1 on another-host held the lease \d+ s ago"):
        RunLease.of(tmp_path).__enter__()
    assert (tmp_path / LOCK_NAME).read_bytes() == foreign_owner().to_bytes()


def test_a_lease_of_another_host_goes_stale_after_a_day(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    path.write_bytes(foreign_owner().to_bytes())
    before = path.stat().st_mtime - STALE_AFTER_S - 60
    os.utime(path, (before, before))
    with RunLease.of(tmp_path):
        pass
    assert not [name for name in os.listdir(tmp_path) if "clock" in name]


@pytest.mark.parametrize("raw", [b"", b"\0\0", b"[]", b'{"host": "h"}', b"not json \xff"])
def test_a_lease_file_that_names_nobody_is_free(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_bytes(raw)
    with RunLease.of(tmp_path):
        pass


def test_an_owner_is_told_from_a_later_process_of_its_number_and_from_an_earlier_boot() -> None:
    owner = Owner.this_process()
    assert Owner.from_bytes(owner.to_bytes()) == owner
    assert not owner.is_dead()
    assert replace(owner, start="1").is_dead()
    assert replace(owner, boot_id="another").is_dead()
    assert not foreign_owner().is_dead()
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert process_start(process.pid) is None
    assert replace(owner, pid=process.pid).is_dead()


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_where_nothing_locks_a_live_holder_is_still_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(tmp_path) as process:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(RunInUseError, match=rf"process {process.pid} on "):
            RunLease.of(tmp_path).__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with RunLease.of(tmp_path):
            pass


def test_where_locks_work_a_name_that_its_living_process_left_behind_is_no_holder(
    tmp_path: Path,
) -> None:
    with holder(tmp_path / "other") as process:
        content = (tmp_path / "other" / LOCK_NAME).read_bytes()
        (tmp_path / LOCK_NAME).write_bytes(content)
        with RunLease.of(tmp_path):
            assert process.poll() is None


def test_another_error_of_the_lock_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match=r"Input/output"):
        RunLease.of(tmp_path).__enter__()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_refresh_shows_other_hosts_that_the_holder_lives(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    with RunLease.of(tmp_path) as held:
        os.utime(path, (1, 1))
        held.refresh()
        assert lease.filesystem_age_s(path) < 60


LEAVES_A_CHILD = """
import os, sys, time
from pathlib import Path
from milepost.storage.lease import RunLease

with RunLease.of(Path(sys.argv[1])):
    runs, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        time.sleep(600)  # as a worker of a data loader that outlives its job
        os._exit(0)
    os.read(runs, 1)
    print(child, flush=True)
    sys.stdin.read()
"""


def test_a_forked_child_does_not_keep_the_lease_of_a_job_that_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAVES_A_CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with pytest.raises(RunInUseError, match=rf"process {process.pid} on "):
                RunLease.of(tmp_path).__enter__()
            process.kill()
            process.wait()
            with RunLease.of(tmp_path):
                os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_save_beside_its_living_parent(tmp_path: Path) -> None:
    with RunLease.of(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                RunLease.of(tmp_path).__enter__()
            except RunInUseError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with holder(tmp_path):  # the child took nothing with it
        pass

"""A process that was forked while a save was under way does not wait for it for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import milepost as mp

SCRIPT = """
import os, sys, threading
from pathlib import Path
import milepost as mp
from milepost.errors import InvalidInputError
from milepost.storage import fileops
from tests.states import training

run, go_on = Path(sys.argv[1]), threading.Event()

def hook(name, target, function, arguments):
    if name == "write" and "checkpoint-2" in target:
        assert go_on.wait(60)
    return function(*arguments)

with fileops.hooked(hook):
    first = mp.save_async(run / "checkpoint-1", training(), step=1)
    first.wait()
    second = mp.save_async(run / "checkpoint-2", training(), step=2)
    child = os.fork()
    if child == 0:
        assert first.wait(5).step == 1
        for look in range(2):
            try:
                second.wait(5)
            except InvalidInputError as error:
                print(error, flush=True)
        assert second.done()
        mp.save_async(run / "of-child" / "checkpoint-7", training(), step=7).wait()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go_on.set()
    assert second.wait(60).step == 2
print(os.getpid(), child, code)
"""


def test_a_forked_child_is_told_that_the_save_is_its_parents(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    *told, last = done.stdout.splitlines()
    parent, child, code = last.split()
    assert code == "0", done.stderr
    assert len(told) == 2 and told[0] == told[1]
    assert told[0].startswith(
        f"{tmp_path / 'checkpoint-2'}: step 2 is being saved by process {parent}; "
        f"this process, {child}, was forked from it"
    )
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [1, 2]

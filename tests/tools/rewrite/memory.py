"""Peak anonymous memory of a program in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys, threading, time
import torch

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

{imports}
torch.set_num_threads(1)
torch.zeros(1000, dtype=torch.bfloat16).float().sum()
peak, is_running = 0, True

def watch():
    global peak
    while is_running:
        peak = max(peak, anonymous())
        time.sleep(0.001)

before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
{work}
is_running = False
watcher.join()
print(max(peak, anonymous()) - before)
"""


def peak_anon_nbytes(imports: str, work: str, *arguments: object) -> int:
    """How far RssAnon rises above that of the interpreter with its `imports` while `work` runs.

    Both are statements; `work` finds its arguments in `sys.argv`. Pages of files are not counted.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(imports=imports, work=work), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])

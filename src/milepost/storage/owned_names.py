"""Temporary names that tell who writes under them, where no lease does.

A lone file, or a directory that a tool makes, may lie anywhere, and its parent gets no lock file
for it. Its temporary name holds the writing process, so that the next writer of the same name can
remove what a dead one left.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from milepost.storage import fileops
from milepost.storage.atomic import remove_quietly
from milepost.storage.lease import STALE_AFTER_S, Owner, filesystem_age_s, process_start

_TAIL = re.compile(r"([0-9a-f]{8})-(\d+)-(\d*)-[0-9a-f]{8}\.tmp")


def owned_name(path: Path) -> Path:
    """A hidden name beside `path` that no other writer uses."""
    owner = Owner.this_process()
    tail = f"{_machine(owner)}-{owner.pid}-{owner.start}-{secrets.token_hex(4)}.tmp"
    return path.with_name(f"{_head(path)}{tail}")


def remove_dead(path: Path) -> None:
    """Remove what dead writers of `path` left under such names, of other hosts after a day."""
    head = _head(path)
    for entry in list(os.scandir(path.parent)):
        tail = _TAIL.fullmatch(entry.name.removeprefix(head))
        if entry.name.startswith(head) and tail is not None and _is_dead(Path(entry.path), tail):
            if entry.is_dir(follow_symlinks=False):
                with suppress(OSError):  # the next writer of this name tries again
                    fileops.remove_tree(entry.path)
            else:
                remove_quietly(entry.path)


def _head(path: Path) -> str:
    return f".{path.name}.milepost-"


def _machine(owner: Owner) -> str:
    return hashlib.blake2b(f"{owner.host} {owner.boot_id}".encode(), digest_size=4).hexdigest()


def _is_dead(path: Path, tail: re.Match[str]) -> bool:
    machine, pid, start = tail.groups()
    if machine == _machine(Owner.this_process()):
        return process_start(int(pid)) != start
    try:
        return filesystem_age_s(path) > STALE_AFTER_S
    except OSError:
        return False

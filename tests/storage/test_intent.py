"""The intent record: several names change together, whatever stops the process that does it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import FormatError
from milepost.storage import fileops
from milepost.storage.intent import (
    INTENT_NAME,
    Intent,
    commit_names,
    finish_intent,
    read_intent,
    remove_asides,
    resolve_name,
)


class Stop(BaseException):
    """What a power cut looks like from inside."""


def content(run: Path) -> dict[str, str]:
    """Each visible name and what it stands for."""
    found = {}
    for path in sorted(run.iterdir()):
        if not path.name.startswith((".milepost", "..milepost")):
            inner = path / "content" if path.is_dir() else path
            found[path.name] = inner.read_text() if inner.exists() else "?"
    return found


def seen_through_the_record(run: Path, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        path = resolve_name(run, name)
        if path.exists():
            found[name] = (path / "content" if path.is_dir() else path).read_text()
    return found


def make(run: Path, **entries: str) -> None:
    """Files, and directories where the text begins with `dir `."""
    run.mkdir(exist_ok=True)
    for name, text in entries.items():
        if text.startswith("dir "):
            (run / name).mkdir()
            (run / name / "content").write_text(text)
        else:
            (run / name).write_text(text)


# name: (before, renames, removes, after)
CHANGES: dict[str, tuple[dict[str, str], list[tuple[str, str]], list[str], dict[str, str]]] = {
    "three files of a trio, the old ones replaced": (
        {"t1": "new1", "t2": "new2", "t3": "new3", "a": "old1", "b": "old2"},
        [("t1", "a"), ("t2", "b"), ("t3", "c")],
        [],
        {"a": "new1", "b": "new2", "c": "new3"},
    ),
    "a stale file removed with the renames": (
        {"t1": "new", "stale": "old"},
        [("t1", "a")],
        ["stale"],
        {"a": "new"},
    ),
    "an old directory aside and the new one in": (
        {"staging": "dir new", "checkpoint": "dir old"},
        [("staging", "checkpoint")],
        ["checkpoint"],
        {"checkpoint": "dir new"},
    ),
    "a directory in place of a file": (
        {"staging": "dir new", "checkpoint": "a file"},
        [("staging", "checkpoint")],
        ["checkpoint"],
        {"checkpoint": "dir new"},
    ),
    "removals only": ({"a": "1", "b": "dir 2", "c": "3"}, [], ["a", "b"], {"c": "3"}),
    "one rename": ({"t": "new", "a": "old"}, [("t", "a")], [], {"a": "new"}),
}
changes = pytest.mark.parametrize("name", CHANGES)


@changes
def test_all_names_change(name: str, tmp_path: Path) -> None:
    before, renames, removes, after = CHANGES[name]
    make(tmp_path, **before)
    commit_names(tmp_path, renames=renames, removes=removes)
    assert content(tmp_path) == after
    assert sorted(os.listdir(tmp_path)) == sorted(after)


@pytest.mark.case("C1.2")
@changes
@pytest.mark.parametrize("kind", ["stopped before", "stopped after", "EIO"])
def test_stopped_at_any_operation_a_reader_sees_all_or_nothing_and_the_next_writer_agrees(
    name: str, kind: str, tmp_path: Path
) -> None:
    before, renames, removes, after = CHANGES[name]
    names = sorted({*before, *after} - {source for source, _ in renames})
    old = {key: text for key, text in before.items() if key in names}
    number = 0
    while True:
        run = tmp_path / str(number)
        make(run, **before)
        if not stop_at(number, kind, run, renames, removes):
            break
        seen = seen_through_the_record(run, names)
        if len(renames) + len(removes) == 1:
            assert seen in (old, after)
        elif read_intent(run) is not None or content(run) == after:
            assert seen == after
        else:
            assert seen == old
        finish_intent(run)
        remove_asides(run)
        assert seen_through_the_record(run, names) == seen
        finish_intent(run)
        if seen == old:
            commit_names(run, renames=renames, removes=removes)
        assert content(run) == after, f"stopped at operation {number}"
        assert sorted(os.listdir(run)) == sorted(after)
        number += 1
    assert number >= 2


def stop_at(
    number: int, kind: str, run: Path, renames: list[tuple[str, str]], removes: list[str]
) -> bool:
    """Commit, stopped at the operation `number`; False when there is no such operation."""
    count = -1

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        nonlocal count
        count += 1
        if count != number:
            if count > number and kind != "EIO":
                raise Stop  # nothing happens after the end
            return function(*arguments)
        if kind == "EIO":
            raise OSError(errno.EIO, "Input/output error", target)
        if kind == "stopped after":
            function(*arguments)
        raise Stop

    try:
        with fileops.hooked(hook):
            commit_names(run, renames=renames, removes=removes)
    except (Stop, OSError):
        return True
    return count >= number


def test_a_rename_between_two_links_of_one_file_still_removes_the_source(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("same")
    os.link(tmp_path / "t", tmp_path / "a")
    make(tmp_path, u="new", b="old")
    commit_names(tmp_path, renames=[("t", "a"), ("u", "b")])
    assert content(tmp_path) == {"a": "same", "b": "new"}


def test_a_finished_record_changes_nothing_when_it_is_carried_out_again(tmp_path: Path) -> None:
    """The crash came between the last rename and the removal of the record."""
    make(tmp_path, staging="dir new", checkpoint="dir old")
    intent = Intent(removes=("checkpoint",), renames=(("staging", "checkpoint"),))
    for _ in range(3):
        (tmp_path / INTENT_NAME).write_bytes(intent.to_bytes())
        finish_intent(tmp_path)
        assert content(tmp_path) == {"checkpoint": "dir new"}


def test_without_a_record_names_are_what_they_are(tmp_path: Path) -> None:
    assert read_intent(tmp_path) is None
    assert read_intent(tmp_path / "missing") is None
    assert resolve_name(tmp_path, "a") == tmp_path / "a"
    finish_intent(tmp_path)


def test_a_record_moves_only_the_names_it_holds(tmp_path: Path) -> None:
    make(tmp_path, t="new", a="old", other="other")
    intent = Intent(renames=(("t", "a"),), removes=("gone",))
    assert intent.resolve(tmp_path, "a") == tmp_path / "t"
    assert intent.resolve(tmp_path, "other") == tmp_path / "other"
    assert not intent.resolve(tmp_path, "gone").exists()
    (tmp_path / "t").unlink()
    assert intent.resolve(tmp_path, "a") == tmp_path / "a"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"milepost_intent": 2, "removes": [], "renames": []}',
        b'{"milepost_intent": 1, "removes": []}',
        b'{"milepost_intent": 1, "removes": [], "renames": [["a"]]}',
        b'{"milepost_intent": 1, "removes": [], "renames": [["a", "b", "c"]]}',
        b'{"milepost_intent": 1, "removes": 7, "renames": []}',
    ],
)
def test_a_record_that_cannot_be_understood_stops_readers_and_writers(
    raw: bytes, tmp_path: Path
) -> None:
    make(tmp_path, a="precious")
    (tmp_path / INTENT_NAME).write_bytes(raw)
    for act in (
        lambda: resolve_name(tmp_path, "a"),
        lambda: finish_intent(tmp_path),
        lambda: commit_names(tmp_path, renames=[("a", "b")]),
    ):
        with pytest.raises(FormatError, match="not an intent record of this version"):
            act()
    assert content(tmp_path) == {"a": "precious"}


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "", ".", "..", "a/b", "a\0b"])
def test_a_record_cannot_name_what_lies_outside_the_run(name: str, tmp_path: Path) -> None:
    documents = [
        {"milepost_intent": 1, "removes": [name], "renames": []},
        {"milepost_intent": 1, "removes": [], "renames": [[name, "a"]]},
        {"milepost_intent": 1, "removes": [], "renames": [["a", name]]},
    ]
    for document in documents:
        (tmp_path / INTENT_NAME).write_text(json.dumps(document))
        with pytest.raises(FormatError, match="not a plain name"):
            read_intent(tmp_path)

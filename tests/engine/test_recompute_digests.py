"""Recomputing digests: every wrong byte is found in its extent, which names its tensor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from milepost.engine.source import BytesSource, TensorSource
from milepost.engine.verify import BadExtent, find_bad_extents, tensor_at
from milepost.engine.write import FileWrite, Piece, WriteOptions, write_files
from milepost.format.digests import Extent
from milepost.format.header import read_header
from milepost.plan.parts import plan_parts


def saved(path: Path) -> list[Extent]:
    """A part with two tensors and an empty one between them, and its extents."""
    tensors = {"a": torch.arange(5.0), "nothing": torch.empty(0), "b": torch.arange(7.0)}
    plan = plan_parts(((n, "F32", tuple(t.shape)) for n, t in tensors.items()), stem="model").parts[
        0
    ]
    pieces = [Piece(start=0, source=BytesSource(plan.header))]
    pieces += [Piece(start=plan.offset(n), source=TensorSource(tensors[n])) for n in plan.tensors]
    (extents,) = write_files([FileWrite(path=path, pieces=tuple(pieces))], WriteOptions())
    return extents


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("threads", [1, 4])
def test_an_untouched_file_has_no_bad_extent_and_all_its_bytes_are_read(
    threads: int, tmp_path: Path
) -> None:
    extents = saved(tmp_path / "p")
    seen: list[int] = []
    assert find_bad_extents({tmp_path / "p": extents}, threads=threads, on_bytes=seen.append) == []
    assert sum(seen) == (tmp_path / "p").stat().st_size


@pytest.mark.case("C1.1")
def test_every_flipped_byte_is_found_in_the_extent_of_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "p"
    extents = saved(path)
    header = read_header(path)
    data_start = header.data_start
    places = [0, 3, 9, 100, data_start - 1, *range(data_start, path.stat().st_size)]
    for at in places:
        flip(path, at)
        (bad,) = find_bad_extents({path: extents}, threads=2)
        assert bad.start <= at < bad.end
        assert bad.error is None
        expected = None if at < data_start else "a" if at < data_start + 20 else "b"
        assert tensor_at(header, bad.start, bad.end) == expected
        flip(path, at)
    assert find_bad_extents({path: extents}) == []


def test_bad_extents_come_in_order_of_file_and_offset(tmp_path: Path) -> None:
    jobs = {tmp_path / name: saved(tmp_path / name) for name in ("p", "q")}
    for path in jobs:
        flip(path, 0)
        flip(path, path.stat().st_size - 1)
    found = find_bad_extents(jobs, threads=4)
    assert [(bad.path.name, bad.start == 0) for bad in found] == [
        ("p", True),
        ("p", False),
        ("q", True),
        ("q", False),
    ]


def test_a_truncated_file_and_one_that_cannot_be_read_are_bad_too(tmp_path: Path) -> None:
    path = tmp_path / "p"
    extents = saved(path)
    os.truncate(path, path.stat().st_size - 1)
    (bad,) = find_bad_extents({path: extents})
    assert bad.end == extents[-1].end
    path.unlink()
    found = find_bad_extents({path: extents})
    assert found == [
        BadExtent(path=path, start=e.start, end=e.end, error="No such file or directory")
        for e in extents
    ]


def test_an_extent_inside_a_tensor_names_it_and_one_of_the_header_names_none(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "p")
    header = read_header(tmp_path / "p")
    start = header.data_start
    assert tensor_at(header, 0, start) is None
    assert tensor_at(header, start + 4, start + 8) == "a"
    assert tensor_at(header, start + 20, start + 24) == "b"
    assert tensor_at(header, start + 44, start + 48) == "b"

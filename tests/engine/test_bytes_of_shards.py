"""What reading shards costs in bytes: counted by the reader, and by the kernel."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from milepost.engine.read import ReadOptions, StoredTensor
from milepost.engine.read_shard import ShardRead, fill_shards
from milepost.errors import DamagedError
from milepost.geometry.placement import Placement, Shard, index_set, local_shape


class Counter:
    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes


def stored(path: Path, *shape: int, start: int = 1000) -> tuple[StoredTensor, Tensor]:
    value = torch.randint(0, 2**15, shape, dtype=torch.int16)
    path.write_bytes(b"\0" * start + value.numpy().tobytes())
    return StoredTensor(name="w", path=path, start=start, dtype="I16", shape=shape), value


def read_chars() -> int:
    with open("/proc/self/io", "rb", buffering=0) as file:
        return int(file.read(4096).split()[1])


def read_shards(
    tensor: StoredTensor, value: Tensor, count: int, placement: Placement
) -> tuple[int, int, int]:
    """Bytes needed, counted and seen by the kernel's read calls, for one shard after the other."""
    counter = Counter()
    needed = kernel = 0
    for rank in range(count):
        held = index_set(tensor.shape, (count,), (rank,), (placement,))
        target = torch.empty(local_shape(held), dtype=torch.int16)
        read = ShardRead(stored=tensor, held=held, target=target)
        before = read_chars()
        fill_shards([read], ReadOptions(threads=2, on_bytes=counter.add))
        kernel += read_chars() - before
        needed += target.numel() * 2
        expected = value
        for dim, spans in enumerate(held):
            keep = torch.cat([torch.arange(*span) for span in spans])
            expected = expected.index_select(dim, keep)
        assert torch.equal(target, expected)
    return needed, counter.nbytes, kernel


@pytest.mark.case("V43")
@pytest.mark.parametrize("placement", [Shard(0), Shard(0, split_factor=2)], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_shards_of_rows_read_what_they_need(placement: Shard, count: int, tmp_path: Path) -> None:
    tensor, value = stored(tmp_path / "f", 1000, 600)
    needed, counted, kernel = read_shards(tensor, value, count, placement)
    assert needed == value.numel() * 2
    assert counted == needed
    assert kernel <= 1.05 * needed


@pytest.mark.case("V43")
@pytest.mark.parametrize(
    ("columns", "count"),
    [(1024, 2), (3000, 4), (4096, 2), (8192, 4), (8192, 2), (16384, 2), (30000, 3)],
)
def test_shards_of_columns_read_at_most_half_more(columns: int, count: int, tmp_path: Path) -> None:
    tensor, value = stored(tmp_path / "f", 200, columns)
    needed, counted, kernel = read_shards(tensor, value, count, Shard(1))
    assert needed == value.numel() * 2
    assert needed <= counted <= 1.5 * needed
    assert kernel <= 1.05 * counted


def test_what_a_window_touches_is_counted_by_pages(tmp_path: Path) -> None:
    tensor, value = stored(tmp_path / "f", 64, 2 * mmap.PAGESIZE, start=mmap.PAGESIZE)
    held = (((0, 64),), ((0, 100),))  # 200 bytes of the first of four pages of each row
    counter = Counter()
    target = torch.empty(64, 100, dtype=torch.int16)
    read = ShardRead(stored=tensor, held=held, target=target)
    fill_shards([read], ReadOptions(threads=1, on_bytes=counter.add))
    assert torch.equal(target, value[:, :100])
    assert counter.nbytes == 64 * mmap.PAGESIZE


def test_a_page_that_two_runs_share_is_counted_once(tmp_path: Path) -> None:
    tensor, _ = stored(tmp_path / "f", mmap.PAGESIZE // 8, 4, start=mmap.PAGESIZE)
    held = (((0, mmap.PAGESIZE // 8),), ((1, 2),))
    counter = Counter()
    read = ShardRead(
        stored=tensor, held=held, target=torch.empty(mmap.PAGESIZE // 8, 1, dtype=torch.int16)
    )
    fill_shards([read], ReadOptions(threads=1, on_bytes=counter.add))
    assert counter.nbytes == mmap.PAGESIZE


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_short_columns_are_read_one_by_one_only_when_their_rows_are_not_in_memory(
    where: str, tmp_path: Path
) -> None:
    tensor, value = stored(tmp_path / "f", 512, 4096)
    with open(tmp_path / "f", "rb") as file:
        os.fsync(file.fileno())
        if where == "on disk":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    needed, counted, kernel = read_shards(tensor, value, 2, Shard(1))
    assert counted == needed
    assert (kernel >= needed // 2) == (where == "on disk")  # the second finds read-ahead


def test_a_file_cut_short_is_damaged_before_its_columns_are_mapped(tmp_path: Path) -> None:
    tensor, _ = stored(tmp_path / "f", 64, 2 * mmap.PAGESIZE, start=mmap.PAGESIZE)
    os.truncate(tensor.path, mmap.PAGESIZE + 100)
    held = (((0, 64),), ((0, 100),))
    target = torch.zeros(64, 100, dtype=torch.int16)
    with pytest.raises(DamagedError, match=rf"f: ends at byte {mmap.PAGESIZE + 100}, \d+ bytes"):
        fill_shards([ShardRead(stored=tensor, held=held, target=target)], ReadOptions(threads=1))
    assert not target.any()

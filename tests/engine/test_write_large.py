"""The writer on what is large: no clone of a tensor, no limit of 2 GiB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from milepost.engine.source import ByteSource, BytesSource, TensorSource
from milepost.engine.write import FileWrite, Piece, WriteMode, WriteOptions, write_files

GROWTH = """
import sys, torch
from pathlib import Path
from milepost.engine.source import TensorSource
from milepost.engine.write import *

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

mode, path = WriteMode(sys.argv[1]), Path(sys.argv[2])
tensor = torch.ones(8192, 16384).t()  # 512 MiB
options = WriteOptions(mode=mode, threads=4)
small = FileWrite(path=path / "s", pieces=(Piece(start=0, source=TensorSource(tensor[:8])),))
write_files([small], options)
before = peak()
write_files([FileWrite(path=path / "b", pieces=(Piece(start=0, source=TensorSource(tensor)),))],
            options)
print(peak() - before)
"""


@pytest.mark.case("V02")
@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_a_transposed_tensor_of_half_a_gibibyte_is_never_cloned(mode: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, mode, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / "b").stat().st_size == 512 * 2**20
    assert int(done.stdout) * 1024 <= 64 * 2**20
    (tmp_path / "b").unlink()


@pytest.mark.slow
@pytest.mark.case("V06")
@pytest.mark.parametrize("mode", WriteMode)
def test_a_tensor_beyond_two_gibibytes_keeps_its_head_and_its_tail(
    mode: WriteMode, tmp_path: Path
) -> None:
    tensor = torch.zeros(2**31 + 5, dtype=torch.uint8)
    tensor[:4], tensor[-4:] = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8])
    path = tmp_path / "part"
    sources: list[ByteSource] = [BytesSource(b"h" * 8), TensorSource(tensor), TensorSource(tensor)]
    starts = [0, 8, 8 + tensor.numel()]
    pieces = tuple(Piece(start=s, source=source) for s, source in zip(starts, sources, strict=True))
    (extents,) = write_files([FileWrite(path=path, pieces=pieces)], WriteOptions(mode=mode))
    assert path.stat().st_size == 8 + 2 * (2**31 + 5) == extents[-1].end
    with path.open("rb") as file:
        for start in (8, 8 + 2**31 + 5):
            file.seek(start)
            assert file.read(4) == bytes([1, 2, 3, 4])
            file.seek(start + 2**31 + 1)
            assert file.read(4) == bytes([5, 6, 7, 8])
    path.unlink()

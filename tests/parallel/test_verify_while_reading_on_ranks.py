"""Proving tensors as each rank reads its own."""

from __future__ import annotations

from pathlib import Path

import milepost as mp
from milepost.errors import DamagedError, LoadTornError
from milepost.format.header import read_header
from tests.parallel.models import FSDP2, TP2, start
from tests.states import flip
from tests.worlds import run_world

WHILE = mp.Verify.WHILE_READING


def load_it_back(rank: int, world_size: int, run: Path) -> tuple[list[str], list[str], str]:
    path = run / "checkpoint-1"
    mp.save(path, start(FSDP2).state(), step=1)
    same = mp.load(path, start(FSDP2, seed=1).state(), verify=WHILE)
    other = mp.load(path, start(TP2, seed=1).state(), verify=WHILE)
    if rank == 0:
        file = path / "model.safetensors"
        header = read_header(file)
        entry = header.tensors["model.layers.1.mlp.down_proj.weight"]
        flip(file, header.data_start + entry.start)  # of rank 0's rows
    try:
        mp.load(path, start(FSDP2, seed=1).state(), verify=WHILE)
    except LoadTornError as error:
        assert isinstance(error.__cause__, DamagedError)
        return same.notes, other.notes, str(error)
    return same.notes, other.notes, ""


def test_each_rank_proves_what_it_reads_whole_and_all_raise_what_one_finds(tmp_path: Path) -> None:
    for same, other, error in run_world(2, load_it_back, tmp_path):
        assert not any("not verified" in note for note in same)
        assert any("read as parts of extents, and not verified" in note for note in other)
        assert "rank 0" in error
        assert "tensor model.layers.1.mlp.down_proj.weight: bytes" in error

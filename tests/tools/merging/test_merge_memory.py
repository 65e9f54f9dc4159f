"""What a thread holds while it merges rows of any length, and what it has left afterwards."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from milepost.tools.merge_models import _memory_nbytes
from milepost.tools.merging import chunks
from milepost.tools.merging.chunks import Inputs, flat, rounded
from milepost.tools.merging.methods import METHODS, Values
from milepost.tools.rewrite.groups import TensorSpec
from milepost.tools.rewrite.source import open_source
from tests.tools.rewrite.hub import write_hub

ROWS = {
    "della": Values({"weight": [1, 0.5], "density": [0.5] * 2, "epsilon": [0.2] * 2},
                    {"lambda": 1, "normalize": 1, "rescale": 1}),
    "model_stock": Values({}, {"filter_wise": 1}),
}  # fmt: skip


def bank(numel: int, seed: int) -> Tensor:
    """Two experts, the rows of which are several chunks long."""
    return torch.randn(2, 1, numel, generator=torch.Generator().manual_seed(seed))


def merged(method: str, tensors: list[Tensor]) -> Tensor:
    base, *others = tensors
    inputs = Inputs([flat(other) for other in others], base.shape, flat(base), "a")
    pieces = METHODS[method].run(inputs, ROWS[method])
    return torch.cat([piece.clone() for piece in rounded(pieces, torch.bfloat16)])


@pytest.mark.parametrize("method", ROWS)
def test_memory_for_long_rows_is_given_back_and_that_of_chunks_is_kept(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [bank(9000, seed) for seed in range(3)]
    kept = merged(method, tensors)
    assert chunks._rooms.held
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", 704)
    assert torch.equal(merged(method, tensors), kept)
    assert not chunks._rooms.held


def test_memory_for_long_rows_is_given_back_when_a_merge_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", 704)
    base, *others = (bank(9000, seed) for seed in range(3))
    inputs = Inputs([flat(other) for other in others], base.shape, flat(base), "a")
    pieces = inputs.chunks(9000)
    next(pieces)
    assert chunks._rooms.held
    del pieces
    assert not chunks._rooms.held


def test_what_a_merge_of_long_rows_says_it_holds_is_no_less_than_what_it_holds(
    tmp_path: Path,
) -> None:
    tensors = [bank(400_000, seed) for seed in range(3)]
    with open_source(write_hub(tmp_path / "in", {"x": tensors[0]})) as source:
        stored = source["x"]
        spec = TensorSpec(name="x", dtype="F32", shape=stored.shape)
        stated = _memory_nbytes(METHODS["della"], [stored] * 3, spec, None)
    base, *others = tensors
    inputs = Inputs([flat(other) for other in others], base.shape, flat(base), "a")
    rooms = 0
    tracemalloc.start()
    try:
        for _ in METHODS["della"].run(inputs, ROWS["della"]):
            rooms = max(rooms, sum(room.nbytes for room in chunks._rooms.held.values()))
        arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.5 * stated < rooms + arrays <= stated

"""How tensors are cut into the chunks that methods go over."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.tools.merging import chunks
from milepost.tools.merging.chunks import Inputs, flat

LIMIT = 64


@given(rows=st.integers(1, 400), width=st.integers(1, 100))
def test_chunks_are_about_equal_and_none_cuts_a_row(rows: int, width: int) -> None:
    tensor = torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_NUMEL", LIMIT)
        found = [
            values[0].clone() for values, _ in Inputs([flat(tensor)], tensor.shape).chunks(width)
        ]
    assert torch.equal(torch.cat(found), tensor.flatten())
    lengths = [len(each) for each in found]
    unit = width if width > 1 else 8
    usual = max(1, LIMIT // unit) * unit
    assert max(lengths) <= max(LIMIT * 3 // 2, unit)
    assert all(length == lengths[0] and length % unit == 0 for length in lengths[:-1])
    assert lengths[-1] % width == 0
    assert 0 <= lengths[0] - lengths[-1] < unit * (tensor.numel() / usual + 1.5)
    assert len(lengths) <= max(1, round(tensor.numel() / usual) + 1)


@pytest.mark.parametrize(("numel", "expected"), [(330, [330]), (884, [296, 296, 292])])
def test_a_little_more_than_a_chunk_makes_longer_chunks_instead_of_a_short_one(
    numel: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", 264)
    tensor = torch.zeros(numel)
    found = [values.shape[1] for values, _ in Inputs([flat(tensor)], tensor.shape).chunks()]
    assert found == expected

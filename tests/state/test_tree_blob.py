"""A tree with its tensors as bytes: the state that one rank has of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import CheckpointError, FormatError, UnencodableError
from milepost.state.tree_blob import pack_tree, unpack_tree

VALUE: dict[str, Any] = {
    "position": 7,
    "buffer": (1, 2.5, None),
    "ids": torch.arange(5),
    "half": torch.ones(2, 3).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.0),
    "shared": [torch.zeros(2)] * 2,
}


def test_a_tree_comes_back_with_every_type_and_bit() -> None:
    blob = pack_tree(VALUE, key="loader")
    back = unpack_tree(blob + bytes(100), where="row")
    assert back["position"] == 7 and back["buffer"] == (1, 2.5, None)
    for name in ("ids", "half", "empty", "scalar"):
        assert back[name].dtype == VALUE[name].dtype and torch.equal(back[name], VALUE[name])
    assert back["shared"][0] is back["shared"][1]


def test_what_cannot_be_stored_is_refused_with_its_key() -> None:
    with pytest.raises(UnencodableError, match=r"loader\.hook"):
        pack_tree({"hook": print}, key="loader")


@pytest.mark.spec("v1#rank-1")
def test_a_row_with_another_beginning_or_an_early_end_is_refused() -> None:
    blob = pack_tree(VALUE, key="loader")
    with pytest.raises(FormatError, match="row: begins with b'XPTREE01'"):
        unpack_tree(b"X" + blob[1:], where="row")
    for length in range(len(blob)):
        with pytest.raises(CheckpointError):
            unpack_tree(blob[:length], where="row")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_row_is_an_error_of_milepost_or_another_value(data: st.DataObject) -> None:
    blob = bytearray(pack_tree(VALUE, key="loader"))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    try:
        unpack_tree(bytes(blob), where="row")
    except CheckpointError:
        return

"""Rules of docs/spec/v1.md about parts, their headers and their index."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

import milepost as mp
from milepost.errors import CheckpointIncompleteError, FormatError
from milepost.format.header import MAX_HEADER_NBYTES, parse_header, read_header
from milepost.format.index import parse_index


def safetensors(document: object, data: bytes = b"") -> bytes:
    text = json.dumps(document).encode() if not isinstance(document, bytes) else document
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.spec("v1#weights-1")
def test_a_part_is_marked_for_torch_and_its_data_is_aligned(saved: Path) -> None:
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        header = read_header(saved / name)
        assert header.metadata == {"format": "pt"}
        assert header.data_start % 8 == 0


@pytest.mark.spec("v1#weights-1")
def test_a_part_with_its_data_elsewhere_is_read(saved: Path, state: dict[str, Any]) -> None:
    part = saved / "model.safetensors"
    raw = part.read_bytes()
    header = read_header(part)
    text = raw[8 : header.data_start].rstrip()
    part.write_bytes(struct.pack("<Q", len(text)) + text + raw[header.data_start :])
    read = mp.Checkpoint.open(saved).read("norm.weight")
    assert read.equal(state["model"].norm.weight)


@pytest.mark.spec("v1#weights-2", "v1#limit-3")
@pytest.mark.parametrize(
    ("document", "data"),
    [
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, b"123"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"123"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 3]}}, b"123"),
        ({"a": {"dtype": "U9", "shape": [3], "data_offsets": [0, 3]}}, b"123"),
        ({f"{n}": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}, b"12"),
        (b'{"__metadata__": {"a": "1", "a": "2"}}', b""),
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused(document: object, data: bytes) -> None:
    raw = safetensors(document, data)
    with pytest.raises(FormatError, match=r"^part: "):
        parse_header(raw, file_nbytes=len(raw), where="part")


@pytest.mark.spec("v1#limit-1", "v1#limit-2", "v1#limit-4")
@pytest.mark.parametrize("claim", [1000, MAX_HEADER_NBYTES + 1, 2**64 - 1])
def test_a_length_that_the_file_does_not_have_takes_no_memory(saved: Path, claim: int) -> None:
    part = saved / "model.safetensors"
    part.write_bytes(struct.pack("<Q", claim) + b"{}")
    with pytest.raises(FormatError, match=rf"{re.escape(str(part))}: header claims {claim} bytes"):
        read_header(part)


@pytest.mark.spec("v1#limit-2")
def test_a_tensor_of_65_dims_is_refused() -> None:
    raw = safetensors({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, b"1")
    with pytest.raises(FormatError, match="'a': shape"):
        parse_header(raw, file_nbytes=len(raw), where="part")


@pytest.mark.spec("v1#index-1")
def test_parts_have_an_index_and_numbered_names(saved: Path, save: Any) -> None:
    one = json.loads((saved / "model.safetensors.index.json").read_bytes())
    assert set(one["weight_map"].values()) == {"model.safetensors"}
    several = sorted(path.name for path in save(4, max_shard_size=64).glob("model-*"))
    count = len(several)
    assert several == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


@pytest.mark.spec("v1#index-2")
@pytest.mark.parametrize("change", ["more", "less"])
def test_an_index_that_disagrees_with_its_parts_is_refused(saved: Path, change: str) -> None:
    place = saved / "model.safetensors.index.json"
    index = json.loads(place.read_bytes())
    if change == "more":
        index["weight_map"]["ghost"] = "model.safetensors"
    else:
        del index["weight_map"]["norm.weight"]
    place.write_bytes(json.dumps(index).encode())
    with pytest.raises(CheckpointIncompleteError):
        mp.Checkpoint.open(saved).tensors()


@pytest.mark.spec("v1#index-3")
@pytest.mark.parametrize("part", ["", ".", "..", "../a", "/a", "a\\b", "a\0"])
def test_a_part_that_lies_elsewhere_is_refused(part: str) -> None:
    raw = json.dumps({"weight_map": {"a": part}}).encode()
    with pytest.raises(FormatError, match="no plain file name"):
        parse_index(raw, "index")


@pytest.mark.spec("v1#index-4")
def test_slices_per_rank_are_refused(saved: Path) -> None:
    place = saved / "model.safetensors.index.json"
    index = json.loads(place.read_bytes())
    index["metadata"]["format"] = "ep_sharded"
    place.write_bytes(json.dumps(index).encode())
    with pytest.raises(FormatError, match="ep_sharded"):
        mp.Checkpoint.open(saved).tensors()

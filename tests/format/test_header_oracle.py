"""Our header codec against safetensors itself, in both directions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from milepost.format.dtypes import DTYPES, Dtype, by_torch_name
from milepost.format.header import encode_header, layout_tensors, read_header

TORCH_ROWS = [row for row in DTYPES.values() if row.torch_name]
SHAPES = [(), (0,), (1,), (0, 4), (3, 8), (2, 1, 4), (1,) * 10]


def random_tensor(row: Dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    dtype = getattr(torch, str(row.torch_name))
    if row.name == "BOOL":
        return torch.arange(seed, seed + torch.Size(shape).numel()).reshape(shape) % 3 == 0
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor(list(random.Random(seed).randbytes(count)), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def header_shape(row: Dtype, tensor: torch.Tensor) -> tuple[int, ...]:
    if row.elements_per_torch == 1:
        return tuple(tensor.shape)
    return (*tensor.shape[:-1], tensor.shape[-1] * row.elements_per_torch)


def some_of_each(rows: list[Dtype]) -> dict[str, torch.Tensor]:
    return {
        f"{row.torch_name}.{number}": random_tensor(row, shape, seed=number)
        for row in rows
        for number, shape in enumerate(SHAPES)
        if shape or row.elements_per_torch == 1  # a torch scalar of packed F4 has no shape there
    }


def write_with_ours(path: Path, tensors: dict[str, torch.Tensor], *, align: int = 8) -> None:
    items = []
    for name, tensor in tensors.items():
        row = by_torch_name(str(tensor.dtype).removeprefix("torch."))
        assert row is not None
        items.append((name, row.name, header_shape(row, tensor)))
    entries = layout_tensors(items)
    data = b"".join(raw_bytes(tensors[name]) for name in entries)
    path.write_bytes(encode_header(entries, {"format": "pt", "k": "v"}, align=align) + data)


@pytest.mark.case("V05")
@pytest.mark.parametrize("row", TORCH_ROWS, ids=lambda row: row.name)
def test_what_safetensors_writes_we_read_with_the_same_offsets(row: Dtype, tmp_path: Path) -> None:
    tensors = some_of_each([row])
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    content = path.read_bytes()
    theirs = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header = read_header(path)
    assert header.metadata == theirs.pop("__metadata__")
    assert set(header.tensors) == set(theirs) == set(tensors)
    for name, entry in header.tensors.items():
        assert [entry.start, entry.end] == theirs[name]["data_offsets"]
        assert list(entry.shape) == theirs[name]["shape"]
        assert entry.dtype == row.name
        assert entry.shape == header_shape(row, tensors[name])
        start = header.data_start + entry.start
        assert content[start : start + entry.nbytes] == raw_bytes(tensors[name])


@pytest.mark.case("V05")
@pytest.mark.case("V07")
@pytest.mark.parametrize("align", [8, 4096])
@pytest.mark.parametrize("row", TORCH_ROWS, ids=lambda row: row.name)
def test_what_we_write_safetensors_loads(row: Dtype, align: int, tmp_path: Path) -> None:
    tensors = some_of_each([row])
    path = tmp_path / "a.safetensors"
    write_with_ours(path, tensors, align=align)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw_bytes(loaded[name]) == raw_bytes(tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "k": "v"}


@pytest.mark.case("V05")
def test_all_types_together_lie_aligned_and_load(tmp_path: Path) -> None:
    tensors = some_of_each(TORCH_ROWS)
    path = tmp_path / "a.safetensors"
    write_with_ours(path, tensors)
    loaded = load_file(path)
    assert {k: raw_bytes(v) for k, v in loaded.items()} == {
        k: raw_bytes(v) for k, v in tensors.items()
    }
    header = read_header(path)
    for name, entry in header.tensors.items():
        assert (header.data_start + entry.start) % tensors[name].dtype.itemsize == 0


@pytest.mark.case("V05")
@pytest.mark.parametrize("name", ["F6_E2M3", "F6_E3M2"])
def test_packed_types_without_a_torch_dtype_keep_their_bytes(name: str, tmp_path: Path) -> None:
    entries = layout_tensors([("w", name, (2, 6)), ("e", name, (0,)), ("x", "F32", (1,))])
    data = bytes(range(4 + 9))
    (tmp_path / "a").write_bytes(encode_header(entries, {}) + data)
    theirs = dict(safetensors.deserialize((tmp_path / "a").read_bytes()))  # type: ignore[no-untyped-call]
    assert theirs["w"]["shape"] == [2, 6] and theirs["w"]["dtype"] == name
    assert bytes(theirs["w"]["data"]) == data[4:]
    assert read_header(tmp_path / "a").tensors == entries


def test_a_header_that_safetensors_writes_is_ours_to_the_byte(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.ones(3), 'ü"\n': torch.ones(1, dtype=torch.int8)}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    header = read_header(tmp_path / "a")
    ours = encode_header(header.tensors, header.metadata)
    assert (tmp_path / "a").read_bytes().startswith(ours)
    assert len(ours) == header.data_start

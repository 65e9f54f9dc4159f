from __future__ import annotations

import re

import pytest
import safetensors
import torch

from milepost.format.dtypes import DTYPES, by_torch_name


def names_that_safetensors_knows() -> list[str]:
    header = b'{"a":{"dtype":"no such type","shape":[1],"data_offsets":[0,1]}}'
    with pytest.raises(safetensors.SafetensorError) as refused:
        safetensors.deserialize(len(header).to_bytes(8, "little") + header + b"x")  # type: ignore[no-untyped-call]
    _, _, expected = str(refused.value).partition("expected one of")
    return re.findall(r"`([A-Z0-9_]+)`", expected)


@pytest.mark.case("V05")
def test_the_table_has_exactly_the_types_of_safetensors() -> None:
    assert list(DTYPES) == names_that_safetensors_knows()


@pytest.mark.case("V05")
@pytest.mark.parametrize("name", DTYPES)
def test_the_width_of_a_type_is_that_of_safetensors(name: str) -> None:
    elements = 8
    nbytes = elements * DTYPES[name].nbits // 8
    header = b'{"a":{"dtype":"%s","shape":[8],"data_offsets":[0,%d]}}' % (name.encode(), nbytes)
    file = len(header).to_bytes(8, "little") + header + bytes(nbytes)
    [(_, tensor)] = safetensors.deserialize(file)  # type: ignore[no-untyped-call]
    assert len(tensor["data"]) == nbytes


@pytest.mark.case("V05")
@pytest.mark.parametrize("row", [r for r in DTYPES.values() if r.torch_name], ids=lambda r: r.name)
def test_an_element_of_torch_has_the_bytes_of_its_row(row: object) -> None:
    from milepost.format.dtypes import Dtype

    assert isinstance(row, Dtype) and row.torch_name
    dtype = getattr(torch, row.torch_name)
    assert isinstance(dtype, torch.dtype)
    assert dtype.itemsize * 8 == row.nbits * row.elements_per_torch
    assert by_torch_name(str(dtype).removeprefix("torch.")) is row


def test_a_type_that_the_container_cannot_hold_has_no_row() -> None:
    for name in ("complex128", "complex32", "quint8", "bits8", "int4", "float31", ""):
        assert by_torch_name(name) is None

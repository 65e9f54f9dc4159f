"""The element types of safetensors 0.8, as rows of one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One element type.

    `nbits` is the width of one element: 4 and 6 are packed (two elements in a byte, four in
    three). `torch_name` is torch's word without `torch.`, None where torch has no such type.
    torch counts a `float4_e2m1fn_x2` byte as one element, safetensors counts the two F4 in it:
    `elements_per_torch` is 2 there, and the last dim in the header is twice torch's.
    """

    name: str
    nbits: int
    torch_name: str | None
    elements_per_torch: int = 1


_ROWS: tuple[tuple[str, int, str | None], ...] = (
    ("BOOL", 8, "bool"),
    ("F4", 4, "float4_e2m1fn_x2"),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("U8", 8, "uint8"),
    ("I8", 8, "int8"),
    ("F8_E5M2", 8, "float8_e5m2"),
    ("F8_E4M3", 8, "float8_e4m3fn"),
    ("F8_E8M0", 8, "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    ("I16", 16, "int16"),
    ("U16", 16, "uint16"),
    ("F16", 16, "float16"),
    ("BF16", 16, "bfloat16"),
    ("I32", 32, "int32"),
    ("U32", 32, "uint32"),
    ("F32", 32, "float32"),
    ("C64", 64, "complex64"),
    ("F64", 64, "float64"),
    ("I64", 64, "int64"),
    ("U64", 64, "uint64"),
)

DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {
        name: Dtype(
            name=name,
            nbits=nbits,
            torch_name=torch_name,
            elements_per_torch=2 if name == "F4" else 1,
        )
        for name, nbits, torch_name in _ROWS
    }
)

_BY_TORCH_NAME = {row.torch_name: row for row in DTYPES.values() if row.torch_name}


def by_torch_name(name: str) -> Dtype | None:
    """The type that torch calls `name`, or None when the container cannot hold it.

    >>> by_torch_name("bfloat16").name
    'BF16'
    >>> by_torch_name("complex128") is None
    True
    """
    return _BY_TORCH_NAME.get(name)

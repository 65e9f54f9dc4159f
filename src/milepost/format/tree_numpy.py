"""numpy arrays, scalars and dtypes as fields of the typed tree; numpy is imported in use."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any

from milepost.format.tree_rules import decode_bytes, encode_bytes, expect

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INLINE_NBYTES = 64  # arrays up to this size stay in the JSON
# Fixed-size kinds only; comma lists, objects and structures are not even parsed.
_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,10}(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?")
_AS_NUMBER = "biufcU"  # kinds whose scalars `item()` gives exactly, up to the size below
_EXACT_NBYTES = {"f": 8, "c": 16}


def is_numpy(value: Any) -> bool:
    """Whether `value` is an array, a scalar or a dtype, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic | numpy.dtype)


def scalar_class() -> type[np.generic]:
    import numpy as np

    return np.generic


def array_class() -> type[NDArray[Any]]:
    import numpy as np

    return np.ndarray


def dtype_text(dtype: np.dtype[Any]) -> str:
    """`<f4` and the like; TypeError for a dtype that such a text does not give back."""
    if not _DTYPE.fullmatch(dtype.str) or _dtype(dtype.str) != dtype:
        raise TypeError(f"numpy dtype {dtype} has no fixed plain size; convert it to plain columns")
    return dtype.str


def dtype_from_text(text: Any) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(expect(text, str, "dtype")):
        raise ValueError(f"{text!r:.50} is no plain numpy dtype")
    return _dtype(text)


def _dtype(text: str) -> np.dtype[Any]:
    import numpy as np

    return np.dtype(text)


def raw_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of `array` in row-major order, a view where that is possible."""
    import numpy as np

    if type(array) is not np.ndarray:
        raise TypeError("save numpy.asarray(value)")
    dtype_text(array.dtype)
    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def array_from_bytes(data: Any, dtype: Any, shape: Any) -> NDArray[Any]:
    """A writable array of its own, from a buffer of exactly the bytes it needs."""
    import numpy as np

    kind = dtype_from_text(dtype)
    lengths = [expect(length, int, "a length in shape") for length in expect(shape, list, "shape")]
    raw = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    needed = math.prod(lengths) * kind.itemsize
    if min(lengths, default=0) < 0 or raw.nbytes != needed:
        raise ValueError(f"shape {lengths} of {dtype} needs {needed} bytes, found {raw.nbytes}")
    array: NDArray[Any] = np.ndarray(tuple(lengths), kind)
    if needed:
        array.reshape(-1).view(np.uint8)[:] = raw
    return array


def scalar_fields(scalar: Any) -> tuple[str, Any]:
    """(dtype, value); the value is a plain number or text where that is exact, else base64."""
    text = dtype_text(scalar.dtype)
    kind = scalar.dtype.kind
    if kind == "U":  # not item(): it drops NULs at the end
        return text, "".join(scalar)
    if kind == "S":
        return text, encode_bytes(memoryview(scalar))
    if _is_number(scalar.dtype):
        return text, scalar.item()
    return text, encode_bytes(scalar.tobytes())


def scalar_from_fields(dtype: Any, value: Any) -> np.generic:
    kind = dtype_from_text(dtype)
    make: Any = kind.type
    if kind.kind == "S":
        return make(decode_bytes(value))  # type: ignore[no-any-return]
    if not _is_number(kind):
        found: np.generic = array_from_bytes(decode_bytes(value), dtype, [1])[0]
        return found
    exact = {"b": bool, "i": int, "u": int, "f": float, "c": complex, "U": str}[kind.kind]
    scalar: np.generic = make(expect(value, exact, "value"))
    return scalar


def _is_number(dtype: np.dtype[Any]) -> bool:
    kind = dtype.kind
    return kind in _AS_NUMBER and dtype.itemsize <= _EXACT_NBYTES.get(kind, dtype.itemsize)

"""Arrays, scalars and dtypes of numpy from a pickle, for plain numeric types only.

numpy is imported when a pickle uses it. An array of objects is refused: its elements would be
anything at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_CODE = re.compile(r"[<>|=]?(b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU]\d{1,6})")


def _dtype(code: object, align: object = False, copy: object = False) -> object:
    import numpy as np

    if not isinstance(code, str) or not _CODE.fullmatch(code):
        raise ValueError("a numpy dtype is no plain number or text")
    return np.dtype(code, copy=True)


def _ndarray(cls: object, shape: object, code: object) -> object:
    """The empty array that numpy's `_reconstruct` makes; BUILD fills it."""
    import numpy as np

    if getattr(cls, "name", None) != "numpy.ndarray" or shape != (0,):
        raise ValueError("an array that is no plain numpy.ndarray")
    return np.ndarray((0,), dtype=np.int8)


def _scalar(dtype: object, data: object = None) -> object:
    plain = _plain(dtype)
    if not isinstance(data, bytes) or len(data) != plain.itemsize:
        raise ValueError("the bytes of a numpy scalar do not fit its dtype")
    import numpy as np

    return np.frombuffer(data, dtype=plain, count=1)[0]


def _from_buffer(data: object, dtype: object, shape: object, order: object) -> object:
    """How protocol 5 stores an array, the buffer in band."""
    import numpy as np

    plain = _plain(dtype)
    if not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
        raise ValueError("the buffer of an array is no bytes")
    lengths = _lengths(shape, plain, len(data))
    order_code: Any = order
    return np.frombuffer(data, dtype=plain).reshape(lengths, order=order_code)


def build(target: object, state: object) -> None:
    """BUILD of an array or dtype that was made here."""
    if type(target).__module__.partition(".")[0] != "numpy" or not isinstance(state, tuple):
        raise ValueError(f"a state is given to a {type(target).__name__}")
    import numpy as np

    if isinstance(target, np.dtype):
        _build_dtype(target, state)
    elif type(target) is np.ndarray:
        _build_array(target, state)
    else:
        raise ValueError(f"a state is given to a {type(target).__name__}")


def _build_dtype(target: np.dtype[Any], state: tuple[object, ...]) -> None:
    """Only the byte order is taken from the file; numpy would believe hostile sizes and flags."""
    order = state[1] if len(state) in (8, 9) else None
    if order not in ("<", ">", "|", "=") or state[2:5] != (None, None, None) or any(state[8:]):
        raise ValueError("a numpy dtype with fields, metadata or parts")
    wanted = target.newbyteorder(order)
    reduced: Any = wanted.__reduce__()
    if state[5:7] != reduced[2][5:7]:
        raise ValueError("a numpy dtype changes its size")
    target.__setstate__(reduced[2])  # type: ignore[attr-defined]


def _build_array(target: np.ndarray[Any, Any], state: tuple[object, ...]) -> None:
    if len(state) != 5:
        raise ValueError("the state of an array has not five parts")
    version, shape, dtype, fortran, data = state
    plain = _plain(dtype)
    if version != 1 or type(fortran) is not bool or not isinstance(data, bytes):
        raise ValueError("the state of an array is not that of plain numbers")
    _lengths(shape, plain, len(data))
    parts: Any = (1, shape, plain, fortran, data)
    target.__setstate__(parts)


def _plain(dtype: object) -> np.dtype[Any]:
    import numpy as np

    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcSU" or dtype.hasobject:
        raise ValueError("the dtype of an array is no plain numeric one")
    return dtype


def _lengths(shape: object, dtype: np.dtype[Any], nbytes: int) -> tuple[int, ...]:
    if not isinstance(shape, tuple):
        raise ValueError("the shape of an array is no tuple")
    lengths = tuple(n for n in shape if type(n) is int and 0 <= n < 2**62)
    if len(lengths) != len(shape) or len(shape) > 32:
        raise ValueError("the shape of an array is no tuple of lengths")
    if math.prod(lengths) * dtype.itemsize != nbytes:
        raise ValueError("the bytes of an array do not fit its shape")
    return lengths


CALLS: dict[str, Callable[..., object]] = {"numpy.dtype": _dtype}
for _module in ("numpy.core", "numpy._core"):
    CALLS[f"{_module}.multiarray._reconstruct"] = _ndarray
    CALLS[f"{_module}.multiarray.scalar"] = _scalar
    CALLS[f"{_module}.numeric._frombuffer"] = _from_buffer

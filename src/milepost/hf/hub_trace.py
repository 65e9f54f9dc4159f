"""Where the elements of a tensor come from, followed through torch operations without data.

The operations run on meta tensors, where a view is still a view of its storage. Each storage is
known by the copies that fill it from the tensors that the trace began with; what makes a new
storage adds an entry, and views cost nothing. An operation that computes is not followed, and a
tensor that depends on it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from milepost.errors import InvalidInputError
from milepost.geometry.strided import StridedCopy, compose, contiguous_strides
from milepost.plan.hub_map import HubPiece, whole_piece

_COPIES = frozenset({"aten::clone", "aten::_to_copy"})


class _Content(NamedTuple):
    """What fills a storage: pieces whose `to` side is the flat storage, all of one dtype."""

    dtype: torch.dtype
    pieces: tuple[HubPiece, ...]


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what happens to `tensors`, fresh meta tensors by name, while it is entered."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._contents: dict[int, _Content] = {}
        self._unknown: dict[int, str] = {}
        self._alive: list[Tensor] = []  # a freed storage would give its address to another
        for name, tensor in tensors.items():
            self._fill(tensor, whole_piece(name, tuple(tensor.shape)))

    def pieces_of(self, tensor: Tensor) -> tuple[HubPiece, ...]:
        """The elements of `tensor`, as pieces of its row-major form."""
        pieces = self._pieces(tensor, 0, contiguous_strides(tuple(tensor.shape)))
        filled = tuple(piece for piece in pieces if piece.copy.numel)
        return filled or pieces[:1]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if func._schema.is_mutable:
            self._lose(_computes(name), _tensors((*args, *kwargs.values(), out)))
        elif name in _COPIES:
            self._follow(out, lambda: self._copied(args[0], out))
        elif name in ("aten::cat", "aten::stack"):
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            join = self._stacked if name == "aten::stack" else self._concatenated
            self._follow(out, lambda: join(args[0], out, dim % out.dim()))
        else:
            self._lose(_computes(name), [t for t in _tensors(out) if not self._knows(t)])
        return out

    def _follow(self, out: Tensor, pieces: Callable[[], tuple[HubPiece, ...]]) -> None:
        try:
            self._fill(out, pieces())
        except InvalidInputError as e:
            self._lose(str(e), [out])

    def _knows(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage in self._contents or storage in self._unknown

    def _fill(self, tensor: Tensor, pieces: tuple[HubPiece, ...]) -> None:
        self._contents[_storage(tensor)] = _Content(tensor.dtype, pieces)
        self._alive.append(tensor)

    def _lose(self, reason: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._contents.pop(_storage(tensor), None)
            self._unknown[_storage(tensor)] = reason
            self._alive.append(tensor)

    def _copied(self, source: Tensor, out: Tensor) -> tuple[HubPiece, ...]:
        _refuse_cast(source, out)
        return self._pieces(source, _offset(out), out.stride())

    def _concatenated(
        self, sources: Sequence[Tensor], out: Tensor, dim: int
    ) -> tuple[HubPiece, ...]:
        pieces: list[HubPiece] = []
        offset = _offset(out)
        for source in sources:
            _refuse_cast(source, out)
            if source.dim() == out.dim():  # torch lets empty tensors of one dim pass
                pieces += self._pieces(source, offset, out.stride())
                offset += out.stride(dim) * source.shape[dim]
        return tuple(pieces)

    def _stacked(self, sources: Sequence[Tensor], out: Tensor, dim: int) -> tuple[HubPiece, ...]:
        strides = (*out.stride()[:dim], *out.stride()[dim + 1 :])
        pieces: list[HubPiece] = []
        for number, source in enumerate(sources):
            _refuse_cast(source, out)
            offset = _offset(out) + number * out.stride(dim)
            pieces += self._pieces(source, offset, strides)
        return tuple(pieces)

    def _pieces(
        self, view: Tensor, to_offset: int, to_strides: Sequence[int]
    ) -> tuple[HubPiece, ...]:
        """The elements of `view`, put at `to_offset` and `to_strides`."""
        content = self._contents.get(_storage(view))
        if content is None or view.is_conj() or view.is_neg():
            raise InvalidInputError(self._unknown.get(_storage(view), "a value that is no weight"))
        if content.dtype != view.dtype:
            raise InvalidInputError(f"a view of {content.dtype} as {view.dtype}")
        if not view.numel():
            return tuple(whole_piece(piece.source, (0,))[0] for piece in content.pieces[:1])
        later = StridedCopy(
            tuple(view.shape), to_offset, tuple(to_strides), _offset(view), view.stride()
        )
        try:
            return tuple(
                HubPiece(source=piece.source, copy=copy.normalised())
                for piece in content.pieces
                for copy in compose(later, piece.copy)
            )
        except ValueError as e:
            raise InvalidInputError(str(e)) from e


def _computes(operation: str) -> str:
    return f"{operation} does more than move elements"


def _refuse_cast(source: Tensor, out: Tensor) -> None:
    if source.dtype != out.dtype:
        raise InvalidInputError(f"a cast from {source.dtype} to {out.dtype}")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []

"""A base with fewer tokens than an adapter was saved with gets the rows of the new ones.

Rows of tokens that were added before the training are stored with the adapter, and a base that
comes from where it always came from does not have them. Its embeddings are enlarged in place, so
that parameters stay the objects that optimizers and ties refer to, and the load then fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from milepost.adapters.base import vocabulary_of
from milepost.errors import ShapeMismatchError
from milepost.hf.foreign_calls import attempt
from milepost.hf.live import hf_config, unwrap
from milepost.state.declared import declaration
from milepost.state.model_plan import StoredInfo
from milepost.state.names import Model, own_tensors, places
from milepost.state.tensors import is_dtensor

_SIZES: dict[type, str] = {nn.Embedding: "num_embeddings", nn.Linear: "out_features"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a live model and those of a stored adapter; `where` names both in messages."""

    model: Model
    rows: int
    wanted: int
    where: str
    short: list[_Short]

    def enlarge(self, undo: ExitStack, *, world_size: int) -> str:
        """Give the embeddings as many rows as they are stored with; a line for the report.

        Closing `undo` gives the model its own rows back. `ShapeMismatchError` says what to do where
        rows cannot be added: to shards, to trained embeddings on several ranks, and where fewer are
        wanted than there are.
        """
        known = {id(each.tensor) for each in self.short}
        is_whole = all(
            id(getattr(module, "weight", None)) in known for module in _embeddings(self.model)
        )
        if not is_whole or not all(self._can_grow(each, world_size) for each in self.short):
            raise ShapeMismatchError(
                f"{self.where} has {self.rows} tokens, and the adapter was saved with a vocabulary "
                f"of {self.wanted}, which is not that of the base: call "
                f"resize_token_embeddings({self.wanted}) on the base before its adapter is put on "
                "and before it is sharded, and the saved rows will be restored"
            )
        for each in self.short:
            _grow(each, undo)
        _tell(self.model, self.rows, known, undo)
        return (
            f"the vocabulary was enlarged from {self.rows} to {self.wanted} tokens, with which the "
            "adapter was saved"
        )

    def _can_grow(self, each: _Short, world_size: int) -> bool:
        tensor = each.tensor
        is_plain = not is_dtensor(tensor) and declaration(tensor) is None
        is_free = tensor.grad is None and not (world_size > 1 and tensor.requires_grad)
        grows = (tensor.shape[each.axis], each.shape[each.axis]) == (self.rows, self.wanted)
        return is_plain and is_free and grows and self.wanted > self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Short:
    """A tensor of an embedding of which `axis` is another one than in its stored `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    axis: int


def other_vocabulary(
    model: Model,
    names_of: Callable[[Tensor], list[str]],
    infos: Mapping[str, StoredInfo],
    recorded: int | None,
    *,
    where: str,
) -> Vocabulary | None:
    """How the vocabulary of `model` differs from that of a stored adapter; None where it does not.

    `names_of` has the names that a live tensor may have among `infos`; `recorded` is the vocabulary
    that the adapter was saved with, if that is known.
    """
    rows = vocabulary_of(model)
    if rows is None:
        return None
    short = list(_short(model, names_of, infos))
    wanted = recorded
    if wanted is None:
        sizes = {s.shape[s.axis] for s in short if s.tensor.shape[s.axis] == rows}
        wanted = sizes.pop() if len(sizes) == 1 else rows
    if wanted == rows:
        return None
    return Vocabulary(model=model, rows=rows, wanted=wanted, where=where, short=short)


def _short(
    model: Model, names_of: Callable[[Tensor], list[str]], infos: Mapping[str, StoredInfo]
) -> Iterator[_Short]:
    seen: set[int] = set()
    for embedding in _embeddings(model):
        for place in places(embedding):
            for _, tensor in own_tensors(place.module):
                stored = next((each for each in names_of(tensor) if each in infos), None)
                if stored is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                shape = tuple(infos[stored][1])
                pairs = enumerate(zip(tensor.shape, shape, strict=False))
                axes = [axis for axis, (here, there) in pairs if here != there]
                if len(shape) == tensor.ndim and len(axes) == 1:
                    yield _Short(tensor=tensor, shape=shape, axis=axes[0])


def _inner(model: Model) -> Any:
    return unwrap(model[0] if isinstance(model, list | tuple) else model)


def _embeddings(model: Model) -> list[nn.Module]:
    """The input and output embeddings."""
    getters = ("get_input_embeddings", "get_output_embeddings")
    found = (attempt(getattr(_inner(model), name, lambda: None))[0] for name in getters)
    return [module for module in found if isinstance(module, nn.Module)]


def _grow(each: _Short, undo: ExitStack) -> None:
    """Zeros behind what the tensor has; the same object, of the stored shape."""
    tensor, before = each.tensor, each.tensor.data
    larger = torch.zeros(each.shape, dtype=before.dtype, device=before.device)
    larger.narrow(each.axis, 0, before.shape[each.axis]).copy_(before)
    undo.callback(setattr, tensor, "data", before)
    tensor.data = larger


def _tell(model: Model, rows: int, grown: set[int], undo: ExitStack) -> None:
    """Bring whatever else states the size of the vocabulary in line; `grown` are ids of tensors."""
    for embedding in _embeddings(model):
        for place in places(embedding):
            weight = getattr(place.module, "weight", None)
            if isinstance(weight, Tensor) and id(weight) in grown:
                for kind, attribute in _SIZES.items():
                    if isinstance(place.module, kind):
                        _set(place.module, attribute, weight.shape[0], undo)
    wanted = vocabulary_of(model)
    of_adapted = zip(_embeddings(model), ("in_features", "out_features"), strict=False)
    for embedding, attribute in of_adapted:
        if isinstance(embedding, tuple(_SIZES)):
            continue
        if getattr(embedding, attribute, None) == rows:
            _set(embedding, attribute, wanted, undo)
    inner = _inner(model)
    config = hf_config(inner)
    for holder in [inner] if config is None else [inner, config.get_text_config()]:
        if getattr(holder, "vocab_size", None) == rows:
            _set(holder, "vocab_size", wanted, undo)


def _set(holder: Any, attribute: str, value: int | None, undo: ExitStack) -> None:
    undo.callback(setattr, holder, attribute, getattr(holder, attribute))
    setattr(holder, attribute, value)

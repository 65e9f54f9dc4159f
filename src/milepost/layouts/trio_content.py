"""What a trio is made of, checked and laid out before a byte is written."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.errors import UnencodableError
from milepost.layouts.payload import STATE_SLOTS
from milepost.layouts.trio_meta import TrioMeta, as_epoch, as_loss, check_encodable, now_text
from milepost.layouts.trio_names import MODEL_EXTRA_KEY, MODEL_METADATA_KEY, TYPED_KEY
from milepost.layouts.trio_typed import TypedState

if TYPE_CHECKING:
    import torch

    from milepost.engine.write import FileWrite

DATA_ALIGNMENT_NBYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TrioContent:
    """What a trio is made of. `loss` and `best_loss` may be tensors of one element.

    `metadata` is whatever else is to be recorded, for `meta.json`: plain values by name, of the
    kinds of the typed tree. `typed` holds values that torch's safe loading would refuse; they are
    put back when the trio is read. `origin` says what a converted trio was made of. `created` is
    the time of the save, by default now.
    """

    model_state: Mapping[str, Any]
    optimizer_state: Any = None
    scheduler_state: Any = None
    scaler_state: Any = None
    extra_state: Any = None
    epoch: int = 0
    loss: Any = None
    best_loss: Any = None
    model_config: Any = None
    step: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    typed: TypedState = field(default_factory=TypedState)
    origin: Mapping[str, Any] | None = None
    created: str | None = None


class PreparedTrio:
    """One trio to be written. What cannot be stored is refused here, with its key.

    `nbytes` is about what it will take on disk; `state` is the content of `extra_state.pt`.
    """

    def __init__(self, content: TrioContent) -> None:
        from milepost.format.names import strip_compile_prefix
        from milepost.layouts.torch_archive import check_loadable

        self.save_id = uuid.uuid4().hex
        epoch = as_epoch(content.epoch)
        best_loss = as_loss(content.best_loss, "best_loss")
        state = strip_compile_prefix(content.model_state)
        self.tensors, self.tied, extras = _sorted_entries(state)
        self.meta = TrioMeta(
            epoch=epoch,
            loss=as_loss(content.loss, "loss"),
            best_loss=float("inf") if best_loss is None else best_loss,
            model_config=content.model_config,
            save_id=self.save_id,
            step=content.step,
            created=content.created or now_text(),
            metrics=content.metrics,
            tied=self.tied,
            metadata=content.metadata,
            origin=content.origin,
        )
        check_encodable(self.meta)
        self.state = _state_document(content, self.meta, extras, state)
        check_loadable(self.state)
        self.header, self.starts = _layout(self.tensors, self.save_id, epoch)
        self.nbytes = sum(
            tensor.numel() * tensor.element_size() for tensor in self.tensors.values()
        )
        self.nbytes += len(self.header) + tensor_nbytes_below(self.state)

    def weights_file(self, path: Path) -> FileWrite:
        """The weights as one file at `path`; no tensor is copied."""
        from milepost.engine.source import BytesSource, TensorSource
        from milepost.engine.write import FileWrite, Piece

        pieces = [Piece(start=0, source=BytesSource(self.header))]
        for name, start in self.starts.items():
            pieces.append(Piece(start=start, source=TensorSource(self.tensors[name])))
        return FileWrite(path=path, pieces=tuple(pieces))


def _sorted_entries(
    state: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """Tensors that get bytes of their own, names tied to them, and entries that are no tensors."""
    import torch

    from milepost.state.tensors import is_dtensor, refuse_unstorable
    from milepost.state.ties import tied_groups

    tensors: dict[str, torch.Tensor] = {}
    extras: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            extras[name] = value
            continue
        key = f"model_state.{name}"
        if is_dtensor(value):
            raise UnencodableError(
                f"{key}: a DTensor; a trio is written by one process that holds whole tensors: "
                "gather it with full_tensor(), or save a checkpoint directory instead",
                key=key,
            )
        refuse_unstorable(value, key=key)
        tensors[name] = value
    tied = {name: group[0] for group in tied_groups(tensors) for name in group[1:]}
    return {name: t for name, t in tensors.items() if name not in tied}, tied, extras


def _state_document(
    content: TrioContent, meta: TrioMeta, extras: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """What `extra_state.pt` holds; the two additive keys stand only where there is something."""
    document = {slot: getattr(content, slot) for slot in STATE_SLOTS}
    document |= {"save_id": meta.save_id, "epoch": meta.epoch}
    if extras:
        document[MODEL_EXTRA_KEY] = dict(extras)
    if getattr(state, "_metadata", None):
        document[MODEL_METADATA_KEY] = state._metadata  # type: ignore[attr-defined]
    if content.typed:
        document[TYPED_KEY] = content.typed.pack()
    return document


def _layout(
    tensors: Mapping[str, torch.Tensor], save_id: str, epoch: int
) -> tuple[bytes, dict[str, int]]:
    """The header of the weights, and the first byte of each tensor in the file, ascending."""
    from milepost.engine.read import dtype_name, header_shape
    from milepost.format.header import encode_header, layout_tensors

    items = []
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor)
        if dtype is None:
            key = f"model_state.{name}"
            raise UnencodableError(
                f"{key}: safetensors has no type for {tensor.dtype}; convert it before saving",
                key=key,
            )
        items.append((name, dtype, header_shape(tensor)))
    entries = layout_tensors(items)
    marks = {"format": "pt", "save_id": save_id, "epoch": str(epoch)}
    header = encode_header(entries, marks, align=DATA_ALIGNMENT_NBYTES)
    return header, {name: len(header) + entry.start for name, entry in entries.items()}


def tensor_nbytes_below(value: Any) -> int:
    """Bytes of the tensors below a tree of containers, storages shared by several counted once."""
    import torch

    seen: dict[int, int] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            nbytes = item.numel() * item.element_size()
            key = item.untyped_storage().data_ptr() or id(item)
            seen[key] = max(seen.get(key, 0), nbytes)
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
    return sum(seen.values())

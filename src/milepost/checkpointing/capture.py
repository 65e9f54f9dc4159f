"""The state to save, taken apart: models, optimizers, everything else, random state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from milepost.engine.read import dtype_name
from milepost.errors import InvalidInputError, UnencodableError
from milepost.format.strictjson import dumps
from milepost.format.tree import encode
from milepost.layouts.directory import PRIMARY, STATE_FORMAT
from milepost.state.aliases import kept_names, optimizer_aliases, under_kept_names
from milepost.state.data_position import position_of
from milepost.state.model import ModelState, capture_model, parameter_names
from milepost.state.optimizer import OptimizerState, capture_optimizer, inner_optimizers
from milepost.state.other import Kind, capture_stateful, kind_of
from milepost.state.rng import capture_rng, pack_rng
from milepost.state.tree_torch import StateTensors

State: TypeAlias = Mapping[str, Any]
"""Objects by key: models, optimizers, anything with `state_dict`, plain values."""

STATE_VERSION = "1.0"
RNG_TENSOR = "rng"
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# A key becomes a file or directory name beside these.
_TAKEN_KEYS = frozenset({"training", "state", "rng", "resume_adapter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedOptimizer:
    """One torch optimizer. `place` is its key, or `key.sub` inside a container of several."""

    key: str
    place: str
    state: OptimizerState


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedSet:
    """Tensors of a model that lie in files of their own: `<directory>/<stem>.safetensors`."""

    directory: str
    stem: str
    leaves: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """References to everything that a save writes.

    `trees` is the content of `training/state.json` by key, `tensors` what it refers to. `rows` maps
    a tensor that holds one row of bytes per rank to its key. `prefixes` gives the directory of each
    model inside the checkpoint, empty for the one at the root. `positions` are trees of where the
    whole job stands in its data, by key. `aliases` are the ties of each model across ranks: alias
    to the name under which its tensor is kept. `attached` are further sets of tensors, by key.
    `renamed` has the models and sets whose tensors have other names on disk: these by live name.
    `stems` has the stem of the files of a model that is not `model`.
    """

    kinds: dict[str, Kind]
    models: dict[str, ModelState]
    prefixes: dict[str, str]
    optimizers: list[CapturedOptimizer]
    trees: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    positions: dict[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    attached: dict[str, AttachedSet] = field(default_factory=dict)
    renamed: dict[str, Mapping[str, str]] = field(default_factory=dict)
    stems: dict[str, str] = field(default_factory=dict)

    def replace_by_row(self, key: str, row: torch.Tensor) -> None:
        """Store `key` as this rank's row of bytes instead of a tree that is the same for all."""
        self.trees.pop(key, None)
        name = f"per_rank.{key}"
        self.rows[name] = key
        self.tensors[name] = row

    def replace_tree(self, key: str, value: Any) -> None:
        """Store another value under `key`."""
        sink = StateTensors()
        self.trees[key] = encode(value, sink, key=f"{key}~merged")
        self.tensors.update(sink.tensors)

    def keep_only(self, names: set[str]) -> None:
        """Drop small tensors that no tree refers to any more."""
        for name in [n for n in self.tensors if n not in names | {RNG_TENSOR, *self.rows}]:
            del self.tensors[name]

    def document_bytes(self, world_size: int) -> bytes:
        """`training/state.json`."""
        document: dict[str, Any] = {
            "format": STATE_FORMAT,
            "format_version": STATE_VERSION,
            "state": self.trees,
        }
        if RNG_TENSOR in self.tensors:
            document["rng"] = {"tensor": RNG_TENSOR, "world_size": world_size}
        if self.rows:
            document["per_rank"] = {
                key: {"tensor": name, "world_size": world_size} for name, key in self.rows.items()
            }
        if self.positions:
            document["positions"] = self.positions
        return dumps(document, indent=1) + b"\n"


def check_keys(state: State) -> dict[str, Kind]:
    """The kind of each entry of `state`; keys that cannot name a file are refused."""
    if not isinstance(state, Mapping) or not state:
        raise InvalidInputError(
            "state: expected a mapping with at least one entry, such as "
            f"{{'model': model, 'optimizer': optimizer}}; got {type(state).__name__}"
        )
    for key in state:
        if not isinstance(key, str) or not _KEY.fullmatch(key) or key in _TAKEN_KEYS:
            raise InvalidInputError(
                f"state: the key {key!r} cannot be used; a key is a word such as 'ema' or "
                f"'optimizer_g', and none of {', '.join(sorted(_TAKEN_KEYS))}"
            )
    return {key: kind_of(value) for key, value in state.items()}


def primary_key(kinds: Mapping[str, Kind], primary: str | None) -> str | None:
    """The key of the model that lies at the root: the one named, `model`, or the only one."""
    models = [key for key, kind in kinds.items() if kind is Kind.MODEL]
    if primary is not None:
        if primary not in models:
            raise InvalidInputError(
                f"primary={primary!r} is no model of the state; its models: {models or 'none'}"
            )
        return primary
    if PRIMARY in models:
        return PRIMARY
    if len(models) > 1:
        raise InvalidInputError(
            f"state: {len(models)} models ({', '.join(models)}) and none is called 'model'; "
            "say which lies at the root of the checkpoint with primary="
        )
    return models[0] if models else None


def model_prefixes(kinds: Mapping[str, Kind], primary: str | None) -> dict[str, str]:
    """Directory of each model inside the checkpoint."""
    return {key: "" if key == primary else key for key, kind in kinds.items() if kind is Kind.MODEL}


def capture(
    state: State,
    *,
    primary: str | None = None,
    aliases: Mapping[str, Mapping[str, str]] | None = None,
) -> Captured:
    """Take references to all of `state`, and encode what is not a model or a moment.

    `aliases` are names of each model's tensors that other ranks keep under another name.
    Nothing is initialised, moved or copied. Everything that cannot be stored is refused here, with
    its key, before a file exists.
    """
    kinds = check_keys(state)
    first = primary_key(kinds, primary)
    kept = aliases or {}
    models = {
        key: under_kept_names(capture_model(state[key]), kept.get(key, {}))
        for key, kind in kinds.items()
        if kind is Kind.MODEL
    }
    names = parameter_names({key: state[key] for key in models}, primary=first)
    names = kept_names(names, optimizer_aliases(kept, primary=first))
    optimizers = [
        CapturedOptimizer(
            key=key,
            place=f"{key}.{sub}" if sub else key,
            state=capture_optimizer(inner, names, key=f"{key}.{sub}" if sub else key),
        )
        for key, kind in kinds.items()
        if kind is Kind.OPTIMIZER
        for sub, inner in inner_optimizers(state[key]).items()
    ]
    captured = Captured(
        kinds=kinds,
        models=models,
        prefixes=model_prefixes(kinds, first),
        optimizers=optimizers,
        aliases=kept,
    )
    _encode_trees(captured, state)
    _refuse_dtypes(captured)
    return captured


def _encode_trees(captured: Captured, state: State) -> None:
    sink = StateTensors()
    trees: dict[str, Any] = {}
    for key, model in captured.models.items():
        if model.extra:
            trees[key] = encode({"extra": model.extra}, sink, key=key)
    for optimizer in captured.optimizers:
        tree = encode(optimizer.state.record.to_tree(), sink, key=optimizer.place)
        trees[optimizer.place] = tree
    for key, kind in captured.kinds.items():
        if kind is Kind.STATEFUL:
            value = capture_stateful(state[key])
            trees[key] = encode(value, sink, key=key)
            position = position_of(state[key], value)
            if position is not None:
                captured.positions[key] = encode(position, key=f"position of {key}")
        elif kind is Kind.VALUE:
            trees[key] = encode(state[key], sink, key=key)
    captured.trees.update(trees)
    captured.tensors.update(sink.tensors)


def add_rng(captured: Captured) -> None:
    """Add the random state of this process: one row of `[world, n]` bytes."""
    row = torch.frombuffer(bytearray(pack_rng(capture_rng())), dtype=torch.uint8)
    captured.tensors[RNG_TENSOR] = row.reshape(1, -1)


def _refuse_dtypes(captured: Captured) -> None:
    """Refuse dtypes that the container cannot hold, before the first byte is written."""
    named = [
        *((name, tensor) for m in captured.models.values() for name, tensor in m.leaves.items()),
        *((name, tensor) for o in captured.optimizers for name, tensor in o.state.tensors.items()),
        *captured.tensors.items(),
    ]
    bad = [(name, tensor) for name, tensor in named if dtype_name(tensor) is None]
    if bad:
        name, tensor = bad[0]
        raise UnencodableError(
            f"{name}: safetensors cannot hold {tensor.dtype} ({len(bad)} such tensors); store "
            "it as another dtype, for instance torch.view_as_real for complex128",
            key=name,
        )

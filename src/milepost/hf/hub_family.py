"""The conversions that transformers has between hub names and a live model's names.

`save_pretrained` reverts what happened to be used when the model was loaded, so the same weights
get other names after another history. Here the conversions depend on the model's class and
configuration alone: the registry's, for each transformers model inside, without those that only
add or strip a prefix (where a text model was cut out of a larger one, its own names are right).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from milepost.errors import InvalidInputError
from milepost.hf.live import hf_config, live_class
from milepost.hf.tied_names import whole_class
from milepost.state.names import Model, places


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The kind of a transformers model: its class, and its conversions in loading direction.

    `shell` stands in for the model: the transformers models inside it, without wrappers and
    without weights. `conversions` is empty where disk and memory agree.
    """

    name: str
    shell: Any
    conversions: list[Any]


def family_of(model: Model) -> Family | None:
    """The family of `model`; None when it is no transformers model, or transformers is below 5."""
    shell = _shell_of(model)
    if shell is None:
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return None
    conversions = _recorded_by_quantiser(model)
    if conversions is None:
        conversions = get_model_conversion_mapping(shell, add_legacy=False)
    kept = [entry for entry in conversions if not isinstance(entry, PrefixChange)]
    return Family(name=type(shell).__name__, shell=shell, conversions=kept)


def revert(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' own way back, for any tensors: runtime names in, hub names out."""
    from transformers.core_model_loading import revert_weight_conversion

    attributes = vars(family.shell)
    attributes["_weight_conversions"] = family.conversions
    # Conversions that look at shapes ask the model; these are the global ones.
    attributes["get_parameter"] = tensors.__getitem__
    try:
        found: dict[str, Tensor] = revert_weight_conversion(family.shell, dict(tensors))
    finally:
        del attributes["_weight_conversions"], attributes["get_parameter"]
    return found


def refuse_partial(family: Family, names: Iterable[str]) -> None:
    """`InvalidInputError` where only some of the tensors are there that one on disk is made of.

    transformers would join what is there and leave out the rest.
    """
    converters = [
        entry.reverse_transform()
        for entry in reversed(family.conversions)
        if hasattr(entry, "operations")
    ]
    found: dict[str, tuple[Any, set[str]]] = {}
    for name in names:
        for converter in converters:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                found.setdefault(renamed, (converter, set()))[1].add(pattern)
                break
    for renamed, (converter, patterns) in found.items():
        lacking = set(converter.source_patterns) - patterns
        if lacking:
            raise InvalidInputError(
                f"{renamed} is made of {len(converter.source_patterns)} tensors, and "
                f"{', '.join(sorted(lacking))} are not there"
            )


def names_on_load(
    family: Family, hub_names: Iterable[str], names: Iterable[str]
) -> dict[str, set[str]]:
    """The runtime tensors into which `from_pretrained` would put each hub name's tensor.

    `names` are all runtime names, which decide whether a prefix is added or stripped.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    entries = get_model_conversion_mapping(family.shell)
    renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    targets = {p: c.target_patterns for c in converters for p in c.source_patterns}
    known = dict.fromkeys(names, True)
    prefix = family.shell.base_model_prefix
    found = {}
    for name in sorted(hub_names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = rename_source_key(name, [], [], prefix, known)
        first, *others = targets.get(pattern, [renamed])
        found[name] = {renamed, *(renamed.replace(first, other) for other in others)}
    return found


def _recorded_by_quantiser(model: Model) -> list[Any] | None:
    """A quantised model has tensors the registry does not know; its quantiser's are recorded."""
    for place in places(model):
        if getattr(place.module, "hf_quantizer", None) is not None:
            recorded = getattr(place.module, "_weight_conversions", None)
            return None if recorded is None else list(recorded)
    return None


def _shell_of(model: Model) -> Any | None:
    """The transformers models inside `model` as empty modules of their own classes, in a tree.

    A stage of a pipeline need not be one; then its configuration says what the whole is.
    """
    found: dict[str, Any] = {}
    root: Any = None
    for place in places(model):
        root = place.module if root is None else root
        kind = live_class(place.module)
        if kind is not None:
            found.setdefault(place.canonical.removesuffix("."), _empty(kind, place.module.config))
    config = hf_config(root)
    if "" not in found and config is not None:
        kind = whole_class(root, config)
        # Where the whole model is below another name, the tensors have names of their own.
        if kind is not None and found.keys() <= {getattr(kind, "base_model_prefix", "")}:
            found[""] = _empty(kind, config)
    shell = found.pop("", None)
    if shell is not None:
        for path, inner in found.items():
            _attach(shell, path.split("."), inner)
    return shell


def _empty(kind: type, config: Any) -> Any:
    module: Any = object.__new__(kind)
    nn.Module.__init__(module)
    vars(module)["config"] = config
    return module


def _attach(module: nn.Module, path: list[str], inner: nn.Module) -> None:
    for name in path[:-1]:
        below = module._modules.setdefault(name, nn.Module())
        assert below is not None, "the tree is made of modules only"
        module = below
    module._modules[path[-1]] = inner

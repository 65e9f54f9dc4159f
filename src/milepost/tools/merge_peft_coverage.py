"""Whether an adapter is all there: what its configuration covers in the base, it has factors of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from milepost.adapters.coverage import covers
from milepost.adapters.names import Role
from milepost.errors import CheckpointError, InvalidInputError
from milepost.hf.expert_layouts import DOWN, GATE_UP, UP
from milepost.hf.load_names import unused_names
from milepost.layouts.directory import read_manifest
from milepost.tools.merge_peft_adapter import OpenedAdapter
from milepost.tools.merge_peft_base import BaseIndex
from milepost.tools.merge_peft_lookups import Roles

_BANKS = (GATE_UP, UP, DOWN)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_LISTED = 6


def refuse_partial(
    adapter: OpenedAdapter,
    base: BaseIndex,
    groups: Mapping[tuple[str, int, str], Roles],
    own: Mapping[str, str],
) -> None:
    """`InvalidInputError` where the file lacks factors that the adapter must have had.

    A module must have some where others like it, of other layers or experts, have, and where the
    configuration covers it; `modules_to_save` must be there. What a save of Milepost lists with
    this size is what was trained. `groups` are those of `by_module`, `own` the base's names.
    """
    if _is_as_saved(adapter):
        return
    adapted = dict(_adapted(groups, own))
    missing = [*_without_factors(adapter, base, adapted), *_not_saved(adapter, base, groups)]
    if missing:
        raise InvalidInputError(
            f"{adapter.directory}: has factors of {len(adapted)} modules "
            f"({_listed(list(adapted.values()))}), and nothing of {len(missing)} that its "
            f"configuration covers too and {base.source.path} has: {_listed(missing)}; nothing is "
            "merged in part: copy the adapter as a whole, or say in its adapter_config.json which "
            "modules it is for (target_modules, layers_to_transform)"
        )


def _is_as_saved(adapter: OpenedAdapter) -> bool:
    file = adapter.source.path
    for directory in (adapter.directory, adapter.directory.parent):
        try:
            entry = read_manifest(directory).file(str(file.relative_to(directory)))
        except (CheckpointError, OSError):
            continue
        if entry is not None:
            return entry.nbytes == file.stat().st_size
    return False


def _adapted(
    groups: Mapping[tuple[str, int, str], Roles], own: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The places in the base that have factors, with what the adapter calls them."""
    for (module, _, parameter), roles in groups.items():
        if roles.keys() <= {Role.WHOLE, Role.TOKENS}:
            continue
        if parameter:
            yield own[f"{module}.{parameter}"], f"{module}.{parameter}"
        else:
            held = (f"{module}.{leaf}" for leaf in ("weight", *_BANKS))
            yield own[next(name for name in held if name in own)].rpartition(".")[0], module


def _without_factors(
    adapter: OpenedAdapter, base: BaseIndex, adapted: Mapping[str, str]
) -> list[str]:
    """Places of the base that are like adapted ones, are covered, and have no factors."""
    alike = {_NUMBER.sub("*", place): name for place, name in adapted.items()}
    found: dict[str, list[str]] = {}
    for name in base.names:
        module, _, leaf = name.rpartition(".")
        for place in {"weight": (module,)}.get(leaf, (module, name) if leaf in _BANKS else ()):
            sibling = alike.get(_NUMBER.sub("*", place))
            if sibling is not None and place not in adapted:
                called = _renumbered(sibling, place)
                if place == name or _is_covered(adapter, called, leaf):
                    found.setdefault(called, []).append(name)
    if not found:
        return []
    unused = _unused(base, adapted)
    return [
        called
        for called, names in found.items()
        if not unused.issuperset(stored for name in names for stored in _stored(base, name))
    ]


def _is_covered(adapter: OpenedAdapter, module: str, leaf: str) -> bool:
    lora = adapter.config.lora
    parameters = () if lora is None else lora.target_parameters
    return covers(adapter.config, module) or any(
        f".{module}.{leaf}".endswith(f".{target}") for target in parameters
    )


def _not_saved(
    adapter: OpenedAdapter, base: BaseIndex, groups: Mapping[tuple[str, int, str], Roles]
) -> list[str]:
    """Modules that were trained whole, are in the base, and are not in the file."""
    lora = adapter.config.lora
    held = [f"{m}.{p}" for (m, _, p), roles in groups.items() if Role.WHOLE in roles]
    return [
        name
        for name in (() if lora is None else lora.modules_to_save)
        if _has(base.source.tensors, name) and not _has(held, name)
    ]


def _has(names: Iterable[str], module: str) -> bool:
    return any(f".{module}." in f".{name}" for name in names)


# ---- tensors that lie in the files of the base and are no part of the model


def _unused(base: BaseIndex, adapted: Iterable[str]) -> frozenset[str]:
    """Stored tensors that the model's class has no use for, as layers that predict further tokens
    are. None, where it would have none for what is adapted either."""
    source = base.source
    if not source.path.is_dir():
        return frozenset()
    unused = unused_names(source.path, source.config, source.tensors)
    known = [name for place in adapted for name in _stored(base, f"{place}.weight")]
    return frozenset() if unused.intersection(known) else unused


def _stored(base: BaseIndex, name: str) -> tuple[str, ...]:
    """The stored tensors that a name of the base stands for."""
    tensor, bank, place = base.tensor(name), base.bank(name), base.place(name)
    if tensor is not None:
        return (tensor.name,)
    if bank is not None:
        return tuple(bank.parts)
    return () if place is None else (place[0].name,)


def _renumbered(name: str, place: str) -> str:
    """`name` with the numbers of layer and expert that `place` has."""
    numbers = iter(_NUMBER.findall(place))
    return _NUMBER.sub(lambda found: next(numbers, found[0]), name)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more

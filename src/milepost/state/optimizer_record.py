"""What is known of an optimizer besides its tensors, and its form as a typed tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from milepost.errors import FormatError
from milepost.state.names import FQN

DEVICES = ("cpu", "param")

Cut: TypeAlias = tuple[tuple[int, int, int], ...]
"""How a tensor is cut: for each mesh axis that cuts, its length, the dim and the split factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarTensor:
    """A 0-d tensor by value. `dtype` is torch's word; `device` is "cpu" or "param"."""

    dtype: str
    value: bool | int | float
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A value of a slot that is no tensor of its own: a number, None, a nested container."""

    value: Any


SlotValue: TypeAlias = ScalarTensor | Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotValues:
    """The values of one slot: `default` for every parameter but `exceptions` and `absent`.

    `absent` names those for which the slot does not exist or is a tensor; parameters without any
    state are not counted.
    """

    default: SlotValue | None = None
    exceptions: dict[FQN, SlotValue] = field(default_factory=dict)
    absent: tuple[FQN, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A parameter group: `hyper` is every key but `params`, `param_names` and `name`."""

    name: str | None
    params: tuple[FQN, ...]
    hyper: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a state tensor is that is stored as its parts: a known class with its attributes.

    `dtypes` are torch's words, by part. `runs` has the number of consecutive elements that an entry
    of a part stands for, for parts that have such entries. With a `cut`, runs are counted in each
    shard of that cut, and such parts have shape `[*grid, entries of the largest shard]`. `shape` is
    that of the whole tensor where no part shows it.
    """

    class_name: str
    attributes: dict[str, Any]
    dtypes: dict[str, str]
    runs: dict[str, int]
    cut: Cut = ()
    shape: tuple[int, ...] = ()

    def to_tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {
            "class": self.class_name,
            "attributes": self.attributes,
            "dtypes": self.dtypes,
            "runs": self.runs,
        }
        if self.shape:
            tree["shape"] = list(self.shape)
        return tree | ({"cut": [list(axis) for axis in self.cut]} if self.cut else {})

    @staticmethod
    def from_tree(tree: object, *, where: str) -> Form:
        top = _dict(tree, where)
        return Form(
            class_name=_typed(top.get("class"), str, f"{where}.class"),
            attributes=_dict(top.get("attributes"), f"{where}.attributes"),
            dtypes={
                part: _typed(word, str, f"{where}.dtypes.{part}")
                for part, word in _dict(top.get("dtypes"), f"{where}.dtypes").items()
            },
            runs={
                part: _positive(run, f"{where}.runs.{part}")
                for part, run in _dict(top.get("runs"), f"{where}.runs").items()
            },
            cut=_cut(top.get("cut", []), f"{where}.cut"),
            shape=tuple(
                _positive(n, f"{where}.shape")
                for n in _typed(top.get("shape", []), list, f"{where}.shape")
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """An optimizer without its tensors, which are named `tensor_name(fqn, slot)`.

    `stateless` lists parameters of groups that have no entry in `optimizer.state` at all,
    `ungrouped` those that have one and are in no group. `odd_shaped` lists tensors whose shape is
    not that of their parameter; `offloaded` lists tensors kept on the CPU while their parameter
    is elsewhere. `shared` is state under keys that are no parameters. `wrapped` has the form of
    each tensor that is stored as its parts, `part_name(name, part)`; `per_rank` lists those that
    every rank keeps by itself. `class_name` is None when the source did not record it.
    """

    class_name: str | None
    defaults: dict[str, Any] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    slots: dict[str, SlotValues] = field(default_factory=dict)
    stateless: tuple[FQN, ...] = ()
    ungrouped: tuple[FQN, ...] = ()
    odd_shaped: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    shared: dict[str, Any] = field(default_factory=dict)
    wrapped: dict[str, Form] = field(default_factory=dict)
    per_rank: tuple[str, ...] = ()

    def stateful(self) -> list[FQN]:
        """Parameters that have an entry in `optimizer.state`, groups first."""
        without = set(self.stateless)
        grouped = [fqn for group in self.groups for fqn in group.params if fqn not in without]
        return grouped + list(self.ungrouped)

    def to_tree(self) -> dict[str, Any]:
        """A tree of dicts and lists; hyper-parameters and nested state stand in it as they are."""
        tree: dict[str, Any] = {
            "class": self.class_name,
            "defaults": self.defaults,
            "groups": [
                {"name": g.name, "params": list(g.params), "hyper": g.hyper} for g in self.groups
            ],
            "slots": {slot: _values_to_tree(values) for slot, values in self.slots.items()},
            "stateless": list(self.stateless),
            "ungrouped": list(self.ungrouped),
            "odd_shaped": list(self.odd_shaped),
            "offloaded": list(self.offloaded),
            "shared": self.shared,
        }
        if self.wrapped:
            tree["forms"] = _forms_to_tree(self.wrapped)
        if self.per_rank:
            tree["per_rank"] = list(self.per_rank)
        return tree

    @staticmethod
    def from_tree(tree: object, *, where: str) -> OptimizerRecord:
        """The record that `to_tree` gave; `FormatError` names the place inside `where`."""
        top = _dict(tree, where)
        groups = _typed(top.get("groups"), list, f"{where}.groups")
        slots = _dict(top.get("slots"), f"{where}.slots")
        return OptimizerRecord(
            class_name=_optional_str(top.get("class"), f"{where}.class"),
            defaults=_dict(top.get("defaults"), f"{where}.defaults"),
            groups=tuple(_group(g, f"{where}.groups[{i}]") for i, g in enumerate(groups)),
            slots={slot: _values(v, f"{where}.slots[{slot!r}]") for slot, v in slots.items()},
            stateless=_names(top.get("stateless"), f"{where}.stateless"),
            ungrouped=_names(top.get("ungrouped"), f"{where}.ungrouped"),
            odd_shaped=_names(top.get("odd_shaped"), f"{where}.odd_shaped"),
            offloaded=_names(top.get("offloaded"), f"{where}.offloaded"),
            shared=_dict(top.get("shared"), f"{where}.shared"),
            wrapped=_forms(top.get("forms", []), f"{where}.forms"),
            per_rank=_names(top.get("per_rank", []), f"{where}.per_rank"),
        )


def tensor_name(fqn: FQN, slot: str) -> str:
    """Name of the tensor that `slot` of a parameter is stored under.

    >>> tensor_name("lm_head.weight", "exp_avg")
    'lm_head.weight.exp_avg'
    >>> tensor_name("lm_head.weight", "a.b%")
    'lm_head.weight.a%2Eb%25'
    """
    return f"{fqn}.{slot.replace('%', '%25').replace('.', '%2E')}"


def part_name(name: str, part: str) -> str:
    """Name of the stored tensor that is a part of the state tensor `name`.

    >>> split_tensor_name(part_name("lm_head.weight.exp_avg", "codes"))
    ('lm_head.weight', 'exp_avg.codes')
    """
    return f"{name}%2E{part}"


def split_tensor_name(name: str) -> tuple[FQN, str]:
    """Parameter and slot of a stored tensor; the inverse of `tensor_name`.

    >>> split_tensor_name("lm_head.weight.a%2Eb%25")
    ('lm_head.weight', 'a.b%')
    """
    fqn, _, slot = name.rpartition(".")
    return fqn, slot.replace("%2E", ".").replace("%25", "%")


def values_by_parameter(record: OptimizerRecord) -> dict[FQN, dict[str, SlotValue]]:
    """Each parameter's slots that are no tensors, with defaults spread out."""
    found: dict[FQN, dict[str, SlotValue]] = {fqn: {} for fqn in record.stateful()}
    for slot, values in record.slots.items():
        absent = set(values.absent)
        for fqn, entry in found.items():
            value = values.exceptions.get(fqn, values.default)
            if value is not None and fqn not in absent:
                entry[slot] = value
    return found


def _forms_to_tree(wrapped: Mapping[str, Form]) -> list[dict[str, Any]]:
    """Each distinct form once, with the tensors that have it."""
    found: dict[str, dict[str, Any]] = {}
    for name, form in wrapped.items():
        entry = found.setdefault(repr(form), form.to_tree() | {"tensors": []})
        entry["tensors"].append(name)
    return list(found.values())


def _forms(tree: object, where: str) -> dict[str, Form]:
    wrapped: dict[str, Form] = {}
    for index, entry in enumerate(_typed(tree, list, where)):
        form = Form.from_tree(entry, where=f"{where}[{index}]")
        for name in _names(entry.get("tensors"), f"{where}[{index}].tensors"):
            wrapped[name] = form
    return wrapped


def _cut(tree: object, where: str) -> Cut:
    axes = []
    for index, axis in enumerate(_typed(tree, list, where)):
        numbers = _typed(axis, list, f"{where}[{index}]")
        if len(numbers) != 3 or not all(type(n) is int and n >= 0 for n in numbers):
            raise FormatError(f"{where}[{index}]: expected three numbers, found {numbers!r:.80}")
        axes.append((numbers[0], numbers[1], numbers[2]))
    return tuple(axes)


def _positive(value: object, where: str) -> int:
    number: int = _typed(value, int, where)
    if number < 1:
        raise FormatError(f"{where}: expected a number of elements, found {number}")
    return number


def _values_to_tree(values: SlotValues) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    if values.default is not None:
        tree["default"] = _value_to_tree(values.default)
    if values.exceptions:
        tree["exceptions"] = {fqn: _value_to_tree(v) for fqn, v in values.exceptions.items()}
    if values.absent:
        tree["absent"] = list(values.absent)
    return tree


def _value_to_tree(value: SlotValue) -> dict[str, Any]:
    if isinstance(value, Plain):
        return {"value": value.value}
    return {"scalar": {"dtype": value.dtype, "value": value.value, "device": value.device}}


def _values(tree: object, where: str) -> SlotValues:
    top = _dict(tree, where)
    exceptions = _dict(top.get("exceptions", {}), f"{where}.exceptions")
    default = top.get("default")
    return SlotValues(
        default=None if default is None else _value(default, f"{where}.default"),
        exceptions={
            fqn: _value(value, f"{where}.exceptions[{fqn!r}]") for fqn, value in exceptions.items()
        },
        absent=_names(top.get("absent", []), f"{where}.absent"),
    )


def _value(tree: object, where: str) -> SlotValue:
    top = _dict(tree, where)
    if "value" in top:
        return Plain(value=top["value"])
    scalar = _dict(top.get("scalar"), f"{where}.scalar")
    dtype = _typed(scalar.get("dtype"), str, f"{where}.scalar.dtype")
    value = scalar.get("value")
    if not isinstance(value, bool | int | float):
        raise FormatError(f"{where}.scalar.value: expected a number, found {value!r}")
    if scalar.get("device") not in DEVICES:
        raise FormatError(
            f"{where}.scalar.device: expected one of {DEVICES}, found {scalar.get('device')!r}"
        )
    return ScalarTensor(dtype=dtype, value=value, device=scalar["device"])


def _group(tree: object, where: str) -> Group:
    top = _dict(tree, where)
    return Group(
        name=_optional_str(top.get("name"), f"{where}.name"),
        params=_names(top.get("params"), f"{where}.params"),
        hyper=_dict(top.get("hyper"), f"{where}.hyper"),
    )


def _names(value: object, where: str) -> tuple[str, ...]:
    for index, name in enumerate(_typed(value, list, where)):
        _typed(name, str, f"{where}[{index}]")
    return tuple(value)  # type: ignore[arg-type]


def _optional_str(value: object, where: str) -> str | None:
    return None if value is None else str(_typed(value, str, where))


def _dict(value: object, where: str) -> dict[str, Any]:
    found: Mapping[Any, Any] = _typed(value, dict, where)
    for key in found:
        _typed(key, str, f"{where}: key {key!r}")
    return dict(found)


def _typed(value: object, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise FormatError(
            f"{where}: expected a {kind.__name__}, found {type(value).__name__} {value!r:.80}"
        )
    return value

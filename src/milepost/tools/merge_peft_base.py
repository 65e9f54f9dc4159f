"""The tensors of a base by the names that an adapter calls them: of modules, and of expert banks.

On disk the experts of most families lie one by one, in memory as banks. Adapters name either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from milepost.adapters.names import PREFIX, aligned
from milepost.hf.expert_layouts import BANK, DOWN, EXPERT, GATE_UP, UP, ExpertNames, expert_names
from milepost.hf.foreign_calls import attempt
from milepost.tools.merge_peft_edits import Region
from milepost.tools.module_names import module_names
from milepost.tools.rewrite.source import Source, SourceTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bank:
    """A bank of experts as modules have it, [experts, rows, columns]. `parts` are the stored
    tensors and the region that each of them is; a bank that is stored whole is its only part."""

    shape: tuple[int, ...]
    parts: Mapping[str, Region | None]


class BaseIndex:
    """`tied` maps names without a tensor to the name that has it. `doubled` maps a head that is
    stored although config.json ties it to the embedding that it is tied to."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._names = expert_names(source.model_types)
        self.tied, self.doubled = self._ties()
        self._stored = {self._in_module(name): name for name in source.tensors}
        self._stored |= {module: name for name, module in module_names(source).items()}
        self._stored |= {name: name for name in source.tensors}
        self._banks = self._joined() if self._names is not None else {}
        self._places = self._single_places() if self._names is not None else {}

    @property
    def names(self) -> set[str]:
        """All names that it knows tensors, banks and single experts by."""
        return {*self._stored, *self._banks, *self._places, *self.tied}

    def resolve(self, names: Iterable[str]) -> dict[str, str]:
        """Those of the tensor `names` of an adapter's modules that the base has, under its own
        prefixes: the names that the other methods take."""
        found = aligned([PREFIX + name for name in names], {PREFIX + name for name in self.names})
        return {key.removeprefix(PREFIX): own.removeprefix(PREFIX) for key, own in found.items()}

    def tensor(self, name: str) -> SourceTensor | None:
        """The tensor stored for a name that `resolve` gave; for a tied one, that of its twin."""
        stored = self._stored.get(self.tied.get(name, name))
        return None if stored is None else self.source.tensors[stored]

    def bank(self, name: str) -> Bank | None:
        """The bank of this name, stored whole or as its experts."""
        tensor = self.tensor(name)
        if tensor is None:
            return self._banks.get(name)
        if len(tensor.shape) != 3:
            return None
        return Bank(shape=tensor.shape, parts={tensor.name: None})

    def place(self, name: str) -> tuple[SourceTensor, Region] | None:
        """Where one expert's weight lies inside a bank that is stored whole."""
        found = self._places.get(name)
        return None if found is None else (self.source.tensors[found[0]], found[1])

    def sibling_of(self, stored: str) -> tuple[str, ...]:
        """All stored tensors of the bank that a stored tensor is a part of."""
        for bank in self._banks.values():
            if stored in bank.parts:
                return tuple(bank.parts)
        return (stored,)

    def _ties(self) -> tuple[dict[str, str], dict[str, str]]:
        found = dict(self.source.tied)
        tensors = self.source.tensors
        embedding = next((n for n in tensors if n.endswith(_EMBEDDINGS)), None)
        if embedding is None or _HEAD in found:
            return found, {}
        if _HEAD in tensors:
            return found, {_HEAD: embedding} if _stated_tie(self.source) else {}
        return found | ({_HEAD: embedding} if _is_tied(self.source) else {}), {}

    def _in_module(self, stored: str) -> str:
        """A name of the hub as modules of transformers have it."""
        for module, hub in reversed(self._names.renames if self._names is not None else ()):
            stored = stored.replace(hub, module)
        return stored

    def _joined(self) -> dict[str, Bank]:
        names = self._names
        assert names is not None
        by_bank: dict[str, dict[tuple[str, int], SourceTensor]] = {}
        for tensor in self.source.tensors.values():
            found = EXPERT.fullmatch(tensor.name)
            if found is None or found["kind"] != "weight" or found["leaf"] not in names.leaves:
                continue
            bank = DOWN if found["leaf"] == names.down else UP if names.gate is None else GATE_UP
            path = f"{self._in_module(found['prefix'] + '.').rstrip('.')}.{bank}"
            by_bank.setdefault(path, {})[found["leaf"], int(found["number"])] = tensor
        return {path: made for path, held in by_bank.items() if (made := _bank(held, names))}

    def _single_places(self) -> dict[str, tuple[str, Region]]:
        names = self._names
        assert names is not None
        found: dict[str, tuple[str, Region]] = {}
        for tensor in self.source.tensors.values():
            match = BANK.fullmatch(tensor.name)
            if match is None or match["bias"] or len(tensor.shape) != 3:
                continue
            experts, rows, _ = tensor.shape
            prefix = self._in_module(match["prefix"] + ".")
            half = {DOWN: (names.down,), GATE_UP: (names.gate, names.up), UP: (names.up,)}
            leaves = half.get(match["leaf"], ())
            for position, leaf in enumerate(leaves):
                size = rows // len(leaves)
                for expert in range(experts):
                    region = (expert, position * size, (position + 1) * size)
                    found[f"{prefix}{expert}.{leaf}.weight"] = (tensor.name, region)
        return found


_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def _is_tied(source: Source) -> bool:
    """Whether a head that is in no file is the embedding, as config.json declares it.

    What that leaves out is the default of the configuration's class. Where transformers cannot be
    asked it is true, the one value that `save_pretrained` ever left out, for a class with a head.
    """
    stated = _stated_tie(source)
    if stated is not None:
        return stated
    return any(str(n).endswith(_WITH_HEAD) for n in source.config.get("architectures") or ())


def _stated_tie(source: Source) -> bool | None:
    """What config.json says, or the configuration's class by default; None where nobody does."""
    config = source.config
    stated = source.text_config.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if stated is not None:
        return bool(stated)
    known, _ = attempt(partial(_default_of_class, config.get("model_type")))
    return known


def _default_of_class(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return bool(CONFIG_MAPPING[model_type]().tie_word_embeddings)


def _bank(held: Mapping[tuple[str, int], SourceTensor], names: ExpertNames) -> Bank | None:
    """The bank that single experts are; None where experts are missing, or have other shapes."""
    leaves = [leaf for leaf in names.leaves if (leaf, 0) in held]
    count = len(held) // len(leaves) if leaves else 0
    if {(leaf, n) for leaf in leaves for n in range(count)} != held.keys():
        return None
    shapes = {tensor.shape for tensor in held.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        return None
    ((rows, columns),) = shapes
    parts: dict[str, Region | None] = {
        tensor.name: (number, leaves.index(leaf) * rows, (leaves.index(leaf) + 1) * rows)
        for (leaf, number), tensor in held.items()
    }
    return Bank(shape=(count, rows * len(leaves), columns), parts=parts)

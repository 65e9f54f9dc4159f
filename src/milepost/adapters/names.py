"""The names of an adapter's tensors in its file, and what they are the tensors of.

Stock files name a factor `base_model.model.<module>.lora_A.weight`; adapters of grouped experts
name it `<module>.<projection>.lora_A`. Other writers put more or fewer prefixes before the module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

PREFIX = "base_model.model."
BASE_SEGMENT = "base_layer"
_TOKENS = ".token_adapter.trainable_tokens_delta"


class Role(Enum):
    """What a stored tensor is to the module whose name stands before it."""

    A = "lora_A"
    B = "lora_B"
    B_BIAS = "bias of lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    EXPERTS_A = "grouped lora_A"
    EXPERTS_B = "grouped lora_B"
    TOKENS = "trained rows of an embedding"
    WHOLE = "a tensor that replaces that of the base"


class AdapterKey(NamedTuple):
    """A stored name taken apart. `module` has no `base_model.model.`; of nested wrappers, which
    adapt several parameters of one module, `depth` counts those inside. `parameter` is the
    projection of grouped experts, or the name in the module of a `WHOLE` tensor."""

    module: str
    role: Role
    depth: int = 0
    parameter: str = ""


_SUFFIXES = {
    ".lora_A.weight": Role.A,
    ".lora_B.weight": Role.B,
    ".lora_B.bias": Role.B_BIAS,
    ".lora_embedding_A": Role.EMBEDDING_A,
    ".lora_embedding_B": Role.EMBEDDING_B,
    ".lora_magnitude_vector": Role.MAGNITUDE,
    ".lora_magnitude_vector.weight": Role.MAGNITUDE,
    ".lora_A": Role.EXPERTS_A,
    ".lora_B": Role.EXPERTS_B,
    _TOKENS: Role.TOKENS,
}


def parse_key(name: str) -> AdapterKey:
    """What the tensor `name` of an adapter file is.

    >>> parse_key("base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight")[:3]
    ('model.layers.0.mlp.experts', <Role.A: 'lora_A'>, 1)
    >>> parse_key("model.layers.0.mlp.experts.down_proj.lora_B").parameter
    'down_proj'
    """
    inner = name.removeprefix(PREFIX)
    for suffix, role in _SUFFIXES.items():
        if not inner.endswith(suffix):
            continue
        module = inner.removesuffix(suffix)
        if role in (Role.EXPERTS_A, Role.EXPERTS_B):
            path, _, projection = module.rpartition(".")
            return AdapterKey(path, role, parameter=projection)
        depth = 0
        while module.endswith(f".{BASE_SEGMENT}"):
            module, depth = module.removesuffix(f".{BASE_SEGMENT}"), depth + 1
        return AdapterKey(module, role, depth)
    module, _, parameter = without_wrappers(inner).rpartition(".")
    return AdapterKey(module, Role.WHOLE, parameter=parameter)


def without_wrappers(name: str) -> str:
    """A name without what peft puts around the modules that it adapts.

    >>> without_wrappers("model.embed_tokens.token_adapter.base_layer.weight")
    'model.embed_tokens.weight'
    """
    return re.sub(r"(^|\.)(?:token_adapter\.)?(?:base_layer\.|original_module\.)+", r"\1", name)


def aligned(names: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """Stored name to wanted name, for sets that differ in the prefixes before their modules.

    All names are taken with the one spelling that fits most of them: as they stand, or with
    `base_model.model.`, a doubled `model.` or `language_model.` put on or taken off. Names that
    nothing fits are left out.
    """
    stored, known = list(names), set(wanted)
    best: dict[str, str] = {}
    for rule in _SPELLINGS:
        found = {name: new for name in stored if (new := _respelled(name, rule)) in known}
        if len(found) > len(best):
            best = found
    return best


# What is taken off after `base_model.model.`, and what is put there instead.
_SPELLINGS = (
    ("", ""),
    ("model.", ""),
    ("", "model."),
    ("model.language_model.", "model."),
    ("model.", "model.language_model."),
    ("language_model.model.", "model."),
    ("model.", "language_model.model."),
    ("language_model.", ""),
    ("", "language_model."),
    ("model.language_model.", "language_model."),
    ("0.auto_model.", ""),
    ("0.model.", ""),
    ("", "0.auto_model."),
)


def _respelled(name: str, rule: tuple[str, str]) -> str:
    off, on = rule
    inner = name.removeprefix(PREFIX)
    if not inner.startswith(off):
        return name
    inner = on + inner.removeprefix(off)
    # Factors of grouped experts have no prefix of peft; other tensors have it in stock files.
    is_grouped = parse_key(inner).role in (Role.EXPERTS_A, Role.EXPERTS_B)
    return inner if is_grouped else PREFIX + inner


def by_module(names: Iterable[str]) -> Mapping[tuple[str, int, str], dict[Role, str]]:
    """Stored names by what they adapt: (module, depth, projection), and in it by role.

    `WHOLE` tensors are grouped with their module and parameter.
    """
    found: dict[tuple[str, int, str], dict[Role, str]] = {}
    for name in names:
        key = parse_key(name)
        found.setdefault((key.module, key.depth, key.parameter), {})[key.role] = name
    return found

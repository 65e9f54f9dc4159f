"""`adapter_config.json`, read strictly: how a low-rank adapter is scaled, and what it consists of.

Beside peft's own kinds there are two of expert-parallel runs, whose names peft does not know, so
that it refuses them instead of dropping a half: grouped experts alone, and together with peft's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from milepost.errors import CheckpointIncompleteError, FormatError, InvalidInputError
from milepost.format import strictjson
from milepost.format.places import shown

LORA = "LORA"
EXPERT_LORA = "EXPERT_LORA"
MIXED_LORA = "LORA_WITH_EP_EXPERT_LORA"
EXPERT_FIELD = "ep_expert_lora"

# Fields that say how an adapter came about or where it goes, not what its tensors mean.
_NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "trainable_token_indices",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "r",
        "rank_pattern",
        "target_parameters",
        "use_dora",
        "use_rslora",
        EXPERT_FIELD,
    }
)
# Starts that change the base: the adapter is relative to weights that lie nowhere.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The fields of a LoRA configuration by which its tensors are understood.

    `tokens` gives for names of embeddings the rows that were trained, where any were.
    """

    r: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def rank(self, path: str) -> int:
        """The rank at a module path; for an adapted parameter the path ends in its name."""
        return _by_pattern(self.rank_pattern, path, self.r)

    def scaling(self, path: str) -> float:
        """What the product of the factors at `path` is multiplied by."""
        alpha = _by_pattern(self.alpha_pattern, path, self.alpha)
        return scaling(self.rank(path), alpha, use_rslora=self.use_rslora)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """Low-rank factors of grouped experts, one pair for each of the `projections`."""

    r: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    projections: tuple[str, ...] = ()

    @property
    def scaling(self) -> float:
        return scaling(self.r, self.alpha, use_rslora=self.use_rslora)

    def document(self) -> dict[str, Any]:
        """The fields as they stand in a configuration."""
        return {
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.use_rslora,
            "expert_projections": sorted(self.projections),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A configuration as it lies on disk. `lora` and `experts` are there as far as the kind has
    them; another method of peft has neither, and only its `document`."""

    peft_type: str
    base: str | None
    lora: LoraSettings | None
    experts: ExpertSettings | None
    document: Mapping[str, Any]


def scaling(r: int, alpha: float, *, use_rslora: bool) -> float:
    """alpha / r, or alpha / sqrt(r) where the rank is to be stabilised.

    >>> scaling(4, 8, use_rslora=False), scaling(4, 8, use_rslora=True)
    (2.0, 4.0)
    """
    return alpha / math.sqrt(r) if use_rslora else alpha / r


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The configuration in `directory`. `CheckpointIncompleteError` when there is none."""
    place = directory / "adapter_config.json"
    try:
        raw = place.read_bytes()
    except FileNotFoundError:
        raise CheckpointIncompleteError(
            f"{place}: not there, so nobody can say how the adapter beside it is scaled; copy it "
            "from where the adapter was saved",
            path=place,
        ) from None
    return parse_adapter_config(strictjson.loads(raw, where=str(place)), where=str(place))


def parse_adapter_config(document: object, *, where: str) -> AdapterConfig:
    """Check and decode; `FormatError` names the field that is wrong or unknown."""
    if not isinstance(document, Mapping):
        raise FormatError(f"{where}: expected an object, found {shown(document)}")
    fields = _Fields(document, where)
    peft_type = fields.get("peft_type", _text)
    base = fields.optional("base_model_name_or_path", _text)
    lora = experts = None
    if peft_type in (LORA, MIXED_LORA):
        lora = _lora(fields)
    if peft_type == MIXED_LORA:
        nested = fields.get(EXPERT_FIELD, _mapping)
        experts = _experts(_Fields(nested, f"{where}: {EXPERT_FIELD}"))
    elif peft_type == EXPERT_LORA:
        experts = _experts(fields)
    return AdapterConfig(
        peft_type=peft_type, base=base, lora=lora, experts=experts, document=dict(document)
    )


def refuse_unmergeable(config: AdapterConfig, *, where: str) -> None:
    """`InvalidInputError` for what cannot be folded into weights as factors are, naming the field.

    A field that this version does not know and that is set may change what the tensors mean, so it
    is refused as well.
    """
    if config.lora is None and config.experts is None:
        raise InvalidInputError(
            f"{where}: peft_type is {config.peft_type}, which Milepost cannot fold into weights; "
            "it folds low-rank adapters (LORA and those of experts)"
        )
    if config.lora is None:
        return
    for name, value in config.document.items():
        if value and name not in _NEUTRAL and name not in _READ:
            raise InvalidInputError(
                f"{where}: {name} is {shown(value)}: a variant of LoRA that Milepost cannot fold "
                "into weights; merge it with the library that trained it"
            )


def refuse_changed_base(config: AdapterConfig, *, where: str) -> None:
    """`InvalidInputError` for adapters whose start changed the weights of their base."""
    start = config.document.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise InvalidInputError(
            f"{where}: init_lora_weights is {start!r}: the adapter is relative to a base that was "
            "changed when it was made, not to the one on disk; save it with peft's "
            "path_initial_model_for_weight_conversion first"
        )


class _Fields:
    """Typed look-ups that name the field which is wrong."""

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self._document, self._where = document, where

    def get(self, name: str, read: Callable[[object], _T | None]) -> _T:
        if name not in self._document:
            raise FormatError(f"{self._where}: {name} is missing")
        found = read(self._document[name])
        if found is None:
            raise FormatError(
                f"{self._where}: {name}: {shown(self._document[name])} is not what stands there "
                f"in a configuration ({read.__doc__})"
            )
        return found

    def optional(self, name: str, read: Callable[[object], _T | None]) -> _T | None:
        return None if self._document.get(name) is None else self.get(name, read)

    def flag(self, name: str) -> bool:
        return self.optional(name, _flag) or False


def _lora(fields: _Fields) -> LoraSettings:
    return LoraSettings(
        r=fields.get("r", _rank),
        alpha=fields.get("lora_alpha", _number),
        use_rslora=fields.flag("use_rslora"),
        use_dora=fields.flag("use_dora"),
        lora_bias=fields.flag("lora_bias"),
        bias=fields.optional("bias", _bias) or "none",
        fan_in_fan_out=fields.flag("fan_in_fan_out"),
        rank_pattern=fields.optional("rank_pattern", _ranks) or {},
        alpha_pattern=fields.optional("alpha_pattern", _numbers) or {},
        target_parameters=fields.optional("target_parameters", _texts) or (),
        modules_to_save=fields.optional("modules_to_save", _texts) or (),
        tokens=fields.optional("trainable_token_indices", _tokens) or {},
    )


def _experts(fields: _Fields) -> ExpertSettings:
    return ExpertSettings(
        r=fields.get("r", _rank),
        alpha=fields.get("lora_alpha", _number),
        use_rslora=fields.flag("use_rslora"),
        dropout=fields.optional("lora_dropout", _number) or 0.0,
        projections=fields.get("expert_projections", _texts),
    )


def _by_pattern(patterns: Mapping[str, _T], path: str, default: _T) -> _T:
    """The value of the first pattern that a path, or the end of it after a dot, matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def _text(value: object) -> str | None:
    """text"""
    return value if isinstance(value, str) and value else None


def _flag(value: object) -> bool | None:
    """true or false"""
    return value if isinstance(value, bool) else None


def _rank(value: object) -> int | None:
    """an integer from 1 up"""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _number(value: object) -> float | None:
    """a number"""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


def _bias(value: object) -> str | None:
    """none, all or lora_only"""
    return value if isinstance(value, str) and value in ("none", "all", "lora_only") else None


def _mapping(value: object) -> Mapping[str, Any] | None:
    """an object"""
    return value if isinstance(value, Mapping) else None


def _texts(value: object) -> tuple[str, ...] | None:
    """a list of texts"""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    return None


def _ranks(value: object) -> Mapping[str, int] | None:
    """an object of integers from 1 up, by pattern"""
    return _patterns(value, _rank)


def _numbers(value: object) -> Mapping[str, float] | None:
    """an object of numbers, by pattern"""
    return _patterns(value, _number)


def _patterns(value: object, read: Callable[[object], _T | None]) -> Mapping[str, _T] | None:
    if not isinstance(value, Mapping):
        return None
    found: dict[str, _T] = {}
    for pattern, item in value.items():
        number = read(item)
        if number is None or not _compiles(pattern):
            return None
        found[pattern] = number
    return found


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _tokens(value: object) -> Mapping[str, tuple[int, ...]] | None:
    """a list of rows, or an object of such lists by the name of the embedding"""
    by_name = {"embed_tokens": value} if isinstance(value, list | tuple) else value
    if not isinstance(by_name, Mapping):
        return None
    found = {}
    for name, rows in by_name.items():
        if not isinstance(rows, list | tuple) or not all(_is_row(row) for row in rows):
            return None
        found[name] = tuple(rows)
    return found


def _is_row(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""The card of an output: the source's, with what the output is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from milepost.hf.card import is_hub_id, relate_card
from milepost.tools.rewrite.source import Source


class RelationKind(StrEnum):
    """What the Hub calls the relation of a model to its base models."""

    MERGE = "merge"
    QUANTIZED = "quantized"
    FINETUNE = "finetune"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """`base_models` are Hub ids; what is none (a local path) is left out of the card."""

    kind: RelationKind
    base_models: Sequence[str] = ()


def hub_id_of(source: Source) -> str | None:
    """The Hub id that a source was loaded from, as far as its configuration says."""
    name = source.config.get("_name_or_path")
    return name if isinstance(name, str) and is_hub_id(name) else None


def related(card: bytes | None, relation: Relation, *, where: str | Path) -> bytes:
    """The card with the relation; a new one for None. `FormatError` for one that is malformed."""
    known = [name for name in relation.base_models if is_hub_id(name)]
    return relate_card(card, known, relation.kind.value, where=str(where))

"""The model card of what is published: where it comes from, for people and for the Hub's graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from milepost.hf.card import TAG, front_matter, is_hub_id, tag_card, write_metadata

KEY = "milepost"
_TAG_OF_BASE = re.compile(r"base_model:(?:[a-z]+:)?(.+)")


class BaseModelRelation(StrEnum):
    """What the Hub calls the relation of a model to its base models."""

    FINETUNE = "finetune"
    ADAPTER = "adapter"
    MERGE = "merge"
    QUANTIZED = "quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card is told. `provenance` are plain values that name no path, host or command."""

    title: str
    base_models: Sequence[str] = ()
    relation: BaseModelRelation | None = None
    library_name: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


def published_card(
    text: bytes | None, facts: CardFacts, *, where: str = "README.md"
) -> tuple[bytes, list[str]]:
    """The card to publish, and notes on what was left out of the one that is there.

    What a card says already stays, in its order; base models, their relation and the library are
    added where it says nothing, and the key `milepost` always holds this checkpoint. Paths of a
    machine that stand for base models go. A card without a body gets one. `FormatError` for a
    malformed card: the Hub would refuse it after everything else was uploaded.
    """
    tagged = tag_card(text, where=where)
    assert tagged is not None, "malformed cards raise"
    metadata, body = front_matter(tagged, where)
    wanted, notes = _without_paths(metadata)
    own: dict[str, Any] = {}
    if facts.base_models:
        names = list(facts.base_models)
        own["base_model"] = names[0] if len(names) == 1 else names
    if facts.library_name is not None:
        own["library_name"] = facts.library_name
    wanted = {**own, **wanted}
    if "base_model" in wanted and facts.relation is not None:
        wanted.setdefault("base_model_relation", facts.relation.value)
    if facts.provenance:
        wanted[KEY] = dict(facts.provenance)
    made = _body(facts) if not body.strip() else None
    return write_metadata(tagged, wanted, body=made, where=where), notes


def _without_paths(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The metadata without base models that are paths of some machine."""
    wanted = dict(metadata)
    notes = []
    bases = wanted.get("base_model")
    listed = bases if isinstance(bases, list) else [] if bases is None else [bases]
    paths = [str(base) for base in listed if not is_hub_id(str(base))]
    if paths:
        kept = [base for base in listed if str(base) not in paths]
        notes.append(f"model card: base_model {', '.join(paths)} is no model of the Hub: left out")
        wanted.pop("base_model")
        if kept:
            wanted["base_model"] = kept if len(kept) > 1 else kept[0]
    tags = wanted.get("tags")
    if isinstance(tags, list):
        wanted["tags"] = [tag for tag in tags if not _names_a_path(tag)]
    return wanted, notes


def _names_a_path(tag: Any) -> bool:
    match = _TAG_OF_BASE.fullmatch(tag) if isinstance(tag, str) else None
    return match is not None and not is_hub_id(match[1])


def _body(facts: CardFacts) -> str:
    lines = [f"# {facts.title}", ""]
    if facts.base_models:
        relation = facts.relation.value if facts.relation is not None else "made from"
        lines += [f"Base: {', '.join(facts.base_models)} ({relation}).", ""]
    lines += ["## Provenance", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_shown(value)} |" for name, value in facts.provenance.items()]
    return "\n".join([*lines, "", f"Saved by Milepost (tag `{TAG}`).", ""])


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return str(value).replace("|", r"\|")

"""The model card: README.md with the tag `milepost`, and nothing else touched."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from milepost.errors import FormatError, MissingExtraError

TAG = "milepost"

_FRONT_MATTER = re.compile(
    r"\A\ufeff?\s*---[ \t]*(?:\r\n|\n|\r)(?P<yaml>.*?)(?<=[\r\n])---[ \t]*(?=[\r\n]|\Z)",
    re.DOTALL,
)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+|[A-Za-z0-9][A-Za-z0-9._-]*")
_PLAIN = re.compile(r"[A-Za-z][\w.+/-]*")


class MalformedCard(Enum):
    """What to do with a card whose metadata cannot be edited."""

    RAISE = "raise"
    KEEP = "keep"


def new_card(*, library_name: str | None = None, base_model: str | None = None) -> bytes:
    """A card of metadata only. A `base_model` that is no Hub id (a local path) is left out."""
    lines = ["---"]
    if base_model is not None and is_hub_id(base_model):
        lines.append(f"base_model: {_scalar(base_model)}")
    if library_name is not None:
        lines.append(f"library_name: {_scalar(library_name)}")
    lines += ["tags:", f"- {TAG}", "---", ""]
    return "\n".join(lines).encode()


def is_hub_id(name: str) -> bool:
    """Whether `name` can be a model on the Hub and is not a path on this machine."""
    if not _HUB_ID.fullmatch(name) or len(name) > 96 or "--" in name or ".." in name:
        return False
    return not name.endswith((".git", "-", ".")) and not Path(name).exists()


def tag_card(
    text: bytes | None,
    *,
    malformed: MalformedCard = MalformedCard.RAISE,
    library_name: str | None = None,
    base_model: str | None = None,
    where: str = "README.md",
) -> bytes | None:
    """The card with the tag: a new one for None, the same bytes for one that has the tag already.

    An existing card keeps its order, comments, body and line endings; `tags` alone is rewritten.
    A malformed card (metadata is no mapping, tags are neither list nor text) raises `FormatError`,
    or gives None, "leave it alone", with `MalformedCard.KEEP`.
    """
    if text is None:
        return new_card(library_name=library_name, base_model=base_model)
    try:
        return _tagged(text, where)
    except FormatError:
        if malformed is MalformedCard.RAISE:
            raise
        return None


def _tagged(raw: bytes, where: str) -> bytes:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise FormatError(f"{where}: not UTF-8 at byte {e.start}; save the card as UTF-8") from e
    match = _FRONT_MATTER.match(text)
    if match is None:
        newline = _newline(text)
        return newline.join(["---", "tags:", f"- {TAG}", "---", text]).encode()
    block = match["yaml"]
    metadata = _metadata(block, where)
    tags = metadata.get("tags")
    if tags == TAG or (isinstance(tags, list) and TAG in tags):
        return raw
    wanted = {**metadata, "tags": [*([tags] if isinstance(tags, str) else tags or []), TAG]}
    edited = _edited(block, wanted, _newline(text))
    start, end = match.span("yaml")
    return (text[:start] + edited + text[end:]).encode()


def relate_card(
    text: bytes | None, base_models: Sequence[str], relation: str, *, where: str = "README.md"
) -> bytes:
    """The card with the tag, `base_model` and `base_model_relation`; body and other keys stay.

    Without base models that the Hub knows, only a `base_model` that the card has already is kept.
    `FormatError` for a malformed card.
    """
    tagged = _tagged(text, where) if text is not None else new_card()
    metadata, _ = front_matter(tagged, where)
    if base_models:
        metadata["base_model"] = base_models[0] if len(base_models) == 1 else list(base_models)
    if "base_model" in metadata:
        metadata["base_model_relation"] = relation
    return write_metadata(tagged, metadata, where=where)


def front_matter(card: bytes, where: str) -> tuple[dict[str, Any], str]:
    """The metadata of a card that has some, and its body. `FormatError` for a malformed card."""
    text = card.decode("utf-8")
    match = _FRONT_MATTER.match(text)
    return ({}, text) if match is None else (_metadata(match["yaml"], where), text[match.end() :])


def write_metadata(
    card: bytes, wanted: dict[str, Any], *, body: str | None = None, where: str = "README.md"
) -> bytes:
    """`card`, which has metadata, with `wanted` as metadata and, if given, another body.

    Keys that are new are put behind the others, which stay as they are written; where a value
    changed, all metadata is written anew.
    """
    text = card.decode("utf-8")
    match = _FRONT_MATTER.match(text)
    assert match is not None, "a tagged card has metadata"
    newline, block = _newline(text), match["yaml"]
    old = _metadata(block, where)
    added = {key: value for key, value in wanted.items() if key not in old}
    tail = _dumped(added, newline) if added else ""
    edited = block + ("" if block.endswith(("\n", "\r")) else newline) + tail
    try:
        result = _yaml().safe_load(edited)
    except _yaml().YAMLError:
        result = None
    if result != wanted:
        edited = _dumped(wanted, newline)
    start, end = match.span("yaml")
    rest = text[end:] if body is None else f"---{newline}{newline}" + body.replace("\n", newline)
    return (text[:start] + edited + rest).encode()


def _dumped(metadata: dict[str, Any], newline: str) -> str:
    dumped: str = _yaml().safe_dump(metadata, sort_keys=False, allow_unicode=True, width=10**6)
    if _yaml().safe_load(dumped) != metadata:  # line breaks of Unicode are not escaped in there
        dumped = _yaml().safe_dump(metadata, sort_keys=False, width=10**6)
    return dumped.replace("\n", newline)


def _newline(text: str) -> str:
    found = re.search(r"\r\n|\n|\r", text)
    return found[0] if found else "\n"


def _metadata(block: str, where: str) -> dict[str, Any]:
    yaml = _yaml()
    try:
        metadata = yaml.safe_load(block)
    except yaml.YAMLError as e:
        problem = " ".join(str(e).split())
        raise FormatError(f"{where}: the metadata is not YAML: {problem}; correct the card") from e
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise FormatError(
            f"{where}: the metadata is a {type(metadata).__name__}, expected a mapping; "
            f"correct the card"
        )
    if not isinstance(metadata.get("tags"), list | str | None):
        raise FormatError(
            f"{where}: tags is a {type(metadata['tags']).__name__}, expected a list or a text; "
            f"correct the card"
        )
    return metadata


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as e:
        raise MissingExtraError(
            "editing a model card needs PyYAML; pip install 'milepost[hf]'"
        ) from e
    return yaml


def _edited(block: str, wanted: dict[str, Any], newline: str) -> str:
    """`block` with `tags` as `wanted` has them: edited in place, written anew if that fails."""
    yaml = _yaml()
    edited = _edit_in_place(yaml.compose(block, Loader=yaml.SafeLoader), block, newline)
    try:
        result = yaml.safe_load(edited)
    except yaml.YAMLError:
        result = None
    if result == wanted and list(result) == list(wanted):
        return edited
    return _dumped(wanted, newline)


def _edit_in_place(root: Any, block: str, newline: str) -> str:
    """The tag put where it belongs, by the positions that the YAML parser gives."""
    entry = f"tags:{newline}- {TAG}{newline}"
    if root is None:
        return block + entry
    value = next((v for k, v in root.value if k.value == "tags"), None)
    if value is None and not root.flow_style:
        ending = "" if block.endswith(("\n", "\r")) else newline
        return block + ending + entry
    if value is None:
        return _insert_in_flow(root, block, f"tags: [{TAG}]", [v for _, v in root.value])
    if not isinstance(value.value, list):
        return _replace_scalar(value, block)
    if value.flow_style:
        return _insert_in_flow(value, block, TAG, value.value)
    return _append_item(value, block, newline)


def _insert_in_flow(node: Any, block: str, text: str, items: list[Any]) -> str:
    if items:
        at = items[-1].end_mark.index
        return f"{block[:at]}, {text}{block[at:]}"
    at = node.end_mark.index - 1
    return f"{block[:at]}{text}{block[at:]}"


def _replace_scalar(node: Any, block: str) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    old = [] if node.tag == "tag:yaml.org,2002:null" else [_scalar(node.value)]
    space = "" if block[:start].endswith(" ") else " "
    return f"{block[:start]}{space}[{', '.join([*old, TAG])}]{block[end:]}"


def _append_item(node: Any, block: str, newline: str) -> str:
    item = f"{' ' * node.start_mark.column}- {TAG}{newline}"
    at: int = node.value[-1].end_mark.index
    if at and block[at - 1] in "\r\n":
        return block[:at] + item + block[at:]
    line_end = re.compile(r"\r\n|\n|\r").search(block, at)
    if line_end is None:
        return block + newline + item
    return block[: line_end.end()] + item + block[line_end.end() :]


def _scalar(value: str) -> str:
    """A YAML scalar; JSON strings are valid YAML and need no further thought."""
    reserved = value.lower() in {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
    plain = _PLAIN.fullmatch(value) is not None and not reserved
    return value if plain else json.dumps(value, ensure_ascii=False)

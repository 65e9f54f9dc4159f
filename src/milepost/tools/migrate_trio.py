"""From the content of a checkpoint to a trio: what goes into which of its files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from milepost.errors import UnencodableError
from milepost.format import strictjson, tree
from milepost.layouts.payload import STATE_SLOTS
from milepost.layouts.torch_archive import check_loadable
from milepost.layouts.trio import TrioContent
from milepost.layouts.trio_meta import plain_numbers, time_text
from milepost.layouts.trio_typed import TypedState
from milepost.tools.migrate_compare import Comparison
from milepost.tools.migrate_content import Content

MAX_METADATA_NBYTES = 2**20


def trio_of(content: Content, *, mtime_ns: int) -> TrioContent:
    """The trio that holds everything of `content`; reads all of its tensors.

    `mtime_ns` is when the source was written. What has no place is refused: `UnencodableError`.
    """
    state, slots = content.load()
    typed = TypedState()
    metadata = _split_metadata(content, typed)
    described = content.described
    created = datetime.fromtimestamp(mtime_ns / 1e9, UTC)
    return TrioContent(
        model_state=with_versions(state, content.versions),
        **{slot: _split_slot(slot, slots.get(slot), typed) for slot in STATE_SLOTS},
        epoch=described["epoch"],
        loss=described["loss"],
        best_loss=described["best_loss"],
        model_config=described["model_config"],
        step=described["step"],
        metrics=_metrics(described["metrics"]),
        metadata=metadata,
        typed=typed,
        origin=content.origin,
        created=time_text(created),
    )


def with_versions(
    state: Mapping[str, Any], versions: Mapping[str, Any] | None
) -> OrderedDict[str, Any]:
    """The state dict with the versions of the modules, as torch keeps them."""
    ordered: OrderedDict[str, Any] = OrderedDict(state)
    if versions is not None:
        ordered._metadata = versions  # type: ignore[attr-defined]
    return ordered


def _split_metadata(content: Content, typed: TypedState) -> dict[str, Any]:
    """What `meta.json` can hold and has no field for; what it cannot hold goes to `typed`."""
    compare, kept = Comparison(), {}
    fields = {**content.described, "metrics": _metrics(content.described["metrics"])}
    for key, value in content.metadata.items():
        if key in fields and compare.same(value, fields[key]):
            continue
        if _fits_meta(value):
            kept[key] = value
        else:
            typed.metadata[key] = value
    return kept


def _fits_meta(value: Any) -> bool:
    try:
        return len(strictjson.dumps(tree.encode(value, key=""))) <= MAX_METADATA_NBYTES
    except UnencodableError:
        return False


def _split_slot(slot: str, value: Any, typed: TypedState) -> Any:
    """The value without what torch's safe loading would refuse, which goes to `typed`."""
    if _is_loadable(value):
        return value
    if type(value) is not dict:
        typed.whole[slot] = value
        return None
    plain = {key: item for key, item in value.items() if _is_loadable({key: item})}
    typed.entries[slot] = {key: item for key, item in value.items() if key not in plain}
    return plain


def _is_loadable(value: Any) -> bool:
    try:
        check_loadable(value)
    except UnencodableError:
        return False
    return True


def _metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those that `meta.json` can hold; all are among the metadata, under their own keys."""
    plain = plain_numbers(metrics)
    return {key: value for key, value in plain.items() if _fits_meta(value)}

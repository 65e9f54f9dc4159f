"""`<name>.meta.json`: what a trio says about itself, and the digests of its other two files.

Keys of the split layout: `format_version`, `epoch`, `loss`, `best_loss`, `model_config`,
`save_id`. JSON holds no infinity and no NaN, so such a loss is null there and stands by its text in
`milepost.nonfinite`; a `best_loss` that is null or absent reads as infinite. The additive key
`milepost` holds the rest, and `self_digest` covers the document. Values of `model_config` and
`milepost.metrics` that JSON does not know are written as the typed tree does (`format.tree`).
"""

from __future__ import annotations

import binascii
import json
import math
import operator
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from milepost.errors import FormatError, InvalidInputError
from milepost.format import selfdigest, strictjson, tree
from milepost.format.digests import (
    DIGEST_NBYTES,
    Extent,
    cut_extents,
    pack_records,
    root_digest,
)
from milepost.format.header import Header
from milepost.layouts.legacy import is_tensor, number, whole
from milepost.layouts.trio_migrations import FORMAT_VERSION, migrate

OWN_KEY = "milepost"
MAX_META_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDigests:
    """Of the weights file: its bytes, one digest for each extent, and the root over them."""

    nbytes: int
    root: str
    extents: bytes

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> WeightDigests:
        return cls(
            nbytes=extents[-1].end if extents else 0,
            root=root_digest(pack_records(extents)),
            extents=b"".join(extent.digest for extent in extents),
        )

    def matched(self, header: Header, where: str) -> list[Extent]:
        """The extents, cut where the header and its tensors end. `FormatError` when that does not
        fit what is recorded."""
        borders = [header.data_start + entry.end for entry in header.tensors.values()]
        ranges = cut_extents([0, header.data_start, *borders])
        digests = [
            self.extents[at : at + DIGEST_NBYTES]
            for at in range(0, len(self.extents), DIGEST_NBYTES)
        ]
        if len(ranges) != len(digests):
            raise FormatError(
                f"{where}: its header gives {len(ranges)} extents, {len(digests)} were saved"
            )
        extents = [
            Extent(digest=digest, start=start, nbytes=end - start)
            for digest, (start, end) in zip(digests, ranges, strict=True)
        ]
        if root_digest(pack_records(extents)) != self.root:
            raise FormatError(f"{where}: its tensors lie elsewhere than when it was saved")
        return extents


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """Of `extra_state.pt`: its bytes, and the digest of those before the comment at its end."""

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrioMeta:
    """What `meta.json` records. `is_ours` tells whether Milepost wrote it, with digests.

    `metadata` are values by name that none of the other fields is for; `origin` says what a
    converted trio was made of.
    """

    epoch: int = 0
    loss: float | None = None
    best_loss: float = math.inf
    model_config: Any = None
    save_id: str | None = None
    format_version: str = FORMAT_VERSION
    step: int | None = None
    created: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    weights: WeightDigests | None = None
    extra_state: StateDigest | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] | None = None
    writer: str | None = None
    defaulted: frozenset[str] = frozenset()
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.weights is not None

    @property
    def stamps(self) -> tuple[str | None, str | None]:
        """`save_id` and epoch as text, None where not recorded."""
        return self.save_id, None if "epoch" in self.defaulted else str(self.epoch)

    def as_metadata(self) -> dict[str, Any]:
        """Every recorded value under its own key, defaults included."""
        optional = {"step": self.step, "created": self.created, "metrics": dict(self.metrics)}
        return {
            **self.metadata,
            "epoch": self.epoch,
            "loss": self.loss,
            "best_loss": self.best_loss,
            "model_config": self.model_config,
            "save_id": self.save_id,
            "format_version": self.format_version,
            **{key: value for key, value in optional.items() if value not in (None, {})},
            **self.unknown,
        }


def now_text() -> str:
    """The time as `created` records it."""
    return time_text(datetime.now(UTC))


def time_text(time: datetime) -> str:
    """A time of the zone UTC to the millisecond, as RFC 3339 writes it."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def milepost_version() -> str | None:
    try:
        return version("milepost")
    except PackageNotFoundError:
        return None


def encode_meta(meta: TrioMeta) -> bytes:
    """The bytes of `meta.json`. `UnencodableError` names the value that cannot be stored."""
    assert meta.weights is not None and meta.extra_state is not None
    document = {
        **check_encodable(meta),
        "epoch": meta.epoch,
        "format_version": FORMAT_VERSION,
        "save_id": meta.save_id,
    }
    document[OWN_KEY] |= {
        "version": milepost_version(),
        "step": meta.step,
        "created": meta.created,
        "tied": dict(meta.tied),
        "digests": {
            "safetensors": {
                "nbytes": meta.weights.nbytes,
                "root": meta.weights.root,
                "extents": b64encode(meta.weights.extents).decode(),
            },
            "extra_state": {
                "nbytes": meta.extra_state.nbytes,
                "digest": meta.extra_state.digest,
            },
        },
    }
    return selfdigest.seal(document, sort_keys=True)


def check_encodable(meta: TrioMeta) -> dict[str, Any]:
    """The values that came from the caller, encoded; for refusing them before a byte is written."""
    nonfinite = {"loss": meta.loss, "best_loss": meta.best_loss}
    texts = {
        key: str(value)
        for key, value in nonfinite.items()
        if value is not None and not math.isfinite(value)
    }
    if meta.best_loss == math.inf:
        del texts["best_loss"]  # what an absent one means
    own = {
        "metrics": tree.encode(plain_numbers(meta.metrics), key="metrics"),
        "nonfinite": texts,
    }
    if meta.metadata:
        own["metadata"] = tree.encode(dict(meta.metadata), key="metadata")
    if meta.origin is not None:
        own["origin"] = tree.encode(dict(meta.origin), key="origin")
    return {
        "loss": _finite(meta.loss),
        "best_loss": _finite(meta.best_loss),
        "model_config": tree.encode(meta.model_config, key="model_config"),
        OWN_KEY: own,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with tensors of one element as floats."""
    return {key: number(value) if is_tensor(value) else value for key, value in metrics.items()}


def as_loss(value: Any, name: str) -> float | None:
    """A loss as given by a training loop: a number, a tensor of one element, or None."""
    found = number(value)
    if value is not None and found is None:
        raise InvalidInputError(
            f"{name} is {value!r:.80}, expected a number or a tensor of one element"
        )
    return found


def as_epoch(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidInputError(f"epoch is {value!r:.80}, expected a whole number") from None


def parse_meta(raw: bytes, where: str) -> TrioMeta:
    """The content of a `meta.json`, ours or not. Raises `FormatError`, `DigestMismatchError` or
    `UnsupportedVersionError`."""
    document = _loads(raw, where)
    if not isinstance(document, dict):
        raise FormatError(
            f"{where}: holds a {type(document).__name__}, expected an object", path=where
        )
    recorded = frozenset(document)
    document = migrate(document, where=where)
    if OWN_KEY in document or selfdigest.KEY in document:
        selfdigest.check(raw, document, where)
    try:
        return _meta(document, recorded, where)
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{where}: not the metadata of a checkpoint: {error!r:.200}", path=where
        ) from error


def _meta(document: dict[str, Any], recorded: frozenset[str], where: str) -> TrioMeta:
    own = document.get(OWN_KEY)
    epoch, best_loss = whole(document.get("epoch")), number(document.get("best_loss"))
    save_id = document.get("save_id")
    known = {"epoch", "loss", "best_loss", "model_config", "save_id", "format_version"}
    common: dict[str, Any] = {
        "epoch": 0 if epoch is None else epoch,
        "loss": number(document.get("loss")),
        "best_loss": math.inf if best_loss is None else best_loss,
        "model_config": document.get("model_config"),
        "save_id": None if save_id is None else str(save_id),
        "format_version": document["format_version"],
        "defaulted": (known - recorded) | (frozenset() if epoch is not None else {"epoch"}),
    }
    hidden = known | {OWN_KEY, selfdigest.KEY}
    common["unknown"] = {key: value for key, value in document.items() if key not in hidden}
    if own is None:
        return TrioMeta(**common)
    common |= {name: float(text) for name, text in own.get("nonfinite", {}).items()}
    common["model_config"] = tree.decode(
        common["model_config"], None, where=f"{where}: model_config"
    )
    weights, state = own["digests"]["safetensors"], own["digests"]["extra_state"]
    return TrioMeta(
        **common,
        step=own["step"],
        created=own["created"],
        metrics=_decoded(own, "metrics", where),
        metadata=_decoded(own, "metadata", where) or {},
        origin=_decoded(own, "origin", where),
        tied={str(name): str(kept) for name, kept in own["tied"].items()},
        weights=WeightDigests(
            nbytes=weights["nbytes"],
            root=weights["root"],
            extents=b64decode(weights["extents"], validate=True),
        ),
        extra_state=StateDigest(nbytes=state["nbytes"], digest=state["digest"]),
        writer=own["version"],
    )


def _decoded(own: Mapping[str, Any], key: str, where: str) -> Any:
    return tree.decode(own.get(key), None, where=f"{where}: {OWN_KEY}.{key}")


def _loads(raw: bytes, where: str) -> Any:
    """Strict JSON; `Infinity` and `NaN` pass in a file that is not ours, since older writers of the
    split layout put them there."""
    try:
        return strictjson.loads(raw, where)
    except FormatError:
        if f'"{OWN_KEY}"'.encode() in raw or f'"{selfdigest.KEY}"'.encode() in raw:
            raise
        try:
            document = json.loads(raw, object_pairs_hook=_unique)
            strictjson.loads(json.dumps(_without_nonfinite(document)).encode(), where)
        except (ValueError, RecursionError):
            document = None
        if document is None:
            raise
        return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return document


def _without_nonfinite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _without_nonfinite(item) for key, item in value.items()}
        case list():
            return [_without_nonfinite(item) for item in value]
        case _:
            return value

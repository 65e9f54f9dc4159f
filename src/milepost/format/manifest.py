"""The manifest `milepost.json`: what a checkpoint holds, written last, sealed by its own digest.

The normative text is `docs/spec/v1.md`. A manifest of a newer major version, or one that requires a
feature unknown here, is refused by name; keys that this version does not know are kept. One of an
older version is brought up to date in memory, step by step (`MIGRATIONS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from milepost.errors import FormatError, UnsupportedVersionError
from milepost.format import selfdigest, strictjson

MANIFEST_NAME = "milepost.json"
DIGESTS_NAME = "training/digests.bin"
STATE_NAME = "training/state.json"
STATE_TENSORS_NAME = "training/state.safetensors"
FORMAT = "milepost"
FORMAT_VERSION = "1.0"
MAX_MANIFEST_NBYTES = 64 * 2**20

Role = Literal["weights", "state", "info"]
KNOWN_REQUIREMENTS: frozenset[str] = frozenset()

Document: TypeAlias = Mapping[str, Any]
Step: TypeAlias = Callable[[Document], dict[str, Any]]
# Every version that a release wrote: the next one and the step that leads there, None for the one
# that is written now. A new version adds a row, a golden directory of the old one and a test.
MIGRATIONS: Mapping[str, tuple[str, Step] | None] = {"1.0": None}

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the checkpoint.

    `name` is relative to the checkpoint, with `/`. `digest` is XXH3-128 in hex: of the records that
    `records` names in `training/digests.bin` as [first, count], or of the file's bytes when there
    are none. `role`: weights and state must be intact to load; info only warns.
    """

    name: str
    nbytes: Natural
    role: Role
    digest: str
    records: tuple[Natural, Natural] | None = None


class ViewRule(msgspec.Struct, frozen=True, kw_only=True):
    """Runtime tensors named like `runtime`, of `shape`, lie on disk as tensors named like `stored`.

    `*` stands for numbers that are the same in both names, `#` for the index at the first fixed
    dim, each from 0. `dims` has for each dim of the stored tensor (dim of the runtime tensor,
    offset, step, length); `fixed` the indices at its other dims, without the one that `#` is.
    """

    runtime: str
    shape: tuple[Natural, ...]
    stored: str
    dims: tuple[tuple[int, Natural, Natural, Natural], ...]
    fixed: tuple[Natural, ...] = ()


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a model: alone, without the weights of its base, or beside weights into which
    it was folded (`merged_adapter`).

    It lies in the directory `prefix` as `<stem>.safetensors`, with `adapter_config.json`; what is
    trained or updated beside it as `<extra>.safetensors` where there is such. `base` says what is
    known of the base: `name`, `checkpoint_id`, and digests of `config` and `weights`. `vocabulary`
    is the number of rows of the live embedding, where that is not the base's. `views` are as those
    of the model, for a merged one whose own are those of its weights.
    """

    kind: Literal["adapter", "merged_adapter"]
    peft_type: str
    prefix: str
    stem: str
    extra: str | None = None
    base: dict[str, str] = {}
    vocabulary: Natural | None = None
    views: tuple[ViewRule, ...] = ()


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the checkpoint: `prefix` is its directory inside it (empty at the root), `stem`
    the stem of its parts. `tied` maps a name that has no tensor to the one it shares. `views` are
    parameters that lie on disk under other names or in other shapes; optimizers keep theirs.
    `adapter` is there for a model whose adapter was saved by itself."""

    prefix: str
    stem: str
    huggingface: bool
    tied: dict[str, str] = {}
    views: tuple[ViewRule, ...] = ()
    adapter: AdapterEntry | None = None


class StateEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the saved state. `stem` is that of its tensor parts where it has its own."""

    kind: Literal["model", "optimizer", "stateful", "value"]
    stem: str | None = None
    class_name: str | None = None


class Manifest(msgspec.Struct, kw_only=True):
    """See `docs/spec/v1.md`. Times are UTC in RFC 3339; `phases` are seconds of the save,
    `phase_nbytes` bytes that rank 0 moved in them.

    `generation` is raised when a run resumes from anything but its newest checkpoint, and
    `branch_step` is the step it resumed from then. `fingerprint` is read by
    `OptimizerStateFingerprint.from_recorded`; `pp_stage_partition` has an entry for each model that
    is a pipeline.
    """

    format: str = FORMAT
    format_version: str = FORMAT_VERSION
    requires: list[str] = []
    checkpoint_id: str
    parent_id: str | None = None
    generation: Natural = 0
    branch_step: Natural | None = None
    step: Natural
    epoch: float | None = None
    created: str
    metrics: dict[str, float | int | str | None] = {}
    writer: dict[str, str | None] = {}
    mesh: dict[str, Any] = {}
    files: list[FileEntry] = []
    models: dict[str, ModelEntry] = {}
    state: dict[str, StateEntry] = {}
    model_config: Any = None
    needs: list[str] = []
    linked: list[str] = []
    notes: list[str] = []
    phases: dict[str, float] = {}
    phase_nbytes: dict[str, Natural] = {}
    fingerprint: Any = None
    pp_stage_partition: dict[str, list[list[Natural]]] = {}
    provenance: dict[str, Any] = {}
    exactness: dict[str, Any] = {}

    def file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.nbytes for entry in self.files)


def encode_manifest(manifest: Manifest, unknown: Mapping[str, Any] | None = None) -> bytes:
    """The file's bytes; `unknown` are keys of a newer minor version, carried along."""
    document = {**(unknown or {}), **msgspec.to_builtins(manifest)}
    return selfdigest.seal(document, sort_keys=False)


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Check and decode; `FormatError`, `DigestMismatchError` or `UnsupportedVersionError`."""
    document = strictjson.loads(raw, where=where)
    if not isinstance(document, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(document).__name__}")
    check_version(document, where)
    selfdigest.check(raw, document, where)
    try:
        manifest = msgspec.convert(migrate(document), Manifest)
    except msgspec.ValidationError as error:
        raise FormatError(f"{where}: {error}; this is not a manifest of version 1") from error
    _check_names(manifest, where)
    return manifest


def migrate(
    document: Document, *, migrations: Mapping[str, tuple[str, Step] | None] = MIGRATIONS
) -> dict[str, Any]:
    """`document` in the version that is written now, by as many steps as it takes.

    A newer minor version has no row and stays as it is.
    """
    migrated = dict(document)
    while (row := migrations.get(migrated["format_version"])) is not None:
        version, step = row
        migrated = {**step(migrated), "format_version": version}
    return migrated


def _check_names(manifest: Manifest, where: str) -> None:
    """Names of files are plain relative paths, each listed once; so are prefixes and stems."""
    seen: set[str] = set()
    for entry in manifest.files:
        check_file_name(entry.name, where)
        if entry.name in seen:
            raise FormatError(f"{where}: files: {entry.name!r} is listed twice")
        seen.add(entry.name)
    adapters = [model.adapter for model in manifest.models.values() if model.adapter is not None]
    prefixes = [model.prefix for model in manifest.models.values()]
    for prefix in (*prefixes, *(adapter.prefix for adapter in adapters)):
        if prefix:
            check_file_name(prefix, where)
    stems = [model.stem for model in manifest.models.values()]
    stems += [stem for adapter in adapters for stem in (adapter.stem, adapter.extra) if stem]
    stems += [entry.stem for entry in manifest.state.values() if entry.stem is not None]
    for stem in stems:
        check_file_name(stem, where)
        if "/" in stem:
            raise FormatError(f"{where}: the stem {stem!r} is not a plain name; refusing it")


def unknown_keys(raw: bytes, where: str) -> dict[str, Any]:
    """Top-level keys of a manifest that this version does not know."""
    known = {field.name for field in msgspec.structs.fields(Manifest)} | {selfdigest.KEY}
    document = strictjson.loads(raw, where=where)
    return {key: value for key, value in document.items() if key not in known}


def check_version(document: Mapping[str, Any], where: str) -> None:
    """Refuse what is not ours or newer than this code, by name."""
    if document.get("format") != FORMAT:
        raise FormatError(f"{where}: format is {document.get('format')!r}, expected {FORMAT!r}")
    version = document.get("format_version")
    major, _, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
    if not (major.isdecimal() and minor.isdecimal()):
        raise FormatError(f"{where}: format_version is {version!r}, expected text such as '1.0'")
    if int(major) != 1:
        raise UnsupportedVersionError(
            f"{where}: written in format version {version}, this Milepost reads 1.x; "
            "upgrade milepost to load it",
            path=where,
        )
    requires = document.get("requires", [])
    if not isinstance(requires, list) or not all(isinstance(word, str) for word in requires):
        raise FormatError(f"{where}: requires: expected a list of texts")
    missing = sorted(set(requires) - KNOWN_REQUIREMENTS)
    if missing:
        raise UnsupportedVersionError(
            f"{where}: needs {', '.join(missing)}, which this Milepost does not know; "
            "upgrade milepost to load it",
            path=where,
        )


def check_file_name(name: str, where: str) -> None:
    """Refuse a name that could lead out of the checkpoint."""
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise FormatError(f"{where}: file name {name!r} is not a plain relative path; refusing it")

"""Which files a checkpoint directory will have, and what of them this rank writes.

A pure step between agreement and disk: the layout follows from the merged inventory, this rank's
share from its place in it. A process that is alone has all of everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milepost._collector import collector_paused
from milepost.checkpointing.capture import Captured
from milepost.checkpointing.part_writer import PartLayout, PartWriter, lay_out_part
from milepost.checkpointing.stage_ties import ties_of
from milepost.engine.exchange import ExchangeStep
from milepost.engine.source import BytesSource, Scratch
from milepost.engine.write import FileWrite, Piece
from milepost.errors import CheckpointIncompleteError
from milepost.format.digests import Extent, digest_of, pack_records, root_digest
from milepost.format.dtypes import DTYPES
from milepost.format.manifest import (
    AdapterEntry,
    FileEntry,
    ModelEntry,
    Role,
    StateEntry,
    ViewRule,
)
from milepost.plan.division import StepKey
from milepost.plan.inventory import Inventory, items_of
from milepost.plan.part_names import StageParts, WeightFiles, naming_of
from milepost.plan.parts import PartsPlan, plan_parts
from milepost.plan.shares import DOMAIN_NBYTES, WriteRules
from milepost.plan.view_rules import view_rules
from milepost.state.other import Kind
from milepost.state.placements import Held

WEIGHTS_STEM = "model"
TRAINING = "training"
SMALL_SET = "state"
_PACK = {name: row.elements_per_torch for name, row in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSetPlace:
    """Where a set of tensors lies: `<prefix>/<stem>*.safetensors`."""

    stem: str
    prefix: str
    role: Role
    max_part_nbytes: int
    weight_files: WeightFiles = WeightFiles.NUMBERED
    has_index: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file, by its name inside the checkpoint, and the pieces of it that this rank writes.

    `header` is that of a part of frozen tensors, which an earlier checkpoint may have already.
    `digested` are the extents of the pieces, where they were hashed while they could not change."""

    name: str
    role: Role
    nbytes: int
    pieces: tuple[Piece, ...]
    header: bytes | None = None
    digested: Sequence[Extent] | None = None

    def write_into(self, directory: Path) -> FileWrite:
        return FileWrite(path=directory / self.name, pieces=self.pieces, file_nbytes=self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesPlan:
    """Everything that will be written: the same files on all ranks, each rank's own pieces, and
    what it exchanges with others, in the order in which all do that. Paths are inside the
    checkpoint.

    `partition` has the layers of each stage, for each model that is written stage by stage."""

    files: tuple[PlannedFile, ...]
    steps: tuple[ExchangeStep, ...]
    partition: Mapping[str, list[list[int]]]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def document_file(name: str, data: bytes, role: Role) -> PlannedFile:
    """A file whose bytes are at hand; the coordinator writes it."""
    return PlannedFile(
        name=name, role=role, nbytes=len(data), pieces=(Piece(start=0, source=BytesSource(data)),)
    )


def document_bytes(file: PlannedFile) -> bytes:
    """The bytes of what `document_file` made."""
    (piece,) = file.pieces
    scratch = Scratch(0)
    return b"".join(piece.source.pieces(0, piece.source.nbytes, scratch))


def tensor_sets(
    captured: Captured, *, max_part_nbytes: int, weight_files: WeightFiles = WeightFiles.AUTO
) -> dict[str, TensorSetPlace]:
    """The sets of a save by key, in the order in which their files are listed."""
    places = {
        key: TensorSetPlace(
            stem=WEIGHTS_STEM,
            prefix=captured.prefixes[key],
            role="weights",
            max_part_nbytes=max_part_nbytes,
            weight_files=_files_of(weight_files, captured.prefixes[key]),
        )
        if key not in captured.stems
        else _in_one_file(captured.prefixes[key], captured.stems[key])
        for key in captured.models
    }
    for key, attached in captured.attached.items():
        places[key] = _in_one_file(attached.directory, attached.stem)
    for optimizer in captured.optimizers:
        places[optimizer.place] = TensorSetPlace(
            stem=optimizer.place, prefix=TRAINING, role="state", max_part_nbytes=max_part_nbytes
        )
    places[SMALL_SET] = TensorSetPlace(
        stem="state", prefix=TRAINING, role="state", max_part_nbytes=2**63, has_index=False
    )
    return places


def _in_one_file(directory: str, stem: str) -> TensorSetPlace:
    """Adapters are read by programs that know one file only."""
    return TensorSetPlace(
        stem=stem, prefix=directory, role="weights", max_part_nbytes=2**63, has_index=False
    )


def _files_of(wanted: WeightFiles, prefix: str) -> WeightFiles:
    """Only the model at the root has files for each rank."""
    return WeightFiles.AUTO if wanted is WeightFiles.RANKS and prefix else wanted


@collector_paused()
def plan_files(
    places: Mapping[str, TensorSetPlace],
    inventory: Inventory,
    held: Mapping[str, Mapping[str, Held]],
    rules: WriteRules,
    *,
    rank: int,
) -> FilesPlan:
    """Lay out all sets and find what `rank` does; the leader also writes headers and indices.

    `held` has the names that tensors have on disk.
    """
    layout = _layout_of(places, inventory, held, rules, rank)
    files: list[PlannedFile] = []
    steps: list[tuple[StepKey, ExchangeStep]] = []
    for key, parts, index in layout.sets:
        place = places[key]
        for part in parts:
            writer = PartWriter(part, held.get(key, {}))
            name = _joined(place.prefix, part.part.name)
            files.append(
                PlannedFile(
                    name=name,
                    role=place.role,
                    nbytes=part.part.nbytes,
                    pieces=tuple(writer.pieces()),
                    header=part.part.header if part.part.is_frozen else None,
                )
            )
            steps += writer.steps(Path(name))
        if index is not None:
            files.append(index)
    steps.sort(key=lambda step: step[0])
    return FilesPlan(
        files=tuple(files),
        steps=tuple(step for _, step in steps),
        partition=layout.partition,
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """All parts of all sets and their indices, as one rank sees them, and the inventory that they
    follow from."""

    inventory: Inventory
    sets: list[tuple[str, list[PartLayout], PlannedFile | None]]
    partition: Mapping[str, list[list[int]]]


_KEPT_LAYOUTS = 4
_layouts: dict[tuple[Any, ...], _Layout] = {}


def _layout_of(
    places: Mapping[str, TensorSetPlace],
    inventory: Inventory,
    held: Mapping[str, Mapping[str, Held]],
    rules: WriteRules,
    rank: int,
) -> _Layout:
    """The layout, kept while the inventory is that of an earlier save: it is the same object then,
    and so are the names that this rank holds."""
    wanted = (id(inventory), tuple(places.items()), rules, rank)
    known = _layouts.get(wanted)
    if known is None:
        while len(_layouts) >= _KEPT_LAYOUTS:
            _layouts.pop(next(iter(_layouts)))
        known = _layouts[wanted] = _lay_out(places, inventory, held, rules, rank)
    return known


def _lay_out(
    places: Mapping[str, TensorSetPlace],
    inventory: Inventory,
    held: Mapping[str, Mapping[str, Held]],
    rules: WriteRules,
    rank: int,
) -> _Layout:
    sets: list[tuple[str, list[PartLayout], PlannedFile | None]] = []
    partition: dict[str, list[list[int]]] = {}
    number = turn = 0
    for key, place in places.items():
        leaves = inventory.on_disk(key)
        kept = set(inventory.ties_on_disk(key, ties_of(inventory, key)).values())
        naming = naming_of(place.weight_files, leaves, kept, world_size=len(rules.hosts))
        if isinstance(naming, StageParts):
            partition[key] = naming.stages.partition()
        plan = plan_parts(
            items_of(leaves, _PACK),
            stem=place.stem,
            max_part_nbytes=place.max_part_nbytes,
            naming=naming,
            frozen=inventory.frozen_on_disk(key),
        )
        parts = []
        for part in plan.parts:
            own = held.get(key, {})
            parts.append(
                lay_out_part(key, part, leaves, own, rules, rank=rank, number=number, turn=turn)
            )
            number += 1
            turn += -(-part.nbytes // DOMAIN_NBYTES)
        index = _index_file(plan, place) if place.has_index else None
        if index is not None and rank != rules.leader:
            index = replace(index, pieces=())
        sets.append((key, parts, index))
    return _Layout(inventory, sets, partition)


def _index_file(plan: PartsPlan, place: TensorSetPlace) -> PlannedFile:
    return document_file(_joined(place.prefix, plan.index_name), plan.index_bytes(), place.role)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def model_entries(
    captured: Captured,
    inventory: Inventory,
    huggingface: Iterable[str],
    adapters: Mapping[str, AdapterEntry],
) -> dict[str, ModelEntry]:
    """The manifest's entries for the models; `huggingface` are the keys that load there."""
    known = set(huggingface)
    return {
        key: ModelEntry(
            prefix=captured.prefixes[key],
            stem=captured.stems.get(key, WEIGHTS_STEM),
            huggingface=key in known,
            tied=inventory.ties_on_disk(key, ties_of(inventory, key)),
            views=views_of_set(inventory, key),
            adapter=adapters.get(key),
        )
        for key in captured.models
    }


def views_of_set(inventory: Inventory, key: str) -> tuple[ViewRule, ...]:
    """The manifest's rules for the tensors of one set that have other names on disk."""
    shapes = {fqn: leaf.shape for fqn, leaf in inventory.sets.get(key, {}).items()}
    return tuple(view_rules(shapes, inventory.views.get(key, {})))


def state_entries(captured: Captured) -> dict[str, StateEntry]:
    """The manifest's entry for each key of the state; an optimizer of several has one for each."""
    entries: dict[str, StateEntry] = {}
    for optimizer in captured.optimizers:
        entries[optimizer.place] = StateEntry(
            kind="optimizer",
            stem=optimizer.place,
            class_name=optimizer.state.record.class_name,
        )
    for key, kind in captured.kinds.items():
        if kind is Kind.MODEL:
            entries[key] = StateEntry(kind="model")
        elif kind is Kind.STATEFUL:
            entries[key] = StateEntry(kind="stateful")
        elif kind is Kind.VALUE:
            entries[key] = StateEntry(kind="value")
    return entries


def file_entries(
    files: Iterable[PlannedFile], extents: Iterable[Sequence[Extent]]
) -> tuple[list[FileEntry], bytes]:
    """Manifest entries of written files, and the records for `training/digests.bin`.

    `extents` are those of all ranks, file by file. A file of one extent has its digest in the
    manifest itself. Extents that do not tile their file are refused: a rank did not write its part.
    """
    entries: list[FileEntry] = []
    records = bytearray()
    count = 0
    for file, unordered in zip(files, extents, strict=True):
        found = sorted(unordered, key=lambda extent: extent.start)
        _check_tiling(file, found)
        if len(found) <= 1:
            digest = found[0].digest.hex() if found else digest_of(b"")
            place = None
        else:
            packed = pack_records(found)
            records += packed
            digest, place = root_digest(packed), (count, len(found))
            count += len(found)
        entries.append(
            FileEntry(
                name=file.name, nbytes=file.nbytes, role=file.role, digest=digest, records=place
            )
        )
    return entries, bytes(records)


def _check_tiling(file: PlannedFile, extents: Sequence[Extent]) -> None:
    covered = 0
    for extent in extents:
        if extent.start != covered:
            break
        covered = extent.end
    if covered != file.nbytes:
        raise CheckpointIncompleteError(
            f"{file.name}: written without a gap up to byte {covered} of {file.nbytes}; what "
            "follows has no writer or two, which is a fault of Milepost; nothing was committed"
        )

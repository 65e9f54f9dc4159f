"""Which files a checkpoint directory will have, and what of them this rank writes.

A pure step between agreement and disk: the layout follows from the merged inventory, this rank's
share from its place in it. A process that is alone has all of everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from milepost.checkpointing.capture import Captured
from milepost.engine.exchange import ExchangeJob, PeerShare
from milepost.engine.exchange_write import ExchangeWrite
from milepost.engine.source import BytesSource, TensorSource
from milepost.engine.write import FileWrite, Piece
from milepost.errors import CheckpointIncompleteError
from milepost.format.digests import Extent, digest_of, pack_records, root_digest
from milepost.format.dtypes import DTYPES
from milepost.format.manifest import FileEntry, ModelEntry, Role, StateEntry
from milepost.geometry.placement import local_shape
from milepost.plan.holding import Holding
from milepost.plan.inventory import Inventory, LeafInfo, holding_of, items_of
from milepost.plan.parts import PartPlan, PartsPlan, plan_parts
from milepost.plan.shares import TensorPlace, column_boxes, rows_held, share_at, share_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file, by its name inside the checkpoint, and the pieces of it that this rank writes."""

    name: str
    role: Role
    nbytes: int
    pieces: tuple[Piece, ...]

    def write_into(self, directory: Path) -> FileWrite:
        return FileWrite(path=directory / self.name, pieces=self.pieces, file_nbytes=self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedExchange:
    """A tensor of which whole rows must be put together from several ranks."""

    file: str
    write: ExchangeWrite

    def write_into(self, directory: Path) -> ExchangeWrite:
        write = self.write
        return ExchangeWrite(
            job=write.job, path=directory / self.file, place=write.place, rows=write.rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesPlan:
    """Everything that will be written: the same files on all ranks, each rank's own pieces."""

    files: tuple[PlannedFile, ...]
    exchanges: tuple[PlannedExchange, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def document_file(name: str, data: bytes, role: Role) -> PlannedFile:
    """A file whose bytes are at hand; the coordinator writes it."""
    return PlannedFile(
        name=name, role=role, nbytes=len(data), pieces=(Piece(start=0, source=BytesSource(data)),)
    )


def tensor_sets(captured: Captured, *, max_part_nbytes: int) -> dict[str, TensorSetPlace]:
    """The sets of a save by key, in the order in which their files are listed."""
    places = {
        key: TensorSetPlace(
            stem=WEIGHTS_STEM,
            prefix=captured.prefixes[key],
            role="weights",
            max_part_nbytes=max_part_nbytes,
        )
        for key in captured.models
    }
    for optimizer in captured.optimizers:
        places[optimizer.place] = TensorSetPlace(
            stem=optimizer.place, prefix=TRAINING, role="state", max_part_nbytes=max_part_nbytes
        )
    places[SMALL_SET] = TensorSetPlace(
        stem="state", prefix=TRAINING, role="state", max_part_nbytes=2**63
    )
    return places


def plan_files(
    places: Mapping[str, TensorSetPlace],
    inventory: Inventory,
    held: Mapping[str, Mapping[str, Held]],
    *,
    rank: int,
) -> FilesPlan:
    """Lay out all sets and find this rank's pieces; the coordinator also writes the headers."""
    files: list[PlannedFile] = []
    exchanges: list[PlannedExchange] = []
    for key, place in places.items():
        leaves = inventory.sets.get(key, {})
        plan = plan_parts(
            items_of(leaves, _PACK), stem=place.stem, max_part_nbytes=place.max_part_nbytes
        )
        for part in plan.parts:
            writer = _PartWriter(key, leaves, held.get(key, {}), rank)
            files.append(writer.plan(part, place))
            exchanges += writer.exchanges
        if key != SMALL_SET:
            files.append(_index_file(plan, place, rank))
    return FilesPlan(files=tuple(files), exchanges=tuple(exchanges))


class _PartWriter:
    """Finds what one rank writes of one part."""

    def __init__(
        self, key: str, leaves: Mapping[str, LeafInfo], held: Mapping[str, Held], rank: int
    ) -> None:
        self._key, self._leaves, self._held, self._rank = key, leaves, held, rank
        self.exchanges: list[PlannedExchange] = []

    def plan(self, part: PartPlan, place: TensorSetPlace) -> PlannedFile:
        name = _joined(place.prefix, part.name)
        pieces: list[Piece] = []
        if self._rank == 0:
            pieces.append(Piece(start=0, source=BytesSource(part.header)))
        for fqn in part.tensors:
            if fqn not in self._held:
                continue
            leaf = self._leaves[fqn]
            where = TensorPlace(shape=leaf.shape, start=part.offset(fqn), itemsize=leaf.itemsize)
            holding = holding_of(leaf, f"{self._key}: {fqn}")
            if holding.peer_count == 1:
                pieces += self._own_rows(holding, where, self._held[fqn])
            else:
                self._exchange(f"{self._key}: {fqn}", holding, where, name, self._held[fqn])
        return PlannedFile(name=name, role=place.role, nbytes=part.nbytes, pieces=tuple(pieces))

    def _own_rows(self, holding: Holding, where: TensorPlace, held: Held) -> list[Piece]:
        if holding.sole_holder == self._rank:
            return [Piece(start=where.start, source=TensorSource(held.local))]
        share = share_of(holding, where, self._rank)
        if share is None:
            return []
        if not where.shape:
            return [Piece(start=where.start, source=TensorSource(held.local))]
        pieces = []
        position = share.local[0]
        for start, end in share.rows:
            rows = held.local[position : position + end - start]
            offset = where.start + start * where.row_nbytes
            pieces.append(Piece(start=offset, source=TensorSource(rows)))
            position += end - start
        return pieces

    def _exchange(
        self, name: str, holding: Holding, where: TensorPlace, file: str, held: Held
    ) -> None:
        coordinate = holding.shard_coordinate(self._rank)
        if coordinate is None or where.nbytes == 0:
            return
        replica = holding.replicas(coordinate).index(self._rank)
        if replica >= holding.replica_count:
            return
        peers = []
        for other in holding.peers(coordinate):
            other_held = holding.held(where.shape, other)
            share = share_at(holding, where, other, replica)
            peers.append(
                PeerShare(
                    rank=holding.replicas(other)[replica],
                    columns=tuple(column_boxes(other_held, where.shape)),
                    column_shape=local_shape(other_held)[1:],
                    rows=(0, 0) if share is None else share.local,
                )
            )
        job = ExchangeJob(
            name=name,
            local=held.local.contiguous(),
            global_columns=where.shape[1:],
            peers=tuple(peers),
        )
        rows = rows_held(holding.held(where.shape, coordinate))
        write = ExchangeWrite(job=job, path=Path(file), place=where, rows=rows)
        self.exchanges.append(PlannedExchange(file=file, write=write))


def _index_file(plan: PartsPlan, place: TensorSetPlace, rank: int) -> PlannedFile:
    file = document_file(_joined(place.prefix, plan.index_name), plan.index_bytes(), place.role)
    return file if rank == 0 else replace(file, pieces=())


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def model_entries(captured: Captured, huggingface: Iterable[str]) -> dict[str, ModelEntry]:
    """The manifest's entries for the models; `huggingface` are the keys that load there."""
    known = set(huggingface)
    return {
        key: ModelEntry(
            prefix=captured.prefixes[key],
            stem=WEIGHTS_STEM,
            huggingface=key in known,
            tied=dict(model.ties),
        )
        for key, model in captured.models.items()
    }


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

"""One save under way: agreed, planned, staged, written by all ranks, committed by one."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from milepost.checkpointing.agree import agree_inventory, held_sets, settle_trees
from milepost.checkpointing.capture import Captured, State
from milepost.checkpointing.files import (
    SMALL_SET,
    FilesPlan,
    PlannedFile,
    document_file,
    file_entries,
    model_entries,
    plan_files,
    state_entries,
    tensor_sets,
)
from milepost.checkpointing.replicas import prove_replicas
from milepost.checkpointing.target import (
    OnExisting,
    check_target,
    committed_at,
    taken,
)
from milepost.checkpointing.world import exchange_group
from milepost.engine.exchange_write import exchange_and_write
from milepost.engine.rendezvous import Conversation, together
from milepost.engine.write import Durability, WriteOptions, create_files, fill_files
from milepost.errors import CheckpointError, MismatchError
from milepost.format.digests import Extent, digest_of, pack_records, unpack_records
from milepost.format.manifest import (
    DIGESTS_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
)
from milepost.hf.aux_files import collect_model_files
from milepost.hf.trainer_state import trainer_state
from milepost.layouts.directory import read_manifest
from milepost.layouts.run import RunEntry, list_run
from milepost.plan.inventory import Inventory
from milepost.plan.parts import parse_nbytes
from milepost.storage import atomic, fileops
from milepost.storage.space import human, storage_error
from milepost.storage.staging import StagingDirectory, move_to_incomplete

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did. `written` is False when an existing checkpoint was kept.

    `phases` maps capture, write and commit to seconds. `notes` are things an engineer should know:
    side files that had trouble, a model that is not a Hugging Face model.
    """

    path: Path
    step: int
    checkpoint_id: str
    nbytes: int
    written: bool = True
    phases: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a checkpoint stands in its run (`docs/spec/v1.md`, generations)."""

    parent_id: str | None = None
    generation: int = 0
    branch_step: int | None = None


def _lineage_of(target: Path) -> Lineage:
    """The lineage of a save that nobody stated: the next one after the newest of the run."""
    newest: RunEntry | None = None
    if target.parent.is_dir():
        newest = list_run(target.parent).newest
    if newest is None:
        return Lineage()
    manifest = newest.manifest
    return Lineage(
        parent_id=manifest.checkpoint_id,
        generation=manifest.generation,
        branch_step=manifest.branch_step,
    )


class SaveRun:
    """One save under way: its conversation, target, options and phases."""

    def __init__(self, talk: Conversation, target: Path, step: int, options: WriteOptions) -> None:
        self.talk = talk
        self.target = target
        self.step = step
        self.options = options
        self.phases: dict[str, float] = {}
        self.notes: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[name] = round(time.perf_counter() - start, 6)

    def begin(self, on_existing: OnExisting, lineage: Lineage | None) -> dict[str, Any]:
        """The coordinator looks at the target and decides; all ranks agree on what is saved."""
        call = json.dumps([str(self.target), self.step, on_existing.value]).encode()
        with together(self.talk, "begin"):
            for rank, other in enumerate(self.talk.gather("call", call)):
                if other != call:
                    raise MismatchError(
                        f"rank 0 saves {call.decode()}, rank {rank} {other.decode()}; every rank "
                        "must make the same call"
                    )
            decision = b""
            if self.talk.is_coordinator:
                decision = json.dumps(self._decide(on_existing, lineage)).encode()
            decision = self.talk.broadcast("decision", decision or None)
        found: dict[str, Any] = json.loads(decision)
        return found

    def _decide(self, on_existing: OnExisting, lineage: Lineage | None) -> dict[str, Any]:
        existing = check_target(self.target, on_existing)
        if existing is not None and on_existing is OnExisting.KEEP:
            nbytes = existing.nbytes
            return {"kept": True, "checkpoint_id": existing.checkpoint_id, "nbytes": nbytes}
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return {
            "kept": False,
            "replaces": existing is not None,
            "checkpoint_id": uuid.uuid4().hex,
            "created": now.replace("+00:00", "Z"),
            **asdict(lineage or _lineage_of(self.target)),
        }

    def kept(self, begin: Mapping[str, Any]) -> SaveReport:
        return SaveReport(
            path=self.target,
            step=self.step,
            checkpoint_id=begin["checkpoint_id"],
            nbytes=begin["nbytes"],
            written=False,
            notes=(f"{self.target} was there already and is kept",),
        )

    def plan(
        self, captured: Captured, state: State, max_shard_size: int | str
    ) -> tuple[FilesPlan, Inventory]:
        """Agree on all trees and tensors, and lay out their files; collective."""
        small = settle_trees(self.talk, captured, state)
        places = tensor_sets(captured, max_part_nbytes=parse_nbytes(max_shard_size))
        held = held_sets(captured, small)
        prove_replicas(self.talk, {key: held[key] for key in held if key != SMALL_SET})
        inventory = agree_inventory(self.talk, held)
        plan = plan_files(places, inventory, held, rank=self.talk.rank)
        return plan, inventory

    def side_files(
        self,
        captured: Captured,
        inventory: Inventory,
        state: State,
        processing_class: Any,
        manifest: Manifest,
        log_history: Sequence[Mapping[str, Any]],
    ) -> list[PlannedFile]:
        """Config, tokenizer, card, trainer state and trees: what the coordinator alone writes.

        Sets the manifest's entries for models and state. Names and dtypes are those of all ranks.
        """
        files: list[PlannedFile] = []
        huggingface = []
        for key, model in captured.models.items():
            prefix = captured.prefixes[key]
            aux = collect_model_files(
                state[key],
                processing_class=processing_class if prefix == "" else None,
                ties=model.ties,
                dtype_names=[leaf.dtype for leaf in inventory.sets[key].values()],
                saved_names=[*inventory.sets[key], *model.ties],
            )
            self.notes += [f"{key}: {note}" for note in aux.notes]
            if "config.json" in aux.files:
                huggingface.append(key)
            for name, data in aux.files.items():
                full = f"{prefix}/{name}" if prefix else name
                files.append(document_file(full, data, "info"))
        trainer, notes = trainer_state(
            global_step=self.step, epoch=manifest.epoch or 0.0, log_history=log_history
        )
        self.notes += notes
        files.append(document_file("trainer_state.json", trainer, "info"))
        document = captured.document_bytes(self.talk.world_size)
        files.append(document_file(STATE_NAME, document, "state"))
        manifest.models = model_entries(captured, huggingface)
        manifest.state = state_entries(captured)
        manifest.notes = list(self.notes)
        return files

    def run(
        self,
        plan: FilesPlan,
        own: list[PlannedFile],
        manifest: Manifest | None,
        begin: Mapping[str, Any],
    ) -> SaveReport:
        """Stage, write, commit; collective. The coordinator has files of its `own`, and the
        manifest."""
        files = [*plan.files, *own]
        needed = sum(file.nbytes for file in files)
        checkpoint_id: str = begin["checkpoint_id"]
        staging = StagingDirectory(
            self.target,
            unique=f"{checkpoint_id}-{self.target.name}",
            owns=lambda path: _holds(path, checkpoint_id),
        )
        with ExitStack() as stack:
            with self._step("stage", needed):
                if self.talk.is_coordinator:
                    stack.enter_context(staging)
                    self._create(staging.path, files)
            with self._step("write", needed):
                extents = self._write(staging.path, files, plan)
            with self._step("commit", needed):
                if manifest is not None:
                    entries = self._digests(staging.path, files, extents)
                    self._commit(staging, manifest, entries, replaces=begin["replaces"])
        self._log(needed)
        return SaveReport(
            path=self.target,
            step=self.step,
            checkpoint_id=checkpoint_id,
            nbytes=needed,
            phases=dict(self.phases),
            notes=tuple(self.notes),
        )

    @contextmanager
    def _step(self, name: str, needed: int) -> Iterator[None]:
        """A phase that all ranks finish or fail together, its `OSError` told as what is left."""
        with together(self.talk, name), self.phase(name), self._told(needed):
            yield

    @contextmanager
    def _told(self, needed: int) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error(error, self.target, needed_nbytes=needed) from error

    def _create(self, directory: Path, files: Sequence[PlannedFile]) -> None:
        for parent in sorted({file.name.rpartition("/")[0] for file in files} - {""}):
            _make_below(directory, parent)
        create_files([file.write_into(directory) for file in files], self.options)

    def _write(
        self, directory: Path, files: Sequence[PlannedFile], plan: FilesPlan
    ) -> list[list[Extent]]:
        """Write this rank's pieces; every rank's extents, file by file, at the coordinator."""
        writes = [file.write_into(directory) for file in files]
        own: dict[int, list[Extent]] = {}
        with together(self.talk, "pieces"), self._told(sum(file.nbytes for file in files)):
            busy = [number for number, file in enumerate(files) if file.pieces]
            found = fill_files([writes[number] for number in busy], self.options)
            own.update(zip(busy, found, strict=True))
        exchanged = self._exchange(directory, plan)
        for number, write in enumerate(writes):
            own.setdefault(number, []).extend(exchanged.get(write.path, []))
        packed = msgspec.msgpack.encode({n: pack_records(e) for n, e in own.items()})
        extents: list[list[Extent]] = [[] for _ in files]
        for rank, raw in enumerate(self.talk.gather("extents", packed)):
            for number, records in msgspec.msgpack.decode(raw, type=dict[int, bytes]).items():
                extents[number] += unpack_records(records, f"rank {rank}")
        return extents

    def _exchange(self, directory: Path, plan: FilesPlan) -> dict[Path, list[Extent]]:
        if self.talk.world_size == 1:
            return {}
        writes = [exchange.write_into(directory) for exchange in plan.exchanges]
        return exchange_and_write(writes, self.options, group=exchange_group(), rank=self.talk.rank)

    def _digests(
        self, directory: Path, files: Sequence[PlannedFile], extents: Sequence[list[Extent]]
    ) -> list[FileEntry]:
        entries, records = file_entries(files, extents)
        self._write_document(directory / DIGESTS_NAME, records)
        entries.append(
            FileEntry(
                name=DIGESTS_NAME, nbytes=len(records), role="state", digest=digest_of(records)
            )
        )
        return entries

    def _write_document(self, path: Path, data: bytes) -> None:
        if self.options.durability is Durability.DURABLE:
            atomic.write_new_file(path, data)
        else:
            atomic.write_unsynced_file(path, data)

    def _commit(
        self,
        staging: StagingDirectory,
        manifest: Manifest,
        entries: list[FileEntry],
        *,
        replaces: bool,
    ) -> None:
        manifest.files = entries
        manifest.phases = dict(self.phases)
        self._write_document(staging.path / MANIFEST_NAME, encode_manifest(manifest))
        if replaces:
            staging.commit_replacing()
            return
        if os.path.lexists(self.target):  # torn: it does not count, its data is kept
            found = committed_at(self.target)
            if found is not None:  # by another writer, before this one had the lease
                raise taken(self.target, found)
            place = move_to_incomplete(self.target.parent, self.target.name)
            self.notes.append(f"{self.target} was no committed checkpoint; moved to {place}")
        staging.commit()

    def _log(self, nbytes: int) -> None:
        seconds = sum(self.phases.values())
        logger.info(
            "step %d committed: %s, %s, %.2f s (%s), %s/s",
            self.step,
            self.target,
            human(nbytes),
            seconds,
            ", ".join(f"{name} {value:.2f}" for name, value in self.phases.items()),
            human(nbytes / max(seconds, 1e-9)),
        )


def _make_below(directory: Path, relative: str) -> None:
    path = directory
    for part in relative.split("/"):
        path = path / part
        if not path.is_dir():
            fileops.make_directory(path)


def _holds(path: Path, checkpoint_id: str) -> bool:
    try:
        return read_manifest(path).checkpoint_id == checkpoint_id
    except CheckpointError:
        return False

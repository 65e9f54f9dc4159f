"""One save under way: agreed, planned, staged, written by all ranks, committed by one."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from milepost.checkpointing.adapter_files import adapter_entries, files_of_models
from milepost.checkpointing.adapter_fold import fold_adapters
from milepost.checkpointing.adapter_save import AdapterSave, rename_views
from milepost.checkpointing.agree import agree_inventory, held_sets, settle_trees
from milepost.checkpointing.capture import Captured, State
from milepost.checkpointing.copies import Copies, agree_rules, share_documents
from milepost.checkpointing.ep_sharded import slice_experts
from milepost.checkpointing.events import EventKind, Events, OnEvent
from milepost.checkpointing.files import (
    SMALL_SET,
    FilesPlan,
    PlannedFile,
    document_file,
    model_entries,
    plan_files,
    state_entries,
    tensor_sets,
)
from milepost.checkpointing.led_copy import LedCopy, holds
from milepost.checkpointing.lineage import Lineage, lineage_of
from milepost.checkpointing.linking import Linked, Linking, Unchanged, linkable_nbytes
from milepost.checkpointing.names_on_disk import agree_on_names, held_on_disk
from milepost.checkpointing.pace import Pace
from milepost.checkpointing.phases_text import phases_text
from milepost.checkpointing.rank_write import ExchangeGroup, RankWrite, ready_group
from milepost.checkpointing.replicas import prove_replicas
from milepost.checkpointing.save_phases import Phases, share_nbytes
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.stage_ties import tie_facts
from milepost.checkpointing.target import OnExisting, check_target
from milepost.engine.rendezvous import Conversation, together
from milepost.engine.rendezvous import led as led_by_coordinator
from milepost.engine.write import WriteOptions
from milepost.errors import CheckpointError, MismatchError, SaveOutcomeUnknownError
from milepost.format.digests import Extent
from milepost.format.manifest import STATE_NAME, Manifest
from milepost.hf.trainer_state import BestCheckpoint, trainer_state
from milepost.plan.inventory import Inventory
from milepost.plan.part_names import WeightFiles
from milepost.plan.parts import parse_nbytes
from milepost.plan.shares import WriteRules
from milepost.storage.space import human, storage_error

logger = logging.getLogger(__name__)

_LOOKS, _PAUSE_S = 10, 0.5


class SaveRun:
    """One save under way: its conversation, target, options and phases."""

    def __init__(
        self,
        talk: Conversation,
        target: Path,
        step: int,
        options: WriteOptions,
        weight_files: WeightFiles = WeightFiles.AUTO,
        copies: Copies = Copies.ONE,
        on_event: OnEvent | None = None,
        unchanged: Unchanged = Unchanged.LINK_VERIFIED,
    ) -> None:
        self.talk = talk
        self.target = target
        self.step = step
        self.events = Events(on_event, step=step, path=target, rank=talk.rank)
        self.phases = Phases(self.events)
        self.phase = self.phases.phase
        self.pace = Pace()
        self.options = self.pace.paced(self.phases.counted(options))
        self.weight_files = weight_files
        self.copies = copies
        self.unchanged = unchanged
        self.rules: list[WriteRules] = []
        self.plans: list[FilesPlan] = []
        self._groups: list[ExchangeGroup | None] = []
        self.notes: list[str] = []
        self._handed_over = False  # before that, the coordinator has nothing to commit

    def begin(self, on_existing: OnExisting, lineage: Lineage | None) -> dict[str, Any]:
        """The coordinator looks at the target and decides; all ranks agree on what is saved."""
        place = self.target if self.copies is Copies.ONE else self.target.name
        ways = (on_existing.value, self.copies.value, self.unchanged.value)
        call = json.dumps([str(place), self.step, *ways]).encode()
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
        if not found["kept"]:
            unique = found["checkpoint_id"]
            self.rules = agree_rules(self.talk, self.target, unique, self.options, self.copies)
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
            **asdict(lineage or lineage_of(self.target)),
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
        self,
        captured: Captured,
        state: State,
        max_shard_size: int | str,
        adapters: Mapping[str, AdapterSave],
    ) -> tuple[FilesPlan, Inventory]:
        """Agree on all trees and tensors, and lay out their files; collective."""
        small = settle_trees(self.talk, captured, state)
        places = tensor_sets(
            captured,
            max_part_nbytes=parse_nbytes(max_shard_size),
            weight_files=self.weight_files,
        )
        held = held_sets(captured, small)
        ties = {key: model.ties for key, model in captured.models.items()}
        proven = {key: held[key] for key in held if key != SMALL_SET}
        prove_replicas(self.talk, proven, captured.aliases)
        held |= fold_adapters(self.talk, captured, adapters, held)
        if self.weight_files is WeightFiles.RANKS:
            names = slice_experts(self.talk, captured, held)
        else:
            models = {key: state[key] for key in captured.models}
            models |= {key: saved.model for key, saved in adapters.items()}
            names = agree_on_names(self.talk, models, captured)
        self.notes += names.notes
        for key, renamed in captured.renamed.items():
            leaves = captured.attached[key] if key in captured.attached else captured.models[key]
            names.views[key] = rename_views(renamed, leaves.leaves)
        frozen = {key: model.frozen for key, model in captured.models.items()}
        inventory = agree_inventory(self.talk, held, tie_facts(ties), names.views, frozen)
        on_disk = held_on_disk(held, inventory, self.talk.rank)
        self.plans = [
            plan_files(places, inventory, on_disk, rules, rank=self.talk.rank)
            for rules in self.rules
        ]
        self._groups = [
            ready_group(self.talk, number, rules, plan)
            for number, (rules, plan) in enumerate(zip(self.rules, self.plans, strict=True))
        ]
        return self.plans[0], inventory

    def side_files(
        self,
        captured: Captured,
        inventory: Inventory,
        state: State,
        processing_class: Any,
        manifest: Manifest,
        log_history: Sequence[Mapping[str, Any]],
        best: BestCheckpoint | None,
        adapters: Mapping[str, AdapterSave],
    ) -> list[PlannedFile]:
        """Config, tokenizer, card, trainer state and trees: what the coordinator alone writes.

        Sets the manifest's entries for models and state. Names and dtypes are those of all ranks.
        """
        models = files_of_models(state, captured, inventory, adapters, processing_class)
        files = models.files
        self.notes += models.notes
        sliced = [""] if self.weight_files is WeightFiles.RANKS else []
        huggingface = [k for k in models.huggingface if captured.prefixes[k] not in sliced]
        trainer, notes = trainer_state(
            global_step=self.step,
            epoch=manifest.epoch or 0.0,
            log_history=log_history,
            best=best,
        )
        self.notes += notes
        files.append(document_file("trainer_state.json", trainer, "info"))
        document = captured.document_bytes(self.talk.world_size)
        files.append(document_file(STATE_NAME, document, "state"))
        entries = adapter_entries(adapters, inventory)
        manifest.models = model_entries(captured, inventory, huggingface, entries)
        manifest.state = state_entries(captured)
        manifest.notes = list(self.notes)
        return files

    def run(
        self,
        own: list[PlannedFile],
        manifest: Manifest | None,
        begin: Mapping[str, Any],
    ) -> SaveReport:
        """Stage, write, commit; collective. The coordinator has files of its `own`, and the
        manifest."""
        own, manifest = share_documents(self.talk, self.rules, own, manifest)
        led = next((n for n, r in enumerate(self.rules) if r.leader == self.talk.rank), None)
        needed = sum(file.nbytes for file in (*self.plans[led or 0].files, *own))
        checkpoint_id: str = begin["checkpoint_id"]
        copy = LedCopy(self.target, checkpoint_id, self.options)
        with ExitStack() as stack:
            linked = self._link(stack, copy, led, manifest, needed)
            files = [*self.plans[led or 0].files, *own]
            self.events.tell(EventKind.STARTED, nbytes=share_nbytes(self.plans[led or 0], files))
            with self._step("stage", needed - linked.nbytes):
                if led is not None:
                    if led > 0:
                        copy.check_alike(replaces=begin["replaces"])
                    copy.stage(stack, linked.to_create(files))
            with self._learned(checkpoint_id):
                with self._step("write", needed):
                    extents = self._write(copy.directory, files, led)
                    for number, found in linked.extents.items():
                        extents[number] = found
                    self.pace.finish()  # before others, who may rest, have written theirs
                    self._handed_over = True

                def complete() -> None:
                    if manifest is not None:
                        copy.complete(manifest, files, extents, self.phases)

                self._commit(copy, complete, led, needed, replaces=begin["replaces"])
        self.notes += copy.notes
        self._told_all(needed, linked.nbytes)
        return SaveReport(
            path=self.target,
            step=self.step,
            checkpoint_id=checkpoint_id,
            nbytes=needed,
            phases=dict(self.phases.seconds),
            phase_nbytes=dict(self.phases.nbytes),
            linked=linked.names,
            linked_nbytes=linked.nbytes,
            linkable_nbytes=linkable_nbytes(self.plans[0], self.unchanged),
            notes=tuple(self.notes),
        )

    def _link(
        self,
        stack: ExitStack,
        copy: LedCopy,
        led: int | None,
        manifest: Manifest | None,
        needed: int,
    ) -> Linked:
        """Link what an earlier checkpoint has, and plan to write the rest; collective."""
        if not linkable_nbytes(self.plans[0], self.unchanged):
            return Linked()
        with self.phase("link"):
            with together(self.talk, "open"), self._told(needed):
                if led is not None:
                    copy.open(stack)
            linked = Linking(
                talk=self.talk,
                rules=self.rules,
                plans=self.plans,
                groups=self._groups,
                options=self.options,
                copy=copy,
                led=led,
                unchanged=self.unchanged,
                told=lambda: self._told(needed),
            ).link(manifest.parent_id if manifest is not None else None)
        self.plans = [linked.unwritten(plan) for plan in self.plans]
        if manifest is not None:
            manifest.linked = list(linked.names)
        return linked

    @contextmanager
    def _step(self, name: str, needed: int) -> Iterator[None]:
        """A phase that all ranks finish or fail together, its `OSError` told as what is left."""
        with together(self.talk, name), self.phase(name), self._told(needed):
            yield

    @contextmanager
    def _learned(self, checkpoint_id: str) -> Iterator[None]:
        """When nobody says whether the checkpoint was committed, look for it on disk."""
        try:
            yield
        except CheckpointError as error:
            if self.talk.knows_outcome or not self._handed_over:
                raise
            for _ in range(_LOOKS):
                if holds(self.target, checkpoint_id):
                    self.notes.append(f"{self.target} was committed, though {error}")
                    return
                time.sleep(_PAUSE_S)
            if self.talk.is_coordinator:
                raise  # it renames the checkpoint itself, so it knows that it did not
            raise SaveOutcomeUnknownError(
                f"{self.target}: {error}; checkpoint {checkpoint_id} is not there, but the rename "
                "may still be under way: list the run before going on",
                path=self.target,
            ) from error

    @contextmanager
    def _told(self, needed: int) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error(error, self.target, needed_nbytes=needed) from error

    def _write(
        self, directory: Path, files: Sequence[PlannedFile], led: int | None
    ) -> list[list[Extent]]:
        """Write this rank's part of every copy; the extents of all ranks for the one it leads."""
        extents: list[list[Extent]] = []
        for number, (rules, plan) in enumerate(zip(self.rules, self.plans, strict=True)):
            write = RankWrite(
                self.talk,
                rules,
                self.options,
                directory,
                label=str(number),
                told=lambda: self._told(sum(file.nbytes for file in files)),
            )
            mine = files if number == led else plan.files
            found = write.run(plan, mine, self._groups[number])
            extents = found if number == led else extents
        return extents

    def _commit(
        self,
        copy: LedCopy,
        complete: Callable[[], None],
        led: int | None,
        needed: int,
        *,
        replaces: bool,
    ) -> None:
        """Publish: further copies first, then the coordinator's, whose name decides.

        All copies are complete before the first gets its name; when one cannot have it, those that
        have theirs give it back.
        """
        is_further = led is not None and led > 0
        try:
            if len(self.rules) > 1:
                with together(self.talk, "complete"), self._told(needed):
                    complete()
                with together(self.talk, "publish"), self._told(needed):
                    if is_further:
                        copy.publish(replaces=replaces)
            with led_by_coordinator(self.talk, "commit"), self.phase("commit"), self._told(needed):
                if self.talk.is_coordinator:
                    complete()
                    self.talk.claim()
                    copy.publish(replaces=replaces)
        except CheckpointError:
            if is_further and self.talk.knows_outcome:
                copy.withdraw()
            raise

    def _told_all(self, nbytes: int, linked: int) -> None:
        """Log the save and tell of it."""
        seconds = sum(self.phases.seconds.values())
        logger.info(
            "step %d committed: %s, %s%s, %.2f s: %s",
            self.step,
            self.target,
            human(nbytes),
            f" ({human(linked)} of it linked)" if linked else "",
            seconds,
            phases_text(self.phases.seconds, self.phases.nbytes),
        )
        self.events.tell(EventKind.COMMITTED, seconds=seconds, nbytes=nbytes)

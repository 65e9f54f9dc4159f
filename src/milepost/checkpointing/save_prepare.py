"""The part of a save that reads live state: agreed and planned, ready to be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypedDict

from milepost.checkpointing.adapter_save import Adapters, take_adapters
from milepost.checkpointing.agree import mesh_of
from milepost.checkpointing.capture import State, add_rng, capture
from milepost.checkpointing.config import as_mapping
from milepost.checkpointing.copies import Copies
from milepost.checkpointing.events import OnEvent
from milepost.checkpointing.files import PlannedFile
from milepost.checkpointing.lineage import Lineage, lineage_of
from milepost.checkpointing.linking import Unchanged
from milepost.checkpointing.numbers import plain_epoch, plain_metrics
from milepost.checkpointing.provenance import exactness, provenance, writer
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.save_run import SaveRun
from milepost.checkpointing.sidecars import Documents, Sidecars, sidecar_files, with_documents
from milepost.checkpointing.stage_ties import stage_ties
from milepost.checkpointing.target import OnExisting, check_step
from milepost.checkpointing.topology import fingerprint_of_save
from milepost.engine.rendezvous import Conversation, together
from milepost.engine.write import WriteOptions
from milepost.format.fingerprint import Stated
from milepost.format.manifest import Manifest, encode_manifest
from milepost.format.tree import encode
from milepost.hf.trainer_state import BestCheckpoint
from milepost.plan.part_names import WeightFiles
from milepost.plan.parts import DEFAULT_PART_NBYTES
from milepost.storage.fileops import PathLike


class Rng(Enum):
    """Whether the random state of python, numpy, torch and devices is part of it."""

    INCLUDE = "include"
    LEAVE_OUT = "leave-out"


class SaveKeywords(TypedDict, total=False):
    """Keywords of `save`, which says what they mean."""

    epoch: float | None
    metrics: Mapping[str, float] | None
    model_config: Any
    processing_class: Any
    log_history: Sequence[Mapping[str, Any]]
    best: BestCheckpoint | None
    primary: str | None
    rng: Rng
    on_existing: OnExisting
    max_shard_size: int | str
    weight_files: WeightFiles
    fingerprint: Stated
    sidecars: Sidecars | None
    documents: Documents | None
    copies: Copies
    lineage: Lineage | None
    options: WriteOptions | None
    on_event: OnEvent | None
    unchanged: Unchanged
    adapters: Adapters


@dataclass(slots=True, kw_only=True)
class PreparedSave:
    """A save that is agreed on and laid out. `kept` is its report when nothing is to be written."""

    run: SaveRun
    kept: SaveReport | None = None
    own: Sequence[PlannedFile] = ()
    manifest: Manifest | None = None
    begin: Mapping[str, Any]
    lineage: Lineage | None = None

    def follow_newest(self) -> None:
        """Descend from what is the newest checkpoint now, unless the lineage was stated."""
        if self.lineage is None:
            self.stand_at(lambda: lineage_of(self.run.target))

    def stand_at(self, lineage: Callable[[], Lineage]) -> None:
        """Write down another lineage than the one at the call; the coordinator's is asked."""
        if self.manifest is not None:
            found = lineage()
            self.manifest.parent_id = found.parent_id
            self.manifest.generation = found.generation
            self.manifest.branch_step = found.branch_step

    def finish(self) -> SaveReport:
        """Stage, write and commit; collective."""
        if self.kept is not None:
            return self.kept
        return self.run.run(list(self.own), self.manifest, self.begin)


def prepare_save(
    talk: Conversation, path: PathLike, state: State, step: int, keywords: SaveKeywords
) -> PreparedSave:
    """Everything up to the first file: decide, capture, agree, plan. Collective."""
    target = Path(path)
    step = check_step(target, step)
    run = SaveRun(
        talk,
        target,
        step,
        keywords.get("options") or WriteOptions(),
        keywords.get("weight_files", WeightFiles.AUTO),
        keywords.get("copies", Copies.ONE),
        keywords.get("on_event"),
        keywords.get("unchanged", Unchanged.LINK_VERIFIED),
    )
    begin = run.begin(keywords.get("on_existing", OnExisting.ERROR), keywords.get("lineage"))
    if begin["kept"]:
        return PreparedSave(run=run, kept=run.kept(begin), begin=begin)
    with together(talk, "capture"), run.phase("capture"):
        aliases = stage_ties(talk, state)
        captured = capture(state, primary=keywords.get("primary"), aliases=aliases)
        wanted = keywords.get("adapters", Adapters.ALONE)
        live = dict(captured.models)
        adapters = take_adapters(talk, captured, state, wanted)
        if keywords.get("rng", Rng.INCLUDE) is Rng.INCLUDE:
            add_rng(captured)
    with together(talk, "plan"), run.phase("plan"):
        shard = keywords.get("max_shard_size", DEFAULT_PART_NBYTES)
        plan, inventory = run.plan(captured, state, shard, adapters)
        placed = {key: adapters[key].placed if key in adapters else key for key in live}
        if not talk.is_coordinator:
            return PreparedSave(run=run, begin=begin)
        manifest = Manifest(
            checkpoint_id=begin["checkpoint_id"],
            parent_id=begin["parent_id"],
            generation=begin["generation"],
            branch_step=begin["branch_step"],
            step=step,
            epoch=plain_epoch(keywords.get("epoch")),
            created=begin["created"],
            metrics=plain_metrics(keywords.get("metrics") or {}),
            writer=writer(),
            mesh=mesh_of(live, inventory, talk.world_size, placed),
            fingerprint=fingerprint_of_save(
                captured,
                state,
                inventory,
                live,
                world_size=talk.world_size,
                stated=keywords.get("fingerprint"),
                placed=placed,
            ).to_dict(),
            pp_stage_partition=dict(plan.partition),
            model_config=_encoded(keywords.get("model_config")),
            provenance=provenance(),
            exactness=exactness(state),
        )
        own = run.side_files(
            captured,
            inventory,
            state,
            keywords.get("processing_class"),
            manifest,
            keywords.get("log_history", ()),
            keywords.get("best"),
            adapters,
        )
        tensor_files = [file.name for file in plan.files]
        own = with_documents(own, keywords.get("documents") or {}, tensor_files)
        sidecars = keywords.get("sidecars") or {}
        own += sidecar_files(sidecars, [*tensor_files, *(file.name for file in own)])
        manifest.needs = list(sidecars)
        encode_manifest(manifest)  # what it cannot hold is refused before a file exists
    lineage = keywords.get("lineage")
    return PreparedSave(run=run, own=own, manifest=manifest, begin=begin, lineage=lineage)


def _encoded(model_config: Any) -> Any:
    if model_config is None:
        return None
    return encode(as_mapping(model_config), key="model_config")

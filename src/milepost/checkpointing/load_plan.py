"""Phase 1 of a load: compare a state with a checkpoint, decode what it needs, touch nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from milepost.checkpointing.adapter_load import plan_adapter, stored_adapter
from milepost.checkpointing.adapter_save import adapter_leaves, carries_adapter
from milepost.checkpointing.agree import agree_inventory, names_elsewhere, topology_digest
from milepost.checkpointing.agree_optimizer import own_states
from milepost.checkpointing.capture import State, check_keys, primary_key
from milepost.checkpointing.fresh_moments import files_of_optimizers
from milepost.checkpointing.legacy_shards import legacy_shards
from milepost.checkpointing.load_dcp import plan_dcp
from milepost.checkpointing.load_foreign import plan_foreign
from milepost.checkpointing.load_model import plan_model
from milepost.checkpointing.load_request import LoadPlan, LoadPolicies, Moments
from milepost.checkpointing.load_tensors import LazyTensors, infos_of, read_stored
from milepost.checkpointing.per_rank import PerRank
from milepost.checkpointing.provenance import exactness, exactness_differences
from milepost.checkpointing.report import Level, LoadReport
from milepost.checkpointing.topology import agreed_differences, fingerprint_of
from milepost.engine.read import read_tensor
from milepost.engine.rendezvous import Conversation
from milepost.errors import DamagedError, KeyMismatchError, MismatchError
from milepost.format.fingerprint import OptimizerStateFingerprint
from milepost.format.manifest import STATE_NAME
from milepost.format.tree import decode
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.dcp import DcpCheckpoint
from milepost.layouts.directory import DirectoryCheckpoint, require_intact
from milepost.layouts.tensor_set import TensorSet
from milepost.plan.inventory import Inventory
from milepost.state.aliases import kept_names, optimizer_aliases, under_kept_names
from milepost.state.leaves import collect_leaves
from milepost.state.model import model_state, parameter_names
from milepost.state.optimizer import inner_optimizers
from milepost.state.optimizer_merge import without
from milepost.state.optimizer_own import NO_OWN_STATES
from milepost.state.optimizer_plan import plan_restore_optimizer
from milepost.state.optimizer_record import OptimizerRecord, split_tensor_name
from milepost.state.other import Kind, require_fillable, restore_stateful, restore_value
from milepost.state.placements import describe
from milepost.state.policies import Missing
from milepost.state.tree_torch import MappingSource


def plan_load(
    talk: Conversation,
    checkpoint: Checkpoint,
    state: State,
    policies: LoadPolicies,
    primary: str | None,
    undo: ExitStack,
) -> LoadPlan:
    """Check that `state` can be filled from `checkpoint`; all that phase 2 needs, or an error.

    Collective: topologies are compared over all ranks. Whatever changes, closing `undo` takes back.
    """
    kinds = check_keys(state)
    info = checkpoint.info
    plan = LoadPlan(
        report=LoadReport(
            path=checkpoint.path,
            step=info.step,
            epoch=info.epoch,
            checkpoint_id=info.checkpoint_id,
            metrics=dict(info.metrics),
            level=Level.EXACT,
        ),
        undo=undo,
    )
    if isinstance(checkpoint, DcpCheckpoint):
        plan_dcp(talk, checkpoint, state, kinds, policies, plan, primary)
        return plan
    if not isinstance(checkpoint, DirectoryCheckpoint):
        plan_foreign(talk, checkpoint, state, kinds, policies, plan)
        return plan
    only_models = all(kind is Kind.MODEL for kind in kinds.values())
    has_model = Kind.MODEL in kinds.values()
    is_fresh = policies.moments is Moments.FRESH
    require_intact(
        checkpoint,
        ["weights"] * has_model + ["state"] * (not only_models),
        leave_out=files_of_optimizers(checkpoint.manifest) if is_fresh else (),
    )
    wanted = _Wanted(talk, checkpoint, state, kinds, policies, plan)
    wanted.plan_models(primary)
    if only_models:
        plan.report.level = Level.WEIGHTS_ONLY
        plan.report.not_loaded = [key for key in checkpoint.manifest.state if key not in state]
        return plan
    wanted.plan_training()
    wanted.set_level()
    return plan


class _Wanted:
    """The comparison of a state with a checkpoint directory."""

    def __init__(
        self,
        talk: Conversation,
        checkpoint: DirectoryCheckpoint,
        state: State,
        kinds: Mapping[str, Kind],
        policies: LoadPolicies,
        plan: LoadPlan,
    ) -> None:
        self.talk = talk
        self.checkpoint, self.state, self.kinds = checkpoint, state, kinds
        self.policies, self.plan, self.report = policies, plan, plan.report
        self._trees: dict[str, Any] = {}
        self._small: TensorSet | None = None
        self._primary: str | None = None
        self._adapters: set[str] = set()

    def plan_models(self, primary: str | None) -> None:
        models = [key for key, kind in self.kinds.items() if kind is Kind.MODEL]
        self._primary = primary_key(self.kinds, primary)
        for key in models:
            saved_key = self._saved_model(key)
            if self._plan_adapter(key, saved_key):
                continue
            tensors = self.checkpoint.weights(saved_key)
            entry = self.checkpoint.model_entry(saved_key)
            load = plan_model(
                self.talk,
                key,
                self.state[key],
                infos_of(tensors.tensors),
                entry.tied,
                self.policies,
                self._extra(key, saved_key),
            )
            load.check_ties(partial(read_stored, tensors))
            self.plan.models[key] = (load, tensors.stored)
            self.report.models[key] = load.restore.report
            self.report.notes += [] if load.note is None else [f"{key}: {load.note}"]

    def _plan_adapter(self, key: str, saved_key: str) -> bool:
        """Plan the adapter of a model where it was saved by itself; whether it was.

        Weights with the adapter folded in are those of a model that has no adapter.
        """
        saved = stored_adapter(self.checkpoint, saved_key)
        if saved is None:
            return False
        has_weights = saved.entry is not None and saved.entry.kind == "merged_adapter"
        if has_weights and not carries_adapter(self.talk, key, self.state[key]):
            self._refuse_merged(key)
            return False
        load = plan_adapter(self.talk, key, self.state[key], saved, self.policies, self.plan.undo)
        load.check_ties(lambda name: read_tensor(saved.stored(name)))
        self.plan.models[key] = (load, saved.stored)
        self.report.models[key] = load.restore.report
        self.report.notes += [] if load.note is None else [f"{key}: {load.note}"]
        self._adapters.add(key)
        return True

    def _refuse_merged(self, key: str) -> None:
        """Merged weights may be looked at, but nothing goes on training from them."""
        if any(kind is Kind.OPTIMIZER for kind in self.kinds.values()):
            raise MismatchError(
                f"{self.checkpoint.path}: an adapter was trained and folded into these weights, "
                f"and {key} has no adapter to go on training; put it on the base, "
                "model_name_or_path, or load the weights alone: {'model': model}"
            )

    def _saved_model(self, key: str) -> str:
        """The saved model for a live one: of the same key, or the one at the root for the root."""
        saved = self.checkpoint.model_keys()
        if key in saved or key != self._primary:
            self.checkpoint.model_entry(key)  # names what there is, if it is not there
            return key
        self.checkpoint.model_entry()
        return saved[0]

    def _extra(self, live: str, key: str) -> dict[str, Any]:
        """Module extra state of the saved model `key`: all that weights need of `state.json`."""
        if self.checkpoint.manifest.file(STATE_NAME) is None:
            return {}
        try:
            return dict(self._decoded(key).get("extra", {})) if key in self._documents() else {}
        except DamagedError as error:
            if collect_leaves(self.state[live]).extra:
                raise
            self.report.notes.append(f"{live}: saved extra state, if any, was not read: {error}")
            return {}

    def plan_training(self) -> None:
        saved = {key for key, entry in self.checkpoint.manifest.state.items()}
        places = {
            f"{key}.{sub}" if sub else key: (key, inner)
            for key, kind in self.kinds.items()
            if kind is Kind.OPTIMIZER
            for sub, inner in inner_optimizers(self.state[key]).items()
        }
        others = [k for k, kind in self.kinds.items() if kind in (Kind.STATEFUL, Kind.VALUE)]
        if self.policies.moments is Moments.FRESH:
            self.plan.fresh = {place: inner for place, (_, inner) in places.items()}
            self.report.fresh_moments = dict.fromkeys(places, self.policies.fresh_because)
        wanted = [key for key in (*places, *others) if key not in self.plan.fresh]
        absent = [key for key in wanted if key not in saved]
        if absent and self.policies.missing is Missing.ERROR:
            warm = ", or moments=Moments.FRESH" if set(absent) & set(places) else ""
            raise KeyMismatchError(
                f"{self.checkpoint.path}: holds no {', '.join(absent)}; it holds "
                f"{', '.join(sorted(saved))}; leave them out of the state, or load with "
                f"missing=Missing.KEEP{warm}{legacy_shards(self.checkpoint.path)}",
                missing=absent,
            )
        self.report.kept = absent
        if not self.plan.fresh:
            self._plan_optimizers({p: v for p, v in places.items() if p in saved})
        for key in others:
            if key in saved:
                self._plan_other(key)
        asked = {*places, *others, *self.report.models}
        self.report.not_loaded = sorted(saved - asked)
        self._plan_rng()

    def _plan_optimizers(self, places: Mapping[str, tuple[str, Any]]) -> None:
        models = {key: self.state[key] for key, kind in self.kinds.items() if kind is Kind.MODEL}
        names = kept_names(parameter_names(models, primary=self._primary), self._aliases())
        for place, (_, optimizer) in places.items():
            tensors = self.checkpoint.state_set(place)
            if tensors is None:
                raise DamagedError(f"{self.checkpoint.path}: {place} was not saved as an optimizer")
            where = f"{self.checkpoint.path}: {place}"
            record = OptimizerRecord.from_tree(self._decoded(place), where=where)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            own = {names[id(p)]: p for p in params if id(p) in names}
            saved = [fqn for group in record.groups for fqn in group.params]
            elsewhere = names_elsewhere(self.talk, place, own, [*saved, *record.ungrouped])
            infos = infos_of(tensors.tensors)
            kept = NO_OWN_STATES
            if record.per_rank:
                kept = own_states(self.talk, self._per_rank(), place, record, own)
            record = without(record, elsewhere)
            plan = plan_restore_optimizer(
                optimizer,
                names,
                record,
                {n: i for n, i in infos.items() if split_tensor_name(n)[0] not in elsewhere},
                key=place,
                missing=self.policies.missing,
                unexpected=self.policies.unexpected,
                classes=self.policies.optimizer_class,
                blocks=self.policies.blocks,
                own=kept,
                shape=self.policies.shape,
            )
            self.plan.optimizers[place] = (plan, tensors)
            self.report.optimizers[place] = plan.report

    def _aliases(self) -> dict[str, str]:
        """Names that the checkpoint keeps under another, as optimizers know them."""
        ties = {key: load.ties for key, (load, _) in self.plan.models.items()}
        return optimizer_aliases(ties, primary=self._primary)

    def _plan_other(self, key: str) -> None:
        live = self.state[key]
        saved_size = int(self.checkpoint.manifest.mesh.get("world_size", 1))
        try:
            found = self._per_rank().find(key, live, saved_size, lambda: self._decoded(key))
        except MismatchError as error:
            if self.policies.missing is Missing.ERROR:
                raise
            self.report.kept = [*self.report.kept, key]
            self.report.notes.append(str(error))
            return
        if found.seek is not None:
            self.plan.others.append(found.seek)
            self.report.notes.append(found.note)
            return
        value = found.value
        if self.kinds[key] is Kind.STATEFUL:
            self.plan.others.append(lambda: restore_stateful(live, value))
            return
        require_fillable(live, value, key)
        self.plan.others.append(lambda: restore_value(live, value))

    def _plan_rng(self) -> None:
        restore, note = self._per_rank().rng()
        self.report._restore_rng = restore
        if note is not None:
            self.report.notes.append(note)

    def _per_rank(self) -> PerRank:
        return PerRank(
            self.checkpoint.whole_document(),
            self._small_tensors(),
            where=f"{self.checkpoint.path}/{STATE_NAME}",
            rank=self.talk.rank,
            world_size=self.talk.world_size,
        )

    def set_level(self) -> None:
        """Exact unless something is left out, differs, or can break bits."""
        report, manifest = self.report, self.checkpoint.manifest
        now = exactness(self.state)
        report.differences = exactness_differences(manifest.exactness, now)
        left_out = [*report.kept, *report.not_loaded, *report.fresh_moments]
        partial = any(
            r.missing or r.unexpected or r.cast or r.skipped for r in report.models.values()
        ) or any(
            r.missing or r.unexpected or r.not_carried or r.requantised or r.reshaped
            for r in report.optimizers.values()
        )
        for place, optimizer in report.optimizers.items():
            report.differences += [f"{place}: {text}" for text in optimizer.implementation]
        resharded = self._is_resharded()
        if left_out or partial:
            report.level = Level.WARM_RESTART
        elif resharded:
            report.level = Level.RESHARDED
        elif report.differences or report.fingerprint:
            report.level = Level.EXACT_STATE
        if report._restore_rng is None:
            report.differences.append("the checkpoint holds no random state")
            if report.level is Level.EXACT:
                report.level = Level.EXACT_STATE

    def _is_resharded(self) -> bool:
        """Whether weights are held by ranks in another way than when they were saved."""
        saved = self.checkpoint.manifest.mesh
        if not self.report.models:
            return self._is_on_other_ranks(saved.get("world_size"))
        whole = {
            key: under_kept_names(model_state(self.state[key]), load.ties).leaves
            for key, (load, _) in self.plan.models.items()
        }
        models = {
            key: adapter_leaves(self.state[key]) if key in self._adapters else own
            for key, own in whole.items()
        }
        leaves = {
            key: {name: describe(tensor, key=name) for name, tensor in own.items()}
            for key, own in models.items()
        }
        inventory = agree_inventory(self.talk, leaves)
        self._compare_fingerprint(whole, inventory)
        topology = topology_digest(inventory, {key: key for key in leaves})
        if saved.get("topology") in (None, topology):
            return False
        self.report.differences.insert(
            0,
            f"topology: saved on {saved.get('world_size')} ranks {saved.get('axes') or ''}, loaded "
            f"on {self.talk.world_size}, placed differently".replace("  ", " "),
        )
        return True

    def _is_on_other_ranks(self, saved_size: int | None) -> bool:
        if saved_size in (None, self.talk.world_size):
            return False
        self.report.differences.insert(
            0, f"saved on {saved_size} ranks, loaded on {self.talk.world_size}"
        )
        return True

    def _compare_fingerprint(
        self, models: Mapping[str, Mapping[str, torch.Tensor]], inventory: Inventory
    ) -> None:
        """Which fields of the topology differ, as the coordinator sees them; collective."""
        saved = OptimizerStateFingerprint.from_recorded(self.checkpoint.manifest.fingerprint)
        now = fingerprint_of(
            {key: self.state[key] for key in models},
            models,
            [self.state[key] for key, kind in self.kinds.items() if kind is Kind.OPTIMIZER],
            inventory,
            world_size=self.talk.world_size,
            stated=self.policies.fingerprint,
        )
        self.report.fingerprint = agreed_differences(self.talk, saved, now)

    def _documents(self) -> dict[str, Any]:
        if not self._trees:
            self._trees = self.checkpoint.state_document()
        return self._trees

    def _small_tensors(self) -> TensorSet:
        if self._small is None:
            self._small = TensorSet(
                self.checkpoint.path / "training", "state", file_prefix="training/"
            )
        return self._small

    def _decoded(self, key: str) -> Any:
        trees, tensors = self._documents(), self._small_tensors()
        where = f"{self.checkpoint.path}/training/state.json: {key}"
        if key not in trees:
            raise DamagedError(f"{where}: missing, though the manifest lists it")
        return decode(trees[key], MappingSource(LazyTensors(tensors)), where=where)

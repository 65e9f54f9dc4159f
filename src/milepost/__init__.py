"""Milepost: durable, verified checkpoints of PyTorch language models that `from_pretrained` loads.

    import milepost as mp

    mp.save("run/checkpoint-1000", {"model": model, "optimizer": optimizer}, step=1000)
    report = mp.load("run/checkpoint-1000", {"model": model, "optimizer": optimizer})
    mp.Checkpoint.open("run/checkpoint-1000").read("lm_head.weight")

Names are imported when they are first used, so `import milepost` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "milepost.adapters.expert": ("ExpertLora", "declare_expert_lora"),
    "milepost.adapters.kinds": ("CheckpointKind", "checkpoint_kind"),
    "milepost.checkpointing.adapter_save": ("Adapters",),
    "milepost.checkpointing.capture": ("State",),
    "milepost.checkpointing.ep_sharded": ("MergeOnSave", "validate_ep_sharded_save"),
    "milepost.checkpointing.copies": ("Copies",),
    "milepost.checkpointing.events": ("EventKind", "SaveEvent"),
    "milepost.checkpointing.functions": (
        "load_checkpoint",
        "load_full_state_dict",
        "save_checkpoint",
    ),
    "milepost.checkpointing.lineage": ("Lineage",),
    "milepost.checkpointing.progress": ("ProgressBar", "progress_bar"),
    "milepost.checkpointing.linking": ("Unchanged",),
    "milepost.checkpointing.load": ("RngRestore", "Verify", "load"),
    "milepost.checkpointing.load_request": ("Moments", "Staging", "Weights"),
    "milepost.checkpointing.peft_sidecar": ("load_peft", "save_peft"),
    "milepost.checkpointing.report": ("Level", "LoadReport"),
    "milepost.checkpointing.in_flight": ("InFlight", "SaveHandle", "wait_for_saves"),
    "milepost.checkpointing.save": ("save",),
    "milepost.checkpointing.save_async": ("Overlap", "save_async"),
    "milepost.checkpointing.save_layouts": ("save_pp_checkpoint", "save_sharded_ep"),
    "milepost.checkpointing.save_prepare": ("Rng",),
    "milepost.checkpointing.save_report": ("SaveReport",),
    "milepost.checkpointing.sidecar_read": ("read_sidecar",),
    "milepost.checkpointing.target": ("OnExisting",),
    "milepost.checkpointing.weights_source": (
        "WeightsOrigin",
        "WeightsSource",
        "resolve_resume_weights_source",
    ),
    "milepost.checkpointing.weights_stamp": ("stamp_weights_source",),
    "milepost.engine.host_buffers": ("HostBuffers",),
    "milepost.engine.read": ("ReadMode", "ReadOptions"),
    "milepost.engine.write": ("Durability", "InnerDim", "WriteMode", "WriteOptions"),
    "milepost.format.fingerprint": ("OptimizerStateFingerprint",),
    "milepost.geometry.placement": ("PackedShard",),
    "milepost.hf.publish_card": ("BaseModelRelation",),
    "milepost.hf.trainer_state": ("BestCheckpoint",),
    "milepost.hf.training_sidecars": ("apply_training_sidecars",),
    "milepost.layouts.checkpoint": (
        "Checkpoint",
        "CheckpointInfo",
        "FileInfo",
        "Layout",
        "Problem",
        "Severity",
        "TensorInfo",
        "VerifyReport",
    ),
    "milepost.layouts.run": ("RunEntry", "RunListing", "list_run", "newest"),
    "milepost.manager.best": ("BestMetric",),
    "milepost.manager.contributors": (
        "CheckpointContributor",
        "collect_extra_state",
        "load_extra_state",
    ),
    "milepost.manager.cursors": (
        "StreamCursor",
        "StreamDataState",
        "StreamShardState",
        "dedup_source",
        "hf_source",
        "local_source",
        "shard_key",
    ),
    "milepost.manager.manager": ("CheckpointManager",),
    "milepost.manager.mirror": ("Mirror",),
    "milepost.manager.resume": ("Resume",),
    "milepost.manager.retention": (
        "BestMode",
        "KeepAll",
        "KeepBest",
        "KeepEvery",
        "KeepLast",
        "KeepNewerThan",
        "RetentionPolicy",
    ),
    "milepost.manager.save_policies": (
        "AnyOf",
        "EveryNMinutes",
        "EveryNSteps",
        "OnSignal",
        "SaveContext",
        "SavePolicy",
        "WhenIdle",
    ),
    "milepost.manager.saving": ("Saving",),
    "milepost.manager.signals": ("shield_worker",),
    "milepost.manager.stage_types": (
        "OnStage",
        "OnStale",
        "Stage",
        "StageAction",
        "StageResult",
        "StageStart",
    ),
    "milepost.manager.stages": ("StagePipeline",),
    "milepost.plan.part_names": ("WeightFiles",),
    "milepost.state.data_position": ("GlobalPosition",),
    "milepost.state.declare": ("declare_placement",),
    "milepost.state.elastic_sampler": ("ElasticSampler", "EpochTail", "SampleOrder"),
    "milepost.state.policies": (
        "BlockPolicy",
        "ClassPolicy",
        "DtypePolicy",
        "Missing",
        "ShapePolicy",
        "Unexpected",
    ),
    "milepost.state.wrappers": ("PartRole", "register_tensor_class"),
    "milepost.tools.export": ("TrainingState",),
    "milepost.tools.migrate": ("convert_legacy_checkpoint_to_split",),
    "milepost.tools.publish": (
        "PublishMode",
        "PublishReport",
        "PublishTo",
        "StaleWeights",
        "Visibility",
        "publish",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted([*_HOME_OF, "errors"])


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("milepost.errors")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'milepost' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from milepost import errors as errors
    from milepost.adapters.expert import ExpertLora as ExpertLora
    from milepost.adapters.expert import declare_expert_lora as declare_expert_lora
    from milepost.adapters.kinds import CheckpointKind as CheckpointKind
    from milepost.adapters.kinds import checkpoint_kind as checkpoint_kind
    from milepost.checkpointing.adapter_save import Adapters as Adapters
    from milepost.checkpointing.capture import State as State
    from milepost.checkpointing.copies import Copies as Copies
    from milepost.checkpointing.ep_sharded import MergeOnSave as MergeOnSave
    from milepost.checkpointing.ep_sharded import (
        validate_ep_sharded_save as validate_ep_sharded_save,
    )
    from milepost.checkpointing.events import EventKind as EventKind
    from milepost.checkpointing.events import SaveEvent as SaveEvent
    from milepost.checkpointing.functions import load_checkpoint as load_checkpoint
    from milepost.checkpointing.functions import load_full_state_dict as load_full_state_dict
    from milepost.checkpointing.functions import save_checkpoint as save_checkpoint
    from milepost.checkpointing.in_flight import InFlight as InFlight
    from milepost.checkpointing.in_flight import SaveHandle as SaveHandle
    from milepost.checkpointing.in_flight import wait_for_saves as wait_for_saves
    from milepost.checkpointing.lineage import Lineage as Lineage
    from milepost.checkpointing.linking import Unchanged as Unchanged
    from milepost.checkpointing.load import RngRestore as RngRestore
    from milepost.checkpointing.load import Verify as Verify
    from milepost.checkpointing.load import load as load
    from milepost.checkpointing.load_request import Moments as Moments
    from milepost.checkpointing.load_request import Staging as Staging
    from milepost.checkpointing.load_request import Weights as Weights
    from milepost.checkpointing.peft_sidecar import load_peft as load_peft
    from milepost.checkpointing.peft_sidecar import save_peft as save_peft
    from milepost.checkpointing.progress import ProgressBar as ProgressBar
    from milepost.checkpointing.progress import progress_bar as progress_bar
    from milepost.checkpointing.report import Level as Level
    from milepost.checkpointing.report import LoadReport as LoadReport
    from milepost.checkpointing.save import save as save
    from milepost.checkpointing.save_async import Overlap as Overlap
    from milepost.checkpointing.save_async import save_async as save_async
    from milepost.checkpointing.save_layouts import save_pp_checkpoint as save_pp_checkpoint
    from milepost.checkpointing.save_layouts import save_sharded_ep as save_sharded_ep
    from milepost.checkpointing.save_prepare import Rng as Rng
    from milepost.checkpointing.save_report import SaveReport as SaveReport
    from milepost.checkpointing.sidecar_read import read_sidecar as read_sidecar
    from milepost.checkpointing.target import OnExisting as OnExisting
    from milepost.checkpointing.weights_source import WeightsOrigin as WeightsOrigin
    from milepost.checkpointing.weights_source import WeightsSource as WeightsSource
    from milepost.checkpointing.weights_source import (
        resolve_resume_weights_source as resolve_resume_weights_source,
    )
    from milepost.checkpointing.weights_stamp import stamp_weights_source as stamp_weights_source
    from milepost.engine.host_buffers import HostBuffers as HostBuffers
    from milepost.engine.read import ReadMode as ReadMode
    from milepost.engine.read import ReadOptions as ReadOptions
    from milepost.engine.write import Durability as Durability
    from milepost.engine.write import InnerDim as InnerDim
    from milepost.engine.write import WriteMode as WriteMode
    from milepost.engine.write import WriteOptions as WriteOptions
    from milepost.format.fingerprint import OptimizerStateFingerprint as OptimizerStateFingerprint
    from milepost.geometry.placement import PackedShard as PackedShard
    from milepost.hf.publish_card import BaseModelRelation as BaseModelRelation
    from milepost.hf.trainer_state import BestCheckpoint as BestCheckpoint
    from milepost.hf.training_sidecars import apply_training_sidecars as apply_training_sidecars
    from milepost.layouts.checkpoint import Checkpoint as Checkpoint
    from milepost.layouts.checkpoint import CheckpointInfo as CheckpointInfo
    from milepost.layouts.checkpoint import FileInfo as FileInfo
    from milepost.layouts.checkpoint import Layout as Layout
    from milepost.layouts.checkpoint import Problem as Problem
    from milepost.layouts.checkpoint import Severity as Severity
    from milepost.layouts.checkpoint import TensorInfo as TensorInfo
    from milepost.layouts.checkpoint import VerifyReport as VerifyReport
    from milepost.layouts.run import RunEntry as RunEntry
    from milepost.layouts.run import RunListing as RunListing
    from milepost.layouts.run import list_run as list_run
    from milepost.layouts.run import newest as newest
    from milepost.manager.best import BestMetric as BestMetric
    from milepost.manager.contributors import CheckpointContributor as CheckpointContributor
    from milepost.manager.contributors import collect_extra_state as collect_extra_state
    from milepost.manager.contributors import load_extra_state as load_extra_state
    from milepost.manager.cursors import StreamCursor as StreamCursor
    from milepost.manager.cursors import StreamDataState as StreamDataState
    from milepost.manager.cursors import StreamShardState as StreamShardState
    from milepost.manager.cursors import dedup_source as dedup_source
    from milepost.manager.cursors import hf_source as hf_source
    from milepost.manager.cursors import local_source as local_source
    from milepost.manager.cursors import shard_key as shard_key
    from milepost.manager.manager import CheckpointManager as CheckpointManager
    from milepost.manager.mirror import Mirror as Mirror
    from milepost.manager.resume import Resume as Resume
    from milepost.manager.retention import BestMode as BestMode
    from milepost.manager.retention import KeepAll as KeepAll
    from milepost.manager.retention import KeepBest as KeepBest
    from milepost.manager.retention import KeepEvery as KeepEvery
    from milepost.manager.retention import KeepLast as KeepLast
    from milepost.manager.retention import KeepNewerThan as KeepNewerThan
    from milepost.manager.retention import RetentionPolicy as RetentionPolicy
    from milepost.manager.save_policies import AnyOf as AnyOf
    from milepost.manager.save_policies import EveryNMinutes as EveryNMinutes
    from milepost.manager.save_policies import EveryNSteps as EveryNSteps
    from milepost.manager.save_policies import OnSignal as OnSignal
    from milepost.manager.save_policies import SaveContext as SaveContext
    from milepost.manager.save_policies import SavePolicy as SavePolicy
    from milepost.manager.save_policies import WhenIdle as WhenIdle
    from milepost.manager.saving import Saving as Saving
    from milepost.manager.signals import shield_worker as shield_worker
    from milepost.manager.stage_types import OnStage as OnStage
    from milepost.manager.stage_types import OnStale as OnStale
    from milepost.manager.stage_types import Stage as Stage
    from milepost.manager.stage_types import StageAction as StageAction
    from milepost.manager.stage_types import StageResult as StageResult
    from milepost.manager.stage_types import StageStart as StageStart
    from milepost.manager.stages import StagePipeline as StagePipeline
    from milepost.plan.part_names import WeightFiles as WeightFiles
    from milepost.state.data_position import GlobalPosition as GlobalPosition
    from milepost.state.declare import declare_placement as declare_placement
    from milepost.state.elastic_sampler import ElasticSampler as ElasticSampler
    from milepost.state.elastic_sampler import EpochTail as EpochTail
    from milepost.state.elastic_sampler import SampleOrder as SampleOrder
    from milepost.state.policies import BlockPolicy as BlockPolicy
    from milepost.state.policies import ClassPolicy as ClassPolicy
    from milepost.state.policies import DtypePolicy as DtypePolicy
    from milepost.state.policies import Missing as Missing
    from milepost.state.policies import ShapePolicy as ShapePolicy
    from milepost.state.policies import Unexpected as Unexpected
    from milepost.state.wrappers import PartRole as PartRole
    from milepost.state.wrappers import register_tensor_class as register_tensor_class
    from milepost.tools.export import TrainingState as TrainingState
    from milepost.tools.migrate import (
        convert_legacy_checkpoint_to_split as convert_legacy_checkpoint_to_split,
    )
    from milepost.tools.publish import PublishMode as PublishMode
    from milepost.tools.publish import PublishReport as PublishReport
    from milepost.tools.publish import PublishTo as PublishTo
    from milepost.tools.publish import StaleWeights as StaleWeights
    from milepost.tools.publish import Visibility as Visibility
    from milepost.tools.publish import publish as publish

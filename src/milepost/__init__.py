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
    "milepost.checkpointing.capture": ("State",),
    "milepost.checkpointing.ep_sharded": ("MergeOnSave", "validate_ep_sharded_save"),
    "milepost.checkpointing.copies": ("Copies",),
    "milepost.checkpointing.events": ("EventKind", "SaveEvent"),
    "milepost.checkpointing.functions": ("load_checkpoint", "save_checkpoint"),
    "milepost.checkpointing.lineage": ("Lineage",),
    "milepost.checkpointing.progress": ("ProgressBar", "progress_bar"),
    "milepost.checkpointing.linking": ("Unchanged",),
    "milepost.checkpointing.load": ("RngRestore", "Verify", "load"),
    "milepost.checkpointing.load_request": ("Moments",),
    "milepost.checkpointing.peft_sidecar": ("load_peft", "save_peft"),
    "milepost.checkpointing.report": ("Level", "LoadReport"),
    "milepost.checkpointing.in_flight": ("InFlight", "SaveHandle", "wait_for_saves"),
    "milepost.checkpointing.save": ("save",),
    "milepost.checkpointing.save_async": ("Overlap", "save_async"),
    "milepost.checkpointing.save_layouts": ("save_pp_checkpoint", "save_sharded_ep"),
    "milepost.checkpointing.save_prepare": ("Rng",),
    "milepost.checkpointing.save_report": ("SaveReport",),
    "milepost.checkpointing.target": ("OnExisting",),
    "milepost.engine.host_buffers": ("HostBuffers",),
    "milepost.engine.read": ("ReadMode", "ReadOptions"),
    "milepost.engine.write": ("Durability", "InnerDim", "WriteMode", "WriteOptions"),
    "milepost.format.fingerprint": ("OptimizerStateFingerprint",),
    "milepost.hf.trainer_state": ("BestCheckpoint",),
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
    "milepost.tools.migrate": ("convert_legacy_checkpoint_to_split",),
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
    from milepost.checkpointing.capture import State as State
    from milepost.checkpointing.copies import Copies as Copies
    from milepost.checkpointing.ep_sharded import MergeOnSave as MergeOnSave
    from milepost.checkpointing.ep_sharded import (
        validate_ep_sharded_save as validate_ep_sharded_save,
    )
    from milepost.checkpointing.events import EventKind as EventKind
    from milepost.checkpointing.events import SaveEvent as SaveEvent
    from milepost.checkpointing.functions import load_checkpoint as load_checkpoint
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
    from milepost.checkpointing.target import OnExisting as OnExisting
    from milepost.engine.host_buffers import HostBuffers as HostBuffers
    from milepost.engine.read import ReadMode as ReadMode
    from milepost.engine.read import ReadOptions as ReadOptions
    from milepost.engine.write import Durability as Durability
    from milepost.engine.write import InnerDim as InnerDim
    from milepost.engine.write import WriteMode as WriteMode
    from milepost.engine.write import WriteOptions as WriteOptions
    from milepost.format.fingerprint import OptimizerStateFingerprint as OptimizerStateFingerprint
    from milepost.hf.trainer_state import BestCheckpoint as BestCheckpoint
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
    from milepost.tools.migrate import (
        convert_legacy_checkpoint_to_split as convert_legacy_checkpoint_to_split,
    )

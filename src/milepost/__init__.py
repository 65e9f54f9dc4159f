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
    "milepost.checkpointing.functions": ("load_checkpoint", "save_checkpoint"),
    "milepost.checkpointing.load": ("RngRestore", "Verify", "load"),
    "milepost.checkpointing.load_plan": ("Moments",),
    "milepost.checkpointing.report": ("Level", "LoadReport"),
    "milepost.checkpointing.save": ("Lineage", "OnExisting", "Rng", "SaveReport", "save"),
    "milepost.engine.write": ("Durability", "WriteMode", "WriteOptions"),
    "milepost.layouts.checkpoint": ("Checkpoint", "CheckpointInfo", "Layout", "TensorInfo"),
    "milepost.layouts.run": ("RunEntry", "RunListing", "list_run", "newest"),
    "milepost.state.policies": (
        "ClassPolicy",
        "DtypePolicy",
        "Missing",
        "ShapePolicy",
        "Unexpected",
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
    from milepost.checkpointing.capture import State as State
    from milepost.checkpointing.functions import load_checkpoint as load_checkpoint
    from milepost.checkpointing.functions import save_checkpoint as save_checkpoint
    from milepost.checkpointing.load import RngRestore as RngRestore
    from milepost.checkpointing.load import Verify as Verify
    from milepost.checkpointing.load import load as load
    from milepost.checkpointing.load_plan import Moments as Moments
    from milepost.checkpointing.report import Level as Level
    from milepost.checkpointing.report import LoadReport as LoadReport
    from milepost.checkpointing.save import Lineage as Lineage
    from milepost.checkpointing.save import OnExisting as OnExisting
    from milepost.checkpointing.save import Rng as Rng
    from milepost.checkpointing.save import SaveReport as SaveReport
    from milepost.checkpointing.save import save as save
    from milepost.engine.write import Durability as Durability
    from milepost.engine.write import WriteMode as WriteMode
    from milepost.engine.write import WriteOptions as WriteOptions
    from milepost.layouts.checkpoint import Checkpoint as Checkpoint
    from milepost.layouts.checkpoint import CheckpointInfo as CheckpointInfo
    from milepost.layouts.checkpoint import Layout as Layout
    from milepost.layouts.checkpoint import TensorInfo as TensorInfo
    from milepost.layouts.run import RunEntry as RunEntry
    from milepost.layouts.run import RunListing as RunListing
    from milepost.layouts.run import list_run as list_run
    from milepost.layouts.run import newest as newest
    from milepost.state.policies import ClassPolicy as ClassPolicy
    from milepost.state.policies import DtypePolicy as DtypePolicy
    from milepost.state.policies import Missing as Missing
    from milepost.state.policies import ShapePolicy as ShapePolicy
    from milepost.state.policies import Unexpected as Unexpected

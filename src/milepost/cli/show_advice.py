"""How to get one Hugging Face checkpoint out of what lies there: told from documents and headers.

No torch: `milepost show` answers at once.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from milepost.adapters.kinds import ADAPTER_FILES, CheckpointKind, checkpoint_kind
from milepost.errors import CheckpointError
from milepost.hf.expert_layouts import serving_notes
from milepost.hf.sidecar_files import SIDECARS
from milepost.layouts.checkpoint import Checkpoint, Layout, TensorInfo
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.tensor_set import TensorSet
from milepost.tools.reattach_families import is_text_of_a_whole

_APPLIES_SIDECARS = ("convert-to-bf16", "merge-peft-adapters")


class Way(StrEnum):
    """What stands between a checkpoint and `from_pretrained`."""

    LOADS = "loads"
    """Nothing: it is one already."""
    MERGED = "merged"
    """Nothing: the adapter is folded into the weights, and kept beside them for training."""
    SIDECARS = "sidecars"
    """It loads, and files beside the weights hold what training changed besides."""
    TEXT_ONLY = "text-only"
    """It loads, as the language model of a vision-language one."""
    ADAPTER = "adapter"
    EP_SHARDED = "ep-sharded"
    NO_CONFIG = "no-config"
    OTHER_LAYOUT = "other-layout"
    DAMAGED = "damaged"
    NOTHING = "nothing"
    """There are no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One line to read, and the command to run; None where there is none to run."""

    way: Way
    text: str
    command: str | None = None

    @property
    def line(self) -> str:
        return self.text if self.command is None else f"{self.text}: {self.command}"

    def document(self) -> dict[str, Any]:
        return {"way": self.way.value, "text": self.text, "command": self.command}


def advice_of(checkpoint: Checkpoint, weights: Mapping[str, TensorInfo]) -> Advice:
    """What to do with a checkpoint that has these weights."""
    path = checkpoint.path
    try:
        kind = checkpoint_kind(checkpoint)
    except CheckpointError as error:
        return Advice(way=Way.DAMAGED, text=str(error))
    if not weights:
        return Advice(way=Way.NOTHING, text="there are no weights in it")
    if _is_sliced(checkpoint):
        text = "experts lie one slice for each rank; they become one model by"
        return Advice(way=Way.EP_SHARDED, text=text, command=_verb("merge-ep-shards", path))
    if kind is CheckpointKind.ADAPTER:
        place = path.parent if path.name in ADAPTER_FILES else path
        command = _verb("merge-peft-adapters", place, option="--adapter-dir")
        text = "an adapter without its base; both become one model by"
        return Advice(way=Way.ADAPTER, text=text, command=command)
    if not path.is_dir() or checkpoint.layout not in (Layout.DIRECTORY, Layout.HUGGING_FACE):
        return _exported(checkpoint)
    return _of_directory(checkpoint, weights, kind)


def _of_directory(
    checkpoint: Checkpoint, weights: Mapping[str, TensorInfo], kind: CheckpointKind
) -> Advice:
    """A directory with weights of a whole model at its root."""
    path, config = checkpoint.path, _config(checkpoint.path)
    if not isinstance(config.get("model_type"), str):
        text = "from_pretrained needs a config.json with a model_type, and there is none; put the "
        return Advice(way=Way.NO_CONFIG, text=f"{text}model's own beside the weights")
    if kind in (CheckpointKind.MERGED_ADAPTER, CheckpointKind.MERGED_ADAPTER_MISSING):
        text = "loads as it is: the adapter is in the weights; merged again, it would count twice"
        return Advice(way=Way.MERGED, text=text)
    needs = _needs(checkpoint)
    if needs and _made_by(checkpoint) not in _APPLIES_SIDECARS:
        text = f"loads, but serves another model without {' and '.join(needs)}; applied by"
        return Advice(way=Way.SIDECARS, text=text, command=_verb("convert-to-bf16", path))
    types = [config["model_type"]]
    if is_text_of_a_whole(types):
        text = "loads as it is, as a text model; back into its vision-language base it gets by"
        command = _verb("reattach-vision-tower", path, "--model-id", "BASE")
        return Advice(way=Way.TEXT_ONLY, text=text, command=command)
    notes = serving_notes(types, weights)
    if notes:
        command = _verb("unfuse-moe-experts", path)
        return Advice(way=Way.LOADS, text="loads as it is; servers get experts by", command=command)
    in_fp32 = sum(info.nbytes for info in weights.values() if info.dtype == "F32")
    if 2 * in_fp32 > sum(info.nbytes for info in weights.values()):
        text = "loads as it is; half the size for serving by"
        return Advice(way=Way.LOADS, text=text, command=_verb("convert-to-bf16", path))
    return Advice(way=Way.LOADS, text="loads as it is with from_pretrained")


def _exported(checkpoint: Checkpoint) -> Advice:
    """Files that only become a directory by being written anew."""
    command = shlex.join(["milepost", "export", str(checkpoint.path), "OUT"])
    text = f"a {checkpoint.layout.value} checkpoint; it becomes a directory by"
    config = checkpoint.info.model_config
    if not (isinstance(config, Mapping) and "model_type" in config):
        text = (
            f"a {checkpoint.layout.value} checkpoint without a transformers configuration; put the "
            "model's config.json into the directory that it becomes by"
        )
    return Advice(way=Way.OTHER_LAYOUT, text=text, command=command)


def _verb(name: str, path: Path, *more: str, option: str = "--input-dir") -> str:
    return shlex.join(["milepost", name, option, str(path), *more, "--output-dir", "OUT"])


def foreign_slices(checkpoint: Checkpoint) -> TensorSet | None:
    """The files of an `ep_sharded` save that has no manifest; None for everything else."""
    if checkpoint.layout is not Layout.HUGGING_FACE or not checkpoint.path.is_dir():
        return None
    found = TensorSet(checkpoint.path, "model")
    return found if found.is_ep_sharded else None


def _is_sliced(checkpoint: Checkpoint) -> bool:
    if isinstance(checkpoint, DirectoryCheckpoint):
        return any(checkpoint.weights(key).is_ep_sharded for key in checkpoint.model_keys())
    return foreign_slices(checkpoint) is not None


def _needs(checkpoint: Checkpoint) -> list[str]:
    if isinstance(checkpoint, DirectoryCheckpoint):
        return list(checkpoint.manifest.needs)
    return [name for name in SIDECARS if (checkpoint.path / name).is_file()]


def _made_by(checkpoint: Checkpoint) -> Any:
    made = (checkpoint.info.extra.get("provenance") or {}).get("made_by") or {}
    return made.get("verb")


def _config(directory: Path) -> dict[str, Any]:
    try:
        document = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}

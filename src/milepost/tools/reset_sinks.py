"""`reset_sinks`: attention sinks made ineffective, and no other byte of the weights changed."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path

import msgspec
import torch

from milepost.errors import FormatError, InvalidInputError
from milepost.format import strictjson
from milepost.format.manifest import DIGESTS_NAME, MANIFEST_NAME, Manifest
from milepost.format.places import shown
from milepost.hf.router_slots import SINKS
from milepost.hf.sidecar_files import PROVENANCE, SINKS_KEY, SinkPolicy
from milepost.hf.training_sidecars import NEUTRAL_SINK
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.storage.fileops import PathLike
from milepost.tools.carried import Carried, carried_files
from milepost.tools.rewrite.dtypes import FLOATS, torch_type
from milepost.tools.rewrite.groups import Group, by_rows, passed
from milepost.tools.rewrite.options import RewriteOptions, Untouched
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Parts, Rewrite
from milepost.tools.rewrite.run import Target, run_rewrite
from milepost.tools.rewrite.source import Source, SourceTensor, open_source

_NOT_CARRIED = (MANIFEST_NAME, DIGESTS_NAME)


class Place(Enum):
    """Where the result goes."""

    OUTPUT = "output"
    IN_PLACE = "in-place"


def reset_sinks(
    source: PathLike,
    output: PathLike | None = None,
    *,
    place: Place = Place.OUTPUT,
    untouched: Untouched | None = None,
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Set every attention sink of `source` to a logit that takes no attention.

    The files of the weights stay as they are, tensor by tensor; those without sinks are copied, or
    linked (`untouched`; in place they are linked by default). `training_provenance.json` says then
    that sinks are neutralised. In place, the directory with everything in it, training state
    included, is exchanged for the new one at once. One of `output` and in place must be given.
    """
    in_place = place is Place.IN_PLACE
    if in_place == (output is not None):
        raise InvalidInputError("reset-sinks: give an output directory or --in-place, one of them")
    opened = open_source(source)
    if in_place and (opened.set is None or not opened.path.is_dir()):
        raise InvalidInputError(
            f"{opened.path}: in place needs a directory with safetensors parts", path=opened.path
        )
    sinks = [t for t in opened.tensors.values() if t.name.rpartition(".")[2] == SINKS]
    rewrite = Rewrite(
        verb="reset-sinks",
        sources=[opened],
        groups=[_group(tensor) for tensor in opened.tensors.values()],
        parts=Parts.KEEP,
        stem=opened.set.stem if opened.set is not None else "model",
        counts={"sinks": len(sinks)},
        arguments={"value": NEUTRAL_SINK},
    )
    if not sinks:
        rewrite.notes.append("there are no attention sinks; nothing changes")
    carried = carried_files(opened.checkpoint)
    if in_place:
        _carry_everything(opened, carried)
        rewrite.edit_manifest = lambda manifest: _inherit(opened, manifest)
    if sinks:
        _state_policy(carried)
    rewrite.aux = carried
    return run_rewrite(
        rewrite,
        opened.path if output is None else output,
        options,
        target=Target.IN_PLACE if in_place else Target.NEW,
        untouched=untouched or (Untouched.LINK if in_place else Untouched.COPY),
    )


def _group(tensor: SourceTensor) -> Group:
    if tensor.name.rpartition(".")[2] != SINKS or tensor.dtype not in FLOATS:
        return passed(tensor)
    dtype = torch_type(tensor.dtype)
    return by_rows(
        tensor,
        lambda values: torch.full(values.shape, NEUTRAL_SINK, dtype=dtype),
        dtype=tensor.dtype,
    )


def _state_policy(carried: Carried) -> None:
    """The provenance file says that sinks are neutralised."""
    place = carried.paths.pop(PROVENANCE, None)
    document = {} if place is None else strictjson.loads(place.read_bytes(), where=str(place))
    if not isinstance(document, dict):
        raise FormatError(f"{place}: expected an object, found {shown(document)}", path=place)
    document[SINKS_KEY] = SinkPolicy.NEUTRALIZED.value
    carried.documents[PROVENANCE] = json.dumps(document, indent=2).encode() + b"\n"


def _carry_everything(source: Source, carried: Carried) -> None:
    """All files of the directory but its weights and its manifest."""
    assert source.set is not None
    skipped = {*source.set.part_names, source.set.index_path.name, *_NOT_CARRIED}
    for path in sorted(source.path.rglob("*")):
        name = path.relative_to(source.path).as_posix()
        if path.is_file() and name not in skipped and name not in carried.names:
            carried.paths[name] = Path(path)
    if isinstance(source.checkpoint, DirectoryCheckpoint):
        carried.roles = {entry.name: entry.role for entry in source.checkpoint.manifest.files}


def _inherit(source: Source, manifest: Manifest) -> None:
    """Everything that a manifest says of training, which goes on as before."""
    if not isinstance(source.checkpoint, DirectoryCheckpoint):
        return
    own = ("checkpoint_id", "created", "writer", "files", "needs", "notes", "provenance", "linked")
    for name in msgspec.structs.fields(Manifest):
        if name.encode_name not in own:
            value = getattr(source.checkpoint.manifest, name.encode_name)
            setattr(manifest, name.encode_name, value)

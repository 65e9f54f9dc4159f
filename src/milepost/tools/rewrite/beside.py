"""The files beside the weights of an output, and its manifest."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from milepost.checkpointing.files import PlannedFile, document_file
from milepost.checkpointing.numbers import recorded_metrics
from milepost.checkpointing.provenance import writer
from milepost.engine.write import Piece
from milepost.format.header import read_header
from milepost.format.manifest import Manifest, ModelEntry, Role, StateEntry
from milepost.format.tree import encode
from milepost.hf.aux_files import CARD, CONFIG
from milepost.hf.foreign_calls import attempt
from milepost.hf.model_config import encode as encode_config
from milepost.hf.model_config import set_dtype
from milepost.layouts.directory import PRIMARY, DirectoryCheckpoint
from milepost.tools.carried import Carried
from milepost.tools.rewrite.cards import related
from milepost.tools.rewrite.dtypes import FLOATS
from milepost.tools.rewrite.lone_adapter import lone_adapter
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.sources import FileRange


def edited(rewrite: Rewrite) -> Carried:
    """What is carried, with config.json and the card as the rewrite wants them."""
    carried = rewrite.carried()
    _edit_config(rewrite, carried)
    if rewrite.relation is not None:
        relation = rewrite.relation
        where = carried.paths.get(CARD, Path(CARD))
        card = _content(carried, CARD)
        made, problem = attempt(lambda: related(card, relation, where=where))
        if made is not None:
            _put(carried, CARD, made)
        if problem is not None:
            carried.notes.append(f"model card: its base models are not stated: {problem}")
    return carried


def _content(carried: Carried, name: str) -> bytes | None:
    if name in carried.documents:
        return carried.documents[name]
    return carried.paths[name].read_bytes() if name in carried.paths else None


def _put(carried: Carried, name: str, data: bytes) -> None:
    carried.paths.pop(name, None)
    carried.documents[name] = data


def _edit_config(rewrite: Rewrite, carried: Carried) -> None:
    """config.json as the verb edits it, its dtype that of most weights when they have changed.

    One that nothing changes keeps its bytes.
    """
    raw = _content(carried, CONFIG)
    if raw is None:
        return
    document, problem = attempt(lambda: json.loads(raw))
    if not isinstance(document, dict):
        carried.notes.append(f"config.json: carried as it is: {problem or 'it is no object'}")
        return
    before = json.dumps(document, sort_keys=True)
    if rewrite.edit_config is not None:
        carried.notes += rewrite.edit_config(document)
    dtype = new_dtype(rewrite)
    if dtype is not None:
        set_dtype(document, [dtype])
    if json.dumps(document, sort_keys=True) != before:
        _put(carried, CONFIG, encode_config(document))


def new_dtype(rewrite: Rewrite) -> str | None:
    """The float type of most weights, when other types are there than in the first source, when
    values were made of codes, or when the verb wants it stated."""
    before, after = dict.fromkeys(FLOATS, 0), dict.fromkeys(FLOATS, 0)
    tensors = rewrite.sources[0].tensors.values()
    for tensor in tensors:
        if tensor.dtype in before:
            before[tensor.dtype] += prod(tensor.shape)
    for spec in (spec for group in rewrite.groups for spec in group.outputs):
        if spec.dtype in after:
            after[spec.dtype] += prod(spec.shape)
    most = max(FLOATS, key=lambda dtype: after[dtype])
    is_decoded = any(tensor.stored_dtype != tensor.dtype for tensor in tensors)
    same_types = [bool(n) for n in before.values()] == [bool(n) for n in after.values()]
    same_most = most == max(FLOATS, key=lambda dtype: before[dtype])
    is_same = same_types and same_most and not is_decoded and not rewrite.states_dtype
    return None if is_same or not after[most] else most


def copied_file(name: str, path: Path, role: Role) -> PlannedFile:
    """A file that is copied as it is; digests of a safetensors file are cut at its tensors."""
    nbytes = path.stat().st_size
    borders = [0, nbytes]
    if name.endswith(".safetensors"):
        header = read_header(path)
        ends = (header.data_start + entry.end for entry in header.tensors.values())
        borders = sorted({0, header.data_start, *ends})
    pieces = tuple(
        Piece(start=start, source=FileRange(path, start, end - start))
        for start, end in pairwise(borders)
    )
    return PlannedFile(name=name, role=role, nbytes=nbytes, pieces=pieces)


def beside_files(carried: Carried) -> list[PlannedFile]:
    """What is carried, as files to write."""
    files = [copied_file(name, path, carried.role(name)) for name, path in carried.paths.items()]
    return files + [
        document_file(name, data, carried.role(name)) for name, data in carried.documents.items()
    ]


def manifest_of(rewrite: Rewrite, carried: Carried) -> Manifest:
    """The manifest of the output, its files still to be filled in."""
    main = rewrite.sources[0]
    info = main.checkpoint.info
    is_directory = isinstance(main.checkpoint, DirectoryCheckpoint)
    key, entry = _model(rewrite, huggingface=CONFIG in carried.names)
    config = info.model_config
    return Manifest(
        checkpoint_id=uuid.uuid4().hex,
        parent_id=info.checkpoint_id,
        step=info.step or 0,
        epoch=info.epoch,
        created=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        metrics=recorded_metrics(info.metrics),
        writer=writer(),
        mesh={"axes": {}, "world_size": 1},
        models={key: entry},
        state={key: StateEntry(kind="model")},
        model_config=config if is_directory or config is None else encode(config, key="config"),
        needs=carried.needs,
        notes=list(carried.notes),
        provenance=_provenance(rewrite),
    )


def _model(rewrite: Rewrite, *, huggingface: bool) -> tuple[str, ModelEntry]:
    """The key of the model and what the manifest says of it.

    Where all names and shapes stay, so does what says which parameters lie there: views, and what
    a lone adapter is.
    """
    entry = ModelEntry(prefix="", stem=rewrite.stem, huggingface=huggingface, tied=rewrite.ties)
    checkpoint = rewrite.sources[0].checkpoint
    if not isinstance(checkpoint, DirectoryCheckpoint) or not checkpoint.manifest.models:
        return PRIMARY, entry
    key = checkpoint.model_keys()[0]
    if not rewrite.keeps_names:
        return key, entry
    views, adapter = checkpoint.model_entry(key).views, lone_adapter(checkpoint)
    return key, msgspec.structs.replace(entry, views=views, adapter=adapter)


def _provenance(rewrite: Rewrite) -> dict[str, Any]:
    """The verb, its arguments and its inputs; of the first input, what that knows of itself.

    What made the first input is the last of `made_before`.
    """
    inherited = dict(rewrite.sources[0].checkpoint.info.extra.get("provenance") or {})
    before = inherited.pop("made_by", None)
    if before is not None:
        inherited["made_before"] = [*inherited.get("made_before", []), before]
    return {
        **inherited,
        **rewrite.provenance,
        "made_by": {
            "verb": rewrite.verb,
            "arguments": dict(rewrite.arguments),
            "inputs": [source.identity() for source in rewrite.sources],
        },
    }

"""`milepost show`: what one checkpoint holds, without reading a byte of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.checkpointing.phases_text import phases_text
from milepost.cli.answer import Answer
from milepost.cli.show_advice import Advice, advice_of, foreign_slices
from milepost.cli.text import age, counted, human, metrics_text, number, pairs, table
from milepost.errors import CheckpointError
from milepost.layouts.checkpoint import Checkpoint, TensorInfo
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.manager.retention import age_s

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 3


class Detail(Enum):
    SUMMARY = "summary"
    TENSORS = "tensors"


def show_answer(path: Path, *, detail: Detail = Detail.SUMMARY) -> Answer:
    """Describe the checkpoint at `path`."""
    checkpoint = Checkpoint.open(path)
    advice = advice_of(checkpoint, _weights(checkpoint))
    document = {**_document(checkpoint), "advice": advice.document()}
    if detail is Detail.TENSORS:
        document["tensors"] = [
            *(_tensor(*item, "weights") for item in _weights(checkpoint).items()),
            *(_tensor(*item, "state") for item in _state_tensors(checkpoint).items()),
        ]
    return Answer(document=document, show=partial(_show, document=document, advice=advice))


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    info = checkpoint.info
    return {
        "path": checkpoint.path,
        "layout": checkpoint.layout,
        "dialect": info.dialect,
        "format_version": info.format_version,
        "step": info.step,
        "epoch": info.epoch,
        "loss": info.loss,
        "best_loss": info.best_loss,
        "created": info.created,
        "age_s": age_s(info.created),
        "checkpoint_id": info.checkpoint_id,
        "generation": info.generation,
        "metrics": info.metrics,
        "nbytes": checkpoint.nbytes,
        "nbytes_by_role": _by_role(checkpoint),
        "weights": _summary(_weights(checkpoint)),
        "tied": checkpoint.tied,
        "models": _models(checkpoint),
        "state": _state(checkpoint),
        "model_config": info.model_config,
        "problems": _problems(checkpoint),
        "files": [
            {"name": file.name, "nbytes": file.nbytes, "role": file.role}
            for file in checkpoint.files()
        ],
        **info.extra,
    }


def _weights(checkpoint: Checkpoint) -> Mapping[str, TensorInfo]:
    """What lies in the files, slices per rank as well."""
    if isinstance(checkpoint, DirectoryCheckpoint):
        return checkpoint.weights().listed if checkpoint.manifest.models else {}
    slices = foreign_slices(checkpoint)
    return checkpoint.tensors() if slices is None else slices.listed


def _by_role(checkpoint: Checkpoint) -> dict[str, int]:
    total: Counter[str] = Counter()
    for file in checkpoint.files():
        total[file.role] += file.nbytes
    return dict(total)


def _summary(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Counts of a set of tensors: by dtype, the elements and bytes."""
    dtypes: dict[str, dict[str, int]] = {}
    for info in tensors.values():
        row = dtypes.setdefault(info.dtype, {"tensors": 0, "parameters": 0, "nbytes": 0})
        row["tensors"] += 1
        row["parameters"] += prod(info.shape)
        row["nbytes"] += info.nbytes
    return {
        "tensors": len(tensors),
        "parameters": sum(row["parameters"] for row in dtypes.values()),
        "nbytes": sum(row["nbytes"] for row in dtypes.values()),
        "dtypes": dtypes,
    }


def _models(checkpoint: Checkpoint) -> dict[str, Any]:
    """Each model of a directory, which may hold several."""
    if not isinstance(checkpoint, DirectoryCheckpoint):
        return {}
    return {
        key: {
            "directory": entry.prefix or ".",
            "hugging_face": entry.huggingface,
            "sliced": checkpoint.weights(key).is_ep_sharded,
            **_summary(checkpoint.weights(key).listed),
        }
        for key in checkpoint.model_keys()
        for entry in [checkpoint.model_entry(key)]
    }


def _state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the training state consists of: per key its kind and the tensors of its own."""
    if not isinstance(checkpoint, DirectoryCheckpoint):
        tensors = _state_tensors(checkpoint)
        groups: dict[str, dict[str, TensorInfo]] = {}
        for name, info in tensors.items():
            groups.setdefault(name.partition(".")[0], {})[name] = info
        return {key: _summary(group) for key, group in groups.items()}
    found: dict[str, Any] = {}
    for key, entry in checkpoint.manifest.state.items():
        found[key] = {"kind": entry.kind, "class": entry.class_name}
        own = checkpoint.state_set(key)
        if own is not None:
            found[key] |= _summary(own.tensors)
    return found


def _state_tensors(checkpoint: Checkpoint) -> Mapping[str, TensorInfo]:
    """Tensors of the training state; none when its file is broken, `problems` says so."""
    try:
        return checkpoint.state_tensors()
    except CheckpointError:
        return {}


def _problems(checkpoint: Checkpoint) -> list[str]:
    """What is seen to be wrong without reading tensors."""
    if isinstance(checkpoint, DirectoryCheckpoint):
        return [f"{entry.name} {how}" for entry, how in checkpoint.damage]
    try:
        checkpoint.state_tensors()
    except CheckpointError as error:
        return [str(error)]
    return []


def _tensor(name: str, info: TensorInfo, role: str) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": info.dtype,
        "shape": info.shape,
        "nbytes": info.nbytes,
        "part": info.file,
        "role": role,
    }


# ---- for people


def _show(console: Console, *, document: dict[str, Any], advice: Advice) -> None:
    console.print(str(document["path"]), style="bold", soft_wrap=True)
    hub = ("hub", advice.line)
    pairs(console, [*_identity(document), *_content(document), hub, *_origin(document)])
    for problem in document["problems"]:
        console.print(f"problem: {problem}", style="red", soft_wrap=True)
    if document.get("tensors") is not None:
        _show_tensors(console, document["tensors"])


def _identity(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    layout = document["layout"].value
    version = document["format_version"]
    dialect = document["dialect"]
    described = [layout, f"format {version}" if version else "", str(dialect) if dialect else ""]
    metrics = dict(document["metrics"])
    for name in ("loss", "best_loss"):
        if document[name] is not None:
            metrics.setdefault(name, document[name])
    created = document["created"]
    return [
        ("layout", ", ".join(dict.fromkeys(text for text in described if text))),
        ("step", "" if document["step"] is None else str(document["step"])),
        ("epoch", "" if document["epoch"] is None else number(document["epoch"])),
        ("created", f"{created} ({age(document['age_s'])} ago)" if created else ""),
        ("id", _lineage(document)),
        ("metrics", metrics_text(metrics, limit=50)),
    ]


def _lineage(document: Mapping[str, Any]) -> str:
    if document["checkpoint_id"] is None:
        return ""
    parent = document.get("parent_id")
    text = document["checkpoint_id"] + (f", parent {parent}" if parent else "")
    generation = document["generation"]
    return f"{text}, generation {generation}" if generation else text


def _content(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    roles = ", ".join(f"{role} {human(n)}" for role, n in document["nbytes_by_role"].items())
    files = counted(len(document["files"]), "file")
    rows = [("size", f"{human(document['nbytes'])} in {files}: {roles}")]
    models = document["models"] or {"weights": document["weights"]}
    for key, summary in models.items():
        rows.append((key, _model_text(summary)))
    tied = document["tied"]
    ties = [f"{name} = {kept}" for name, kept in list(tied.items())[:_SHOWN]]
    rows.append(("tied", _listed(ties, len(tied))))
    for key, entry in document["state"].items():
        if entry.get("kind") != "model":
            rows.append((key, _state_text(entry)))
    rows.append(("needs", ", ".join(document.get("needs") or ())))
    return rows


def _model_text(summary: Mapping[str, Any]) -> str:
    dtypes = summary["dtypes"]
    by_dtype = ", ".join(f"{name} {row['parameters']:,}" for name, row in dtypes.items())
    text = f"{summary['parameters']:,} parameters in {counted(summary['tensors'], 'tensor')}, "
    text += f"{human(summary['nbytes'])}: {by_dtype or 'none'}"
    if "directory" in summary:
        place = "at the root" if summary["directory"] == "." else f"in {summary['directory']}/"
        text += f"; {place}"
        text += ", loads with from_pretrained" if summary["hugging_face"] else ""
        text += ", slices per rank: milepost merge-ep-shards" if summary["sliced"] else ""
    return text


def _state_text(entry: Mapping[str, Any]) -> str:
    text = ", ".join(str(part) for part in (entry.get("kind"), entry.get("class")) if part)
    if entry.get("tensors"):
        dtypes = ", ".join(entry["dtypes"])
        own = f"{counted(entry['tensors'], 'tensor')}, {human(entry['nbytes'])}: {dtypes}"
        text = f"{text}: {own}" if text else own
    return text


def _listed(shown: Sequence[str], count: int) -> str:
    more = f", and {count - len(shown)} more" if count > len(shown) else ""
    return ", ".join(shown) + more


def _origin(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    provenance = document.get("provenance") or {}
    rows = [("written by", _values(document.get("writer")))]
    rows.append(("command", " ".join(map(str, provenance.get("command") or ()))))
    git = provenance.get("git")
    if isinstance(git, Mapping):
        rows.append(("git", f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}"))
    rows.append(("host", str(provenance.get("host") or "")))
    rows.append(("seeds", _values(provenance.get("seeds"))))
    rows.append(("packages", _values(provenance.get("packages"))))
    rows.append(("topology", _values(document.get("fingerprint"))))
    rows.append(("stages", _stages(document.get("pp_stage_partition"))))
    rows.append(("exactness", _values(document.get("exactness"))))
    moved = document.get("phase_nbytes") or {}
    rows.append(("save", phases_text(document.get("phases") or {}, moved)))
    rows.append(("linked", ", ".join(document.get("linked") or ())))
    rows += [("note", str(note)) for note in document.get("notes") or ()]
    return rows


def _values(values: Any) -> str:
    if not isinstance(values, Mapping):
        return ""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _stages(partition: Any) -> str:
    """Layers of each pipeline stage, `model: 0 to 16 | 16 to 32`, the end exclusive."""
    if not isinstance(partition, Mapping):
        return ""
    texts = []
    for key, stages in partition.items():
        spans = [
            " and ".join(f"{a} to {b}" for a, b in zip(s[::2], s[1::2], strict=True))
            for s in stages
        ]
        texts.append(f"{key}: {' | '.join(span or 'none' for span in spans)}")
    return ", ".join(texts)


def _show_tensors(console: Console, tensors: Sequence[Mapping[str, Any]]) -> None:
    console.print()
    made = table("tensor", "dtype", "shape", "size", "part", right=("dtype", "size"))
    for tensor in tensors:
        made.add_row(
            tensor["name"],
            tensor["dtype"],
            "x".join(map(str, tensor["shape"])) or "scalar",
            human(tensor["nbytes"]),
            tensor["part"],
        )
    console.print(made)

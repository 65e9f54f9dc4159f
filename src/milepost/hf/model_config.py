"""The content of config.json: what the class says, set right for what was really saved."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from milepost.hf.foreign_calls import attempt
from milepost.hf.live import live_class, source_directory

# Other float types (float8, float4) are storage of quantised weights, never the model's dtype.
_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "tok_embeddings.weight")


def config_document(
    model: Any, config: Any, *, ties: Mapping[str, str] | None, dtype_names: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """The content of config.json for `model` (unwrapped), and what the caller should report.

    `ties` maps each name that was left out to the saved name that holds its tensor; None means
    that nobody looked, and leaves `tie_word_embeddings` alone. The live objects are not changed.
    """
    notes: list[str] = []
    document, problem = attempt(lambda: json.loads(config.to_json_string()))
    if document is None:
        document, notes = _salvaged(config, str(problem))
    cls = live_class(model)
    if cls is not None:
        document["architectures"] = [cls.__name__]
    notes += _set_model_type(document, config)
    notes += set_dtype(document, dtype_names, current=_dtype_of(config))
    if ties is not None:
        notes += _set_tied_flag(document, model, ties)
    return document, notes


def encode(document: Mapping[str, Any]) -> bytes:
    """The bytes of a Hugging Face configuration file: indent 2, sorted keys, final newline."""
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def set_dtype(
    document: dict[str, Any], dtype_names: Iterable[str], *, current: str | None = None
) -> list[str]:
    """Write the dtype of the saved weights into `document`, in the old and the new spelling.

    `dtype_names` is one name per tensor (`bfloat16` or `BF16`); the most frequent wins, then
    `current`, the one that the configuration had. Sub-configurations that state a dtype follow.
    """
    names = [name.removeprefix("torch.") for name in dtype_names]
    counts = Counter(_DTYPES[name] for name in names if name in _DTYPES)
    if not counts:
        return []
    chosen = max(sorted(counts), key=lambda name: (counts[name], name == current))
    _write_dtype(document, chosen)
    if len(counts) == 1:
        return []
    return [
        f"config.json: the weights have several dtypes ({', '.join(sorted(counts))}); "
        f"dtype is set to {chosen}"
    ]


def _write_dtype(document: dict[str, Any], dtype: str) -> None:
    # transformers before 4.56 and many servers read torch_dtype only; later ones prefer dtype.
    document["dtype"] = document["torch_dtype"] = dtype
    for key, value in document.items():
        if not key.endswith("_config") or not isinstance(value, dict):
            continue
        if isinstance(value.get("dtype", value.get("torch_dtype")), str):
            _write_dtype(value, dtype)


def _dtype_of(config: Any) -> str | None:
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _salvaged(config: Any, problem: str) -> tuple[dict[str, Any], list[str]]:
    """A configuration that its own class cannot serialise, without the values in the way."""
    kept, dropped = {}, []
    for key, value in vars(config).items():
        if key.startswith("_"):
            continue
        text, error = attempt(lambda value=value: json.dumps(value))  # type: ignore[misc]
        if error is None:
            kept[key] = json.loads(str(text))
        else:
            dropped.append(key)
    note = (
        f"config.json: {type(config).__name__} could not be serialised ({problem}); "
        f"written without {', '.join(sorted(dropped)) or 'its defaults'}"
    )
    return kept, [note]


def _set_model_type(document: dict[str, Any], config: Any) -> list[str]:
    """Some vendor configuration classes omit `model_type`, and no loader can do without."""
    if document.get("model_type"):
        return []
    source = source_directory(config)
    found = getattr(config, "model_type", "") or _model_type_in(source)
    if found:
        document["model_type"] = found
        return []
    return [
        f"config.json: {type(config).__name__} states no model_type, so AutoConfig cannot load it; "
        f"give the class a model_type"
    ]


def _model_type_in(source: Path | None) -> str:
    if source is None or not (source / "config.json").is_file():
        return ""
    document, _ = attempt(lambda: json.loads((source / "config.json").read_bytes()))
    value = document.get("model_type") if isinstance(document, dict) else None
    return value if isinstance(value, str) else ""


def _set_tied_flag(document: dict[str, Any], model: Any, ties: Mapping[str, str]) -> list[str]:
    """Make `tie_word_embeddings` say what the files say: one tensor for both, or two."""
    head = _weight_name(model, "get_output_embeddings")
    embedding = _weight_name(model, "get_input_embeddings")
    if head is None or embedding is None:
        return []
    flag = bool(document.get("tie_word_embeddings", False))
    tied = head == embedding or _connects(ties, head, embedding)
    if flag == tied:
        return []
    document["tie_word_embeddings"] = tied
    how = "are one tensor, saved once" if tied else "are separate tensors, both saved"
    return [
        f"config.json: {head} and {embedding} {how}; tie_word_embeddings is set to "
        f"{str(tied).lower()} (the model's configuration says {str(flag).lower()})"
    ]


def _weight_name(model: Any, getter: str) -> str | None:
    """The parameter name of the input or output embedding of the live model."""
    if not callable(getattr(model, getter, None)):
        return None
    wanted, _ = attempt(getattr(model, getter))
    if wanted is None or getattr(wanted, "weight", None) is None:
        return None
    for name, module in model.named_modules():
        if module is wanted:
            return f"{name}.weight" if name else "weight"
    return None


def _connects(ties: Mapping[str, str], head: str, embedding: str) -> bool:
    """Whether a tie joins the two; by suffix, because saved names may differ from live ones."""
    wanted = {_suffix(head), _suffix(embedding)}
    groups: dict[str, set[str]] = {}
    for alias, saved in ties.items():
        groups.setdefault(saved, {_suffix(saved)}).add(_suffix(alias))
    return any(wanted <= group for group in groups.values())


def _suffix(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def check_tied_flag(
    document: dict[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    same_values: Callable[[str, str], bool],
) -> list[str]:
    """Set `tie_word_embeddings` to false when head and embedding are both saved and differ.

    `shapes` has the saved names; `same_values` compares two saved tensors of equal shape. Nothing
    is changed when more than one head or embedding could be meant; the notes say so.
    """
    if not document.get("tie_word_embeddings", False):
        return []
    heads = [name for name in shapes if _ends_with(name, _HEADS)]
    embeddings = [name for name in shapes if _ends_with(name, _EMBEDDINGS)]
    if not heads or not embeddings:
        return []
    if len(heads) > 1 or len(embeddings) > 1:
        return [
            f"config.json: tie_word_embeddings left as it is: {len(heads)} heads "
            f"({', '.join(heads)}) and {len(embeddings)} embeddings ({', '.join(embeddings)})"
        ]
    head, embedding = heads[0], embeddings[0]
    if shapes[head] == shapes[embedding] and same_values(head, embedding):
        return []
    document["tie_word_embeddings"] = False
    return [f"config.json: {head} and {embedding} differ; tie_word_embeddings is set to false"]


def _ends_with(name: str, suffixes: Iterable[str]) -> bool:
    return any(name == suffix or name.endswith("." + suffix) for suffix in suffixes)

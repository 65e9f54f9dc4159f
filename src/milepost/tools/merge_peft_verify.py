"""`--verify`: the merged model against base and adapter, both run by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from milepost.errors import InvalidInputError
from milepost.hf.foreign_calls import attempt
from milepost.tools.merge_peft_adapter import OpenedAdapter
from milepost.tools.merge_peft_config import MergeTask
from milepost.tools.merge_peft_live import are_plain, put_adapters
from milepost.tools.rewrite.source import open_source

TOKENS = 24
TEXT = (
    "An adapter is a small change to a large model. What it says must not change when it is folded "
    "in: not here (3 + 4 = 7), nor in def double(x): return 2 * x, nor in a list of Ada, Bo and Cy."
)
TOLERANCE = {"F32": 1e-4, "F64": 1e-4, "F16": 1e-2, "BF16": 5e-2}
"""The largest norm of the difference of outputs, over that of the outputs, by the dtype of the
merged weights: what rounding each weight once makes of them."""


def unverifiable(adapters: Sequence[OpenedAdapter]) -> list[str]:
    """Why peft cannot run some adapters together, or at weights, by their configurations."""
    if are_plain(adapters):
        return []
    of_peft = {a.where: a.config.lora for a in adapters if a.config.lora is not None}
    problems = [
        f"{where}: bias is {lora.bias!r}, and peft writes trained biases over those of the base, "
        "so it runs such an adapter alone, at weight 1"
        for where, lora in of_peft.items()
        if lora.bias != "none"
    ]
    told = {
        "target_parameters": {frozenset(lora.target_parameters) for lora in of_peft.values()},
        "trainable_token_indices": {frozenset(lora.tokens) for lora in of_peft.values()},
    }
    problems += [
        f"{' and '.join(of_peft)}: {field} are of other parts of the model, and peft runs several "
        "adapters only where they are of the same"
        for field, values in told.items()
        if len(values) > 1
    ]
    return [f"--verify: {problem}; leave it out" for problem in problems]


def verify_outputs(
    base: Path, adapters: Sequence[OpenedAdapter], merged: Path, task: MergeTask
) -> list[str]:
    """Run both in fp32 on text (where there is a tokenizer) and on ids from all over the
    vocabulary; what is to be told about it.

    `InvalidInputError` when the outputs are further apart than rounding explains, or transformers
    or peft are not installed, or cannot run the adapters. Loads the base and the merged model, one
    after the other.
    """
    try:
        import peft  # noqa: F401 - known before models are loaded
        import transformers
    except ImportError as error:
        raise InvalidInputError(
            f"--verify runs transformers and peft, and {error.name} is not installed; leave it out"
        ) from error
    kinds = {
        MergeTask.CAUSAL_LM: transformers.AutoModelForCausalLM,
        MergeTask.CLASSIFICATION: transformers.AutoModelForSequenceClassification,
    }
    kind: Any = kinds[task]
    after = kind.from_pretrained(merged, dtype=torch.float32).eval()
    rows = _rows(merged, after.config)
    found = _output(after, rows)
    labels = {"num_labels": after.config.num_labels} if task is MergeTask.CLASSIFICATION else {}
    del after
    model = kind.from_pretrained(base, dtype=torch.float32, **labels)
    wanted_rows = _rows_of_adapters(adapters)
    if wanted_rows is not None and wanted_rows != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(wanted_rows)
    expected = _output(put_adapters(model, adapters).eval(), rows)
    off = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    limit = max(TOLERANCE[name] for name in _dtypes(merged))
    whose = "the adapter" if len(adapters) == 1 else "the adapters"
    if not off <= limit:
        raise InvalidInputError(
            f"the outputs of the merged model differ from those of {whose} by {off:.3g} of "
            f"their norm, more than rounding explains ({limit:g}); nothing was kept: is the base "
            f"the one that {whose} {'was' if len(adapters) == 1 else 'were'} trained on?"
        )
    counts = " and ".join(f"{row.numel()} {what}" for what, row in rows.items())
    return [
        f"verified on {counts}: outputs differ from those of {whose} by "
        f"{off:.3g} of their norm (at most {limit:g})"
    ]


def _rows(directory: Path, config: Any) -> dict[str, torch.Tensor]:
    """Rows of ids, [1, length], by what they are."""
    text = config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    ids = torch.linspace(0, text.vocab_size - 1, TOKENS).long()
    if padding is not None:
        ids = ids.masked_fill(ids == padding, (padding + 1) % 2)
    rows = {"tokens from all over the vocabulary": ids.view(1, -1)}
    encoded, _ = attempt(partial(_encoded, directory))
    known = [token for token in encoded or () if token < text.vocab_size and token != padding]
    return rows | ({"tokens of text": torch.tensor([known])} if known else {})


def _encoded(directory: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return list(tokenizer(TEXT)["input_ids"])


def _output(model: Any, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad(), torch.nn.utils.parametrize.cached():
        logits = [model(input_ids=ids).logits.double().flatten() for ids in rows.values()]
    return torch.cat(logits)


def _rows_of_adapters(adapters: Sequence[OpenedAdapter]) -> int | None:
    """The rows of an embedding that an adapter brings along."""
    rows = (
        tensor.shape[0]
        for adapter in adapters
        for name, tensor in adapter.source.tensors.items()
        if name.endswith(("embed_tokens.weight", "embed_tokens.base_layer.weight"))
    )
    return next(rows, None)


def _dtypes(directory: Path) -> set[str]:
    with open_source(directory) as source:
        return {tensor.dtype for tensor in source.tensors.values()} & TOLERANCE.keys()

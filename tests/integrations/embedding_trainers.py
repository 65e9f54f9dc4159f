"""Small trainers of sentence-transformers for tests, all from a random BERT in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import sentence_transformers
import torch
import transformers

from milepost.integrations.transformers import MilepostTrainerMixin
from tests.integrations.trainers import (
    EIGHT_STEPS,
    KillAt,
    bits,
    history,
    moments,
    tiny_tokenizer,
)


class Trainer(MilepostTrainerMixin, sentence_transformers.SentenceTransformerTrainer):  # type: ignore[misc]
    """The trainer of sentence-transformers with Milepost's checkpoints."""


def write_base(place: Path) -> Path:
    """A tiny BERT with its tokenizer."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=32,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def _chain(base: Path, *, norm: bool) -> Any:
    """Transformer, pooling, a projection and, if asked for, a norm."""
    from sentence_transformers.sentence_transformer import modules

    first = modules.Transformer(str(base), max_seq_length=16)
    torch.manual_seed(0)
    return sentence_transformers.SentenceTransformer(
        modules=[
            first,
            modules.Pooling(16),
            modules.Dense(in_features=16, out_features=8),
            *([modules.Normalize()] if norm else []),
        ],
        device="cpu",
    )


def _pairs(count: int = 16) -> Any:
    numbers = torch.randint(3, 32, (count, 8), generator=torch.Generator().manual_seed(0)).tolist()
    return datasets.Dataset.from_dict(
        {
            "anchor": [" ".join(f"w{n}" for n in row[:4]) for row in numbers],
            "positive": [" ".join(f"w{n}" for n in row[4:]) for row in numbers],
            "label": [index % 3 for index in range(count)],
        }
    )


def make(
    base: Path,
    out: Path,
    *,
    cls: Any = Trainer,
    kill_at: int = 0,
    classifier: bool = False,
    norm: bool = True,
    **more: Any,
) -> Any:
    from sentence_transformers.sentence_transformer import losses

    model = _chain(base, norm=norm)
    data = _pairs()
    if classifier:
        torch.manual_seed(3)
        loss = losses.SoftmaxLoss(model, embedding_dimension=8, num_labels=3)
    else:
        loss, data = losses.MultipleNegativesRankingLoss(model), data.remove_columns("label")
    kind = sentence_transformers.SentenceTransformerTrainingArguments
    args = kind(str(out), **{**EIGHT_STEPS, **more})
    return cls(model=model, args=args, train_dataset=data, loss=loss, callbacks=[KillAt(kill_at)])


def outcome(trainer: Any) -> tuple[list[dict[str, Any]], str, str]:
    """What two trainings that are the same agree on; the loss holds the model and what it trains
    besides."""
    return history(trainer), bits(trainer.loss), moments(trainer)

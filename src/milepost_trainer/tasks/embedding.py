"""`embedding`: texts that belong together come to lie together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from milepost_trainer.batches import Batch
from milepost_trainer.config import ConfigError, TrainerConfig
from milepost_trainer.parallel import Head, ParallelModel
from milepost_trainer.samples import NO_LOSS, Samples
from milepost_trainer.tasks import losses, rows
from milepost_trainer.tasks.base import LossTask, Mean, Outcome

MODULES = "modules.json"


class Embedding(LossTask):
    """Multiple-negatives ranking of mean-pooled texts, with cosine similarity.

    The candidates of an anchor are the positives of the whole global batch, on any mesh.
    """

    head = Head.NONE
    needs_pad = True

    def __init__(self, config: TrainerConfig, model: ParallelModel, tokenizer: Any) -> None:
        super().__init__(config, model, tokenizer)
        self._normalized = isinstance(config.base, Path) and _has_normalize(config.base)

    @staticmethod
    def read(config: TrainerConfig, files: Sequence[str], tokenizer: Any) -> Samples:
        return rows.embedding_samples(files, tokenizer, config.max_seq_length)

    def model_files(self) -> dict[str, bytes]:
        """What makes a pipeline of SentenceTransformer of it, in the spelling of every release."""
        hidden = self.model.configs[0].hidden_size
        found = _pipeline(self.config.max_seq_length, hidden, normalized=self._normalized)
        return {name: json.dumps(content, indent=2).encode() + b"\n" for name, content in found}

    def outcome(self, batch: Batch) -> Outcome:
        pooled = self._pooled(*(batch[key].flatten(0, 1) for key in ("input_ids", "labels")))
        anchors, positives = pooled.view(-1, 2, pooled.shape[-1]).unbind(1)
        candidates = self.model.rows_of_all(positives)
        own = torch.arange(len(anchors), device=anchors.device)
        own = own + self.model.data_rank * len(anchors)
        found = losses.ranking(anchors, candidates, own, scale=self.config.similarity_scale)
        with torch.no_grad():
            best = (torch.nn.functional.normalize(candidates, dim=-1) @ anchors.T).argmax(dim=0)
        return Outcome(
            found.sum() / self.global_rows(batch),
            {"accuracy": Mean((best == own).float().sum(), len(own))},
        )

    def _pooled(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean of the hidden states of all tokens that count, (rows, hidden)."""
        counted = labels != NO_LOSS
        mask = self.model.columns(counted)
        whole = mask if self.model.sizes.cp == 1 else None  # causal models need none
        hidden = self.model.outputs(self.model.columns(ids), attention_mask=whole).float()
        total = self.model.sum_over_context((hidden * mask[..., None]).sum(dim=1))
        return total / counted.sum(dim=1, keepdim=True).to(total)


def _pipeline(length: int, hidden: int, *, normalized: bool) -> Iterator[tuple[str, Any]]:
    """The files of a transformer, mean pooling and, if `normalized`, a normalization."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    yield (
        MODULES,
        [
            {
                "idx": number,
                "name": str(number),
                "path": f"{number}_{name}" if number else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for number, name in enumerate(modules)
        ],
    )
    yield "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False}
    yield (
        "1_Pooling/config.json",
        {
            "word_embedding_dimension": hidden,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    if normalized:
        yield "2_Normalize/config.json", {}


def _has_normalize(base: Path) -> bool:
    """Whether the base, if it is a SentenceTransformer, ends in a normalization.

    `ConfigError` when it is one that is more than a transformer, mean pooling and that.
    """
    path = base / MODULES
    if not path.is_file():
        return False
    kinds = {module["type"].rpartition(".")[2]: module["path"] for module in _read(path)}
    known = kinds.keys() <= {"Transformer", "Pooling", "Normalize"} and "Pooling" in kinds
    pooling = _read(base / kinds["Pooling"] / "config.json") if known else {}
    modes = [name for name in ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "lasttoken",
             "weightedmean_tokens") if pooling.get(f"pooling_mode_{name}")]  # fmt: skip
    if not known or modes or pooling.get("pooling_mode", "mean") != "mean":
        raise ConfigError(
            f"model_name_or_path: {path} is a pipeline of {', '.join(kinds)} with "
            f"{', '.join(modes) or pooling.get('pooling_mode', 'no')} pooling; task embedding "
            "trains a transformer with mean pooling; remove the file to train its transformer so"
        )
    return "Normalize" in kinds


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))

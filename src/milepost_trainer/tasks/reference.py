"""The frozen reference: what the base says about the data that the policy is trained on.

It is the base of the run, `model_name_or_path`, and never the policy, wherever that was resumed
from: a second copy on the same mesh, or its scores of all samples, computed once and kept in every
checkpoint as `reference_logps.pt`.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from milepost_trainer.batches import Batch, GlobalBatches
from milepost_trainer.config import ConfigError, TrainerConfig
from milepost_trainer.models import build_model
from milepost_trainer.parallel import ParallelModel, Role
from milepost_trainer.tasks.base import LossTask, Splits

REFERENCE_FILE = "reference_logps.pt"
COLUMN = "reference"
_SAMPLE_NBYTES = 1 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")

Score = Callable[[ParallelModel, Batch], torch.Tensor]


class Reference:
    """Scores of the base for batches, (samples, ...); part of the state, for its settings."""

    def __init__(self, config: TrainerConfig, vocabulary: int, score: Score) -> None:
        self._config, self._vocabulary, self._score = config, vocabulary, score
        self.settings = reference_settings(config)
        self._saved_settings = self.settings
        self._model = None if config.precompute_reference_logps else self._build()
        self._document: dict[str, Any] | None = None

    def _build(self) -> ParallelModel:
        return build_model(self._config, self._vocabulary, role=Role.FROZEN)

    def scores(self, batch: Batch) -> torch.Tensor:
        """Of this rank's samples. Collective, unless they were computed before."""
        if self._model is None:
            return batch[COLUMN]
        with torch.no_grad():
            return self._score(self._model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved_settings = state["settings"]

    def documents(self) -> dict[str, Any]:
        """`reference_logps.pt`, when scores are computed before the training."""
        return {} if self._document is None else {REFERENCE_FILE: self._document}

    def prepare(self, splits: Splits, checkpoint: Path | None) -> list[str]:
        """Check a resumed run's settings; restore or compute the scores, if they are to be kept.

        Collective. `ConfigError` when those of the checkpoint are of another base or other data.
        """
        _check_settings(self._saved_settings, self.settings)
        if not self._config.precompute_reference_logps:
            return [f"the frozen reference is {self.settings['from']}"]
        table = None if checkpoint is None else mp.read_sidecar(checkpoint, REFERENCE_FILE)
        if table is not None:
            _check_table(table, self.settings, splits)
        how = "computed with" if table is None else "restored, of"
        table = table or self._computed(splits)
        self._document = table
        for name, batches in splits.items():
            scores = table["splits"][name]["scores"]
            batches.samples = batches.samples.with_others(**{COLUMN: scores})
        count = sum(split["rows"] for split in table["splits"].values())
        return [f"reference scores of {count} samples {how} {self.settings['from']}"]

    def _computed(self, splits: Splits) -> dict[str, Any]:
        model = self._build()
        table = {name: self._of_split(model, batches) for name, batches in splits.items()}
        return {"settings": self.settings, "splits": table}

    def _of_split(self, model: ParallelModel, batches: GlobalBatches) -> dict[str, Any]:
        found = []
        with torch.no_grad():
            for batch, count in batches.in_order():
                found.append(model.rows_of_all(self._score(model, batch))[:count].cpu())
        return {
            "scores": torch.cat(found),
            "token_digests": batches.samples.digests(),
            "rows": len(batches.samples),
        }


class ReferenceTask(LossTask):
    """A task whose loss compares the policy with the frozen base."""

    def __init__(self, config: TrainerConfig, model: ParallelModel, tokenizer: Any) -> None:
        super().__init__(config, model, tokenizer)
        self.reference = Reference(config, len(tokenizer), self.score)

    @abstractmethod
    def score(self, model: ParallelModel, batch: Batch) -> torch.Tensor:
        """What a model says about this rank's samples, (samples, ...). Collective."""

    def prepare(self, splits: Splits, checkpoint: Path | None) -> list[str]:
        return self.reference.prepare(splits, checkpoint)

    def state(self) -> dict[str, Any]:
        return {"reference": self.reference}

    def documents(self) -> dict[str, Any]:
        return self.reference.documents()


def reference_settings(config: TrainerConfig) -> dict[str, Any]:
    """What scores depend on beside the samples; `from` is for people and may change."""
    base = config.base
    return {
        "task": config.task,
        "dtype": config.dtype,
        "base": _digest_of_path(base)
        if isinstance(base, Path)
        else _digest_of(json.dumps([base, config.seed], sort_keys=True).encode()),
        "from": str(base) if isinstance(base, Path) else f"random weights of seed {config.seed}",
    }


def _digest_of_path(base: Path) -> str:
    """Of a directory's configuration and weights: names, sizes, and the first and last MiB of each
    file, which any training changes."""
    files = [base / "config.json", *sorted(p for glob in _WEIGHTS for p in base.glob(glob))]
    parts = []
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_SAMPLE_NBYTES)
            file.seek(max(size - _SAMPLE_NBYTES, 0))
            parts += [f"{path.name}:{size}".encode(), head, file.read(_SAMPLE_NBYTES)]
    return _digest_of(*parts)


def _digest_of(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.hexdigest()[:32]


def _check_settings(saved: dict[str, Any], now: dict[str, Any]) -> None:
    for key in ("task", "dtype", "base"):
        if saved.get(key) != now[key]:
            where = f" ({saved.get('from')}, now {now['from']})" if key == "base" else ""
            raise ConfigError(
                f"the frozen reference is another one than that of the run: {key} was "
                f"{saved.get(key)}, is {now[key]}{where}; leave model_name_or_path, dtype and task "
                "as they were when the run began: it is the checkpoint that is resumed, and the "
                "reference stays"
            )


def _check_table(table: dict[str, Any], settings: dict[str, Any], splits: Splits) -> None:
    _check_settings(table["settings"], settings)
    for name, batches in splits.items():
        found = table["splits"].get(name)
        if found is None:
            wrong = f"has none for the split {name}"
        elif found["rows"] != len(batches.samples):
            wrong = f"has {found['rows']} samples of {name}, the files have {len(batches.samples)}"
        else:
            differ = (found["token_digests"] != batches.samples.digests()).nonzero().flatten()
            if not len(differ):
                continue
            wrong = (
                f"was made of other tokens: {len(differ)} samples of {name} differ, the first is "
                f"number {int(differ[0])}"
            )
        raise ConfigError(
            f"{REFERENCE_FILE} {wrong}; resume with the files and the tokenizer of the run, or set "
            "precompute_reference_logps: false, so that the base is asked as the run goes"
        )

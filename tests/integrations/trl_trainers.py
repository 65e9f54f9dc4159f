"""Small trainers of TRL for tests, all from a random Llama in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl

from milepost.integrations.transformers import MilepostTrainerMixin
from tests.integrations.trainers import (
    EIGHT_STEPS,
    KillAt,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)


class SFTTrainer(MilepostTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
    """Supervised fine-tuning."""


class DPOTrainer(MilepostTrainerMixin, trl.DPOTrainer):  # type: ignore[misc]
    """Direct preference optimisation."""


class RewardTrainer(MilepostTrainerMixin, trl.RewardTrainer):  # type: ignore[misc]
    """A reward model."""


def write_base(place: Path) -> Path:
    """A directory with the model that everything starts from."""
    tiny_model().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def _words(seed: int, count: int) -> str:
    numbers = torch.randint(3, 32, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


def _texts(count: int = 16) -> Any:
    return datasets.Dataset.from_dict({"text": [_words(n, 5 + n % 3) for n in range(count)]})


def preferences(count: int = 16, *, prompt: bool = True) -> Any:
    columns = {
        "chosen": [_words(2 * n + 100, 4) for n in range(count)],
        "rejected": [_words(2 * n + 101, 4) for n in range(count)],
    }
    if prompt:
        columns["prompt"] = [_words(n, 3) for n in range(count)]
    return datasets.Dataset.from_dict(columns)


def _arguments(config: Any, out: Path, **options: Any) -> Any:
    return config(str(out), **{**EIGHT_STEPS, "bf16": False, **options})


def lora() -> Any:
    return peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1
    )


def load_model(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base)


def sft(
    base: Path,
    out: Path,
    *,
    cls: Any = SFTTrainer,
    kill_at: int = 0,
    peft_config: Any = None,
    **options: Any,
) -> Any:
    return cls(
        model=load_model(base),
        args=_arguments(trl.SFTConfig, out, max_length=8, **options),
        train_dataset=_texts(),
        processing_class=tiny_tokenizer(),
        callbacks=[KillAt(kill_at)],
        peft_config=peft_config,
    )


def dpo(
    base: Path,
    out: Path,
    *,
    cls: Any = DPOTrainer,
    kill_at: int = 0,
    peft_config: Any = None,
    ref_model: Any = None,
    data: Any = None,
    **options: Any,
) -> Any:
    return cls(
        model=load_model(base),
        ref_model=ref_model,
        args=_arguments(trl.DPOConfig, out, max_length=12, **options),
        train_dataset=preferences() if data is None else data,
        processing_class=tiny_tokenizer(),
        callbacks=[KillAt(kill_at)],
        peft_config=peft_config,
    )


def reward(
    base: Path, out: Path, *, cls: Any = RewardTrainer, kill_at: int = 0, **options: Any
) -> Any:
    torch.manual_seed(1)
    model = transformers.LlamaForSequenceClassification(tiny_config(num_labels=1, pad_token_id=0))
    return cls(
        model=model,
        args=_arguments(trl.RewardConfig, out, max_length=8, **options),
        train_dataset=preferences(prompt=False),
        processing_class=tiny_tokenizer(),
        callbacks=[KillAt(kill_at)],
    )

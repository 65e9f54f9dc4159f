"""TRL's trainers with Milepost's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
import trl

import milepost as mp
from milepost.integrations.transformers import MilepostTrainerMixin
from tests.integrations.trainers import (
    KillAt,
    bits,
    outcome,
    run,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:trl.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:trl.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:trl.*"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


class SFTTrainer(MilepostTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
    """Supervised fine-tuning."""


class DPOTrainer(MilepostTrainerMixin, trl.DPOTrainer):  # type: ignore[misc]
    """Direct preference optimisation."""


class RewardTrainer(MilepostTrainerMixin, trl.RewardTrainer):  # type: ignore[misc]
    """A reward model."""


def words(seed: int, count: int) -> str:
    numbers = torch.randint(3, 32, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


def texts(count: int = 16) -> Any:
    return datasets.Dataset.from_dict({"text": [words(n, 5 + n % 3) for n in range(count)]})


def preferences(count: int = 16, *, prompt: bool = True) -> Any:
    columns = {
        "chosen": [words(2 * n + 100, 4) for n in range(count)],
        "rejected": [words(2 * n + 101, 4) for n in range(count)],
    }
    if prompt:
        columns["prompt"] = [words(n, 3) for n in range(count)]
    return datasets.Dataset.from_dict(columns)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with the model that everything starts from."""
    place = tmp_path / "base"
    tiny_model().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def arguments(config: Any, out: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "save_steps": 3,
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
    }
    return config(**{**given, **options})


def sft(base: Path, out: Path, *, kill_at: int = 0, **options: Any) -> Any:
    return SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base),
        args=arguments(trl.SFTConfig, out, max_length=8, **options),
        train_dataset=texts(),
        processing_class=tiny_tokenizer(),
        callbacks=[KillAt(kill_at)],
    )


def dpo(base: Path, out: Path, *, kill_at: int = 0, **options: Any) -> Any:
    return DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base),
        args=arguments(trl.DPOConfig, out, max_length=12, **options),
        train_dataset=preferences(),
        processing_class=tiny_tokenizer(),
        callbacks=[KillAt(kill_at)],
    )


def reward(base: Path, out: Path, *, kill_at: int = 0, **options: Any) -> Any:
    torch.manual_seed(1)
    model = transformers.LlamaForSequenceClassification(tiny_config(num_labels=1, pad_token_id=0))
    return RewardTrainer(
        model=model,
        args=arguments(trl.RewardConfig, out, max_length=8, **options),
        train_dataset=preferences(prompt=False),
        processing_class=tiny_tokenizer(),
        callbacks=[KillAt(kill_at)],
    )


@pytest.mark.parametrize("make", [sft, dpo, reward])
def test_a_trainer_of_trl_resumes_to_the_bits_of_one_that_never_stopped(
    base: Path, tmp_path: Path, make: Any
) -> None:
    whole = run(make(base, tmp_path / "whole"))
    run(make(base, tmp_path / "run", kill_at=5))
    resumed = run(make(base, tmp_path / "run"), resume=True)
    assert (resumed.milepost_report.step, resumed.milepost_report.level) == (3, mp.Level.EXACT)
    assert outcome(resumed) == outcome(whole)
    found = {path.name for path in (tmp_path / "run" / "checkpoint-8").rglob("*")}
    assert not found & {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    assert {"tokenizer.json", "config.json", "model.safetensors", "milepost.json"} <= found


def test_the_reference_of_a_resumed_preference_training_is_still_the_base(
    base: Path, tmp_path: Path
) -> None:
    run(dpo(base, tmp_path / "run", kill_at=5))
    resumed = run(dpo(base, tmp_path / "run"), resume=True)
    start = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert bits(resumed.ref_model) == bits(start)
    assert bits(resumed.model) != bits(start)
    assert set(mp.Checkpoint.open(tmp_path / "run" / "checkpoint-8").training_state()) >= {
        "optimizer",
        "scheduler",
    }
    assert not (tmp_path / "run" / "checkpoint-8" / "reference").exists()


def test_a_reference_that_follows_the_model_is_saved_and_comes_back(
    base: Path, tmp_path: Path
) -> None:
    moving: dict[str, Any] = {
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 0.5,
    }
    whole = run(dpo(base, tmp_path / "whole", **moving))
    run(dpo(base, tmp_path / "run", kill_at=5, **moving))
    resumed = run(dpo(base, tmp_path / "run", **moving), resume=True)
    assert bits(resumed.ref_model) == bits(whole.ref_model)
    assert outcome(resumed) == outcome(whole)


def test_the_card_of_trl_still_lies_beside_the_checkpoints(base: Path, tmp_path: Path) -> None:
    run(sft(base, tmp_path / "run"))
    assert "SFT" in (tmp_path / "run" / "README.md").read_text()


def test_an_adapter_alone_is_saved_and_resumes_exactly(base: Path, tmp_path: Path) -> None:
    def adapted(out: Path, kill_at: int = 0) -> Any:
        return SFTTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(base),
            args=arguments(trl.SFTConfig, out, max_length=8),
            train_dataset=texts(),
            processing_class=tiny_tokenizer(),
            callbacks=[KillAt(kill_at)],
            peft_config=peft.LoraConfig(
                r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1
            ),
        )

    whole = run(adapted(tmp_path / "whole"))
    run(adapted(tmp_path / "run", kill_at=5))
    resumed = run(adapted(tmp_path / "run"), resume=True)
    assert outcome(resumed) == outcome(whole)
    place = tmp_path / "run" / "checkpoint-8"
    assert (place / "adapter_model.safetensors").is_file()
    assert not (place / "model.safetensors").exists()
    start = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert bits(peft.PeftModel.from_pretrained(start, place)) == bits(resumed.model)

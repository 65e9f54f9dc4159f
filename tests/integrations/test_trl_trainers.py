"""TRL's trainers with Milepost's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest

import milepost as mp
from tests.integrations.trainers import bits, outcome, run, stock_files
from tests.integrations.trl_trainers import dpo, load_model, lora, reward, sft, write_base

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:trl.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:trl.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:trl.*"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.mark.parametrize("make", [sft, dpo, reward])
def test_a_trainer_of_trl_resumes_to_the_bits_of_one_that_never_stopped(
    base: Path, tmp_path: Path, make: Any
) -> None:
    whole = run(make(base, tmp_path / "whole"))
    run(make(base, tmp_path / "run", kill_at=5))
    resumed = run(make(base, tmp_path / "run"), resume=True)
    assert (resumed.milepost_report.step, resumed.milepost_report.level) == (3, mp.Level.EXACT)
    assert outcome(resumed) == outcome(whole)
    place = tmp_path / "run" / "checkpoint-8"
    assert stock_files(place) == []
    found = {path.name for path in place.iterdir()}
    assert {"tokenizer.json", "config.json", "model.safetensors", "milepost.json"} <= found


def test_the_reference_of_a_resumed_preference_training_is_still_the_base(
    base: Path, tmp_path: Path
) -> None:
    run(dpo(base, tmp_path / "run", kill_at=5))
    resumed = run(dpo(base, tmp_path / "run"), resume=True)
    start = load_model(base)
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
    whole = run(sft(base, tmp_path / "whole", peft_config=lora()))
    run(sft(base, tmp_path / "run", kill_at=5, peft_config=lora()))
    resumed = run(sft(base, tmp_path / "run", peft_config=lora()), resume=True)
    assert outcome(resumed) == outcome(whole)
    place = tmp_path / "run" / "checkpoint-8"
    assert (place / "adapter_model.safetensors").is_file()
    assert not (place / "model.safetensors").exists()
    adapted = peft.PeftModel.from_pretrained(load_model(base), place)
    assert bits(adapted) == bits(resumed.model)

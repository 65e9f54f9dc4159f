"""Every task goes on as if it had never stopped, and what it leaves loads where people load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import milepost as mp
from milepost_trainer.tasks import ReferenceTask
from milepost_trainer.training import Run, train
from tests.marks import slow
from tests.states import same
from tests.trainer.task_runs import (
    BERT,
    REFERENCED,
    TASKS,
    history,
    kill_task,
    line_of,
    run_task,
    stopped,
    task_config,
    yaml_changes,
)
from tests.trainer.yaml_runs import END, LLAMA, MOE, SAVED, WITHOUT_DROPOUT, contents, look


@pytest.mark.parametrize(
    ("mesh", "precompute"),
    [
        ("", False),
        ("", True),
        ("dp_shard2", False),
        *(slow(mesh, False) for mesh in ("tp2", "cp2", "ddp2", "dp_shard2 tp2")),
        slow("dp_shard2", True),
        slow("dp_shard2 ep2", False),
    ],
)
def test_dpo_that_is_killed_has_the_losses_and_rewards_of_a_run_that_never_stopped(
    mesh: str, precompute: bool, samples: dict[str, Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"precompute_reference_logps": precompute}
    if "ep" in mesh:
        changes["model_config"] = MOE
    end = run_task(tmp_path / "whole", samples["dpo"], "dpo", mesh, **changes)
    kill_task(tmp_path / "killed", samples["dpo"], "dpo", mesh, **changes)
    resumed = run_task(tmp_path / "killed", samples["dpo"], "dpo", mesh, **changes)
    assert history(resumed) == history(end)
    steps = [entry for entry in history(resumed) if "learning_rate" in entry]
    assert len({entry["rewards/chosen"] for entry in steps}) == len(steps) == END
    assert same(contents(resumed), contents(end))


def test_after_a_resume_the_reference_is_still_the_base(
    samples: dict[str, Path], tmp_path: Path
) -> None:
    train(task_config(tmp_path / "base", samples["sft"], "sft", max_steps=2))
    base = tmp_path / "base" / "checkpoint-2"
    start: dict[str, Any] = {"model_config": None, "model_name_or_path": str(base)}
    stopped(tmp_path / "run", samples["dpo"], "dpo", **start)
    resumed = Run(task_config(tmp_path / "run", samples["dpo"], "dpo", **start))
    with mp.CheckpointManager(tmp_path / "run", resume=mp.Resume.MUST) as manager:
        assert resumed.resume(manager) == SAVED
    assert isinstance(resumed.task, ReferenceTask)
    original = AutoModelForCausalLM.from_pretrained(base)
    batch = resumed.batches.next()
    scores = resumed.task.reference.scores(batch)
    for row, ids in enumerate(batch["input_ids"].flatten(0, 1)):
        labels = batch["labels"].flatten(0, 1)[row]
        with torch.no_grad():
            logps = original(ids[None]).logits[0, :-1].log_softmax(-1)
        kept = labels[1:] != -100
        expected = logps[kept].gather(-1, ids[1:][kept][:, None]).sum()
        assert scores.flatten()[row] == pytest.approx(float(expected), abs=1e-5)
    policy = dict(resumed.model.named_parameters())
    assert any(not torch.equal(policy[name], value) for name, value in original.named_parameters())


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        *((task, {}) for task in TASKS if task != "dpo"),
        *((task, {"precompute_reference_logps": True}) for task in REFERENCED if task != "dpo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_other_task_resumes_exactly(
    task: str, changes: dict[str, Any], samples: dict[str, Path], tmp_path: Path
) -> None:
    train(task_config(tmp_path / "whole", samples[task], task, **changes))
    stopped(tmp_path / "parts", samples[task], task, **changes)
    train(task_config(tmp_path / "parts", samples[task], task, **changes))
    whole, parts = (tmp_path / name / f"checkpoint-{END}" for name in ("whole", "parts"))
    assert history(parts) == history(whole)
    assert same(contents(parts), contents(whole))


def test_packed_rows_resume_exactly(samples: dict[str, Path], tmp_path: Path) -> None:
    packed: dict[str, Any] = {"packing": True, "global_batch_size": 2}
    train(task_config(tmp_path / "whole", samples["sft"], "sft", **packed))
    stopped(tmp_path / "parts", samples["sft"], "sft", **packed)
    train(task_config(tmp_path / "parts", samples["sft"], "sft", **packed))
    whole, parts = (tmp_path / name / f"checkpoint-{END}" for name in ("whole", "parts"))
    assert same(contents(parts), contents(whole))


# ---- what others load


@pytest.mark.parametrize("task", ["sft", "dpo", "kto", "sdpg"])
def test_a_language_model_loads_with_its_tokenizer(
    task: str, samples: dict[str, Path], tmp_path: Path
) -> None:
    train(task_config(tmp_path, samples[task], task, max_steps=1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint-1")
    saved = mp.Checkpoint.open(tmp_path / "checkpoint-1").read_weights()
    assert {*model.state_dict()} >= {*saved}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
    assert model.generate(**tokenizer("1+1=", return_tensors="pt"), max_new_tokens=1).shape[0] == 1


def test_a_reward_model_scores_padded_rows_for_transformers_as_in_training(
    samples: dict[str, Path], tmp_path: Path
) -> None:
    train(task_config(tmp_path, samples["reward"], "reward", max_steps=2))
    checkpoint = tmp_path / "checkpoint-2"
    start: dict[str, Any] = {"model_config": None, "model_name_or_path": str(checkpoint)}
    run = Run(task_config(tmp_path / "b", samples["reward"], "reward", **start))
    (batch, _), *_ = run.splits["train"].in_order()
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lines = [line_of("reward", n) for n in range(4)]
    texts = [line["prompt"] + line[key] for line in lines for key in ("chosen", "rejected")]
    padded = tokenizer(
        [text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        scores = model(**padded).logits.view(-1, 2)
    margin = float((scores[:, 0] - scores[:, 1]).mean())
    assert run.task.evaluate(batch)["margin"] == pytest.approx(margin, abs=1e-5)


@pytest.mark.parametrize("model", [LLAMA, BERT], ids=["llama", "bert"])
def test_an_embedding_model_loads_as_a_sentence_transformer(
    model: dict[str, Any], samples: dict[str, Path], tmp_path: Path
) -> None:
    train(task_config(tmp_path, samples["embedding"], "embedding", max_steps=2, model_config=model))
    checkpoint = tmp_path / "checkpoint-2"
    sentences = SentenceTransformer(str(checkpoint), device="cpu")
    assert sentences.max_seq_length == 24
    texts = ["1+1=", "twice 1!"]
    together, alone = sentences.encode(texts), sentences.encode(texts[:1])
    assert torch.allclose(torch.tensor(together[:1]), torch.tensor(alone), atol=1e-5)
    saved = mp.Checkpoint.open(checkpoint).read_weights()
    loaded = {
        name.partition("auto_model.")[2] or name.partition("model.")[2]: value
        for name, value in sentences.state_dict().items()
    }
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    # and a base for the next run
    start: dict[str, Any] = {"model_config": None, "model_name_or_path": str(checkpoint)}
    train(task_config(tmp_path / "b", samples["embedding"], "embedding", max_steps=1, **start))


def test_dpo_goes_on_on_another_mesh(samples: dict[str, Path], tmp_path: Path) -> None:
    kill_task(tmp_path / "run", samples["dpo"], "dpo", "dp_shard2", model_config=WITHOUT_DROPOUT)
    changes = {**yaml_changes("dpo"), "model_config": WITHOUT_DROPOUT}
    for found in look(tmp_path / "run", samples["dpo"], "tp2", **changes):
        assert found["level"] == "resharded", found["notes"]
    resumed = run_task(tmp_path / "run", samples["dpo"], "dpo", "", model_config=WITHOUT_DROPOUT)
    end = run_task(tmp_path / "whole", samples["dpo"], "dpo", "", model_config=WITHOUT_DROPOUT)
    for mine, other in zip(history(resumed), history(end), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)

"""The losses of tasks against plain computations, and against sentence-transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import milepost as mp
from milepost_trainer.config import ConfigError
from milepost_trainer.tasks import losses
from milepost_trainer.training import Run, train
from tests.trainer.task_runs import (
    BERT,
    COUNT,
    LABELS,
    different,
    line_of,
    task_config,
    write_lines,
)
from tests.trainer.yaml_runs import LLAMA, WITHOUT_DROPOUT


def test_labels_that_may_be_swapped_soften_dpo() -> None:
    policy = torch.tensor([[-1.0, -3.0], [-4.0, -2.0]])
    reference = torch.tensor([[-2.0, -2.0], [-2.0, -2.0]])
    found = losses.dpo(policy, reference, beta=0.5, label_smoothing=0.1)
    for row, margin in zip(found.tolist(), (0.5 * 2, -0.5 * 2), strict=True):
        right = -math.log(1 / (1 + math.exp(-margin)))
        swapped = -math.log(1 / (1 + math.exp(margin)))
        assert row == pytest.approx(0.9 * right + 0.1 * swapped, rel=1e-6)
    plain = losses.dpo(policy, reference, beta=0.5, label_smoothing=0.0)
    assert torch.allclose(plain, -torch.sigmoid(torch.tensor([1.0, -1.0])).log())


def test_sdpg_of_a_run_is_what_plain_transformers_computes(tmp_path: Path) -> None:
    lines = write_lines(tmp_path, "sft")
    train(task_config(tmp_path, lines, "sft", model_config=WITHOUT_DROPOUT, max_steps=1))
    base = tmp_path / "checkpoint-1"
    run = Run(
        task_config(
            tmp_path / "run",
            write_lines(tmp_path, "sdpg"),
            "sdpg",
            model_config=None,
            model_name_or_path=str(base),
            global_batch_size=COUNT,
            beta=0.5,
        )
    )
    different(run.model.modules[0])
    frozen = AutoModelForCausalLM.from_pretrained(base)
    policy = AutoModelForCausalLM.from_pretrained(base)
    policy.load_state_dict(run.model.modules[0].state_dict())
    tokenizer = AutoTokenizer.from_pretrained(base)

    def logps(model: Any, prompt: str, completion: str) -> torch.Tensor:
        ids = tokenizer(prompt)["input_ids"]
        answer = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        found: torch.Tensor = logits.log_softmax(-1)[range(len(answer)), answer]
        return found

    total, count = torch.zeros(()), 0
    for n in range(COUNT):
        line = line_of("sdpg", n)
        mine = logps(policy, line["prompt"], line["completion"])
        with torch.no_grad():
            taught = logps(frozen, line["teacher_prompt"], line["completion"])
            before = logps(frozen, line["prompt"], line["completion"])
        ratio = (before - mine).exp()
        total = total - ((taught - mine).detach() * mine).sum()
        total = total + 0.5 * (ratio - 1 - ratio.log()).sum()
        count += len(mine)
    torch.autograd.backward(total / count)
    found = run.task.train_step(run.batches.next())
    assert found["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-4)
    assert found["kl"] > 0
    gradients = dict(policy.named_parameters())
    for name, param in run.model.named_parameters():
        assert torch.allclose(param.grad, gradients[name].grad, atol=1e-5), name  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [WITHOUT_DROPOUT, BERT], ids=["llama", "bert"])
def test_embedding_has_the_loss_and_the_gradients_of_sentence_transformers(
    model: dict[str, Any], tmp_path: Path
) -> None:
    lines = write_lines(tmp_path, "embedding")
    config = task_config(
        tmp_path, lines, "embedding", model_config=model, max_steps=1, global_batch_size=COUNT
    )
    train(config)
    start: dict[str, Any] = {
        "model_config": None,
        "model_name_or_path": str(tmp_path / "checkpoint-1"),
    }
    run = Run(task_config(tmp_path / "b", lines, "embedding", global_batch_size=COUNT, **start))
    found = run.task.train_step(run.batches.next())
    sentences = SentenceTransformer(str(tmp_path / "checkpoint-1"), device="cpu")
    features = [
        sentences.preprocess([line_of("embedding", n)[key] for n in range(COUNT)])
        for key in ("anchor", "positive")
    ]
    expected = MultipleNegativesRankingLoss(sentences)(features, torch.tensor([]))
    expected.backward()
    assert found["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients: dict[str, Any] = {
        name.partition("auto_model.")[2] or name.partition("model.")[2]: param.grad
        for name, param in sentences.named_parameters()
    }
    compared = 0
    for name, param in run.model.named_parameters():
        if param.requires_grad:
            assert torch.allclose(param.grad, gradients[name], atol=1e-4, rtol=1e-4), name  # type: ignore[arg-type]
            compared += 1
    assert compared > 10


def trained_base(directory: Path, task: str) -> dict[str, Any]:
    """Keys of a YAML that goes on from a step of training without dropout."""
    lines = write_lines(directory, task)
    train(task_config(directory, lines, task, model_config=WITHOUT_DROPOUT, max_steps=1))
    return {"model_config": None, "model_name_or_path": str(directory / "checkpoint-1")}


def test_classification_has_the_loss_and_the_gradients_of_transformers(tmp_path: Path) -> None:
    start = trained_base(tmp_path, "classification")
    base, lines = start["model_name_or_path"], write_lines(tmp_path, "classification")
    run = Run(
        task_config(tmp_path / "b", lines, "classification", global_batch_size=COUNT, **start)
    )
    found = run.task.train_step(run.batches.next())
    model = AutoModelForSequenceClassification.from_pretrained(base)
    assert model.config.num_labels == LABELS
    tokenizer = AutoTokenizer.from_pretrained(base)
    samples = [line_of("classification", n) for n in range(COUNT)]
    texts = [line["text"] + tokenizer.eos_token for line in samples]
    labels = torch.tensor([line["label"] for line in samples])
    output = model(**tokenizer(texts, padding=True, return_tensors="pt"), labels=labels)
    output.loss.backward()
    assert found["loss"] == pytest.approx(float(output.loss.detach()), rel=1e-5)
    right = (output.logits.argmax(dim=-1) == labels).float().mean()
    assert found["accuracy"] == pytest.approx(float(right))
    gradients = dict(model.named_parameters())
    for name, param in run.model.named_parameters():
        assert torch.allclose(param.grad, gradients[name].grad, atol=1e-6), name  # type: ignore[arg-type]


def test_value_has_the_loss_of_transformers_and_the_error_of_the_head_that_was_saved(
    tmp_path: Path,
) -> None:
    start = trained_base(tmp_path, "value")
    base, lines = start["model_name_or_path"], write_lines(tmp_path, "value")
    run = Run(task_config(tmp_path / "b", lines, "value", global_batch_size=COUNT, **start))
    found = run.task.train_step(run.batches.next())
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    head = mp.Checkpoint.open(base).read("v_head.weight").requires_grad_()
    nll, error, count = torch.zeros(()), torch.zeros(()), 0
    for line in (line_of("value", n) for n in range(COUNT)):
        ids = tokenizer(line["prompt"])["input_ids"]
        answer = [*tokenizer(line["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(ids) + answer])
        output = model(torch.tensor([ids + answer]), labels=labels, output_hidden_states=True)
        values = output.hidden_states[-1][0, len(ids) :] @ head[0]
        nll = nll + output.loss * len(answer)
        error = error + (values - line["value"]).square().sum()
        count += len(answer)
    torch.autograd.backward((nll + error) / count)
    assert found["nll"] == pytest.approx(float(nll.detach()) / count, rel=1e-5)
    assert found["value_error"] == pytest.approx(float(error.detach()) / count, rel=1e-5)
    assert found["loss"] == pytest.approx(found["nll"] + found["value_error"], rel=1e-5)
    gradients = {**dict(model.named_parameters()), "v_head.weight": head}
    for name, param in run.model.named_parameters():
        assert torch.allclose(param.grad, gradients[name].grad, atol=1e-5), name  # type: ignore[arg-type]


def test_a_classifier_of_other_classes_is_no_base(tmp_path: Path) -> None:
    start = trained_base(tmp_path, "classification")
    lines = write_lines(tmp_path, "reward")
    with pytest.raises(ConfigError, match="is a classifier of 3 labels, and this run has 1"):
        Run(task_config(tmp_path / "b", lines, "reward", **start))


def test_a_packed_row_gives_the_loss_of_its_texts_one_by_one(tmp_path: Path) -> None:
    lines = write_lines(tmp_path, "sft")
    model = {**LLAMA, "attention_dropout": 0.0}
    apart = Run(task_config(tmp_path, lines, "sft", model_config=model, global_batch_size=COUNT))
    packed = Run(
        task_config(
            tmp_path,
            lines,
            "sft",
            model_config=model,
            max_seq_length=30,
            packing=True,
            global_batch_size=1,
        )
    )
    rows = len(packed.batches.samples)
    assert 1 < rows < COUNT
    whole = packed.batches.samples.columns()
    measured = [
        run.task.train_step(batch)["loss"]
        for run, batch in ((apart, apart.batches.next()), (packed, whole))
    ]
    assert measured[1] == pytest.approx(measured[0], rel=1e-5)
    pairs = zip(apart.model.parameters(), packed.model.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs)  # type: ignore[arg-type]

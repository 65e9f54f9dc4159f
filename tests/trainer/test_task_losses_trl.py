"""The losses of tasks are those of TRL: the same files, models and batch, by its trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

from milepost_trainer.tasks import losses
from milepost_trainer.training import Run, train
from tests.trainer.task_runs import (
    COUNT,
    different,
    line_of,
    task_config,
    write_lines,
)
from tests.trainer.yaml_runs import WITHOUT_DROPOUT


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as a directory that both sides load."""
    directory = tmp_path_factory.mktemp("base")
    lines = write_lines(directory, "sft")
    train(task_config(directory, lines, "sft", model_config=WITHOUT_DROPOUT, max_steps=1))
    return directory / "checkpoint-1"


def ours(directory: Path, base: Path, task: str, **changes: Any) -> Run:
    """A run whose policy has gone away from the base, its only batch all samples."""
    lines = write_lines(directory, task)
    start: dict[str, Any] = {"model_config": None, "model_name_or_path": str(base)}
    run = Run(task_config(directory, lines, task, global_batch_size=COUNT, **start, **changes))
    different(run.model.modules[0])
    return run


def theirs(directory: Path, run: Run, trainer: Any, config: Any, base: Path, **options: Any) -> Any:
    """TRL's loss of the same samples under the same weights, and the gradients of these."""
    kind: Any = AutoModelForCausalLM
    more: dict[str, Any] = {}
    if trainer is RewardTrainer:
        kind = AutoModelForSequenceClassification
        more = {"num_labels": 1}
    model = kind.from_pretrained(base, **more)
    model.load_state_dict(run.model.modules[0].state_dict())
    reference = {}
    if trainer in (DPOTrainer, KTOTrainer):
        reference["ref_model"] = AutoModelForCausalLM.from_pretrained(base)
    made = trainer(
        model,
        args=config(
            str(directory / "trl"),
            per_device_train_batch_size=COUNT,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **options,
        ),
        train_dataset=Dataset.from_list([line_of(run.config.task, n) for n in range(COUNT)]),
        processing_class=AutoTokenizer.from_pretrained(base),
        **reference,
    )
    (batch,) = made.get_train_dataloader()
    loss = made.compute_loss(made.model, batch)
    loss.backward()
    return float(loss.detach()), {name: param.grad for name, param in made.model.named_parameters()}


@pytest.mark.parametrize(
    ("task", "trainer", "config", "changes"),
    [
        ("sft", SFTTrainer, SFTConfig, {}),
        ("dpo", DPOTrainer, DPOConfig, {"beta": 0.3}),
        ("kto", KTOTrainer, KTOConfig, {"beta": 0.3, "desirable_weight": 1.5}),
        ("reward", RewardTrainer, RewardConfig, {}),
    ],
    ids=["sft", "dpo", "kto", "reward"],
)
def test_a_batch_has_the_loss_and_the_gradients_of_trl(
    task: str, trainer: Any, config: Any, changes: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    run = ours(tmp_path, base, task, **changes)
    expected, gradients = theirs(tmp_path, run, trainer, config, base, **changes)
    found = run.task.train_step(run.batches.next())
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    for name, param in run.model.named_parameters():
        assert param.grad is not None and gradients[name] is not None, name
        assert torch.allclose(param.grad, gradients[name], atol=1e-6), name


def test_sdpg_is_the_sampled_token_distillation_of_trl_and_a_divergence_from_the_base() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher, base = (torch.randn(3, 7, 11, generator=generator) for _ in range(3))
    student.requires_grad_()
    tokens = torch.randint(0, 11, (3, 7), generator=generator)
    policy, taught, before = (
        logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        for logits in (student, teacher, base)
    )
    found, advantage, divergence = losses.sdpg(policy, taught, before, beta=0.25)
    distilled = compute_sampled_token_self_distillation_loss(
        student, teacher, tokens, distillation_alpha=1.0
    )
    ratio = before.exp() / policy.exp()
    expected = distilled + 0.25 * (ratio - 1 - ratio.log())
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(advantage, taught - policy) and not advantage.requires_grad
    assert (divergence >= 0).all()
    mine, other = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0]
                      for x in (found, expected))  # fmt: skip
    assert torch.allclose(mine, other, atol=1e-5)

"""Adapters under every task: resumed exactly, beside a reference that stays the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import milepost as mp
from milepost_trainer.batches import Batch
from milepost_trainer.config import ConfigError
from milepost_trainer.parallel import ParallelModel
from milepost_trainer.sinks import NEUTRAL_SINK, sinks_of
from milepost_trainer.tasks import ReferenceTask
from milepost_trainer.training import Run, train
from tests.marks import slow
from tests.states import same
from tests.trainer.lora_runs import (
    LORA,
    BaseOf,
    adapter_config,
    adapter_of,
    on_base,
    token_ids,
)
from tests.trainer.task_runs import (
    history,
    stopped,
    task_config,
)
from tests.trainer.test_sinks import GPT_OSS
from tests.trainer.yaml_runs import END, SAVED, contents

HEADS = {"reward": "score", "classification": "score", "value": "v_head"}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:sentence_transformers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:sentence_transformers.*"),
]


# ---- exact resume


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("dpo", {}),
        ("reward", {"lora": {**LORA, "modules_to_save": ["score"]}}),
        slow("dpo", {"precompute_reference_logps": True}),
        slow("reward", {"merge_expert_lora_on_save": True}),
        *(slow(task, {}) for task in ("sft", "kto", "sdpg", "embedding")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_task_with_adapters_resumes_exactly(
    task: str,
    changes: dict[str, Any],
    base_of: BaseOf,
    samples: dict[str, Path],
    tmp_path: Path,
) -> None:
    changes = {**on_base(base_of("llama"), lora=LORA), **changes}
    train(task_config(tmp_path / "whole", samples[task], task, **changes))
    stopped(tmp_path / "parts", samples[task], task, **changes)
    train(task_config(tmp_path / "parts", samples[task], task, **changes))
    whole, parts = (tmp_path / name / f"checkpoint-{END}" for name in ("whole", "parts"))
    first = adapter_of(whole.with_name(f"checkpoint-{SAVED}"))
    assert history(parts) == history(whole)
    assert same(contents(parts), contents(whole))
    assert same(adapter_of(parts), adapter_of(whole))
    assert not any(torch.equal(first[name], value) for name, value in adapter_of(whole).items())


@pytest.mark.parametrize("task", ["classification", slow("value"), slow("reward")])
def test_a_head_learns_beside_adapters(
    task: str, base_of: BaseOf, samples: dict[str, Path], tmp_path: Path
) -> None:
    train(task_config(tmp_path, samples[task], task, **on_base(base_of("llama"), lora=LORA)))
    head = HEADS[task]
    assert adapter_config(tmp_path / f"checkpoint-{END}")["modules_to_save"] == [head]
    first, last = (adapter_of(tmp_path / f"checkpoint-{step}") for step in (SAVED, END))
    (name,) = (name for name in last if name.endswith(f".{head}.weight"))
    assert not torch.equal(first[name], last[name])
    frozen = {"lora": {"r": 2, "expert_projections": ["down_proj"]}}
    with pytest.raises(ConfigError, match=f"the head {head} would keep its random values"):
        Run(task_config(tmp_path / "b", samples[task], task, **on_base(base_of("moe"), **frozen)))


# ---- the frozen reference


def resumed_run(output: Path, lines: Path, task: str, **changes: Any) -> Run:
    """A run in one process that went on from the newest checkpoint of `output`."""
    run = Run(task_config(output, lines, task, **changes))
    with mp.CheckpointManager(output, resume=mp.Resume.MUST) as manager:
        assert run.resume(manager) == SAVED
    return run


def reference_of(run: Run) -> ParallelModel:
    assert isinstance(run.task, ReferenceTask)
    model = run.task.reference._model
    assert model is not None
    return model


@pytest.mark.parametrize("task", ["dpo", slow("kto"), slow("sdpg")])
def test_the_reference_of_adapters_is_the_base_without_them_also_after_a_resume(
    task: str, base_of: BaseOf, samples: dict[str, Path], tmp_path: Path
) -> None:
    changes = on_base(base_of("llama-plain"), lora={**LORA, "lora_dropout": 0.0})
    stopped(tmp_path, samples[task], task, **changes)
    run = resumed_run(tmp_path, samples[task], task, **changes)
    original = dict(AutoModelForCausalLM.from_pretrained(base_of("llama-plain")).named_parameters())
    reference = dict(reference_of(run).named_parameters())
    assert same(reference, {name: reference[name] for name in original})
    assert all(torch.equal(reference[name], value) for name, value in original.items())
    assert isinstance(run.task, ReferenceTask)
    batch = run.batches.next()
    scores = run.task.reference.scores(batch)
    assert not torch.allclose(run.task.score(run.model, batch), scores, atol=1e-4)
    without_adapters(run.model)
    assert torch.allclose(run.task.score(run.model, batch), scores, atol=1e-6)


def without_adapters(model: ParallelModel) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.zero_()


@pytest.mark.parametrize(
    "changes",
    [
        {"reset_sinks": True},
        {"reset_sinks": True, "lora": {**LORA, "lora_dropout": 0.0}},
        slow({"sinks": "live"}),
        slow({"sinks": "trainable"}),
        slow({}),
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
@pytest.mark.parametrize("task", ["dpo", slow("kto")])
def test_the_reference_has_its_sinks_as_the_policy_has_them_and_never_trains_them(
    task: str, changes: dict[str, Any], samples: dict[str, Path], tmp_path: Path
) -> None:
    run = Run(task_config(tmp_path, samples[task], task, model_config=GPT_OSS, **changes))
    reference, policy = reference_of(run), run.model
    assert [param for param in reference.parameters() if param.requires_grad] == []
    ours, theirs = sinks_of(policy.modules[0]), sinks_of(reference.modules[0])
    assert len(ours) == len(theirs) == 2 and same([*ours], [*theirs])
    assert ("reset_sinks" in changes) == all((sinks == NEUTRAL_SINK).all() for sinks in theirs)
    run.task.prepare(run.splits, None)
    before = [param.detach().clone() for param in reference.parameters()]
    metrics = run.task.train_step(run.batches.next())
    rewards = [value for name, value in metrics.items() if name.startswith("rewards/")]
    assert rewards and all(value == 0.0 for value in rewards)  # a policy is its reference still
    for optimizer in run.optimizers.values():
        optimizer.step()
    moved = run.task.evaluate(run.batches.next())
    assert moved["rewards/chosen"] != 0.0
    assert same([param.detach() for param in reference.parameters()], before)


def test_a_reference_with_other_sinks_would_have_other_scores(
    samples: dict[str, Path], tmp_path: Path
) -> None:
    """So that rewards of zero show that both have them out."""
    scores = []
    for name, changes in (("reset", {"reset_sinks": True}), ("live", {"sinks": "live"})):
        run = Run(
            task_config(tmp_path / name, samples["dpo"], "dpo", model_config=GPT_OSS, **changes)
        )
        batch: Batch = run.batches.next()
        assert isinstance(run.task, ReferenceTask)
        scores.append(run.task.reference.scores(batch))
    assert not torch.allclose(scores[0], scores[1], atol=1e-4)


# ---- what others load


@pytest.mark.parametrize("task", ["dpo", *(slow(task) for task in ("sft", "kto", "sdpg"))])
def test_peft_loads_the_adapter_of_a_task(
    task: str, base_of: BaseOf, samples: dict[str, Path], tmp_path: Path
) -> None:
    changes = on_base(base_of("llama"), lora=LORA)
    stopped(tmp_path, samples[task], task, **changes)
    run = resumed_run(tmp_path, samples[task], task, **changes)
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    base = AutoModelForCausalLM.from_pretrained(base_of("llama"))
    loaded = PeftModel.from_pretrained(base, checkpoint).eval()
    assert adapter_config(checkpoint)["task_type"] == "CAUSAL_LM"
    with torch.no_grad(), run.model.evaluating():
        assert torch.equal(loaded(token_ids()).logits, run.model.outputs(token_ids()))


def test_peft_loads_a_reward_model_with_the_head_that_was_trained(
    base_of: BaseOf, samples: dict[str, Path], tmp_path: Path
) -> None:
    changes = on_base(base_of("llama"), lora={**LORA, "modules_to_save": ["score"]})
    stopped(tmp_path, samples["reward"], "reward", **changes)
    run = resumed_run(tmp_path, samples["reward"], "reward", **changes)
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    config = adapter_config(checkpoint)
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = AutoModelForSequenceClassification.from_pretrained(base_of("llama"), num_labels=1)
    base.config.pad_token_id = run.tokenizer.pad_token_id
    loaded = PeftModel.from_pretrained(base, checkpoint).eval()
    with torch.no_grad(), run.model.evaluating():
        found = loaded(token_ids()).logits
        assert torch.allclose(found, run.model.outputs(token_ids())[:, -1], atol=1e-6)
        assert not torch.allclose(found, base.score.original_module(torch.ones(1, 16)), atol=1e-3)


@pytest.mark.slow
def test_an_embedding_model_has_its_adapters_folded_in_and_resumes_unmerged(
    base_of: BaseOf, samples: dict[str, Path], tmp_path: Path
) -> None:
    changes = on_base(base_of("llama"), lora=LORA)
    stopped(tmp_path, samples["embedding"], "embedding", **changes)
    run = resumed_run(tmp_path, samples["embedding"], "embedding", **changes)
    sentences: Any = SentenceTransformer(str(tmp_path / f"checkpoint-{SAVED}"), device="cpu")
    with torch.no_grad(), run.model.evaluating():
        found = sentences[0].auto_model(token_ids()).last_hidden_state
        assert torch.allclose(found, run.model.outputs(token_ids()), rtol=1e-4, atol=1e-4)

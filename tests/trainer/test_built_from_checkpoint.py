"""What a resumed run builds its model from: the checkpoint, or the base that is then filled."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost_trainer.config import ConfigError, parse_config
from milepost_trainer.training import Run, train
from tests.marks import slow
from tests.parallel.models import whole
from tests.states import same
from tests.trainer.lora_runs import LORA, BaseOf, on_base
from tests.trainer.task_runs import task_config, write_lines
from tests.trainer.yaml_runs import (
    END,
    LLAMA,
    MOE,
    SAVED,
    WITHOUT_DROPOUT,
    config_of,
    contents,
    losses,
    ranks_of,
    run,
    yaml_of,
)
from tests.worlds import run_world

ONCE = "built from this checkpoint, weights not read again"
Started = dict[str, tuple[Path, dict[str, Any]]]


def begin(output: Path, text: Path, **changes: Any) -> Path:
    """A run that has come as far as its first save, where a whole one ends after its last."""
    train(config_of(output, text, **changes))
    shutil.rmtree(output / f"checkpoint-{END}")
    for link in ("latest", "best"):
        (output / link).unlink(missing_ok=True)
    return output / f"checkpoint-{SAVED}"


@pytest.fixture(scope="module")
def started(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """A full checkpoint of each family in one process, and what the YAML of its run says."""
    found = {}
    for family, model in (("llama", WITHOUT_DROPOUT), ("moe", MOE)):
        directory = tmp_path_factory.mktemp(family)
        begin(directory, text, model_config=model)
        found[family] = (directory, {"model_config": model})
    return found


# ---- on every mesh


def _resumed(rank: int, world_size: int, document: str) -> tuple[str, dict[str, torch.Tensor]]:
    config = parse_config(document, "run.yaml")
    with mp.CheckpointManager(config.output_dir, resume=mp.Resume.MUST) as manager:
        resumed = Run(config, manager)
        assert resumed.resume(manager) == SAVED
        assert manager.load_report is not None
        lines = manager.load_report.lines()
    weights = {name: whole(param) for name, param in resumed.model.named_parameters()}
    return "\n".join(lines), weights


@pytest.mark.parametrize(
    "mesh",
    [
        *("dp_shard2", "dp_shard2 ep2"),
        *map(slow, ("ddp2", "tp2", "cp2", "pp2", "dp_shard2 tp2", "tp2 ep2", "cp2 ep2")),
    ],
)
def test_all_ranks_build_from_it_and_hold_its_weights(
    mesh: str, started: Started, text: Path
) -> None:
    family = "moe" if "ep" in mesh else "llama"
    directory, model = started[family]
    pieces = {"microbatches": 2} if "pp" in mesh else {}
    document = yaml_of(directory, text, mesh, **model, **pieces)
    (alone,) = run_world(1, _resumed, yaml_of(directory, text, **model))
    found: dict[str, torch.Tensor] = {}
    for lines, weights in [alone, *run_world(ranks_of(mesh), _resumed, document)]:
        assert ONCE in lines
        for name, value in weights.items():
            assert torch.equal(value, found.setdefault(name, value)), name
    saved = mp.Checkpoint.open(directory / f"checkpoint-{SAVED}").read_weights()
    assert same(found["lm_head.weight"], saved["lm_head.weight"])
    assert len(found) == len(alone[1])


# ---- the decision


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the model is built from {}"),
        ({"use_grouped_gemm": True}, "the model is built from {}"),
        ({"use_grouped_gemm": False}, "the model is built from the base, and {} is read into it"),
    ],
    ids=str,
)
def test_grouped_products_say_what_a_model_is_built_from(
    changes: dict[str, Any],
    said: str,
    text: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = {"model_config": MOE, **changes}
    checkpoint = begin(tmp_path, text, **changes)
    end = contents(checkpoint)
    with caplog.at_level(logging.INFO, "milepost_trainer"):
        train(config_of(tmp_path, text, **changes, max_steps=SAVED + 1))
    assert said.format(checkpoint) in caplog.messages
    assert (ONCE in caplog.text) == ("the base" not in said)
    assert not same(contents(tmp_path / f"checkpoint-{SAVED + 1}")["weights"], end["weights"])


@pytest.mark.parametrize(
    "saves", [{}, {"merge_expert_lora_on_save": True}], ids=["alone", "merged"]
)
def test_adapters_keep_the_base(
    saves: dict[str, Any],
    base_of: BaseOf,
    text: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = on_base(base_of("llama"), lora=LORA, **saves)
    checkpoint = begin(tmp_path, text, **changes)
    with caplog.at_level(logging.INFO, "milepost_trainer"):
        train(config_of(tmp_path, text, **changes))
    assert f"the model is built from the base, and {checkpoint} is read into it" in caplog.messages
    assert ONCE not in caplog.text


def test_a_model_that_the_yaml_describes_otherwise_is_that_of_the_yaml(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = begin(tmp_path, text)
    changed = config_of(tmp_path, text, model_config=WITHOUT_DROPOUT)
    with (
        caplog.at_level(logging.INFO, "milepost_trainer"),
        mp.CheckpointManager(tmp_path, resume=mp.Resume.MUST) as manager,
    ):
        resumed = Run(changed, manager)
        assert resumed.resume(manager) == SAVED
    assert f"the model is built from the base: {checkpoint} has another config.json" in (
        caplog.messages
    )
    assert [held.attention_dropout for held in resumed.model.configs] == [0.0]
    wider = {**LLAMA, "intermediate_size": 48}
    with pytest.raises(mp.errors.ShapeMismatchError, match="mlp"):
        train(config_of(tmp_path, text, model_config=wider))


def test_a_model_in_half_the_width_resumes_in_the_dtypes_that_it_was_drawn_in(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers keeps the routers of this family in float32."""
    family = {
        **{name: value for name, value in MOE.items() if name != "num_experts"},
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
    }
    changes: dict[str, Any] = {"model_config": family, "dtype": "bfloat16"}
    whole_run = run(tmp_path / "whole", text, **changes)
    begin(tmp_path / "parts", text, **changes)
    with caplog.at_level(logging.INFO, "milepost_trainer"):
        train(config_of(tmp_path / "parts", text, **changes))
    assert ONCE in caplog.text
    found = contents(tmp_path / "parts" / f"checkpoint-{END}")
    assert same(found, contents(whole_run))
    dtypes = {name: value.dtype for name, value in found["weights"].items()}
    assert dtypes["model.layers.1.mlp.gate.weight"] is torch.float32
    assert dtypes["lm_head.weight"] is torch.bfloat16


def test_a_damaged_checkpoint_is_passed_over_before_there_is_a_model(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(config_of(tmp_path, text))
    with (tmp_path / f"checkpoint-{END}" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with (
        caplog.at_level(logging.INFO, "milepost_trainer"),
        pytest.warns(mp.errors.CheckpointWarning, match=f"not checkpoint-{END}"),
    ):
        train(config_of(tmp_path, text, max_steps=END + 1))
    assert f"the model is built from {tmp_path / f'checkpoint-{SAVED}'}" in caplog.messages
    assert ONCE in caplog.text
    assert len(losses(tmp_path / f"checkpoint-{END + 1}")) == END + 1


def test_a_fresh_run_says_so_once(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(config_of(tmp_path, text, max_steps=1))
    assert caplog.text.count("no checkpoint to resume from, a fresh run") == 1
    assert "the model is built from" not in caplog.text


# ---- what goes on being the base


def test_a_model_that_was_built_from_a_checkpoint_is_still_named_after_its_base(
    base_of: BaseOf, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "base"
    shutil.copytree(base_of("llama"), base)
    (base / "README.md").write_text("---\nlicense: mit\n---\nA base with a card.\n")
    changes = on_base(base)
    whole_run = run(tmp_path / "whole", text, **changes)
    begin(tmp_path / "parts", text, **changes)
    with caplog.at_level(logging.INFO, "milepost_trainer"):
        train(config_of(tmp_path / "parts", text, **changes, save_total_limit=1))
    assert ONCE in caplog.text
    end = tmp_path / "parts" / f"checkpoint-{END}"
    assert same(contents(end), contents(whole_run))
    for name in ("README.md", "config.json", "generation_config.json"):
        assert (end / name).read_bytes() == (whole_run / name).read_bytes(), name
    assert "A base with a card" in (end / "README.md").read_text()
    with mp.CheckpointManager(tmp_path / "parts", resume=mp.Resume.MUST) as manager:
        resumed = Run(config_of(tmp_path / "parts", text, **changes), manager)
    model: Any = resumed.model.model
    assert (model.name_or_path, model.config.name_or_path) == (str(base), str(base))


def test_the_frozen_reference_is_read_from_the_base_and_not_from_the_checkpoint(
    base_of: BaseOf, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path, "dpo")
    changes = on_base(base_of("llama"))
    config = task_config(tmp_path / "run", lines, "dpo", **changes, max_steps=2)
    train(config)
    with mp.CheckpointManager(tmp_path / "run", resume=mp.Resume.MUST) as manager:
        resumed = Run(config, manager)
        assert resumed.resume(manager) == 2
        assert manager.load_report is not None and ONCE in "\n".join(manager.load_report.lines())
    policy = dict(resumed.model.named_parameters())
    reference = dict(resumed.task.reference._model.named_parameters())  # type: ignore[attr-defined]
    base = mp.Checkpoint.open(base_of("llama")).read_weights()
    assert same(reference["lm_head.weight"].detach(), base["lm_head.weight"])
    assert not same(policy["lm_head.weight"].detach(), base["lm_head.weight"])


def test_a_base_that_is_gone_is_named_though_weights_lie_in_the_checkpoint(
    base_of: BaseOf, text: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(base_of("llama"), base)
    train(config_of(tmp_path / "run", text, **on_base(base), max_steps=1))
    (base / "config.json").unlink()
    with pytest.raises(ConfigError, match=f"model_name_or_path: {base} is no directory"):
        train(config_of(tmp_path / "run", text, **on_base(base)))

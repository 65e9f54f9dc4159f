"""Runs of the trainer in real worlds: killed and resumed, on the same mesh and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import milepost as mp
from milepost_trainer.config import ConfigError
from milepost_trainer.training import train
from tests.marks import slow
from tests.states import same
from tests.trainer.yaml_runs import (
    END,
    SAVED,
    WITHOUT_DROPOUT,
    config_of,
    contents,
    look,
    losses,
    run,
    run_and_kill,
)


@pytest.mark.parametrize(
    "mesh",
    [
        *("", "dp_shard2 tp2", "pp2"),
        *map(slow, ("dp_shard2", "tp2", "ddp2", "cp2", "pp2 dp_shard2", "dp_shard2 cp2")),
    ],
)
def test_a_killed_run_ends_like_one_that_never_stopped(
    mesh: str, text: Path, tmp_path: Path
) -> None:
    pieces = {"microbatches": 2} if "pp" in mesh else {}
    end = run(tmp_path / "whole", text, mesh, **pieces)
    run_and_kill(tmp_path / "killed", text, mesh, **pieces)
    resumed = run(tmp_path / "killed", text, mesh, **pieces)
    assert same(contents(resumed), contents(end))
    assert len(losses(resumed)) == END


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that never stops, without dropout."""
    end = run(tmp_path_factory.mktemp("whole"), text, model_config=WITHOUT_DROPOUT)
    return losses(end)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp_shard2", "tp2"),
        ("pp2", ""),
        slow("", "dp_shard2 tp2"),
        slow("tp2", "ddp2"),
        slow("cp2", "pp2"),
    ],
)
def test_another_mesh_goes_on_with_the_same_weights_moments_and_data(
    before: str, after: str, undisturbed: list[float], text: Path, tmp_path: Path
) -> None:
    saved = run_until_saved(tmp_path, text, before)
    for found in look(tmp_path, text, after, model_config=WITHOUT_DROPOUT):
        assert (found["step"], found["consumed"]) == (SAVED, SAVED * 4)
        assert found["level"] == "resharded", found["notes"]
        for name, tensor in found["weights"].items():
            assert torch.equal(tensor, saved["weights"][name]), name
        for name, value in found["moments"].items():
            if name.endswith(".step"):
                assert value == SAVED
            else:
                assert torch.equal(value, saved["state"]["optimizer"]["tensors"][name]), name
    end = run(tmp_path, text, after, model_config=WITHOUT_DROPOUT)
    assert losses(end) == pytest.approx(undisturbed, rel=1e-4)


def run_until_saved(output: Path, text: Path, mesh: str) -> dict[str, Any]:
    run_and_kill(output, text, mesh, model_config=WITHOUT_DROPOUT)
    return contents(output / f"checkpoint-{SAVED}")


def test_a_checkpoint_is_a_model_with_its_tokenizer_for_transformers(
    text: Path, tmp_path: Path
) -> None:
    train(config_of(tmp_path, text, max_steps=2))
    checkpoint = tmp_path / "checkpoint-2"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("12 squared", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 13)
    # and a base for the next run, with the tokenizer that it brings
    base: dict[str, Any] = {"model_config": None, "model_name_or_path": str(checkpoint)}
    frozen: dict[str, Any] = {"learning_rate": 1e-9, "warmup_steps": 0}
    train(config_of(tmp_path / "next", text, max_steps=1, **base, **frozen))
    next_weights = mp.Checkpoint.open(tmp_path / "next" / "checkpoint-1").read_weights()
    for name, tensor in mp.Checkpoint.open(checkpoint).read_weights().items():
        assert torch.allclose(tensor, next_weights[name], atol=1e-6), name


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "adafactor"])
def test_every_optimizer_resumes(optimizer: str, text: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path / "whole", text, optimizer=optimizer))
    train(config_of(tmp_path / "parts", text, optimizer=optimizer, save_steps=SAVED))
    (tmp_path / "parts" / f"checkpoint-{END}").rename(tmp_path / "away")
    (tmp_path / "parts" / "latest").unlink()
    train(config_of(tmp_path / "parts", text, optimizer=optimizer))
    ends = [contents(tmp_path / name / f"checkpoint-{END}") for name in ("whole", "parts")]
    assert same(*ends)


def test_old_checkpoints_go_and_parts_stay_below_their_limit(text: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, text, save_steps=1, save_total_limit=2, save_max_shard_size="8KB"))
    kept = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert {"checkpoint-5", "checkpoint-6"} <= kept <= {f"checkpoint-{n}" for n in range(1, 7)}
    assert len(kept) <= 3  # the best too
    assert len(list((tmp_path / "checkpoint-6").glob("model-*.safetensors"))) > 1


# ---- policies of resume


@pytest.mark.parametrize("mesh", ["", "dp_shard2"])
def test_weights_alone_are_a_warm_restart_that_must_be_allowed(
    mesh: str, text: Path, tmp_path: Path
) -> None:
    run(tmp_path, text, mesh, max_steps=3, save_only_model=True)
    assert "optimizer" not in mp.Checkpoint.open(tmp_path / "checkpoint-3").training_state()
    with pytest.raises(mp.errors.MismatchError, match="holds no optimizer"):
        train(config_of(tmp_path, text))
    end = run(tmp_path, text, mesh, allow_optimizer_warm_restart=True)
    state = mp.Checkpoint.open(end).training_state()
    assert state["data"]["consumed"] == END * 4
    assert state["scheduler"]["last_epoch"] == END
    assert state["optimizer"]["slots"]["step"]["default"]["scalar"]["value"] == 3.0


def test_a_used_directory_is_neither_overwritten_nor_gone_on_from_by_accident(
    text: Path, tmp_path: Path
) -> None:
    train(config_of(tmp_path, text, max_steps=2))
    with pytest.raises(ConfigError, match=r"holds checkpoint-2; set resume_from_checkpoint: true"):
        train(config_of(tmp_path, text, resume_from_checkpoint=False))
    train(
        config_of(
            tmp_path, text, max_steps=1, resume_from_checkpoint=False, overwrite_output_dir=True
        )
    )
    newest = mp.newest(tmp_path)
    assert newest is not None and newest.name == "checkpoint-1"


def test_a_named_checkpoint_is_resumed_and_a_mistyped_one_is_an_error(
    text: Path, tmp_path: Path
) -> None:
    train(config_of(tmp_path / "a", text, max_steps=4, save_steps=2))
    named = str(tmp_path / "a" / "checkpoint-2")
    train(config_of(tmp_path / "b", text, max_steps=4, resume_from_checkpoint=named))
    same_steps = [contents(tmp_path / name / "checkpoint-4")["weights"] for name in ("a", "b")]
    assert same(*same_steps)
    with pytest.raises(mp.errors.NotFoundError, match="checkpoint-3"):
        train(config_of(tmp_path / "c", text, resume_from_checkpoint=named[:-1] + "3"))


def test_other_data_is_refused_at_resume(text: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, text, max_steps=2))
    with pytest.raises(ConfigError, match="give other samples"):
        train(config_of(tmp_path, text, max_seq_length=8))


def test_true_that_finds_only_torn_and_foreign_directories_is_no_fresh_run(
    text: Path, tmp_path: Path
) -> None:
    train(config_of(tmp_path, text, max_steps=1))
    (tmp_path / "checkpoint-1" / "milepost.json").unlink()
    foreign = tmp_path / "checkpoint-5"
    foreign.mkdir()
    (foreign / "pytorch_model.bin").write_bytes(b"of another program")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(mp.errors.NotCommittedError, match=r"checkpoint-1 \(.*checkpoint-5 \("):
        train(config_of(tmp_path, text))
    assert sorted(tmp_path.rglob("*")) == before

"""sentence-transformers' trainer with Milepost's checkpoints on two ranks, DDP and FSDP2."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers

from milepost.errors import InvalidInputError
from tests.integrations.embedding_trainers import make, outcome, write_base
from tests.integrations.trainers import (
    DDP,
    FSDP,
    bits,
    is_sharded,
    quiet,
    real_fsdp2,
    run,
    stock_files,
)
from tests.worlds import run_world

Stock = sentence_transformers.SentenceTransformerTrainer


def trained(rank: int, world_size: int, base: Path, out: Path, is_fsdp: bool) -> dict[str, Any]:
    quiet("sentence_transformers")
    # Accelerate's FSDP2 cannot shard a Normalize: see below.
    options = {**FSDP, "norm": False} if is_fsdp else DDP
    with real_fsdp2() if is_fsdp else nullcontext():
        whole = run(make(base, out / "whole", **options))
        run(make(base, out / "run", kill_at=5, **options))
        resumed = run(make(base, out / "run", **options), resume=True)
        report = resumed.milepost_report
        return {
            "whole": outcome(whole),
            "resumed": outcome(resumed),
            "report": (report.level.value, report.step, report.differences),
            "sharded": is_sharded(resumed),
            "weights": bits(resumed.model),
        }


@pytest.mark.parametrize(
    "is_fsdp", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fsdp2", "ddp"]
)
def test_two_ranks_of_an_embedding_model_resume_to_the_bits_of_a_run_that_never_stopped(
    tmp_path: Path, is_fsdp: bool
) -> None:
    base = write_base(tmp_path / "base")
    ranks = run_world(2, trained, base, tmp_path, is_fsdp)
    checkpoint = tmp_path / "run" / "checkpoint-8"
    loaded = sentence_transformers.SentenceTransformer(str(checkpoint), device="cpu")
    for found in ranks:
        assert found["resumed"] == found["whole"]
        assert found["report"] == ("exact", 3, [])
        assert found["sharded"] == is_fsdp
        assert found["weights"] == bits(loaded)
    assert stock_files(checkpoint) == []
    assert "sentence-transformers" in (checkpoint / "README.md").read_text()


def unwritable(rank: int, world_size: int, base: Path, out: Path) -> None:
    """Every rank hears of a module that the one rank which writes it cannot write."""
    quiet("sentence_transformers")
    trainer = make(base, out, **DDP)

    def save(*args: Any, **kwargs: Any) -> None:
        raise OSError("no room for the module")

    trainer.model[2].save = save
    with pytest.raises(Exception, match="no room for the module"):
        trainer.train()


@pytest.mark.slow
def test_a_module_that_one_rank_cannot_write_ends_the_save_on_all(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    run_world(2, unwritable, base, tmp_path / "run", deadline_s=60)


def apart(rank: int, world_size: int, base: Path, out: Path) -> tuple[str, str]:
    """The head of a loss that the stock trainer trains, and what Milepost says of such a loss."""
    quiet("sentence_transformers")
    options = {**DDP, "classifier": True, "save_strategy": "no"}
    stock = run(make(base, out / "stock", cls=Stock, **options))
    with pytest.raises(InvalidInputError) as refused:
        run(make(base, out / "ours", **options))
    return bits(stock.loss.classifier), str(refused.value)


@pytest.mark.slow
def test_a_loss_that_the_stock_trainer_lets_drift_apart_is_refused(tmp_path: Path) -> None:
    (first, text), (second, _) = run_world(2, apart, write_base(tmp_path / "base"), tmp_path)
    assert first != second
    assert "the loss trains classifier.weight, classifier.bias" in text


def unsharded(rank: int, world_size: int, base: Path, out: Path) -> None:
    quiet("sentence_transformers")
    with real_fsdp2(), pytest.raises(TypeError, match="'FSDPNormalize' object layout differs"):
        run(make(base, out, cls=Stock, **FSDP))


@pytest.mark.slow
def test_accelerate_itself_cannot_shard_a_chain_with_a_norm(tmp_path: Path) -> None:
    run_world(2, unsharded, write_base(tmp_path / "base"), tmp_path)

"""TRL's trainers with Milepost's checkpoints on two ranks, under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import transformers

from tests.integrations.trainers import (
    DDP,
    FSDP,
    bits,
    is_sharded,
    outcome,
    quiet,
    real_fsdp2,
    run,
    stock_files,
)
from tests.integrations.trl_trainers import (
    dpo,
    load_model,
    lora,
    preferences,
    reward,
    sft,
    write_base,
)
from tests.worlds import run_world


def dpo_with_adapter(base: Path, out: Path, **options: Any) -> Any:
    return dpo(base, out, peft_config=lora(), **options)


def dpo_with_model(base: Path, out: Path, **options: Any) -> Any:
    return dpo(base, out, ref_model=load_model(base), **options)


def dpo_with_scores(base: Path, out: Path, **options: Any) -> Any:
    """The reference's scores lie in a file beside the data, which all ranks read."""
    data = datasets.load_from_disk(base / "preferences")
    return dpo(base, out, data=data, precompute_ref_log_probs=True, **options)


MAKERS: dict[str, Callable[..., Any]] = {
    "sft": sft,
    "dpo": dpo,
    "dpo with an adapter": dpo_with_adapter,
    "dpo with a model as reference": dpo_with_model,
    "dpo with scores known before": dpo_with_scores,
    "reward": reward,
}


def trained(
    rank: int, world_size: int, base: Path, out: Path, is_fsdp: bool, kinds: list[str]
) -> dict[str, Any]:
    """Of each kind of trainer, what a run ends with that never stopped, and one that did."""
    quiet("trl")
    with real_fsdp2() if is_fsdp else nullcontext():
        return {kind: _trained(MAKERS[kind], base, out / kind, is_fsdp) for kind in kinds}


def _trained(make: Callable[..., Any], base: Path, out: Path, is_fsdp: bool) -> dict[str, Any]:
    options = FSDP if is_fsdp else DDP
    whole = run(make(base, out / "whole", **options))
    run(make(base, out / "run", kill_at=5, **options))
    resumed = run(make(base, out / "run", **options), resume=True)
    report = resumed.milepost_report
    reference = getattr(resumed, "ref_model", None)
    return {
        "whole": outcome(whole),
        "resumed": outcome(resumed),
        "report": (report.level.value, report.step, report.differences),
        "sharded": is_sharded(resumed),
        "reference": None if reference is None else bits(reference),
    }


def weights_of(kind: str, base: Path, checkpoint: Path) -> str:
    """A digest of what the library of the model loads from a checkpoint."""
    if kind == "reward":
        loader = transformers.AutoModelForSequenceClassification
        return bits(loader.from_pretrained(checkpoint))
    if kind == "dpo with an adapter":
        return bits(peft.PeftModel.from_pretrained(load_model(base), checkpoint))
    return bits(load_model(checkpoint))


@pytest.mark.parametrize(
    ("is_fsdp", "kinds"),
    [
        (False, ["sft"]),
        (True, ["dpo"]),
        pytest.param(False, [*MAKERS][1:], marks=pytest.mark.slow),
        pytest.param(True, [kind for kind in MAKERS if kind != "dpo"], marks=pytest.mark.slow),
    ],
    ids=["ddp: sft", "fsdp2: dpo", "ddp: others", "fsdp2: others"],
)
def test_two_ranks_of_a_trainer_of_trl_resume_to_the_bits_of_a_run_that_never_stopped(
    tmp_path: Path, is_fsdp: bool, kinds: list[str]
) -> None:
    base = write_base(tmp_path / "base")
    preferences().save_to_disk(base / "preferences")
    start = bits(load_model(base))
    ranks = run_world(2, trained, base, tmp_path, is_fsdp, kinds)
    for kind in kinds:
        checkpoint = tmp_path / kind / "run" / "checkpoint-8"
        weights = weights_of(kind, base, checkpoint)
        for found in (every[kind] for every in ranks):
            assert found["resumed"] == found["whole"], kind
            assert found["report"] == ("exact", 3, []), kind
            assert found["sharded"] == is_fsdp, kind
            assert found["resumed"][1] == weights != start, kind
            if kind in ("dpo", "dpo with a model as reference"):
                assert found["reference"] == start, kind
        assert stock_files(checkpoint) == [], kind

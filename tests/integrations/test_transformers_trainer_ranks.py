"""The Hugging Face Trainer with Milepost's checkpoints on two ranks: DDP, FSDP2, and models that
transformers shards when it loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from milepost.integrations.transformers_resume import is_milepost
from tests.integrations.trainers import (
    DDP,
    FSDP,
    bits,
    is_sharded,
    make,
    outcome,
    quiet,
    real_fsdp2,
    run,
    stock_files,
    tiny_config,
    tiny_model,
)
from tests.worlds import run_world


def ddp_run(rank: int, world_size: int, out: str) -> Any:
    quiet()
    place = Path(out)
    whole = run(make(place / "whole", **DDP))
    run(make(place / "run", kill_at=11, **DDP))
    resumed = run(make(place / "run", model=tiny_model(7), **DDP), resume=True)
    report = resumed.milepost_report
    return {
        "whole": outcome(whole),
        "resumed": outcome(resumed),
        "report": (report.level.value, report.step, report.differences),
    }


def test_two_ranks_of_ddp_resume_to_the_bits_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    ranks = run_world(2, ddp_run, str(tmp_path))
    for found in ranks:
        assert found["resumed"] == found["whole"]
        assert found["report"] == ("exact", 8, [])
    assert stock_files(tmp_path / "run" / "checkpoint-8") == []


def stock_ddp_run(rank: int, world_size: int, out: str) -> Any:
    quiet()
    place = Path(out)
    fine = {"logging_steps": 1, **DDP}
    whole = run(make(place / "whole", **fine))
    run(make(place / "stock", cls=transformers.Trainer, kill_at=6, **fine))
    path = str(place / "stock" / "checkpoint-4")
    resumed = run(make(place / "stock", model=tiny_model(7), **fine), path)
    return {"whole": outcome(whole), "resumed": outcome(resumed)}


@pytest.mark.slow
def test_a_checkpoint_of_the_stock_trainer_resumes_exactly_under_ddp(tmp_path: Path) -> None:
    for found in run_world(2, stock_ddp_run, str(tmp_path)):
        assert found["resumed"] == found["whole"]


def fsdp_run(rank: int, world_size: int, out: str) -> Any:
    quiet()
    place = Path(out)
    with real_fsdp2():
        whole = run(make(place / "whole", **FSDP))
        run(make(place / "run", kill_at=11, **FSDP))
        resumed = run(make(place / "run", model=tiny_model(7), **FSDP), resume=True)
        return {
            "whole": outcome(whole),
            "resumed": outcome(resumed),
            "level": resumed.milepost_report.level.value,
            "is sharded": is_sharded(resumed),
        }


def stock_fsdp_run(rank: int, world_size: int, out: str, kind: str) -> Any:
    quiet()
    place = Path(out)
    config = {**FSDP["fsdp_config"], "state_dict_type": kind}
    options = {**FSDP, "fsdp_config": config, "logging_steps": 1}
    with real_fsdp2():
        whole = run(make(place / "whole", **options))
        run(make(place / "stock", cls=transformers.Trainer, kill_at=6, **options))
        path = place / "stock" / "checkpoint-4"
        resumed = run(make(place / "stock", model=tiny_model(7), **options), str(path))
        return {
            "is ours": is_milepost(path),
            "whole": outcome(whole),
            "resumed": outcome(resumed),
            "is sharded": is_sharded(resumed),
        }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_what_accelerates_fsdp_wrote_for_the_stock_trainer_resumes_exactly(
    tmp_path: Path, kind: str
) -> None:
    for found in run_world(2, stock_fsdp_run, str(tmp_path), kind):
        assert not found["is ours"] and found["is sharded"]
        assert found["resumed"] == found["whole"]


def best_run(rank: int, world_size: int, out: str) -> Any:
    """FSDP2 with `load_best_model_at_end`, and then weights alone, which the stock one refuses."""
    quiet()
    place = Path(out)
    scores = iter([2.0, 1.0, 3.0])
    with real_fsdp2():
        trainer = make(
            place / "best",
            eval_steps=4,
            eval_strategy="steps",
            eval_dataset=[{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 2,
            compute_metrics=lambda _: {"score": next(scores)},
            metric_for_best_model="score",
            greater_is_better=False,
            load_best_model_at_end=True,
            save_total_limit=1,
            **FSDP,
        )
        run(trainer)
        alone = run(make(place / "alone", save_only_model=True, **FSDP))
        return {"best": bits(trainer.model), "alone": bits(alone.model)}


@pytest.mark.slow
def test_fsdp2_resumes_exactly_and_saves_what_from_pretrained_loads(tmp_path: Path) -> None:
    ranks = run_world(2, fsdp_run, str(tmp_path))
    for found in ranks:
        assert found["is sharded"]
        assert found["resumed"] == found["whole"]
        assert found["level"] == "exact"
    assert stock_files(tmp_path / "run" / "checkpoint-12") == []
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-12")
    assert bits(model) == ranks[0]["whole"][1]


@pytest.mark.slow
def test_fsdp2_loads_the_best_model_and_saves_weights_alone(tmp_path: Path) -> None:
    ranks = run_world(2, best_run, str(tmp_path))
    best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "best" / "checkpoint-8")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "checkpoint-12")
    assert [found["best"] for found in ranks] == [bits(best)] * 2
    assert [found["alone"] for found in ranks] == [bits(alone)] * 2
    for run_of in ("best/checkpoint-8", "alone/checkpoint-12"):
        assert stock_files(tmp_path / run_of) == []


def resharded(rank: int, world_size: int, source: str, out: str, is_fsdp: bool) -> Any:
    """What a resume on this number of ranks holds before its first step."""
    quiet()

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"]
            held = [
                value.full_tensor() if hasattr(value, "full_tensor") else value
                for group in optimizer.param_groups
                for param in group["params"]
                for slot, value in sorted(optimizer.state[param].items())
                if slot != "step"
            ]
            seen["weights"] = bits(kwargs["model"])
            seen["moments"] = sum(float(value.double().abs().sum()) for value in held)

    seen: dict[str, Any] = {}
    options = FSDP if is_fsdp else {}
    trainer = make(Path(out), model=tiny_model(7), callbacks=[Look()], **options)
    if is_fsdp:
        with real_fsdp2():
            trainer = make(Path(out), model=tiny_model(7), callbacks=[Look()], **options)
            run(trainer, resume=source)
    else:
        run(trainer, resume=source)
    return {**seen, "level": trainer.milepost_report.level.value, "end": trainer.state.global_step}


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_world(2, fsdp_run, str(tmp_path / "two"))
    from_two = str(tmp_path / "two" / "whole" / "checkpoint-8")
    one = resharded(0, 1, from_two, str(tmp_path / "one"), False)
    again = run_world(2, resharded, from_two, str(tmp_path / "same"), True)
    assert one["level"] == "resharded" and one["end"] == 12
    assert [found["level"] for found in again] == ["exact", "exact"]
    for found in again:
        assert found["weights"] == one["weights"]
        assert found["moments"] == pytest.approx(one["moments"], rel=1e-12)
    from_one = str(tmp_path / "one" / "checkpoint-12")
    make_longer = run_world(2, longer, from_one, str(tmp_path / "back"))
    for found in make_longer:
        assert found == ("resharded", 16)


def longer(rank: int, world_size: int, source: str, out: str) -> Any:
    quiet()
    with real_fsdp2():
        trainer = make(Path(out), model=tiny_model(7), max_steps=16, **FSDP)
        run(trainer, resume=source)
    return trainer.milepost_report.level.value, trainer.state.global_step


# ---- models that transformers shards when it loads them


def moe_config() -> Any:
    return transformers.Qwen3MoeConfig(
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=32,
        head_dim=8,
    )


def sharded_at_load(rank: int, world_size: int, base: str, out: str, sizes: dict[str, int]) -> Any:
    quiet()
    from accelerate.parallelism_config import ParallelismConfig
    from transformers.distributed import DistributedConfig

    # Accelerate knows tensor parallelism on accelerators only; gloo does it on a CPU too.
    ParallelismConfig._validate_accelerator = lambda config, accelerator: None

    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            base, distributed_config=DistributedConfig(**sizes)
        )

    place = Path(out)
    refused = ""
    try:
        make(place / "stock", cls=transformers.Trainer, model=model())
    except ValueError as error:
        refused = str(error)
    whole = run(make(place / "whole", model=model()))
    run(make(place / "run", model=model(), kill_at=11))
    trainer = make(place / "run", model=model())
    assert not trainer.args.save_only_model
    resumed = run(trainer, resume=True)
    return {
        "refused": refused,
        "whole": outcome(whole),
        "resumed": outcome(resumed),
        "level": resumed.milepost_report.level.value,
        "sharded": any(hasattr(p, "placements") for p in resumed.model.parameters()),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"fsdp_size": 2}, {"tp_size": 2}, {"fsdp_size": 2, "ep_size": 2}],
    ids=["fsdp", "tp", "ep"],
)
def test_models_sharded_at_load_are_saved_and_resumed_though_the_stock_trainer_refuses(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    is_moe = "ep_size" in sizes
    torch.manual_seed(0)
    base = (
        transformers.Qwen3MoeForCausalLM(moe_config())
        if is_moe
        else transformers.LlamaForCausalLM(tiny_config())
    )
    base.save_pretrained(tmp_path / "base")
    ranks = run_world(2, sharded_at_load, str(tmp_path / "base"), str(tmp_path / "out"), sizes)
    for found in ranks:
        assert "Resuming is not supported for models sharded at load time" in found["refused"]
        assert found["sharded"]
        assert found["resumed"] == found["whole"]
        assert found["level"] == "exact"
    assert stock_files(tmp_path / "out" / "run" / "checkpoint-12") == []
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out" / "whole" / "checkpoint-12"
    )
    assert loaded.num_parameters() == base.num_parameters()

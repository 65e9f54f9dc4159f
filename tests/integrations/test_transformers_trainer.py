"""The Hugging Face Trainer with Milepost's checkpoints, in one process."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.trainer_callback import ExportableState

import milepost as mp
from milepost.integrations.transformers_retention import TotalLimit
from milepost.manager.retention import Kept
from tests.integrations.trainers import (
    bits,
    make,
    names,
    outcome,
    run,
    tiny_model,
    tiny_tokenizer,
    token_data,
)

pytestmark = [
    # The Trainer pins memory where there is no accelerator to pin it for.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3, "optim": "adafactor"},
        {"num_train_epochs": 2, "max_steps": -1, "save_strategy": "epoch", "logging_steps": 4},
    ],
    ids=["mid-epoch", "accumulating", "epochs"],
)
def test_a_killed_training_resumes_to_the_bits_of_one_that_never_stopped(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = run(make(tmp_path / "whole", **options))
    run(make(tmp_path / "run", kill_at=11, **options))
    resumed = run(make(tmp_path / "run", model=tiny_model(7), **options), resume=True)
    assert outcome(resumed) == outcome(whole)
    assert resumed.milepost_report.level is mp.Level.EXACT
    assert resumed.state.total_flos == whole.state.total_flos


def test_a_checkpoint_is_one_commit_and_holds_no_file_of_the_stock_trainer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    trainer = run(make(tmp_path, processing_class=tokenizer))
    place = tmp_path / "checkpoint-12"
    found = {path.name for path in place.rglob("*")}
    stock = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    assert not found & stock
    assert mp.Checkpoint.open(place).verify().ok
    listed = {file.name for file in mp.Checkpoint.open(place).files()}
    assert {"trainer_state.json", "training_args.json"} <= listed
    state = transformers.TrainerState.load_from_json(str(place / "trainer_state.json"))
    assert state.global_step == 12 and state.max_steps == 12
    assert state.log_history == trainer.state.log_history[:4]
    assert "TrainerControl" in state.stateful_callbacks
    assert json.loads((place / "training_args.json").read_bytes())["learning_rate"] == 1e-2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(place)
    assert bits(loaded) == bits(trainer.model)
    other = make(tmp_path / "other", model=tiny_model(7))
    other._load_from_checkpoint(str(place))
    assert bits(other.model) == bits(trainer.model)
    assert transformers.AutoTokenizer.from_pretrained(place).get_vocab() == tokenizer.get_vocab()


def test_secrets_among_the_arguments_are_not_written(tmp_path: Path) -> None:
    run(make(tmp_path, hub_token="hf_secret"))
    for path in (tmp_path / "checkpoint-12").rglob("*"):
        assert path.is_dir() or b"hf_secret" not in path.read_bytes()


def test_the_last_step_is_saved_once_though_the_trainer_asks_twice(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    saved: list[str] = []

    class Again(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            place = tmp_path / f"checkpoint-{state.global_step}"
            saved.append(str(mp.Checkpoint.open(place).info.checkpoint_id))
            if len(saved) == 3:
                trainer._save_checkpoint(trainer.model, None)

    trainer.add_callback(Again())
    run(trainer)
    assert mp.Checkpoint.open(tmp_path / "checkpoint-12").info.checkpoint_id == saved[-1]


def test_a_new_training_in_an_old_directory_leaves_the_old_checkpoints_behind(
    tmp_path: Path,
) -> None:
    run(make(tmp_path))
    old = bits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4"))
    run(make(tmp_path, model=tiny_model(5), kill_at=6))
    new = bits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4"))
    assert new != old
    newest = mp.newest(tmp_path)
    assert newest is not None and newest.step == 4
    resumed = run(make(tmp_path, model=tiny_model(5)), resume=True)
    assert resumed.milepost_report.step == 4


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_save_total_limit_keeps_the_newest_and_the_best(tmp_path: Path, limit: int) -> None:
    losses = iter([3.0, 1.0, 2.0, 4.0, 5.0, 6.0])

    def scripted(_: Any) -> dict[str, float]:
        return {"score": next(losses)}

    trainer = make(
        tmp_path,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        eval_dataset=token_data(2),
        compute_metrics=scripted,
        save_total_limit=limit,
        metric_for_best_model="score",
        greater_is_better=False,
        load_best_model_at_end=True,
    )
    run(trainer)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    kept = {1: {4, 12}, 2: {4, 12}, 3: {4, 10, 12}}[limit]
    assert names(tmp_path) == {f"checkpoint-{step}" for step in kept}
    best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert bits(trainer.model) == bits(best)
    metrics = mp.Checkpoint.open(tmp_path / "checkpoint-4").info.metrics
    assert metrics["eval_score"] == 1.0


def test_the_best_adapter_comes_back_and_the_base_is_not_saved(tmp_path: Path) -> None:
    losses = iter([3.0, 1.0, 2.0])
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make(
        tmp_path,
        model=peft.get_peft_model(tiny_model(), config),
        eval_steps=4,
        eval_strategy="steps",
        eval_dataset=token_data(2),
        compute_metrics=lambda _: {"score": next(losses)},
        metric_for_best_model="score",
        load_best_model_at_end=True,
        greater_is_better=False,
    )
    run(trainer)
    best = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "checkpoint-8")
    last = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "checkpoint-12")
    assert bits(trainer.model) == bits(best) != bits(last)
    assert not (tmp_path / "checkpoint-8" / "model.safetensors").exists()


def test_the_best_that_is_still_on_its_way_does_not_cost_the_one_that_is_there() -> None:
    limit = TotalLimit(2)
    limit.take_best(10)
    limit.take_best(40)
    assert limit.keeps([Kept(step=step) for step in (10, 20, 30)]) == {10, 30}
    assert limit.keeps([Kept(step=step) for step in (10, 20, 30, 40)]) == {40, 30}


def test_a_checkpoint_of_weights_alone_resumes_them_and_says_what_starts_anew(
    tmp_path: Path,
) -> None:
    first = run(make(tmp_path, save_only_model=True))
    found = {path.name for path in (tmp_path / "checkpoint-8").rglob("*")}
    assert not any(name.startswith(("optimizer", "scheduler", "rng")) for name in found)
    assert "trainer_state.json" in found
    with pytest.warns(mp.errors.CheckpointWarning, match="holds no optimizer, .*scheduler"):
        resumed = run(make(tmp_path), resume=str(tmp_path / "checkpoint-8"))
    assert resumed.milepost_report.level is mp.Level.WEIGHTS_ONLY
    assert resumed.state.global_step == first.state.global_step == 12


def test_resume_true_never_becomes_a_fresh_training(tmp_path: Path) -> None:
    with pytest.raises(mp.errors.NotFoundError, match="no checkpoint to resume from"):
        make(tmp_path / "none").train(resume_from_checkpoint=True)
    run(make(tmp_path / "stock", cls=transformers.Trainer, max_steps=4))
    with pytest.raises(mp.errors.NotCommittedError, match="stock Trainer by its path"):
        make(tmp_path / "stock").train(resume_from_checkpoint=True)
    run(make(tmp_path / "torn", max_steps=4))
    (tmp_path / "torn" / "checkpoint-4" / "milepost.json").unlink()
    with pytest.raises(mp.errors.NotCommittedError, match="nothing was ever committed"):
        make(tmp_path / "torn").train(resume_from_checkpoint=True)
    with pytest.raises(mp.errors.NotCommittedError, match="copied incompletely"):
        make(tmp_path / "torn").train(str(tmp_path / "torn" / "checkpoint-4"))
    with pytest.raises(mp.errors.NotFoundError, match="no such checkpoint"):
        make(tmp_path / "none").train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


@pytest.mark.parametrize("file", ["model.safetensors", "trainer_state.json"])
def test_a_damaged_checkpoint_is_passed_over_or_refused(tmp_path: Path, file: str) -> None:
    whole = run(make(tmp_path))
    flip_a_byte(tmp_path / "checkpoint-12" / file)
    with pytest.raises(mp.errors.DamagedError, match=file):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    with pytest.warns(mp.errors.CheckpointWarning, match="checkpoint-8 is resumed from"):
        resumed = run(make(tmp_path), resume=True)
    assert resumed.milepost_report.step == 8
    assert outcome(resumed) == outcome(whole)


@pytest.mark.parametrize("options", [{}, {"milepost_in_flight": mp.InFlight.QUEUE}])
def test_saves_behind_training_are_committed_when_train_returns(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = run(make(tmp_path / "whole"))
    behind = {"milepost_saving": mp.Saving.ASYNC, "save_total_limit": 2, **options}
    run(make(tmp_path / "run", kill_at=11, **behind))
    resumed = run(make(tmp_path / "run", **behind), resume=True)
    assert names(tmp_path / "run") >= {"checkpoint-8", "checkpoint-12"}
    assert resumed.milepost_report.step == 8
    assert outcome(resumed) == outcome(whole)


def test_options_of_saves_behind_training_are_refused_without_them(tmp_path: Path) -> None:
    with pytest.raises(mp.errors.InvalidInputError, match=r"are for saving=Saving\.ASYNC"):
        make(tmp_path, milepost_in_flight=mp.InFlight.SKIP)


class Counting(transformers.TrainerCallback, ExportableState):  # type: ignore[misc]
    """Counts steps, and is saved with the trainer."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_stateful_callbacks_come_back(tmp_path: Path) -> None:
    run(make(tmp_path, callbacks=[Counting(), Counting()], kill_at=6))
    options = {"restore_callback_states_from_checkpoint": True}
    trainer = make(tmp_path, callbacks=[Counting(), Counting()], **options)
    run(trainer, resume=True)
    found = [c.steps for c in trainer.callback_handler.callbacks if isinstance(c, Counting)]
    assert found == [12, 12]
    saved = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_bytes())
    counted = saved["stateful_callbacks"]["Counting"]
    assert [each["attributes"]["steps"] for each in counted] == [12, 12]


# ---- checkpoints of the stock Trainer


def test_a_checkpoint_of_the_stock_trainer_resumes_exactly(tmp_path: Path) -> None:
    options = {"logging_steps": 1}
    whole = run(make(tmp_path / "whole", **options))
    run(make(tmp_path / "run", cls=transformers.Trainer, kill_at=6, **options))
    path = tmp_path / "run" / "checkpoint-4"
    resumed = run(make(tmp_path / "run", model=tiny_model(7), **options), resume=str(path))
    assert outcome(resumed) == outcome(whole)
    newest = mp.newest(tmp_path / "run")
    assert newest is not None and newest.step == 12
    again = run(make(tmp_path / "run", **options), resume=str(tmp_path / "run" / "checkpoint-8"))
    assert outcome(again) == outcome(whole)


def test_an_adapter_that_the_stock_trainer_saved_resumes_exactly(tmp_path: Path) -> None:
    def adapted(seed: int) -> Any:
        model = tiny_model()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    options = {"logging_steps": 1}
    whole = run(make(tmp_path / "whole", model=adapted(1), **options))
    stock = make(tmp_path / "run", model=adapted(1), cls=transformers.Trainer, kill_at=6, **options)
    run(stock)
    path = str(tmp_path / "run" / "checkpoint-4")
    resumed = run(make(tmp_path / "new", model=adapted(2), **options), resume=path)
    assert outcome(resumed) == outcome(whole)


class Harmful:
    """Unpickled by force, it leaves a file behind."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (Path.touch, (self.place,))


def test_a_pickle_that_would_run_code_is_refused_and_nothing_is_filled(tmp_path: Path) -> None:
    run(make(tmp_path / "run", cls=transformers.Trainer, max_steps=4))
    trap = tmp_path / "trap"
    path = tmp_path / "run" / "checkpoint-4"
    torch.save({"state": Harmful(trap)}, path / "scheduler.pt", pickle_module=pickle)
    trainer = make(tmp_path / "new")
    with pytest.raises(mp.errors.UnsafePickleError, match=r"scheduler\.pt"):
        trainer.train(resume_from_checkpoint=str(path))
    assert not trap.exists()
    assert not trainer.optimizer.state


def test_other_groups_than_the_stock_checkpoint_has_are_refused(tmp_path: Path) -> None:
    run(make(tmp_path / "run", cls=transformers.Trainer, max_steps=4))
    path = str(tmp_path / "run" / "checkpoint-4")
    frozen = tiny_model()
    frozen.model.norm.weight.requires_grad_(False)
    with pytest.raises(mp.errors.MismatchError, match="live optimizer has 2 of"):
        make(tmp_path / "new", model=frozen).train(resume_from_checkpoint=path)


# ---- pushes


class Uploads:
    """What would have gone to the Hub."""

    def __init__(self) -> None:
        self.folders: list[tuple[str, list[str]]] = []

    def upload_folder(self, *, folder_path: str, **kwargs: Any) -> Any:
        from concurrent.futures import Future

        self.folders.append(
            (
                kwargs.get("path_in_repo", ""),
                sorted(
                    str(path.relative_to(folder_path))
                    for path in Path(folder_path).rglob("*")
                    if path.is_file()
                ),
            )
        )
        done: Future[str] = Future()
        done.set_result("")
        return done if kwargs.get("run_as_future") else "url"


def test_pushes_of_the_trainer_still_happen_from_committed_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = Uploads()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: uploads)

    def named(self: Any, *args: Any, **kwargs: Any) -> None:
        self.hub_model_id, self.push_in_progress = "me/tiny", None

    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", named)
    trainer = make(
        tmp_path,
        push_to_hub=True,
        hub_strategy="checkpoint",
        hub_always_push=True,
        milepost_saving=mp.Saving.ASYNC,
    )
    run(trainer)
    whole = [files for place, files in uploads.folders if place == "last-checkpoint"]
    assert len(whole) == 3 and all("milepost.json" in files for files in whole)
    model = [files for place, files in uploads.folders if place == ""]
    assert "model.safetensors" in model[0] and "config.json" in model[0]

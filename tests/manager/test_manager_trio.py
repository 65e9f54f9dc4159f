"""The manager on the trio layout: one directory of `latest`, `best` and `epoch_<N>`."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import (
    CheckpointIncompleteError,
    CheckpointWarning,
    ConfigMismatchError,
    DamagedError,
    DigestMismatchError,
    InconsistentError,
    InvalidInputError,
    LoadTornError,
    MismatchError,
    NotFoundError,
    RunInUseError,
    StorageError,
    UnencodableError,
)
from tests.manager.small_training import Training, leaves_untouched, same

CONFIG = {"hidden_size": 8, "num_layers": 2, "dropout": 0.3}


def manager_of(directory: Path, **options: Any) -> mp.CheckpointManager:
    return mp.CheckpointManager(directory, layout=mp.Layout.TRIO, **options)


def save(
    manager: mp.CheckpointManager, training: Training, epoch: int, loss: Any = 1.0, **more: Any
) -> None:
    manager.save_checkpoint(epoch, *training.parts, loss=loss, **more)


def saved_run(directory: Path, losses: list[float], **options: Any) -> Training:
    training = Training()
    with manager_of(directory, **options) as manager:
        for epoch, loss in enumerate(losses):
            training.step()
            save(manager, training, epoch, loss, model_config=CONFIG)
    return training


def stems(directory: Path) -> list[str]:
    return sorted(path.name.removesuffix(".meta.json") for path in directory.glob("*.meta.json"))


def flip(path: Path, at: int = -10) -> None:
    """Change one byte; a file with several names is detached first, as a bad block would not."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


# ---- what a save writes


def test_the_directory_is_created_and_held(tmp_path: Path) -> None:
    with manager_of(tmp_path / "a" / "b") as manager:
        assert (tmp_path / "a" / "b").is_dir()
        assert manager.checkpoints_saved == []


def test_a_first_epoch_has_three_names_and_one_set_of_bytes(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])
    assert stems(tmp_path) == ["best", "epoch_1", "latest"]
    for suffix in (".safetensors", ".meta.json", ".extra_state.pt"):
        inodes = {(tmp_path / f"{stem}{suffix}").stat().st_ino for stem in stems(tmp_path)}
        assert len(inodes) == 1, "one serialisation, three names"


def test_meta_and_extra_state_are_those_of_the_split_layout(tmp_path: Path) -> None:
    training = Training()
    with manager_of(tmp_path) as manager:
        training.step()
        cursor = {"stream_data": {"shards": {"0": {"line_index": 3, "token_buffer": [1, 2]}}}}
        save(manager, training, 4, torch.tensor(0.5), extra_state=cursor, model_config=CONFIG)
    meta = json.loads((tmp_path / "latest.meta.json").read_text())
    extra = torch.load(tmp_path / "latest.extra_state.pt", weights_only=True)
    assert (meta["format_version"], meta["epoch"], meta["loss"]) == ("2.0", 4, 0.5)
    assert meta["best_loss"] == 0.5
    assert meta["model_config"] == {**CONFIG, "optimizer_class": "AdamW"}
    assert {"optimizer_state", "scheduler_state", "scaler_state", "extra_state"} <= extra.keys()
    assert extra["extra_state"]["stream_data"] == cursor["stream_data"]
    assert (extra["save_id"], extra["epoch"]) == (meta["save_id"], meta["epoch"])
    state = extra["optimizer_state"]
    assert set(state) == {"state", "param_groups"}, "the optimizer's own state dict"
    fresh = Training(seed=5)
    fresh.optimizer.load_state_dict(state)


def test_epochs_are_numbered_only_at_the_interval(tmp_path: Path) -> None:
    saved_run(tmp_path, [3.0, 2.0, 1.0, 0.5], save=mp.EveryNSteps(2))
    assert stems(tmp_path) == ["best", "epoch_2", "epoch_4", "latest"]


def test_best_is_the_epoch_with_the_smallest_loss(tmp_path: Path) -> None:
    saved_run(tmp_path, [3.0, 1.0, 2.0])
    info = mp.Checkpoint.open(tmp_path / "best").info
    assert (info.epoch, info.loss) == (1, 1.0)
    assert mp.Checkpoint.open(tmp_path / "latest").info.best_loss == 1.0


def test_best_by_another_metric_and_direction(tmp_path: Path) -> None:
    training = Training()
    best = mp.BestMetric("accuracy", mp.BestMode.MAX)
    with manager_of(tmp_path, best=best) as manager:
        for epoch, accuracy in enumerate([0.5, 0.9, 0.7]):
            save(manager, training, epoch, 1.0, metrics={"accuracy": accuracy})
    assert mp.Checkpoint.open(tmp_path / "best").info.metrics == {"accuracy": 0.9}


def test_without_a_best_metric_there_is_no_best(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0], best=None)
    assert stems(tmp_path) == ["epoch_1", "latest"]


@pytest.mark.case("C3.16")
def test_a_loss_that_is_not_finite_is_saved_but_never_best_and_warned_about_once(
    tmp_path: Path,
) -> None:
    training = Training()
    with manager_of(tmp_path) as manager:
        with pytest.warns(CheckpointWarning, match="epoch 0: loss is nan"):
            save(manager, training, 0, math.nan)
        save(manager, training, 1, -math.inf)
        assert stems(tmp_path) == ["epoch_1", "epoch_2", "latest"]
        save(manager, training, 2, 5.0)
        assert manager.best_loss == 5.0
    assert mp.Checkpoint.open(tmp_path / "best").info.epoch == 2


@pytest.mark.case("C3.16")
def test_a_new_process_without_resume_does_not_replace_a_better_best(tmp_path: Path) -> None:
    saved_run(tmp_path, [0.1])
    saved_run(tmp_path, [2.0], resume=mp.Resume.NEVER)
    assert mp.Checkpoint.open(tmp_path / "best").info.loss == 0.1
    assert mp.Checkpoint.open(tmp_path / "latest").info.best_loss == 0.1


@pytest.mark.case("C1.5")
def test_what_could_not_be_loaded_back_is_refused_before_a_byte_changes(tmp_path: Path) -> None:
    training = saved_run(tmp_path, [1.0])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with (
        manager_of(tmp_path, resume=mp.Resume.NEVER) as manager,
        pytest.raises(UnencodableError, match=r"extra_state\.where"),
    ):
        save(manager, training, 1, extra_state={"where": tmp_path})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_extra_state_that_is_no_dict_or_takes_our_key_is_refused(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        with pytest.raises(InvalidInputError, match="expected a dict"):
            save(manager, Training(), 0, extra_state=[1])
        with pytest.raises(InvalidInputError, match="'milepost' is taken"):
            save(manager, Training(), 0, extra_state={"milepost": {"rng": 1}})


def test_names_of_a_compiled_model_are_plain(tmp_path: Path) -> None:
    training = Training()
    compiled = torch.compile(training.model)
    with manager_of(tmp_path) as manager:
        manager.save_checkpoint(0, compiled, training.optimizer, loss=1.0)  # type: ignore[arg-type]
    names = mp.Checkpoint.open(tmp_path / "latest").tensors()
    assert list(names) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    fresh = Training(seed=3)
    with manager_of(tmp_path) as manager:
        manager.load_checkpoint(fresh.model, fresh.optimizer)
    weights = training.model.state_dict()
    assert torch.equal(fresh.model.state_dict()["0.weight"], weights["0.weight"])


@pytest.mark.case("C2.14")
def test_ties_and_module_extra_state_come_back(tmp_path: Path) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight
            self.calls = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    saved, fresh = Counted(), Counted()
    saved.calls = 7
    with manager_of(tmp_path) as manager:
        manager.save_checkpoint(0, saved, loss=1.0)
    with manager_of(tmp_path) as manager:
        manager.load_checkpoint(fresh)
    assert fresh.calls == 7
    assert torch.equal(fresh.head.weight, saved.embed.weight)
    assert fresh.head.weight is fresh.embed.weight


# ---- retention


def test_keep_last_holds_over_restarts_and_removes_all_files(tmp_path: Path) -> None:
    saved_run(tmp_path, [4.0, 3.0], keep=mp.KeepLast(2))
    (tmp_path / "epoch_1.pt").write_bytes(b"a stale file of the same name")
    training = Training()
    with manager_of(tmp_path, keep=mp.KeepLast(2)) as manager:
        start, _ = manager.load_checkpoint(*training.parts)
        assert start == 2
        for epoch in (2, 3):
            save(manager, training, epoch, 1.0 / epoch)
        assert [path.name for path in manager.checkpoints_saved] == [
            "epoch_2",
            "epoch_3",
            "epoch_4",
        ]
    assert not list(tmp_path.glob("epoch_1.*")), "rotation removes every file of the name"
    with manager_of(tmp_path, keep=mp.KeepLast(2)) as manager:
        manager.load_checkpoint(*training.parts)
        save(manager, training, 4, 0.1)
    assert stems(tmp_path) == ["best", "epoch_4", "epoch_5", "latest"], "epoch_2 was resumed from"


@pytest.mark.case("C3.17")
def test_the_numbered_copy_of_the_best_is_never_removed(tmp_path: Path) -> None:
    saved_run(tmp_path, [3.0, 0.5, 2.0, 2.0, 2.0], keep=mp.KeepLast(1))
    assert stems(tmp_path) == ["best", "epoch_2", "epoch_5", "latest"]


def test_pinned_epochs_and_several_policies_add_up(tmp_path: Path) -> None:
    (tmp_path / "milepost-pins.json").write_text('{"steps": [2]}')
    saved_run(tmp_path, [5.0, 4.0, 3.0, 2.0, 1.0], keep=[mp.KeepLast(1), mp.KeepEvery(3)])
    assert stems(tmp_path) == ["best", "epoch_2", "epoch_3", "epoch_5", "latest"]


def test_a_damaged_epoch_neither_counts_nor_is_removed(tmp_path: Path) -> None:
    saved_run(tmp_path, [4.0, 3.0, 2.0])
    (tmp_path / "epoch_2.meta.json").unlink()
    training = Training()
    with manager_of(tmp_path, keep=mp.KeepLast(2)) as manager:
        manager.load_checkpoint(*training.parts)
        save(manager, training, 3, 1.0)
    assert (tmp_path / "epoch_2.safetensors").exists()
    assert [path.name for path in tmp_path.glob("epoch_*.meta.json")] != []
    assert not (tmp_path / "epoch_1.meta.json").exists()


# ---- resume


@pytest.mark.case("C2.10")
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, cut: int) -> None:
    whole = Training()
    expected = [whole.steps(3) for _ in range(6)]
    first = Training()
    with manager_of(tmp_path) as manager:
        for epoch in range(cut):
            loss = first.steps(3)[-1]
            save(manager, first, epoch, loss)
    second = Training(seed=99)
    with manager_of(tmp_path) as manager:
        start, _ = manager.load_checkpoint(*second.parts)
        assert start == cut
        assert manager.load_report is not None
        assert manager.load_report.level is mp.Level.EXACT
        assert [second.steps(3) for _ in range(start, 6)] == expected[cut:]
    assert same(second.values(), whole.values())


def test_resume_restores_epoch_best_and_extra_state(tmp_path: Path) -> None:
    training = Training()
    with manager_of(tmp_path) as manager:
        save(manager, training, 0, 0.5, extra_state={"global_step": 10})
        save(manager, training, 1, 0.9, extra_state={"global_step": 20})
    with manager_of(tmp_path) as manager:
        assert manager.load_checkpoint(*Training().parts) == (2, 0.5)
        assert manager.best_loss == 0.5
        assert manager.loaded_extra_state == {"global_step": 20}


def test_extra_state_that_was_not_given_is_none_after_the_load(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])
    with manager_of(tmp_path) as manager:
        manager.load_checkpoint(*Training().parts)
        assert manager.loaded_extra_state is None


def test_an_empty_directory_is_a_fresh_run_for_auto_and_an_error_for_must(tmp_path: Path) -> None:
    training = Training()
    with manager_of(tmp_path) as manager:
        assert manager.load_checkpoint(*training.parts) == (0, math.inf)
    with (
        manager_of(tmp_path, resume=mp.Resume.MUST) as manager,
        pytest.raises(NotFoundError, match="nothing to resume from"),
    ):
        manager.load_checkpoint(*training.parts)


@pytest.mark.case("C1.4")
def test_a_mistyped_path_is_an_error_never_a_fresh_run(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])
    with (
        manager_of(tmp_path, resume=tmp_path / "lastest") as manager,
        pytest.raises(NotFoundError, match="lastest"),
    ):
        manager.load_checkpoint(*Training().parts)
    with pytest.raises(NotFoundError):
        manager_of(tmp_path / "rum", resume=mp.Resume.MUST)
    assert not (tmp_path / "rum").exists()


@pytest.mark.parametrize("spelled", ["epoch_1", "epoch_1.safetensors", "epoch_1.meta.json"])
def test_a_path_names_a_stem_or_any_file_of_it(tmp_path: Path, spelled: str) -> None:
    saved_run(tmp_path, [1.0, 0.5])
    with manager_of(tmp_path, resume=tmp_path / spelled) as manager:
        assert manager.load_checkpoint(*Training().parts)[0] == 1


def test_files_of_other_names_are_no_fresh_run(tmp_path: Path) -> None:
    training = Training()
    mp.save_checkpoint(tmp_path / "step_100.pt", training.model.state_dict())
    with manager_of(tmp_path) as manager, pytest.raises(NotFoundError, match=r"step_100\.pt"):
        manager.load_checkpoint(*training.parts)
    with manager_of(tmp_path, resume=mp.Resume.NEVER) as manager:
        assert manager.load_checkpoint(*training.parts) == (0, math.inf)


@pytest.mark.case("C1.2")
@pytest.mark.parametrize("suffix", [".safetensors", ".meta.json", ".extra_state.pt"])
def test_a_damaged_latest_is_passed_over_aloud(tmp_path: Path, suffix: str) -> None:
    saved_run(tmp_path, [3.0, 2.0, 2.5])
    flip(tmp_path / f"latest{suffix}")
    (tmp_path / f"epoch_3{suffix}").unlink()
    training = Training(seed=4)
    with manager_of(tmp_path) as manager:
        with pytest.warns(CheckpointWarning, match="epoch_2 is resumed from, not") as told:
            start, best = manager.load_checkpoint(*training.parts)
        assert (start, best) == (2, 2.0)
        assert manager.load_report is not None
        passed = manager.load_report.passed_over
        assert [text.partition(":")[0] for text in passed] == ["latest", "epoch_3"]
    assert len(told) == 2
    assert told[0].filename == __file__, "the warning points at the line of the user"


@pytest.mark.case("C1.1")
def test_when_everything_is_damaged_that_is_an_error(tmp_path: Path) -> None:
    saved_run(tmp_path, [3.0])
    for stem in stems(tmp_path):
        flip(tmp_path / f"{stem}.safetensors")
    training = Training()
    with manager_of(tmp_path) as manager:
        with pytest.raises(DigestMismatchError, match="none of 3 checkpoints"):
            manager.load_checkpoint(*training.parts)
        assert leaves_untouched(training, lambda: manager.load_checkpoint(*training.parts))


@pytest.mark.case("C1.3")
@pytest.mark.parametrize("suffix", [".safetensors", ".meta.json", ".extra_state.pt"])
def test_a_broken_trio_that_was_named_is_refused_with_the_way_to_its_weights(
    tmp_path: Path, suffix: str
) -> None:
    saved_run(tmp_path, [3.0, 2.0])
    (tmp_path / f"epoch_1{suffix}").unlink()
    path = tmp_path / "epoch_1"
    with (
        manager_of(tmp_path, resume=path) as manager,
        pytest.raises(CheckpointIncompleteError) as raised,
    ):
        manager.load_checkpoint(*Training().parts)
    assert f"milepost.load_checkpoint('{path}')" in str(raised.value)


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    saved_run(tmp_path / "a", [1.0])
    saved_run(tmp_path / "b", [1.0])
    for name in ("safetensors", "extra_state.pt"):
        mixed = tmp_path / f"mixed-{name}"
        mixed.mkdir()
        for suffix in ("safetensors", "meta.json", "extra_state.pt"):
            source = tmp_path / ("b" if suffix == name else "a") / f"latest.{suffix}"
            (mixed / f"latest.{suffix}").write_bytes(source.read_bytes())
        with manager_of(mixed) as manager, pytest.raises(InconsistentError, match="inconsistent"):
            manager.load_checkpoint(*Training().parts)


def test_a_file_that_cannot_be_read_is_no_damage(tmp_path: Path) -> None:
    saved_run(tmp_path, [3.0, 2.0])
    meta = tmp_path / "latest.meta.json"
    meta.unlink()
    meta.symlink_to(meta)  # ELOOP, as good an error as EIO
    with manager_of(tmp_path) as manager, pytest.raises(StorageError):
        manager.load_checkpoint(*Training().parts)


# ---- legacy files


def legacy(path: Path, training: Training, epoch: int = 4) -> None:
    torch.save(
        {
            "epoch": epoch,
            "loss": 0.7,
            "best_loss": 0.6,
            "model_state": {f"_orig_mod.{k}": v for k, v in training.model.state_dict().items()},
            "optimizer_state": training.optimizer.state_dict(),
            "scheduler_state": training.scheduler.state_dict(),
            "scaler_state": None,
            "model_config": CONFIG,
        },
        path,
    )


def test_a_legacy_latest_is_resumed_from_with_one_warning_that_names_the_command(
    tmp_path: Path,
) -> None:
    old = Training()
    old.steps(3)
    legacy(tmp_path / "latest.pt", old)
    training = Training(seed=7)
    with manager_of(tmp_path) as manager:
        with pytest.warns(DeprecationWarning, match="llm-migrate-ckpt") as told:
            assert manager.load_checkpoint(*training.parts) == (5, 0.6)
        assert len(told) == 1
        assert told[0].filename == __file__
        assert same(training.values(), old.values())
        save(manager, training, 5, 0.5)
    assert not (tmp_path / "latest.pt").exists(), "the trio takes the place of the file"


def test_a_trio_wins_over_a_stale_file_of_its_name(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0, 1.0])
    legacy(tmp_path / "latest.pt", Training(), epoch=77)
    with manager_of(tmp_path, resume=tmp_path / "latest.pt") as manager:
        assert manager.load_checkpoint(*Training().parts)[0] == 2


@pytest.mark.case("C1.4")
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short"])
def test_a_corrupt_legacy_file_is_an_error_never_a_fresh_run(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "latest.pt").write_bytes(content)
    with manager_of(tmp_path) as manager, pytest.raises(DamagedError):
        manager.load_checkpoint(*Training().parts)


def test_a_state_without_names_is_read_by_position_when_the_groups_agree(tmp_path: Path) -> None:
    old = Training()
    old.steps(2)
    legacy(tmp_path / "latest.pt", old)
    training = Training(seed=7)
    bias = [p for name, p in training.model.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in training.model.named_parameters() if name.endswith("weight")]
    training.optimizer = torch.optim.AdamW([{"params": rest}, {"params": bias}], lr=1e-2)
    with (
        manager_of(tmp_path) as manager,
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),
        pytest.raises(MismatchError, match="without names"),
    ):
        manager.load_checkpoint(training.model, training.optimizer)


# ---- mismatches change nothing


def test_another_architecture_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])
    training = Training(width=16)
    with manager_of(tmp_path) as manager:
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            manager.load_checkpoint(*training.parts)
        assert leaves_untouched(training, lambda: manager.load_checkpoint(*training.parts))


def test_config_fields_that_decide_the_tensors_are_compared_one_by_one(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])
    other = {**CONFIG, "hidden_size": 16, "num_layers": 3}
    with manager_of(tmp_path) as manager:
        with pytest.raises(ConfigMismatchError) as raised:
            manager.load_checkpoint(*Training().parts, expected_model_config=other)
        text = str(raised.value)
        assert "different model/schedule configuration" in text
        assert "hidden_size (checkpoint 8, now 16)" in text
        assert "num_layers (checkpoint 2, now 3)" in text
        assert "Refusing to silently resume" in text
        assert isinstance(raised.value, ValueError)
        drifted = {**CONFIG, "dropout": 0.9, "something_new": 1}
        assert manager.load_checkpoint(*Training().parts, expected_model_config=drifted)[0] == 1


def test_another_optimizer_class_is_refused(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])
    training = Training()
    training.optimizer = torch.optim.Adam(training.model.parameters())  # type: ignore[assignment]
    with manager_of(tmp_path) as manager:
        with pytest.raises(ConfigMismatchError, match="optimizer_class"):
            manager.load_checkpoint(*training.parts[:2], expected_model_config=CONFIG)
        with pytest.raises(MismatchError, match="AdamW"):
            manager.load_checkpoint(*training.parts[:2])


def test_the_peft_method_stands_beside_the_architecture(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(4, 4))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"]))
    with manager_of(tmp_path) as manager:
        manager.save_checkpoint(0, adapted, loss=1.0, model_config={"hidden_size": 4})
    config = mp.Checkpoint.open(tmp_path / "latest").info.model_config
    assert config == {"hidden_size": 4, "peft_method": "lora", "peft_rank": 2}
    other = peft.get_peft_model(
        nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(r=3, target_modules=["0"])
    )
    with manager_of(tmp_path) as manager:
        with pytest.raises(ConfigMismatchError, match=r"peft_rank \(checkpoint 2, now 3\)"):
            manager.load_checkpoint(other, expected_model_config={"hidden_size": 4})
        manager.load_checkpoint(adapted, expected_model_config={"hidden_size": 4})


@pytest.mark.case("C1.6")
def test_a_scheduler_that_does_not_fit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])

    class Stubborn(torch.optim.lr_scheduler.CosineAnnealingLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if "T_max" in state_dict and state_dict["last_epoch"] > 0:
                raise KeyError("not mine")
            super().load_state_dict(state_dict)

    training = Training(seed=8)
    training.scheduler = Stubborn(training.optimizer, 30)
    with manager_of(tmp_path) as manager:
        with pytest.raises(MismatchError, match="scheduler: Stubborn does not take"):
            manager.load_checkpoint(*training.parts)
        assert leaves_untouched(training, lambda: manager.load_checkpoint(*training.parts))
        grouped = Training(seed=8)
        one, two, *rest = grouped.model.parameters()
        optimizer = torch.optim.AdamW([{"params": [one, two]}, {"params": rest}], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        with pytest.raises(MismatchError, match="scheduler: the saved state does not fit"):
            manager.load_checkpoint(grouped.model, None, scheduler)


def test_a_failure_while_live_state_is_filled_says_that_it_is_torn(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])
    training = Training()

    def explode(module: nn.Module, incompatible: Any) -> None:
        raise ArithmeticError("in a load hook")

    training.model[0].register_load_state_dict_post_hook(explode)  # type: ignore[no-untyped-call]
    with manager_of(tmp_path) as manager, pytest.raises(LoadTornError, match="in a load hook"):
        manager.load_checkpoint(*training.parts)


# ---- moments and schedules


@pytest.mark.case("V33")
def test_moments_follow_names_when_groups_are_listed_in_another_order(tmp_path: Path) -> None:
    def grouped(order: list[str]) -> tuple[nn.ModuleDict, torch.optim.AdamW]:
        model = nn.ModuleDict({name: nn.Linear(4, 4, bias=name != "c") for name in "abc"})
        params = dict(model.named_parameters())
        decay = [params[f"{name}.weight"] for name in order]
        plain = [p for name, p in params.items() if name.endswith("bias")]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0},
        ]
        return model, torch.optim.AdamW(groups if order[0] == "a" else groups[::-1])

    model, optimizer = grouped(["a", "b", "c"])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with manager_of(tmp_path) as manager:
        manager.save_checkpoint(0, model, optimizer, loss=1.0)
    other, turned = grouped(["c", "a", "b"])
    with manager_of(tmp_path) as manager:
        manager.load_checkpoint(other, turned)
    for name, parameter in model.named_parameters():
        saved = optimizer.state[parameter]
        loaded = turned.state[other.get_parameter(name)]
        assert torch.equal(saved["exp_avg"], loaded["exp_avg"]), name
    assert [group["weight_decay"] for group in turned.param_groups] == [0.0, 0.1]


@pytest.mark.case("V34")
def test_moments_keep_their_dtype(tmp_path: Path) -> None:
    def half() -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Linear(3, 3).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = half()
    for parameter in model.parameters():
        moment = torch.full_like(parameter, 1 + 2**-12, dtype=torch.float32)
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": moment,
            "exp_avg_sq": moment * 2,
        }
    with manager_of(tmp_path) as manager:
        manager.save_checkpoint(0, model, optimizer, loss=1.0)
    fresh, other = half()
    with manager_of(tmp_path) as manager:
        manager.load_checkpoint(fresh, other)
    for parameter in fresh.parameters():
        assert other.state[parameter]["exp_avg"].dtype is torch.float32
        assert other.state[parameter]["exp_avg"].flatten()[0].item() == 1 + 2**-12
        assert other.state[parameter]["step"].item() == 3


@pytest.mark.case("V30")
@pytest.mark.parametrize("stop", [3, 10, 57])
def test_the_rate_goes_on_where_it_was(tmp_path: Path, stop: int) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [10])

    def rates(model: nn.Module, optimizer: Any, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    def made() -> tuple[nn.Module, Any, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, schedule(optimizer)

    whole = rates(*made(), 100)
    first = made()
    rates(*first, stop)
    with manager_of(tmp_path) as manager:
        manager.save_checkpoint(0, *first, loss=1.0)
    second = made()
    with manager_of(tmp_path) as manager:
        manager.load_checkpoint(*second)
    assert rates(*second, 100 - stop) == pytest.approx(whole[stop:], abs=1e-12)


@pytest.mark.case("V30")
def test_a_new_horizon_is_named_and_a_missing_scheduler_is_warned_about(tmp_path: Path) -> None:
    saved_run(tmp_path, [1.0])
    training = Training()
    training.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 200)
    with manager_of(tmp_path) as manager:
        manager.load_checkpoint(*training.parts)
        assert manager.load_report is not None
        assert "scheduler: T_max is 30 as saved, not 200" in manager.load_report.notes[0]
        manager.save_checkpoint(1, training.model, training.optimizer, loss=1.0)
    with manager_of(tmp_path) as manager:
        with pytest.warns(CheckpointWarning, match="no state of the scheduler.*warm-up"):
            manager.load_checkpoint(*training.parts)
        assert manager.load_report is not None
        assert manager.load_report.kept == ["scheduler"]
        assert manager.load_report.level is mp.Level.WARM_RESTART


def test_a_scaler_comes_back(tmp_path: Path) -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with manager_of(tmp_path) as manager:
        manager.save_checkpoint(0, training.model, None, None, scaler, loss=1.0)
    fresh = torch.amp.GradScaler("cpu")
    off = torch.amp.GradScaler("cpu", enabled=False)
    with manager_of(tmp_path) as manager:
        manager.load_checkpoint(training.model, scaler=fresh)
        assert fresh.get_scale() == 1024.0
        manager.load_checkpoint(training.model, scaler=off)


# ---- one writer, right use


@pytest.mark.case("C1.7")
def test_a_second_job_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sys, milepost as mp\n"
        "try: mp.CheckpointManager(sys.argv[1], layout=mp.Layout.TRIO)\n"
        "except mp.errors.RunInUseError as error: print(error)\n"
        "else: print('taken')\n"
    )

    def other_job() -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=180,
        )
        return done.stdout

    manager = manager_of(tmp_path)
    assert "is writing checkpoints here" in other_job()
    manager.close()
    manager.close()
    assert other_job() == "taken\n"
    with pytest.raises(InvalidInputError, match="closed"):
        save(manager, Training(), 0)
    assert issubclass(RunInUseError, mp.errors.CheckpointError)


def test_a_forgotten_manager_gives_the_lease_back(tmp_path: Path) -> None:
    from milepost.storage.lease import LOCK_NAME

    manager = manager_of(tmp_path)
    assert (tmp_path / LOCK_NAME).read_bytes()
    del manager
    assert not (tmp_path / LOCK_NAME).read_bytes()


def test_calls_of_the_other_layout_are_refused_by_name(tmp_path: Path) -> None:
    training = Training()
    with manager_of(tmp_path) as manager:
        with pytest.raises(InvalidInputError, match="use save_checkpoint"):
            manager.save(1, training.state)
        with pytest.raises(InvalidInputError, match="use load_checkpoint"):
            manager.resume(training.state)
    with pytest.raises(InvalidInputError, match=r"Layout\.DIRECTORY or Layout\.TRIO"):
        mp.CheckpointManager(tmp_path, layout=mp.Layout.SINGLE_FILE)

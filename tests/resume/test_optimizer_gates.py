"""What becomes of optimizer state at a resume, case by case."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import milepost as mp
from milepost.errors import (
    DamagedError,
    InvalidInputError,
    KeyMismatchError,
    MismatchError,
    ShapeMismatchError,
)
from tests.manager.small_training import Training, leaves_untouched, same
from tests.worlds import run_outcomes, run_world

FRESH, IF_UNUSABLE = mp.Moments.FRESH, mp.Moments.FRESH_IF_UNUSABLE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    training = Training()
    training.steps(3)
    mp.save(tmp_path / "run" / "checkpoint-3", training.state, step=3)
    return tmp_path / "run" / "checkpoint-3"


def optimizer_file(path: Path) -> Path:
    return path / "training" / "optimizer.safetensors"


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def only_rate(training: Training) -> float:
    (group,) = training.optimizer.param_groups
    return float(group["lr"])


# ---- 4, 13: the fingerprint matches


def test_state_of_the_same_topology_is_restored_exactly(path: Path) -> None:
    report = mp.load(path, Training(seed=8).state)
    assert (report.level, report.fingerprint, report.fresh_moments) == (mp.Level.EXACT, {}, {})


def test_a_field_of_the_fingerprint_that_differs_is_told_and_costs_no_state(path: Path) -> None:
    training = Training(seed=8)
    report = mp.load(path, training.state, fingerprint={"tp_size": 2})
    assert report.level is mp.Level.EXACT_STATE
    assert report.fingerprint == {"tp_size": (1, 2)}
    assert "fingerprint.tp_size: saved 1, now 2" in report.lines()
    assert training.optimizer.state


# ---- warm restarts


def test_a_warm_restart_clears_state_and_gradients_and_takes_the_scheduled_rate(
    path: Path,
) -> None:
    saved = Training()
    saved.steps(3)
    training = Training(seed=8)
    training.step()
    report = mp.load(path, training.state, moments=FRESH)
    assert report.level is mp.Level.WARM_RESTART
    assert report.fresh_moments == {"optimizer": "as asked"}
    assert "optimizer: fresh moments: as asked" in report.lines()
    assert not training.optimizer.state
    assert all(param.grad is None for param in training.model.parameters())
    assert only_rate(training) == saved.scheduler.get_last_lr()[0] != 1e-2


def test_a_rate_that_is_a_tensor_is_set_in_place(path: Path) -> None:
    training = Training(seed=8)
    rate = torch.tensor(1e-2)
    training.optimizer.param_groups[0]["lr"] = rate
    mp.load(path, training.state, moments=FRESH)
    assert training.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(training.scheduler.get_last_lr()[0])


def test_a_schedule_of_other_groups_leaves_the_rates_and_says_so(path: Path) -> None:
    training = Training(seed=8)
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    report = mp.load(path, training.state, moments=FRESH)
    assert [group["lr"] for group in training.optimizer.param_groups] == [1e-2, 0.5]
    assert any("stands at 1 learning rates, its optimizer has 2 groups" in n for n in report.notes)


def test_state_that_can_be_used_is_restored_where_a_warm_restart_is_only_allowed(
    path: Path,
) -> None:
    report = mp.load(path, Training(seed=8).state, moments=IF_UNUSABLE)
    assert (report.level, report.fresh_moments) == (mp.Level.EXACT, {})


# ---- 1, 6, 10: torn, missing, unreadable


@pytest.mark.parametrize("how", ["missing", "short"])
def test_torn_optimizer_state_is_refused(path: Path, how: str) -> None:
    tear(path, how)
    training = Training(seed=8)
    assert leaves_untouched(training, lambda: mp.load(path, training.state))
    with pytest.raises(DamagedError, match=r"optimizer\.safetensors"):
        mp.load(path, training.state)


def tear(path: Path, how: str) -> None:
    file = optimizer_file(path)
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(file.read_bytes()[:-8])
    else:
        damage(file)


@pytest.mark.parametrize("how", ["missing", "short", "wrong"])
@pytest.mark.parametrize("moments", [FRESH, IF_UNUSABLE])
def test_a_warm_restart_that_was_asked_for_goes_on_without_it(
    path: Path, how: str, moments: mp.Moments
) -> None:
    tear(path, how)
    training, whole = Training(seed=8), Training()
    whole.steps(3)
    report = mp.load(path, training.state, moments=moments, verify=mp.Verify.DIGESTS)
    assert report.level is mp.Level.WARM_RESTART
    why = report.fresh_moments["optimizer"]
    assert why == "as asked" if moments is FRESH else "optimizer.safetensors" in why
    assert not training.optimizer.state
    for mine, theirs in zip(training.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("how", ["missing", "wrong"])
def test_so_it_is_in_the_manager_for_a_checkpoint_that_is_named(
    path: Path, tmp_path: Path, how: str
) -> None:
    tear(path, how)
    with (
        mp.CheckpointManager(tmp_path / "a", resume=path) as manager,
        pytest.raises(DamagedError, match=r"optimizer\.safetensors"),
    ):
        manager.resume(Training(seed=8).state)
    for number, moments in enumerate((FRESH, IF_UNUSABLE)):
        with mp.CheckpointManager(tmp_path / f"b{number}", resume=path) as manager:
            assert manager.checkpoint_to_resume(moments=moments) == path
            report = manager.resume(Training(seed=8).state, moments=moments)
        assert report is not None and list(report.fresh_moments) == ["optimizer"]


def test_a_torn_weight_is_no_reason_for_a_warm_restart(path: Path) -> None:
    damage(path / "model.safetensors")
    for moments in (FRESH, IF_UNUSABLE):
        with pytest.raises(DamagedError, match=r"model\.safetensors"):
            mp.load(path, Training(seed=8).state, moments=moments, verify=mp.Verify.DIGESTS)


# ---- 0, 3, 7, 8: state of other programs


def test_shards_of_each_rank_in_the_directory_are_named(tmp_path: Path) -> None:
    training, place = Training(), tmp_path / "foreign"
    place.mkdir()
    save_file(dict(training.model.state_dict()), place / "model.safetensors")
    (place / "trainer_state.json").write_text('{"global_step": 3}')
    for name in ("optimizer_shard_00000.pt", "optimizer_shard_00001.pt", "optimizer_meta.pt"):
        (place / name).write_bytes(b"")
    for act in (
        lambda: mp.load(place, training.state),
        lambda: resume_from(place, training),
    ):
        with pytest.raises(InvalidInputError) as caught:
            act()
        assert "2 files optimizer_shard_*.pt and optimizer_meta.pt" in str(caught.value)


def resume_from(path: Path, training: Training) -> None:
    with mp.CheckpointManager(path.parent / "other-run", resume=path) as manager:
        manager.resume(training.state)


def test_they_are_named_beside_a_checkpoint_that_holds_no_optimizer(tmp_path: Path) -> None:
    training = Training()
    path = tmp_path / "checkpoint-1"
    mp.save(path, {"model": training.model}, step=1)
    (path / "optimizer_shard_00000.pt").write_bytes(b"")
    with pytest.raises(KeyMismatchError, match=r"1 file optimizer_shard_\*\.pt"):
        mp.load(path, {"model": training.model, "optimizer": training.optimizer})


# ---- 9: nothing is there


def test_a_checkpoint_without_optimizer_state_needs_a_word(tmp_path: Path) -> None:
    training = Training()
    path = tmp_path / "checkpoint-1"
    mp.save(path, {"model": training.model, "scheduler": training.scheduler}, step=1)
    with pytest.raises(KeyMismatchError, match=r"holds no optimizer; .*moments=Moments\.FRESH"):
        mp.load(path, training.state)
    for moments in (FRESH, IF_UNUSABLE):
        report = mp.load(path, training.state, moments=moments)
        assert list(report.fresh_moments) == ["optimizer"]


# ---- 11, 12: parameters and groups that do not fit


def test_a_trained_parameter_that_the_saved_optimizer_never_had_is_refused(path: Path) -> None:
    training = Training(seed=8)
    training.model.append(nn.Linear(2, 2))
    training.optimizer.add_param_group({"params": list(training.model[3].parameters())})
    state = {"model": training.model, "optimizer": training.optimizer}
    with pytest.raises(KeyMismatchError, match=r"3\.weight"):
        mp.load(path, state)
    with pytest.raises(KeyMismatchError, match=r"3\.weight"):  # the weights lack it as well
        mp.load(path, state, moments=IF_UNUSABLE)
    report = mp.load(path, state, missing=mp.Missing.KEEP)
    assert report.level is mp.Level.WARM_RESTART
    assert report.optimizers["optimizer"].missing == ("3.weight", "3.bias")
    assert len(training.optimizer.state) == 4


def test_a_parameter_that_is_gone_is_named(path: Path) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 8))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(KeyMismatchError, match=r"2\.weight"):
        mp.load(path, state)
    report = mp.load(path, state, unexpected=mp.Unexpected.IGNORE)
    assert report.level is mp.Level.WARM_RESTART
    assert report.optimizers["optimizer"].unexpected == ("2.weight", "2.bias")


def test_moments_of_another_shape_are_refused_or_start_afresh_by_themselves(path: Path) -> None:
    training = Training(seed=8, width=12)
    assert leaves_untouched(training, lambda: mp.load(path, training.state))
    with pytest.raises(ShapeMismatchError, match=r"0\.weight"):
        mp.load(path, training.state)
    report = mp.load(path, training.state, shape=mp.ShapePolicy.SKIP)
    assert report.level is mp.Level.WARM_RESTART
    reshaped = sorted(report.optimizers["optimizer"].reshaped)
    assert reshaped == ["0.bias", "0.weight", "2.weight"]
    assert any("3 parameters of other shapes start fresh" in line for line in report.lines())
    (kept,) = training.optimizer.state
    assert kept is training.model[2].bias
    training.step()


def test_groups_may_drift_as_long_as_their_settings_say_what_holds(path: Path) -> None:
    training = Training(seed=8)
    weights = [p for p in training.model.parameters() if p.ndim > 1]
    others = [p for p in training.model.parameters() if p.ndim < 2]
    split = torch.optim.AdamW([{"params": weights}, {"params": others}], lr=0.5)
    report = mp.load(path, {"model": training.model, "optimizer": split})
    assert len(split.state) == 4 and not report.fresh_moments
    assert split.param_groups[0]["lr"] == split.param_groups[1]["lr"] != 0.5


def test_groups_with_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    training = Training()
    first, second = [*training.model.parameters()][:2], [*training.model.parameters()][2:]
    split = torch.optim.AdamW([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])
    mp.save(tmp_path / "checkpoint-1", {"model": training.model, "optimizer": split}, step=1)
    state = {"model": training.model, "optimizer": training.optimizer}
    with pytest.raises(MismatchError, match="different hyper-parameters"):
        mp.load(tmp_path / "checkpoint-1", state)
    report = mp.load(tmp_path / "checkpoint-1", state, moments=IF_UNUSABLE)
    assert "different hyper-parameters" in report.fresh_moments["optimizer"]


def test_another_class_of_optimizer_is_refused_or_a_warm_restart(path: Path) -> None:
    training = Training(seed=8)
    state = {"model": training.model, "optimizer": torch.optim.SGD(training.model.parameters())}
    with pytest.raises(MismatchError, match="optimizer_class=ClassPolicy"):
        mp.load(path, state)
    report = mp.load(path, state, moments=IF_UNUSABLE)
    assert (
        "the checkpoint holds state of torch.optim.adamw.AdamW"
        in (report.fresh_moments["optimizer"])
    )
    assert report.fingerprint == {"optimizer_class": ("AdamW", "SGD")}


def test_saved_settings_of_groups_are_in_force(path: Path) -> None:
    """They come from the checkpoint; a run that wants others sets them after the load."""
    training = Training(seed=8)
    training.optimizer.param_groups[0]["weight_decay"] = 0.75
    mp.load(path, training.state)
    assert training.optimizer.param_groups[0]["weight_decay"] == 0.01


# ---- the schedule


def test_a_schedule_is_restored_exactly_and_others_of_its_kind_are_told(path: Path) -> None:
    whole = Training()
    whole.steps(3)
    training = Training(seed=8)
    mp.load(path, training.state)
    assert training.scheduler.state_dict() == whole.scheduler.state_dict()
    assert only_rate(training) == only_rate(whole)


def test_a_schedule_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    training = Training()
    state = {"model": training.model, "optimizer": training.optimizer}
    mp.save(tmp_path / "checkpoint-1", state, step=1)
    with pytest.raises(KeyMismatchError, match="holds no scheduler"):
        mp.load(tmp_path / "checkpoint-1", training.state)


# ---- on two ranks


def load_own(rank: int, world_size: int, runs: list[Path], moments: mp.Moments) -> Any:
    training = Training(seed=8)
    state = {"model": training.model, "optimizer": training.optimizer}
    report = mp.load(runs[rank] / "checkpoint-3", state, moments=moments)
    return dict(report.fresh_moments), len(training.optimizer.state)


@pytest.fixture
def copies(path: Path, tmp_path: Path) -> list[Path]:
    """The same checkpoint on two disks; the second lost its optimizer file."""
    shutil.copytree(path.parent, tmp_path / "other")
    optimizer_file(tmp_path / "other" / "checkpoint-3").unlink()
    return [path.parent, tmp_path / "other"]


def test_a_file_that_one_rank_lacks_stops_all(copies: list[Path]) -> None:
    outcomes = run_outcomes(2, load_own, copies, mp.Moments.RESTORE)
    assert [outcome.error_class for outcome in outcomes] == ["DamagedError"] * 2
    for outcome in outcomes:
        assert "rank 1: " in str(outcome.error) and "optimizer.safetensors" in str(outcome.error)


def test_all_ranks_begin_afresh_where_one_has_to(copies: list[Path]) -> None:
    found = run_world(2, load_own, copies, IF_UNUSABLE)
    assert found[0] == found[1]
    why, states = found[0]
    assert "rank 1: " in why["optimizer"] and states == 0


def test_two_restored_optimizers_are_the_same(path: Path) -> None:
    first, second = Training(seed=8), Training(seed=9)
    mp.load(path, first.state)
    mp.load(path, second.state, moments=IF_UNUSABLE)
    assert same(first.values(), second.values())

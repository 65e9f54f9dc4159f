"""Retention policies: which steps each keeps, alone and together; what pruning never removes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import milepost as mp
from milepost.checkpointing.save import save
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import InvalidInputError
from milepost.layouts.run import list_run
from milepost.manager.prune import PruneMode, kept_entries, prune_run
from milepost.manager.retention import (
    BestMode,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNewerThan,
    Kept,
    RetentionPolicy,
    age_s,
    keep_last,
    parse_best,
    parse_duration,
    parse_policy,
    union,
)

NAN, INF = float("nan"), float("inf")


def entries(*steps: int, **metrics: list[float | str | None]) -> list[Kept]:
    return [
        Kept(step=step, metrics={name: values[number] for name, values in metrics.items()})
        for number, step in enumerate(steps)
    ]


# ---- policies


@pytest.mark.case("V21")
def test_the_last_are_the_newest_in_the_order_given_not_the_highest_by_text() -> None:
    steps = entries(1, 2, 9, 10, 100, 9000, 10000)
    assert KeepLast(1).keeps(steps) == {10000}
    assert KeepLast(3).keeps(steps) == {100, 9000, 10000}
    assert KeepLast(99).keeps(steps) == {1, 2, 9, 10, 100, 9000, 10000}
    assert KeepLast(1).keeps([]) == set()


@pytest.mark.case("V21")
def test_no_limit_keeps_all_and_a_limit_of_0_is_refused() -> None:
    steps = entries(1, 2, 3)
    assert keep_last(None).keeps(steps) == keep_last(-1).keeps(steps) == {1, 2, 3}
    assert keep_last(1).keeps(steps) == {3}
    with pytest.raises(InvalidInputError, match="would delete every checkpoint"):
        keep_last(0)
    with pytest.raises(InvalidInputError, match="would delete every checkpoint"):
        KeepLast(0)


@pytest.mark.parametrize("n", [-2, -3])
def test_other_negative_limits_are_refused(n: int) -> None:
    with pytest.raises(InvalidInputError, match="is no count"):
        keep_last(n)


def test_the_best_are_chosen_by_value_and_mode() -> None:
    steps = entries(1, 2, 3, 4, loss=[3.0, 1.0, 2.0, 4.0])
    assert KeepBest(1, "loss").keeps(steps) == {2}
    assert KeepBest(2, "loss").keeps(steps) == {2, 3}
    assert KeepBest(1, "loss", BestMode.MAX).keeps(steps) == {4}
    assert KeepBest(9, "loss").keeps(steps) == {1, 2, 3, 4}


@pytest.mark.parametrize("mode", list(BestMode))
@pytest.mark.parametrize("value", [NAN, INF, -INF, "nan", "inf", "-inf", None, True])
def test_what_is_no_finite_number_is_never_best(mode: BestMode, value: float | str | None) -> None:
    steps = entries(1, 2, 3, loss=[value, 1.0, value])
    assert KeepBest(1, "loss", mode).keeps(steps) == {2}
    assert KeepBest(3, "loss", mode).keeps(steps) == {2}


def test_of_equal_values_the_newer_is_best() -> None:
    assert KeepBest(1, "loss").keeps(entries(1, 2, 3, loss=[1.0, 1.0, 2.0])) == {2}


def test_a_metric_that_was_not_recorded_keeps_nothing() -> None:
    assert KeepBest(1, "loss").keeps([Kept(step=1), Kept(step=2)]) == set()


def test_every_nth_step_stays_for_ever() -> None:
    assert KeepEvery(1000).keeps(entries(0, 500, 1000, 1001, 3000)) == {0, 1000, 3000}


def test_what_is_younger_than_the_limit_stays() -> None:
    ages = [Kept(step=step, age_s=age) for step, age in ((1, 90.0), (2, 60.0), (3, 59.9), (4, -5))]
    assert KeepNewerThan(timedelta(minutes=1)).keeps(ages) == {3, 4}
    with pytest.raises(InvalidInputError):
        KeepNewerThan(timedelta(0))


def test_a_time_that_cannot_be_read_has_no_age() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    assert age_s("2026-01-01T00:00:00.000Z", now) == 86400
    assert age_s("2026-01-01T00:00:00", now) == 86400
    assert age_s("yesterday", now) is None
    assert age_s(None, now) is None


def test_policies_are_frozen_and_say_what_they_are() -> None:
    policy = KeepBest(2, "loss", BestMode.MAX)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.k = 3  # type: ignore[misc]
    assert str(policy) == "best:2:loss:max"
    assert parse_policy(str(policy)) == policy


# ---- together

policies = st.one_of(
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepBest, st.integers(1, 3), st.just("loss"), st.sampled_from(BestMode)),
    st.builds(KeepEvery, st.integers(1, 10)),
    st.builds(KeepNewerThan, st.timedeltas(timedelta(seconds=1), timedelta(days=9))),
    st.just(KeepAll()),
)
runs = st.lists(
    st.builds(
        Kept,
        step=st.integers(0, 50),
        metrics=st.fixed_dictionaries({}, optional={"loss": st.floats()}),
        age_s=st.floats(0, 10**6),
    ),
    unique_by=lambda entry: entry.step,
)


class Broken:
    """A policy of the caller's, with a fault."""

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        return {int(entry.metrics["lost"]) for entry in entries}

    def __str__(self) -> str:
        return "broken"


class Beyond:
    """A policy that names what is not there too."""

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        return {0, entries[-1].step}

    def __str__(self) -> str:
        return "beyond"


def test_a_policy_that_fails_is_named_and_one_that_names_too_much_keeps_what_there_is() -> None:
    with pytest.raises(InvalidInputError, match=r"retention policy broken fails.*KeyError: 'lost'"):
        union([KeepLast(1), Broken()], entries(1, 2))
    assert union([Beyond()], entries(1, 2)) == {2: ["beyond"]}


@pytest.mark.parametrize("saving", mp.Saving)
def test_a_policy_that_fails_costs_no_save(saving: Any, tmp_path: Path) -> None:
    with mp.CheckpointManager(tmp_path, keep=Broken(), saving=saving) as manager:
        saved: Any = manager.save(1, {"progress": {"step": 1}}, metrics={"loss": 1.0})
        report = saved.wait() if saving is mp.Saving.ASYNC else saved
        assert any("the retention policy broken fails" in note for note in report.notes)
        assert manager.log_history == [{"step": 1, "loss": 1.0}]
        manager.save(2, {"progress": {"step": 2}})
    assert [entry.step for entry in list_run(tmp_path).committed] == [1, 2]


@given(st.lists(policies), runs)
def test_the_union_keeps_exactly_what_one_of_the_policies_keeps(
    some: list[RetentionPolicy], run: list[Kept]
) -> None:
    kept = union(some, run)
    assert set(kept) == {step for policy in some for step in policy.keeps(run)}
    assert set(kept) <= {entry.step for entry in run}
    for step, names in kept.items():
        assert names == [str(policy) for policy in some if step in policy.keeps(run)]


@given(policies, runs)
def test_asking_again_about_what_was_kept_keeps_it_all(
    policy: RetentionPolicy, run: list[Kept]
) -> None:
    kept = policy.keeps(run)
    assert policy.keeps([entry for entry in run if entry.step in kept]) == kept


# ---- as text


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("all", KeepAll()),
        ("last:3", KeepLast(3)),
        ("last:-1", KeepAll()),
        ("best:2:loss", KeepBest(2, "loss", BestMode.MIN)),
        ("best:2:eval/f1:macro:max", KeepBest(2, "eval/f1:macro", BestMode.MAX)),
        ("best:-1:loss", KeepAll()),
        ("every:1000", KeepEvery(1000)),
        ("newer-than:7d", KeepNewerThan(timedelta(days=7))),
        ("newer-than:1.5h", KeepNewerThan(timedelta(minutes=90))),
    ],
)
def test_text_names_policies(text: str, policy: RetentionPolicy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text",
    ["", "last", "last:", "last:x", "last:1.5", "all:1", "best:2", "best:2:", "best:x:loss",
     "best:1:min", "every:0", "best:0:loss", "newest:3", "newer-than:7", "newer-than:-1d",
     "newer-than:0s", "newer-than:7 days"],
)  # fmt: skip
def test_text_that_names_no_policy_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_policy(text)


def test_a_metric_alone_means_that_less_is_better() -> None:
    assert parse_best("loss") == ("loss", BestMode.MIN)
    assert parse_best("a:b:max") == ("a:b", BestMode.MAX)
    assert parse_duration("2w") == timedelta(weeks=2)


# ---- on disk


def make_run(run: Path, *steps: int) -> list[str]:
    """Save these steps; the ids of their checkpoints."""
    options = WriteOptions(durability=Durability.PAGE_CACHE, threads=1)
    model = torch.nn.Linear(2, 2)
    return [
        save(
            run / f"checkpoint-{step}",
            {"model": model},
            step=step,
            metrics={"loss": float(step)},
            options=options,
        ).checkpoint_id
        for step in steps
    ]


def left(run: Path) -> list[int]:
    return [entry.step for entry in list_run(run).committed]


@pytest.mark.case("V22")
def test_the_checkpoint_resumed_from_and_the_one_just_written_stay(tmp_path: Path) -> None:
    ids = make_run(tmp_path, 1000, 2, 3, 10)
    report = prune_run(tmp_path, [KeepLast(1)], protect=[ids[1], ids[3]])
    assert left(tmp_path) == [2, 10, 1000]
    assert report.kept == {2: ("protected",), 10: ("protected",), 1000: ("newest", "last:1")}
    assert [removal.entry.step for removal in report.removed] == [3]


@pytest.mark.case("V23")
def test_pruning_by_a_new_process_counts_what_lies_on_disk(tmp_path: Path) -> None:
    for step in range(12):
        make_run(tmp_path, step)
        prune_run(tmp_path, [KeepLast(3)])
    assert left(tmp_path) == [9, 10, 11]
    make_run(tmp_path, 12)
    assert [entry.step for entry in kept_entries(list_run(tmp_path))] == [9, 10, 11, 12]
    prune_run(tmp_path, [KeepLast(3)])
    assert left(tmp_path) == [10, 11, 12]


def test_without_a_policy_nothing_is_pruned(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2)
    with pytest.raises(InvalidInputError, match="say what to keep"):
        prune_run(tmp_path, [])
    assert left(tmp_path) == [1, 2]


def test_age_is_counted_from_the_time_of_the_save(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2)
    later = datetime.now(UTC) + timedelta(days=8)
    policy = parse_policy("newer-than:7d")
    early = prune_run(tmp_path, [policy], mode=PruneMode.DRY_RUN)
    late = prune_run(tmp_path, [policy], mode=PruneMode.DRY_RUN, now=later)
    assert early.removed == ()
    assert [removal.entry.step for removal in late.removed] == [1]


def test_the_newest_stays_though_no_policy_names_it(tmp_path: Path) -> None:
    make_run(tmp_path, 7, 10, 13)
    report = prune_run(tmp_path, [KeepEvery(5)])
    assert left(tmp_path) == [10, 13]
    assert report.kept[13] == ("newest",)


def test_files_that_another_name_shares_free_no_bytes(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2)
    weights = tmp_path / "checkpoint-1" / "model.safetensors"
    whole = sum(p.stat().st_size for p in weights.parent.rglob("*") if p.is_file())
    shared = weights.stat().st_size
    (tmp_path / "linked").hardlink_to(weights)
    report = prune_run(tmp_path, [KeepLast(1)])
    assert report.nbytes == whole - shared
    assert (tmp_path / "linked").stat().st_size == shared

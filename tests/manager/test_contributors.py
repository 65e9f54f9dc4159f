"""Extra state from several objects: each gets back its own, and nothing takes another's place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import CheckpointWarning, FormatError, InvalidInputError
from tests.manager.small_training import Training


class Engine:
    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.state = state
        self.loaded: list[Any] = []

    def get_checkpoint_state(self) -> Mapping[str, Any] | None:
        return self.state

    def load_checkpoint_state(self, state: Mapping[str, Any] | None) -> None:
        self.loaded.append(state)


class EarlyStopping(Engine):
    pass


class Bystander:
    pass


def test_states_are_kept_apart_and_handed_back() -> None:
    saved = mp.collect_extra_state(
        Engine({"global_step": 5}), Bystander(), EarlyStopping({"global_step": 9, "wait": 1})
    )
    assert saved == {
        "contributors": {
            "Engine": {"global_step": 5},
            "EarlyStopping": {"global_step": 9, "wait": 1},
        }
    }
    engine, stopping = Engine(), EarlyStopping()
    assert mp.load_extra_state(saved, stopping, Bystander(), engine) == []
    assert engine.loaded == [{"global_step": 5}]
    assert stopping.loaded == [{"global_step": 9, "wait": 1}]


def test_contributors_without_state_leave_none() -> None:
    assert mp.collect_extra_state(Engine(None), Bystander()) is None
    engine = Engine()
    mp.load_extra_state(None, engine)
    assert engine.loaded == [None]


@pytest.mark.case("C2.13")
def test_two_contributors_of_one_key_are_refused_until_one_is_named() -> None:
    first, second = Engine({"a": 1}), Engine({"a": 2})
    with pytest.raises(InvalidInputError, match="two contributors have the key 'Engine'"):
        mp.collect_extra_state(first, second)
    with pytest.raises(InvalidInputError, match="'Engine'"):
        mp.load_extra_state({"contributors": {}}, first, second)
    second.checkpoint_key = "second"  # type: ignore[attr-defined]
    assert mp.collect_extra_state(first, second, first) == {
        "contributors": {"Engine": {"a": 1}, "second": {"a": 2}}
    }


def test_a_flat_dict_of_an_older_program_is_handed_over_whole() -> None:
    flat = {"global_step": 5, "early_stopping": {"wait": 1}}
    engine, stopping = Engine(), EarlyStopping()
    mp.load_extra_state(flat, engine, stopping)
    assert engine.loaded == stopping.loaded == [flat]


def test_state_that_nobody_takes_is_named_and_a_newcomer_gets_none() -> None:
    newcomer = EarlyStopping()
    with pytest.warns(CheckpointWarning, match="Engine is in the checkpoint") as told:
        assert mp.load_extra_state({"contributors": {"Engine": {"a": 1}}}, newcomer) == ["Engine"]
    assert told[0].filename == __file__
    assert newcomer.loaded == [None]


@pytest.mark.parametrize("wrong", [[1], {"contributors": [1]}])
def test_what_is_no_extra_state_is_refused(wrong: Any) -> None:
    with pytest.raises(FormatError, match="expected a dict"):
        mp.load_extra_state(wrong, Engine())


def test_contributors_go_through_a_checkpoint(tmp_path: Path) -> None:
    training = Training()
    mean = {"mean": torch.tensor([1.0, 2.0]), "best": 0.5}
    with mp.CheckpointManager(tmp_path, layout=mp.Layout.TRIO) as manager:
        state = mp.collect_extra_state(Engine(mean))
        manager.save_checkpoint(0, training.model, loss=1.0, extra_state=state)
    engine = Engine()
    with mp.CheckpointManager(tmp_path, layout=mp.Layout.TRIO) as manager:
        manager.load_checkpoint(training.model)
        mp.load_extra_state(manager.loaded_extra_state, engine)
    assert torch.equal(engine.loaded[0]["mean"], mean["mean"])  # type: ignore[arg-type]

"""Random histories of a run, against a dictionary that says what it must hold."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import milepost as mp
from milepost.errors import (
    CheckpointWarning,
    ExistsError,
    NotCommittedError,
    NotFoundError,
)
from milepost.layouts.run import RunListing, list_run
from milepost.manager.pins import pin_steps, unpin_steps
from milepost.manager.prune import Superseded, prune_run
from milepost.manager.retention import KeepLast
from milepost.testing.faults import Ending, Fault, FaultPlan
from milepost.testing.forked import run_with_fault
from tests.crash.sharded import committed, load, save, save_behind, state

STEPS = st.integers(1, 7)
ORDINARY = st.sampled_from(mp.OnExisting)


@dataclass(frozen=True, slots=True)
class Held:
    """A checkpoint as the dictionary knows it."""

    value: float
    generation: int = 0
    branch: int | None = None

    def leaves_behind(self, step: int, other: Held) -> bool:
        """Whether `other`, of `step`, belongs to a branch that was left before this began."""
        beyond = self.branch is None or step > self.branch
        return other.generation < self.generation and beyond


Model = dict[int, Held]


def superseded(model: Model) -> set[int]:
    return {
        step
        for step, held in model.items()
        if any(other.leaves_behind(step, held) for other in model.values())
    }


def current(model: Model) -> list[int]:
    """The steps that count, the newest last."""
    steps = model.keys() - superseded(model)
    return sorted(steps, key=lambda step: (model[step].generation, step))


def seen(listing: RunListing) -> Model:
    """What a listing says, in the words of the model."""
    found: Model = {}
    for entry in listing.committed:
        value, manifest = entry.manifest.metrics["value"], entry.manifest
        assert isinstance(value, float)
        found[entry.step] = Held(value, manifest.generation, manifest.branch_step)
    return found


class History(RuleBasedStateMachine):
    """Saves, crashes, removals and resumes of one run, in any order."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.model: Model = {}
        self.torn: dict[int, Held] = {}
        self.pins: set[int] = set()
        self.number = 0.0

    @initialize()
    def begin(self) -> None:
        self.save(1, mp.OnExisting.ERROR)

    # ---- saves

    def next_value(self) -> float:
        self.number += 1.0
        return self.number

    def next_held(self) -> Held:
        """What a plain save makes: it goes on from the newest."""
        newest = current(self.model)[-1:]
        like = self.model[newest[0]] if newest else Held(0.0)
        return Held(self.next_value(), like.generation, like.branch)

    def put(self, step: int, held: Held) -> None:
        self.model[step] = held
        self.torn.pop(step, None)

    @contextmanager
    def taken(self, step: int, on_existing: mp.OnExisting, held: Held) -> Iterator[None]:
        """Runs a save, and puts into the model what it is to have done."""
        if step in self.model and on_existing is mp.OnExisting.ERROR:
            with pytest.raises(ExistsError):
                yield
            return
        yield
        if step not in self.model or on_existing is mp.OnExisting.REPLACE:
            self.put(step, held)

    @rule(step=STEPS, on_existing=ORDINARY)
    def save(self, step: int, on_existing: mp.OnExisting) -> None:
        held = self.next_held()
        with self.taken(step, on_existing, held):
            save(self.root, step, held.value, on_existing=on_existing)

    @rule(step=STEPS, on_existing=ORDINARY)
    def save_behind_and_train_on(self, step: int, on_existing: mp.OnExisting) -> None:
        """The live state changes while the save is being written."""
        held = self.next_held()
        live = state(held.value)
        with self.taken(step, on_existing, held):
            mp.save_async(
                self.root / f"checkpoint-{step}",
                live,
                step=step,
                metrics={"value": held.value},
                rng=mp.Rng.LEAVE_OUT,
                on_existing=on_existing,
            )
            for parameter in live["model"].parameters():
                parameter.data.fill_(-1.0)
            live["progress"]["value"] = -1.0
            mp.wait_for_saves()

    @rule(
        step=STEPS,
        nth=st.integers(0, 60),
        fault=st.sampled_from(Fault),
        action=st.sampled_from(["save", "behind"]),
    )
    def crash_while_saving(self, step: int, nth: int, fault: Fault, action: str) -> None:
        """What is there afterwards is what was there before, or the whole of the new one too."""
        held = self.next_held()

        def act() -> None:
            saver = save if action == "save" else save_behind
            saver(self.root, step, held.value, on_existing=mp.OnExisting.REPLACE)

        outcome = run_with_fault(act, FaultPlan(nth, fault))
        before, after = dict(self.model), self.model | {step: held}
        found = seen(list_run(self.root))
        assert found in (before, after), (outcome, found)
        if outcome.ending is Ending.FINISHED:
            assert found == after
        if outcome.ending is Ending.RAISED:
            assert "StorageError" in outcome.classes, outcome
        if found == after:
            self.put(step, held)
        torn = {entry.name for entry in list_run(self.root).torn}
        if f"checkpoint-{step}" not in torn:  # moved aside before the fault
            self.torn.pop(step, None)

    # ---- removals

    @rule(count=st.integers(1, 4), what=st.sampled_from(Superseded))
    def prune(self, count: int, what: Superseded) -> None:
        stay = set(current(self.model)[-count:]) | self.pins
        if what is Superseded.KEEP:
            stay |= superseded(self.model)
        prune_run(self.root, [KeepLast(count)], superseded=what)
        self.model = {step: held for step, held in self.model.items() if step in stay}

    @rule(step=STEPS)
    def pin(self, step: int) -> None:
        if step not in self.model:
            with pytest.raises(NotFoundError):
                pin_steps(self.root, [step])
            return
        pin_steps(self.root, [step])
        self.pins.add(step)

    @rule(step=STEPS)
    def unpin(self, step: int) -> None:
        unpin_steps(self.root, [step])
        self.pins.discard(step)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_by_hand(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        shutil.rmtree(self.root / f"checkpoint-{step}")
        del self.model[step]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def lose_a_file(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        (self.root / f"checkpoint-{step}" / "model.safetensors").unlink()
        self.torn[step] = self.model.pop(step)

    # ---- resumes

    def next_generation(self) -> int:
        known = [held.generation for held in (*self.model.values(), *self.torn.values())]
        return max(known, default=-1) + 1

    @rule(data=st.data(), more=st.integers(1, 3))
    def resume_and_go_on(self, data: st.DataObject, more: int) -> None:
        """From the newest, or from any other checkpoint, which begins a generation."""
        steps = current(self.model)
        if not steps:
            self.resume_from_nothing()
            return
        step = data.draw(st.sampled_from([None, *sorted(self.model)]))
        is_newest = step == steps[-1] or (step is None and max(self.torn, default=0) <= steps[-1])
        start = steps[-1] if step is None else step
        held = self.model[start]
        generation, branch = held.generation, held.branch
        if not is_newest:
            generation, branch = self.next_generation(), start
        new = Held(self.next_value(), generation, branch)
        self.go_on(step, start, start + more, new)

    def go_on(self, named: int | None, start: int, step: int, new: Held) -> None:
        resume = mp.Resume.AUTO if named is None else self.root / f"checkpoint-{named}"
        live = state(0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # torn ones are passed over aloud
            with mp.CheckpointManager(self.root, resume=resume, best=None) as manager:
                report = manager.resume(live)
                assert report is not None and report.step == start
                assert live["progress"] == {"value": self.model[start].value}
                there = self.model.get(step)
                is_free = there is None or step in superseded(self.model)
                if not is_free and there is not None and not new.leaves_behind(step, there):
                    with pytest.raises(ExistsError):
                        self.save_by(manager, step, new)
                    return
                self.save_by(manager, step, new)
                self.put(step, new)

    @staticmethod
    def save_by(manager: mp.CheckpointManager, step: int, new: Held) -> None:
        metrics = {"value": new.value}
        manager.save(step, state(new.value), metrics=metrics, rng=mp.Rng.LEAVE_OUT)

    def resume_from_nothing(self) -> None:
        """A run that never held anything begins; one that lost all it had does not."""
        with mp.CheckpointManager(self.root, best=None) as manager:
            if self.torn or self.model:
                with pytest.raises(NotCommittedError):
                    manager.resume(state(0.5))
            else:
                assert manager.resume(state(0.5)) is None

    # ---- what must hold after each

    @invariant()
    def the_run_holds_what_the_dictionary_says(self) -> None:
        listing = list_run(self.root)
        assert seen(listing) == self.model
        assert {e.step for e in listing.committed if e.superseded} == superseded(self.model)
        assert {int(e.name.partition("-")[2]) for e in listing.torn} == self.torn.keys()
        assert listing.pinned == self.pins
        newest = current(self.model)[-1:]
        assert ([listing.newest.step] if listing.newest else []) == newest
        if listing.newest is not None:
            load(listing.newest.path, self.model[newest[0]].value)

    def teardown(self) -> None:
        try:
            assert committed(self.root) == {s: held.value for s, held in self.model.items()}
        finally:
            shutil.rmtree(self.root)


class TestHistory(History.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=15, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestLongHistories(History.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=250, stateful_step_count=40)

"""When to save: small objects that answer one question at each step."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from milepost.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveContext:
    """What a policy decides by. Times are seconds of `time.monotonic()`.

    `last_saved_step` is the step of the last save or resume of this process, None before it, and
    `last_saved_s` its time, or when the manager was made. `signals` came since that save.
    `saves_in_flight` have been begun behind training and not ended.
    """

    step: int
    now_s: float
    last_saved_s: float
    last_saved_step: int | None = None
    signals: frozenset[signal.Signals] = frozenset()
    saves_in_flight: int = 0


class SavePolicy(Protocol):
    """Says whether to save at a step."""

    def should_save(self, context: SaveContext) -> bool:
        """Depends on nothing but `context`, and may be asked twice for one step.

        On several ranks, each asks at every step as if no time had passed, no signal come and a
        save been in flight; the coordinator alone asks, from a thread and now and then, with what
        is true, and a yes makes all ranks save at one of the next steps.
        """
        ...


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Save at steps that `n` divides, step 0 excepted. The same steps after a restart."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidInputError(f"EveryNSteps({self.n}): give a number of steps from 1 up")

    def should_save(self, context: SaveContext) -> bool:
        step = context.step
        return step > 0 and step % self.n == 0 and step != context.last_saved_step


@dataclass(frozen=True, slots=True)
class EveryNMinutes:
    """Save when the last save is `minutes` ago."""

    minutes: float

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise InvalidInputError(f"EveryNMinutes({self.minutes}): give a time above 0")

    def should_save(self, context: SaveContext) -> bool:
        return context.now_s - context.last_saved_s >= self.minutes * 60


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """Save when no save is in flight: the next begins when the last one is committed.

    For `Saving.ASYNC`: as many checkpoints as the storage takes, and never two at once.
    """

    def should_save(self, context: SaveContext) -> bool:
        return context.saves_in_flight == 0 and context.step != context.last_saved_step


@dataclass(frozen=True, slots=True, init=False)
class OnSignal:
    """Save at the first step after one of `signals`; SIGTERM and SIGUSR1 when none are given.

    The manager listens to them from its construction to its `close`. After SIGTERM its
    `stop_requested` is true as well.
    """

    signals: tuple[signal.Signals, ...]

    def __init__(self, *signals: int) -> None:
        chosen = signals or (signal.SIGTERM, signal.SIGUSR1)
        uncatchable = {signal.SIGKILL, signal.SIGSTOP}.intersection(chosen)
        if uncatchable:
            raise InvalidInputError(f"OnSignal: no process can catch {uncatchable.pop().name}")
        object.__setattr__(self, "signals", tuple(signal.Signals(number) for number in chosen))

    def should_save(self, context: SaveContext) -> bool:
        return not context.signals.isdisjoint(self.signals)


@dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """Save when any of `policies` says so.

    >>> AnyOf(EveryNSteps(500), EveryNMinutes(30), OnSignal()).policies[0]
    EveryNSteps(n=500)
    """

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: SavePolicy) -> None:
        if not policies:
            raise InvalidInputError("AnyOf(): give at least one policy")
        object.__setattr__(self, "policies", policies)

    def should_save(self, context: SaveContext) -> bool:
        return any(policy.should_save(context) for policy in self.policies)


def counts_steps_only(policy: SavePolicy) -> bool:
    """Whether every rank comes to the same answer by itself, since only the step matters."""
    if isinstance(policy, AnyOf):
        return all(counts_steps_only(inner) for inner in policy.policies)
    return isinstance(policy, EveryNSteps)


def signals_of(policies: Iterable[SavePolicy]) -> frozenset[signal.Signals]:
    """The signals that any of `policies` waits for."""
    found: set[signal.Signals] = set()
    for policy in policies:
        if isinstance(policy, OnSignal):
            found.update(policy.signals)
        elif isinstance(policy, AnyOf):
            found |= signals_of(policy.policies)
    return frozenset(found)

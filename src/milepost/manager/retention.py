"""Which checkpoints to keep: policies as small objects, and what several of them keep together.

A policy looks at the checkpoints that count (committed, not superseded), oldest first, and names
the steps that it keeps. What no policy names may go. Policies read nothing and remove nothing;
`milepost.manager.prune` acts on what they say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Protocol

from milepost.errors import InvalidInputError

_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(rf"([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(_UNITS_S)})")


class BestMode(Enum):
    """Whether a smaller or a larger value of a metric is better."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A checkpoint as a policy sees it. `age_s` is in seconds; what is unknown counts as new."""

    step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    age_s: float = 0.0


class RetentionPolicy(Protocol):
    """Says which checkpoints to keep. Its text is what the command line calls it."""

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        """Steps to keep among `entries`, which are in order of age, the newest last.

        Depends on nothing but `entries`, so the answer is the same after a restart.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keep everything."""

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        return {entry.step for entry in entries}

    def __str__(self) -> str:
        return "all"


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the `n` newest."""

    n: int

    def __post_init__(self) -> None:
        _check_count("last", self.n, "would delete every checkpoint as soon as the next is written")

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        return {entry.step for entry in entries[-self.n :]}

    def __str__(self) -> str:
        return f"last:{self.n}"


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the `k` best by `metric`. NaN and infinities are never best; of equals, the newer is."""

    k: int
    metric: str
    mode: BestMode = BestMode.MIN

    def __post_init__(self) -> None:
        _check_count("best", self.k, "would keep none of the best")
        if not self.metric:
            raise InvalidInputError("best: name the metric to choose by, as in best:2:loss:min")

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        sign = 1 if self.mode is BestMode.MAX else -1
        scored = [
            (sign * value, number)
            for number, entry in enumerate(entries)
            if (value := finite_metric(entry.metrics.get(self.metric))) is not None
        ]
        return {entries[number].step for _, number in sorted(scored)[-self.k :]}

    def __str__(self) -> str:
        return f"best:{self.k}:{self.metric}:{self.mode.value}"


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep steps that `n` divides, for ever."""

    n: int

    def __post_init__(self) -> None:
        _check_count("every", self.n, "names no step")

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        return {entry.step for entry in entries if entry.step % self.n == 0}

    def __str__(self) -> str:
        return f"every:{self.n}"


@dataclass(frozen=True, slots=True)
class KeepNewerThan:
    """Keep what was written less than `age` ago."""

    age: timedelta

    def __post_init__(self) -> None:
        if self.age <= timedelta(0):
            raise InvalidInputError(f"newer-than: {self.age} keeps nothing; give a time above 0")

    def keeps(self, entries: Sequence[Kept]) -> set[int]:
        return {entry.step for entry in entries if entry.age_s < self.age.total_seconds()}

    def __str__(self) -> str:
        return f"newer-than:{self.age.total_seconds():.0f}s"


def union(policies: Iterable[RetentionPolicy], entries: Sequence[Kept]) -> dict[int, list[str]]:
    """What any of the policies keeps: step to the policies that name it.

    `InvalidInputError` for a policy that fails, which is the caller's code.
    """
    steps = {entry.step for entry in entries}
    kept: dict[int, list[str]] = {}
    for policy in policies:
        try:
            named = steps.intersection(policy.keeps(entries))
        except Exception as error:
            raise InvalidInputError(
                f"the retention policy {policy} fails, so nothing is removed: "
                f"{type(error).__name__}: {error}; correct its keeps()"
            ) from error
        for step in sorted(named):
            kept.setdefault(step, []).append(str(policy))
    return kept


def keep_last(n: int | None) -> RetentionPolicy:
    """A limit as trainers spell it: None and -1 mean no limit; 0 is refused.

    >>> str(keep_last(-1)), str(keep_last(3))
    ('all', 'last:3')
    """
    return KeepAll() if n is None or n == -1 else KeepLast(n)


def parse_policy(text: str) -> RetentionPolicy:
    """A policy as the command line spells it.

    `last:3`, `best:2:loss:min` (or `max`; `min` when left out), `every:1000`, `newer-than:7d`
    (units s, min, h, d, w) or `all`; a count of -1 means all.

    >>> parse_policy("best:2:accuracy:max")
    KeepBest(k=2, metric='accuracy', mode=<BestMode.MAX: 'max'>)
    """
    kind, _, rest = text.partition(":")
    if kind == "all" and not rest:
        return KeepAll()
    if kind == "last":
        return keep_last(_count(rest, text))
    if kind == "every":
        return KeepEvery(_count(rest, text))
    if kind == "best":
        count, _, metric = rest.partition(":")
        k = _count(count, text)
        return KeepAll() if k == -1 else KeepBest(k, *parse_best(metric))
    if kind == "newer-than":
        return KeepNewerThan(parse_duration(rest))
    raise InvalidInputError(
        f"{text!r}: not a retention policy; give last:3, best:2:loss:min, every:1000, "
        "newer-than:7d or all"
    )


def parse_best(text: str) -> tuple[str, BestMode]:
    """`metric`, `metric:min` or `metric:max`; a metric alone means that less is better.

    >>> parse_best("eval/accuracy:max")
    ('eval/accuracy', <BestMode.MAX: 'max'>)
    """
    metric, _, mode = text.rpartition(":")
    if metric and mode in ("min", "max"):
        return metric, BestMode(mode)
    if not text or text in ("min", "max"):
        raise InvalidInputError(f"{text!r}: name the metric, as in loss:min")
    return text, BestMode.MIN


def parse_duration(text: str) -> timedelta:
    """A number and a unit.

    >>> parse_duration("1.5h")
    datetime.timedelta(seconds=5400)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidInputError(
            f"{text!r}: expected a number and a unit of {', '.join(_UNITS_S)}, such as 7d or 12h"
        )
    return timedelta(seconds=float(match[1]) * _UNITS_S[match[2]])


def finite_metric(value: Any) -> float | None:
    """A metric as a number that can be compared; None for NaN, infinities and what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def age_s(created: str | None, now: datetime | None = None) -> float | None:
    """Seconds since an RFC 3339 time; None when it cannot be read."""
    try:
        then = datetime.fromisoformat(created or "")
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - then).total_seconds()


def _count(text: str, whole: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInputError(f"{whole!r}: {text!r} is not a number") from None


def _check_count(kind: str, n: int, why_not_0: str) -> None:
    if n == 0:
        raise InvalidInputError(f"{kind}: 0 {why_not_0}; use 1 or more, or KeepAll()")
    if n < 0:
        raise InvalidInputError(f"{kind}: {n} is no count; use 1 or more, or KeepAll()")

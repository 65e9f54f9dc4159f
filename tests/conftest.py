"""What all tests share: no time limit per hypothesis example, since machines and disks vary, and
the order of the files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("milepost", deadline=None)
settings.load_profile("milepost")

CRASH = Path(__file__).with_name("crash")
SLOW_WEIGHT = 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the files that fork thousands of times, while the process is small and a fork cheap;
    of these and of the others the longest first, so that several processes end together."""
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += SLOW_WEIGHT if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: (CRASH not in item.path.parents, -weights[item.path]))

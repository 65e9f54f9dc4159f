"""Marks of parametrized cases."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: object) -> Any:
    """A case that `make test-all` runs, and `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)

"""Warnings that point at the user's line, however deep in Milepost they arise."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent) + os.sep


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the nearest line outside this package that led here.

    Python shows a `DeprecationWarning` only where the line it is attributed to is the user's own.
    """
    level = 2
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)

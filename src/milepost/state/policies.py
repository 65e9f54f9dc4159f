"""What a load does where checkpoint and live state differ; the default is always to refuse."""

from __future__ import annotations

from enum import Enum


class Missing(Enum):
    """A name that the live state wants and the checkpoint does not hold."""

    ERROR = "error"
    KEEP = "keep"


class Unexpected(Enum):
    """A name that the checkpoint holds and the live state does not want."""

    ERROR = "error"
    IGNORE = "ignore"


class DtypePolicy(Enum):
    """A stored tensor whose dtype is not that of its live tensor."""

    ERROR = "error"
    CAST = "cast"


class ShapePolicy(Enum):
    """A stored tensor whose shape is not that of its live tensor."""

    ERROR = "error"
    SKIP = "skip"


class ClassPolicy(Enum):
    """State that was saved from an optimizer of another class."""

    ERROR = "error"
    ALLOW = "allow"


class BlockPolicy(Enum):
    """Block-quantised optimizer state whose blocks the live cut divides."""

    ERROR = "error"
    REQUANTISE = "requantise"

"""The optional package `gguf`, imported when it is needed."""

from __future__ import annotations

from typing import Any

from milepost.errors import MissingExtraError


def gguf_package() -> Any:
    """The package; `MissingExtraError` where it is not installed."""
    try:
        import gguf
    except ImportError as e:
        raise MissingExtraError("to-gguf needs gguf; pip install 'milepost[gguf]'") from e
    return gguf

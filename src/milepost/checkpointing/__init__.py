"""Functions and managers that save and load training checkpoints by the habits of their users."""

from __future__ import annotations

from milepost.checkpointing.functions import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]

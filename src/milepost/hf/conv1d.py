"""Families whose linear layers are Conv1D of transformers, which stores inputs first."""

from __future__ import annotations

CONV1D_FAMILIES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})

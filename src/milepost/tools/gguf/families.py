"""The families that GGUF readers know and this package writes: data, by `model_type`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is particular to one family.

    `arch` is what GGUF calls it. `pairs_rope` says that its readers turn neighbouring rows of q and
    k together, where transformers turns the two halves of a head. `biases` are projections that
    have a bias always, `may_have_biases` those that have one in some models. `head_dim` is the one
    that a configuration without the key means; None is the embedding divided by the heads.
    `normalises_experts` is what its readers do with the weights of the experts that a token goes
    to, whatever the configuration says; None is a dense family.
    """

    arch: str
    pairs_rope: bool = False
    has_head_norms: bool = False
    biases: frozenset[str] = frozenset()
    may_have_biases: frozenset[str] = frozenset()
    head_dim: int | None = None
    normalises_experts: bool | None = None
    has_shared_expert: bool = False

    @property
    def has_experts(self) -> bool:
        return self.normalises_experts is not None


_QKV = frozenset({"q_proj", "k_proj", "v_proj"})
_ALL = _QKV | {"o_proj", "gate_proj", "up_proj", "down_proj"}

FAMILIES = {
    "llama": Family(arch="llama", pairs_rope=True, may_have_biases=_ALL),
    "qwen2": Family(arch="qwen2", biases=_QKV),
    "qwen2_moe": Family(
        arch="qwen2moe", biases=_QKV, normalises_experts=False, has_shared_expert=True
    ),
    "qwen3": Family(arch="qwen3", has_head_norms=True, head_dim=128),
    "qwen3_moe": Family(
        arch="qwen3moe", has_head_norms=True, head_dim=128, normalises_experts=True
    ),
}


def family_of(model_types: Iterable[str]) -> Family | None:
    """The family of the whole model; None for one that is not known, or for several parts."""
    kinds = list(model_types)
    return FAMILIES.get(kinds[0]) if len(kinds) == 1 else None

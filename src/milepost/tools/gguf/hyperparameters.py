"""What a configuration says about the shape of a model, and the GGUF keys that say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from milepost.tools.gguf.families import Family
from milepost.tools.rewrite.problems import Problems

Value: TypeAlias = bool | int | float | str | bytes | list[Any]
Keys: TypeAlias = dict[str, Value]
"""GGUF keys in order. Integers are written as uint32, floats as float32."""

_DEFAULT_ROPE_THETA = 10000.0
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NO_PLACE_IN_YARN = ("attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Sizes in elements. `experts` is 0 for a dense model. `rope` has the rope settings by
    transformers' names, `rope_type` and `rope_theta` among them always."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    feed_forward: int
    rms_eps: float
    is_tied: bool
    rope: Mapping[str, Any]
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    shared_feed_forward: int = 0

    def keys(self, arch: str) -> Keys:
        """The keys of the model itself."""
        found: Keys = {
            "context_length": self.context,
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "vocab_size": self.vocabulary,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": float(self.rope["rope_theta"]),
            **self._scaling(),
        }
        if self.experts:
            found["expert_count"] = self.experts
            found["expert_used_count"] = self.experts_used
            found["expert_feed_forward_length"] = self.expert_feed_forward
        if self.shared_feed_forward:
            found["expert_shared_feed_forward_length"] = self.shared_feed_forward
        return {f"{arch}.{key}": value for key, value in found.items()}

    def _scaling(self) -> Keys:
        kind, rope = self.rope["rope_type"], self.rope
        if kind not in ("linear", "yarn"):
            return {}
        found: Keys = {
            "rope.scaling.type": kind,
            "rope.scaling.factor": float(rope["factor"]),
        }
        if kind == "yarn":
            original = rope.get("original_max_position_embeddings") or self.context
            found["rope.scaling.original_context_length"] = int(original)
            for beta in ("beta_fast", "beta_slow"):
                if rope.get(beta) is not None:
                    found[f"rope.scaling.yarn_{beta}"] = float(rope[beta])
        return found

    def rope_factors(self) -> list[float] | None:
        """By what each frequency is divided, [head_dim / 2], for llama3 scaling; else None."""
        if self.rope["rope_type"] != "llama3":
            return None
        factor, low, high, original = (float(self.rope[key]) for key in _LLAMA3)
        found = []
        for position in range(0, self.head_dim, 2):
            frequency = float(self.rope["rope_theta"]) ** (-position / self.head_dim)
            turns = original * frequency / (2 * math.pi)  # within the original context
            if turns > high:
                found.append(1.0)
            elif turns < low:
                found.append(factor)
            else:
                smooth = (turns - low) / (high - low)
                found.append(1 / ((1 - smooth) / factor + smooth))
        return found


class _Config:
    """Reads keys of a configuration; what is not there or malformed is a problem."""

    def __init__(self, config: Mapping[str, Any], problems: Problems) -> None:
        self._config, self._problems = config, problems
        self.is_complete = True

    def size(self, key: str, default: int | None = None, *, alias: str | None = None) -> int:
        value = self._config.get(key)
        if value is None and alias is not None:
            value = self._config.get(alias)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = "is not there" if value is None else f"is {value!r}"
            self._problems.refuse(f"config.json: {key} {found}; expected a positive integer")
            self.is_complete = False
            return 1
        return value

    def require(self, key: str, wanted: Any, *, default: Any, why: str) -> None:
        """Refuse a value that is another one than `wanted`."""
        value = self._config.get(key)
        value = default if value is None else value
        if value != wanted:
            self._problems.refuse(f"config.json: {key} is {value!r}: {why}")


def read_hyperparameters(
    config: Mapping[str, Any], family: Family, problems: Problems
) -> Hyperparameters | None:
    """From the content of config.json. What readers of the format cannot do is refused.

    None when sizes are not there, so that nothing can be said about tensors.
    """
    read = _Config(config, problems)
    only = f"readers of {family.arch} files"
    read.require("hidden_act", "silu", default="silu", why=f"{only} compute silu")
    read.require("use_sliding_window", False, default=False, why=f"{only} attend to everything")
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, float):
        problems.refuse(f"config.json: rms_norm_eps is {eps!r}; expected a number")
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    experts: dict[str, int] = {}
    if family.has_experts:
        experts = _experts(read, family, only)
    found = Hyperparameters(
        layers=read.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=read.size("num_key_value_heads", heads),
        head_dim=read.size("head_dim", family.head_dim or hidden // heads),
        vocabulary=read.size("vocab_size"),
        context=read.size("max_position_embeddings"),
        feed_forward=read.size("intermediate_size"),
        rms_eps=eps if isinstance(eps, float) else 0.0,
        is_tied=config.get("tie_word_embeddings") is True,
        rope=_rope(config, problems),
        **experts,
    )
    return found if read.is_complete else None


def _experts(read: _Config, family: Family, only: str) -> dict[str, int]:
    read.require(
        "norm_topk_prob",
        family.normalises_experts,
        default=False,
        why=f"{only} {'always' if family.normalises_experts else 'never'} normalise the weights of "
        "the experts, so the model would be another one",
    )
    dense = f"{only} expect experts in every layer"
    read.require("mlp_only_layers", [], default=[], why=dense)
    read.require("decoder_sparse_step", 1, default=1, why=dense)
    found = {
        "experts": read.size("num_experts", alias="num_local_experts"),
        "experts_used": read.size("num_experts_per_tok"),
        "expert_feed_forward": read.size("moe_intermediate_size"),
    }
    if family.has_shared_expert:
        found["shared_feed_forward"] = read.size("shared_expert_intermediate_size")
    return found


def _rope(config: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """`rope_parameters`, or `rope_scaling` and `rope_theta` as older configurations have them."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = found.get("rope_theta", config.get("rope_theta"))
    found["rope_theta"] = _DEFAULT_ROPE_THETA if theta is None else theta
    kind = found.get("rope_type", found.get("type", "default"))
    found["rope_type"] = kind
    needed: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": _LLAMA3,
    }
    if kind not in needed:
        problems.refuse(
            f"config.json: rope of type {kind!r} has no form in GGUF that readers of this family "
            f"use; known: {', '.join(needed)}"
        )
        found["rope_type"] = "default"
        return found
    for key in ("rope_theta", *needed[kind]):
        if not isinstance(found.get(key), int | float):
            problems.refuse(f"config.json: rope of type {kind}: {key} is {found.get(key)!r}")
            found["rope_type"] = "default"
            found["rope_theta"] = _DEFAULT_ROPE_THETA
    if kind == "yarn":
        for key in _NO_PLACE_IN_YARN:
            if found.get(key) is not None:
                problems.refuse(
                    f"config.json: yarn with {key}={found[key]}: readers compute that from the "
                    "factor; GGUF has no place for another one"
                )
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        problems.refuse(f"config.json: partial_rotary_factor is {partial}; expected 1")
    return found

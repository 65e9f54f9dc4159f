"""Comparison of a saved model configuration with the live one, field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from milepost.errors import ConfigMismatchError
from milepost.format.tree import decode
from milepost.layouts.checkpoint import Checkpoint

# Fields that decide which tensors there are or what they mean; a difference in any other field
# (dropout, names, paths) does not stop a resume.
STRUCTURAL_FIELDS = frozenset(
    """
    hidden_size num_heads num_kv_heads intermediate_size num_layers vocab_size max_seq_len
    use_glu num_experts top_k attn_impl mlp_impl norm_impl use_kv_cache pos_encoding_learned
    mlp_activation norm_first qkv_bias mlp_bias lm_head_bias use_rope rope_theta use_alibi
    sliding_window norm_eps peft_method peft_rank optimizer_class model_type
    num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    rms_norm_eps rope_scaling max_position_embeddings tie_word_embeddings
    num_experts_per_tok moe_intermediate_size num_local_experts attention_bias d_model
    n_layers n_heads ffn_hidden_size rmsnorm_eps use_attention_sinks num_attention_sinks
    use_swiglu swiglu_multiplier use_gqa gqa_groups use_moe tie_embeddings rope_pairing
    use_qk_norm
    """.split()  # noqa: SIM905
)


def as_mapping(config: Any) -> dict[str, Any]:
    """A configuration as a dict: a mapping, a dataclass, or an object with `to_dict` or fields."""
    if isinstance(config, Mapping):
        return dict(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for method in ("to_dict", "model_dump"):
        if hasattr(config, method):
            return dict(getattr(config, method)())
    return dict(vars(config))


def config_differences(
    saved: Mapping[str, Any],
    live: Mapping[str, Any],
    *,
    fields: Collection[str] | None = None,
) -> dict[str, tuple[Any, Any]]:
    """Fields that both sides carry and whose values differ, as (saved, live).

    Lists and tuples of equal items are equal, as are `1` and `1.0`. `fields` limits the comparison.

    >>> config_differences({"hidden_size": 64, "dropout": 0.1}, {"hidden_size": 32, "dropout": 0})
    {'hidden_size': (64, 32), 'dropout': (0.1, 0)}
    """
    return {
        key: (value, live[key])
        for key, value in saved.items()
        if key in live and (fields is None or key in fields) and not _same(value, live[key])
    }


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    return bool(first == second) or str(first) == str(second)


ABSENT = "(absent)"


def check_model_config(checkpoint: Checkpoint, live: Any) -> dict[str, tuple[Any, Any]]:
    """Refuse a checkpoint of another architecture; every other difference is returned.

    `ConfigMismatchError` lists each structural field with both values. A field that only one side
    has (renamed, or new since) is a difference with `ABSENT` on the other, and stops nothing.
    """
    raw = checkpoint.info.model_config
    if raw is None:
        return {}
    saved = as_mapping(decode(raw, None, where=f"{checkpoint.path}: model_config"))
    now = as_mapping(live)
    differences = config_differences(saved, now)
    structural = {key: pair for key, pair in differences.items() if key in STRUCTURAL_FIELDS}
    if structural:
        raise ConfigMismatchError(
            config_message(str(checkpoint.path), structural), differences=structural
        )
    gone = {key: (value, ABSENT) for key, value in saved.items() if key not in now}
    new = {key: (ABSENT, value) for key, value in now.items() if key not in saved}
    return {**differences, **gone, **new}


def config_message(where: str, differences: Mapping[str, tuple[Any, Any]]) -> str:
    """The sentence that lists differing fields."""
    fields = ", ".join(f"{k} (checkpoint {a!r}, now {b!r})" for k, (a, b) in differences.items())
    return (
        f"{where}: saved from a different model/schedule configuration: {fields}. Refusing to "
        "silently resume: build the model with the saved values, or start a new run"
    )

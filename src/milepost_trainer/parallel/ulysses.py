"""Context parallelism after Ulysses: ranks swap a part of the sequence for a part of the heads.

Every rank holds a slice of the sequence. For attention alone, an all-to-all gives it the whole
sequence of some heads, and another one takes the result back. It is an attention function like
others of transformers, so any model that uses its attention interface runs with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

NAME = "ulysses"
_KNOWN_LAYERS = ("full_attention", "sliding_attention")
# What models pass on to their attention that says nothing about it.
_WITHOUT_EFFECT = (
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
)
_ONLY_VALUES = {"is_causal": True, "output_attentions": False}


class _Swap(torch.autograd.Function):
    """Cuts `split_dim` into one piece a rank and joins the pieces received along `join_dim`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int
    ) -> torch.Tensor:
        ctx.group, ctx.split_dim, ctx.join_dim = group, split_dim, join_dim
        return _swap(tensor, group, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _swap(gradients[0], ctx.group, ctx.join_dim, ctx.split_dim), None, None, None


def _swap(
    tensor: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int
) -> torch.Tensor:
    pieces = torch.stack(tensor.chunk(group.size(), dim=split_dim)).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return torch.cat(received.unbind(0), dim=join_dim)


def _swapped(
    tensor: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int
) -> torch.Tensor:
    out: torch.Tensor = _Swap.apply(tensor, group, split_dim, join_dim)  # type: ignore[no-untyped-call]
    return out


def ulysses_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of `(rows, heads, length / cp, head_dim)` over the whole length.

    With a `sliding_window`, given or of the module, a column sees as many, itself the last of them.
    `s_aux` `(heads,)` are attention sinks. Returns `(rows, length / cp, heads, head_dim)`.
    Collective over the group of the module. `ValueError`, before anything is sent, for attention
    that this is not: with a mask, with other keywords, without the window or the sinks of a model.
    """
    sliding_window = _window_size(module, keywords)
    _require_computed(module, attention_mask, s_aux, keywords)
    group: Any = module.context_group
    heads = query.shape[1]
    if key.shape[1] % group.size():
        key, value = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    query, key, value = (_swapped(t, group, 1, 2) for t in (query, key, value))
    window = None if sliding_window is None else _window(query, sliding_window)
    if s_aux is None:
        output = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=window,
            dropout_p=dropout,
            is_causal=window is None,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    else:
        sinks = s_aux.chunk(group.size())[group.rank()]  # of the heads that this rank has now
        output = _attention_with_sinks(query, key, value, sinks, window, scaling, dropout)
    output = _swapped(output, group, 2, 1)
    return output.transpose(1, 2).contiguous(), None


def _window_size(module: Any, keywords: dict[str, Any]) -> int | None:
    """The window of a layer, taken out of `keywords`; its own where it passes a mask only."""
    if "sliding_window" in keywords:
        given: int | None = keywords.pop("sliding_window")
        return given
    own: int | None = getattr(module, "sliding_window", None)
    if own is None and _is_windowed(module):
        raise _not_computed(module, f"has a window of {module.config.sliding_window} in its mask")
    return own


def _is_windowed(module: Any) -> bool:
    """Whether the configuration gives this layer a window."""
    config = getattr(module, "config", None)
    if not getattr(config, "sliding_window", None) or not getattr(
        config, "use_sliding_window", True
    ):
        return False
    kinds = getattr(config, "layer_types", None)
    return kinds is None or kinds[module.layer_idx] == "sliding_attention"


def _require_computed(
    module: Any,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    keywords: dict[str, Any],
) -> None:
    if mask is not None:
        raise _not_computed(module, "makes a mask of its own")
    if sinks is None and getattr(module, "sinks", None) is not None:
        raise _not_computed(module, "has sinks that it does not pass on")
    for name, value in keywords.items():
        is_only = name in _ONLY_VALUES and value is _ONLY_VALUES[name]
        if value is not None and name not in _WITHOUT_EFFECT and not is_only:
            raise _not_computed(module, f"is called with {name}")


def _not_computed(module: nn.Module, what: str) -> ValueError:
    return ValueError(
        f"{type(module).__name__} {what}, which context parallelism does not compute: use cp=1"
    )


def _window(query: torch.Tensor, size: int | None) -> torch.Tensor:
    """Which columns each column sees, `(length, length)`: those before it, of `size` the last."""
    length = query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return seen if size is None else seen.triu(1 - size)


def _attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    seen: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attention in which each head has one more logit, that no value belongs to."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    seen = _window(query, None) if seen is None else seen
    logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    of_sinks = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    shares = torch.cat([logits, of_sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return nn.functional.dropout(shares, dropout).to(value.dtype) @ value


AttentionInterface.register(NAME, ulysses_attention)


def use_ulysses(model: nn.Module, group: dist.ProcessGroup, *, tp: int) -> None:
    """Gives every attention module its group; raises `ValueError` if a model cannot do it."""
    config: Any = model.config
    heads = config.num_attention_heads // tp
    if heads % group.size():
        raise ValueError(
            f"cp={group.size()} must divide the {heads} attention heads of a rank "
            f"({config.num_attention_heads} heads, tp={tp})"
        )
    _require_attention_alone(model)
    for name, module in model.named_modules():
        if not hasattr(module, "is_causal"):
            continue
        if not module.is_causal:
            raise ValueError(
                f"{name} of {type(model).__name__} reads in both directions; context parallelism "
                "does causal attention only: use cp=1"
            )
        if getattr(module, "attn_logit_softcapping", None) is not None:
            raise ValueError(
                f"{name} of {type(model).__name__} caps its logits, which context parallelism "
                "does not: use cp=1"
            )
        module.context_group = group


def _require_attention_alone(model: Any) -> None:
    """`ValueError` for layers that join columns in other ways than by attention of this kind."""
    kinds = set(getattr(model.config, "layer_types", None) or ()) - set(_KNOWN_LAYERS)
    if kinds:
        raise ValueError(
            f"{type(model).__name__} has layers of the kind {', '.join(sorted(kinds))}, which "
            "context parallelism does not compute: use cp=1"
        )
    if not any(hasattr(module, "is_causal") for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no attention that says whether it is causal, which "
            "context parallelism needs: use cp=1"
        )


def slice_of_sequence(tensor: torch.Tensor, size: int, place: int) -> torch.Tensor:
    """The columns of `(rows, length)` that context-parallel rank `place` of `size` holds."""
    if tensor.shape[1] % size:
        raise ValueError(f"a batch of length {tensor.shape[1]} cannot be cut evenly by cp={size}")
    return tensor.chunk(size, dim=1)[place].contiguous()

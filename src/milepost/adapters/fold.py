"""What the adapter of a live model does to each weight of its base.

A `Change` names the weight and the factors, and says for each dim of a factor which dim of the
weight it follows. So it is known which part of a factor a rank needs for the part of the weight
that it holds, and both may be cut in any way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from milepost.adapters.arithmetic import (
    Layout,
    LowRank,
    convolution,
    embedding,
    grouped_experts,
    joined_experts,
    layout_of_experts,
    linear,
)
from milepost.adapters.expert import ExpertLora
from milepost.adapters.live import LiveAdapter
from milepost.adapters.names import without_wrappers
from milepost.errors import InvalidInputError
from milepost.geometry.placement import IndexSet, whole
from milepost.state.names import FQN
from milepost.state.tensors import global_shape, local_of

Form: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], LowRank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A live tensor of an adapter. `follows` has for each of its dims the dim of the weight whose
    indices it shares, None where it is needed whole."""

    name: FQN
    tensor: Tensor
    follows: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return global_shape(self.tensor)

    def wanted(self, held: IndexSet) -> IndexSet:
        """The part of the factor that belongs to the part `held` of the weight."""
        every = whole(self.shape)
        return tuple(
            every[dim] if of_weight is None else held[of_weight]
            for dim, of_weight in enumerate(self.follows)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happens to the weight or bias `weight`, a live name.

    With factors `a` and `b`, `form` makes them one of the weight (`is_cut`: of the part that they
    are given for); a bias has `b` alone, times `scale`. `rows` are new rows at `indices`.
    """

    weight: FQN
    a: Factor | None = None
    b: Factor | None = None
    magnitude: Factor | None = None
    magnitude_dim: int = 0
    form: Form | None = None
    scale: float = 1.0
    is_cut: bool = True
    rows: Factor | None = None
    indices: tuple[int, ...] = ()

    @property
    def factors(self) -> list[Factor]:
        return [f for f in (self.a, self.b, self.magnitude, self.rows) if f is not None]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for changes that make equal weights of equal ones: by the memory of the factors."""
        memory = frozenset(local_of(f.tensor).untyped_storage().data_ptr() for f in self.factors)
        return (memory, self.scale, self.indices)


def changes_of(adapter: LiveAdapter) -> dict[FQN, list[Change]]:
    """The changes by the live name of the weight; refused where one cannot be followed exactly."""
    found: dict[FQN, list[Change]] = {}
    for prefix, layer in adapter.layers.items():
        for change in _Layer(adapter, prefix, layer).changes():
            found.setdefault(change.weight, []).append(change)
    for prefix, (module, lora) in adapter.experts.items():
        for change in _of_experts(adapter, prefix, module, lora):
            found.setdefault(change.weight, []).append(change)
    if not found and not adapter.saved:
        raise InvalidInputError(
            "the adapter changes no weight of the model, so there is nothing to fold in"
        )
    return found


class _Layer:
    """One module that peft adapts."""

    def __init__(self, adapter: LiveAdapter, prefix: str, layer: nn.Module) -> None:
        self.adapter, self.prefix, self.layer = adapter, prefix, layer
        self.name: Any = adapter.name
        self.path = adapter.inner(prefix).rstrip(".").removesuffix(".token_adapter")

    def changes(self) -> Iterator[Change]:
        layer: Any = self.layer
        if getattr(layer, "merged_adapters", None):
            raise InvalidInputError(
                f"{self.path}: the adapter is merged into the live weight already, and folding it "
                "in once more would add it twice; call unmerge_adapter() first"
            )
        if hasattr(layer, "trainable_tokens_delta"):
            yield from self._tokens(layer)
        elif not hasattr(layer, "lora_A"):
            raise InvalidInputError(
                f"{self.path}: {type(layer).__name__} is no low-rank adapter, and only these can "
                "be folded into weights; save with adapters=Adapters.ALONE"
            )
        elif self.name in layer.lora_A:
            yield from self._matrix(layer)
        elif self.name in layer.lora_embedding_A:
            yield self._embedding(layer)

    def _matrix(self, layer: Any) -> Iterator[Change]:
        a, b = layer.lora_A[self.name], layer.lora_B[self.name]
        scale = float(layer.scaling[self.name])
        if hasattr(layer, "parameter_name"):
            yield self._parameter(layer, a.weight, b.weight, scale)
            return
        base = layer.get_base_layer()
        weight = self._weight(base, "weight")
        is_conv = base.weight.dim() > 2
        if (is_conv and getattr(base, "groups", 1) != 1) or type(layer).__name__ in _UNKNOWN:
            raise InvalidInputError(
                f"{self.path}: {type(layer).__name__} cannot be folded into its weight; save with "
                "adapters=Adapters.ALONE"
            )
        layout = Layout.IN_OUT if getattr(layer, "fan_in_fan_out", False) else Layout.OUT_IN
        out_dim = 0 if layout is Layout.OUT_IN else 1
        magnitude = self._magnitude(layer, out_dim)
        if is_conv and magnitude is not None:
            raise InvalidInputError(f"{self.path}: DoRA of a convolution cannot be folded in")

        def form(a: Tensor, b: Tensor, magnitude: Tensor | None) -> LowRank:
            if is_conv:
                return convolution(a, b, scale)
            return linear(a, b, scale, layout=layout, magnitude=magnitude)

        inner = (None,) * (base.weight.dim() - 2)
        yield Change(
            weight=weight,
            a=self._factor(a.weight, (None, 1 - out_dim, *inner)),
            b=self._factor(b.weight, (out_dim, None, *inner)),
            magnitude=magnitude,
            magnitude_dim=out_dim,
            form=form,
            scale=scale,
        )
        if b.bias is not None:
            if getattr(base, "bias", None) is None:
                raise InvalidInputError(
                    f"{self.path}: lora_bias needs a layer with a bias to fold into"
                )
            yield Change(
                weight=self._weight(base, "bias"), b=self._factor(b.bias, (0,)), scale=scale
            )

    def _parameter(self, layer: Any, a: Tensor, b: Tensor, scale: float) -> Change:
        param = layer.get_param()
        weight = self._weight(layer.get_base_layer(), layer.parameter_name)
        shape = global_shape(param)
        if len(shape) == 2:
            form: Form = partial(_linear, scale=scale)
            return Change(
                weight=weight,
                a=self._factor(a, (None, 1)),
                b=self._factor(b, (0, None)),
                form=form,
                scale=scale,
            )
        is_swapped = bool(layer._did_swap_in_out_features)
        layout = Layout.OUT_IN if is_swapped else Layout.IN_OUT
        return Change(
            weight=weight,
            a=self._factor(a, (None, None)),
            b=self._factor(b, (None, None)),
            form=partial(_joined, experts=shape[0], scale=scale, layout=layout),
            scale=scale,
            is_cut=False,
        )

    def _embedding(self, layer: Any) -> Change:
        scale = float(layer.scaling[self.name])

        def form(a: Tensor, b: Tensor, magnitude: Tensor | None) -> LowRank:
            return embedding(a, b, scale, magnitude=magnitude)

        return Change(
            weight=self._weight(layer.get_base_layer(), "weight"),
            a=self._factor(layer.lora_embedding_A[self.name], (None, 0)),
            b=self._factor(layer.lora_embedding_B[self.name], (1, None)),
            magnitude=self._magnitude(layer, 1),
            magnitude_dim=1,
            form=form,
            scale=scale,
        )

    def _tokens(self, layer: Any) -> Iterator[Change]:
        if self.name in layer.trainable_tokens_delta:
            indices = tuple(int(index) for index in layer.token_indices[self.name])
            yield Change(
                weight=self._weight(layer.get_base_layer(), "weight"),
                rows=self._factor(layer.trainable_tokens_delta[self.name], (None, 1)),
                indices=indices,
            )

    def _magnitude(self, layer: Any, dim: int) -> Factor | None:
        variant = getattr(layer, "lora_variant", {}).get(self.name)
        if variant is None:
            return None
        if not type(variant).__name__.startswith("Dora"):
            raise InvalidInputError(
                f"{self.path}: {type(variant).__name__} is a variant of LoRA that cannot be folded "
                "into a weight; save with adapters=Adapters.ALONE"
            )
        return self._factor(layer.lora_magnitude_vector[self.name].weight, (dim,))

    def _factor(self, tensor: Tensor, follows: Sequence[int | None]) -> Factor:
        name = self.adapter.names[id(tensor)]
        return Factor(name=name, tensor=tensor, follows=tuple(follows))

    def _weight(self, base: nn.Module, name: str) -> FQN:
        return weight_name(self.adapter, getattr(base, name), f"{self.path}.{name}")


# Layers of peft whose weight is more than one, or lies elsewhere.
_UNKNOWN = frozenset({"MultiheadAttention"})


def weight_name(adapter: LiveAdapter, tensor: Tensor, path: str) -> FQN:
    """The live name of the weight at `path` inside the adapted model, one of those it may have.

    Refused when it is quantised: the sum would be rounded to its few bits.
    """
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise InvalidInputError(
            f"{path}: the weight is quantised ({tensor.dtype}), and an adapter folded into it "
            "would be lost in the rounding; save with adapters=Adapters.ALONE and merge that into "
            "the weights as they were before they were quantised"
        )
    wanted = without_wrappers(path)
    candidates = adapter.names_of(tensor)
    ending = [name for name in candidates if without_wrappers(name).endswith(wanted)]
    if not ending:
        raise InvalidInputError(
            f"{path}: the state dict of the model leaves this weight out, so nothing can be folded "
            "into it"
        )
    return ending[0]


def _of_experts(
    adapter: LiveAdapter, prefix: str, module: nn.Module, lora: ExpertLora
) -> Iterator[Change]:
    for projection, (name_a, name_b) in lora.factors.items():
        weight = module.get_parameter(projection)
        a, b = module.get_parameter(name_a), module.get_parameter(name_b)
        path = f"{adapter.inner(prefix)}{projection}"
        shape, inner, outer = global_shape(weight), global_shape(a)[1], global_shape(b)[2]
        if lora.is_transposed is None:
            layout = layout_of_experts(inner, outer, shape, name=path)
        else:
            layout = Layout.IN_OUT if lora.is_transposed else Layout.OUT_IN
        dim_in, dim_out = (1, 2) if layout is Layout.IN_OUT else (2, 1)
        yield Change(
            weight=weight_name(adapter, weight, path),
            a=Factor(name=adapter.names[id(a)], tensor=a, follows=(0, dim_in, None)),
            b=Factor(name=adapter.names[id(b)], tensor=b, follows=(0, None, dim_out)),
            form=partial(_grouped, scale=lora.scaling, layout=layout),
            scale=lora.scaling,
        )


def _linear(a: Tensor, b: Tensor, magnitude: Tensor | None, *, scale: float) -> LowRank:
    return linear(a, b, scale, magnitude=magnitude)


def _joined(
    a: Tensor, b: Tensor, _: Tensor | None, *, experts: int, scale: float, layout: Layout
) -> LowRank:
    return joined_experts(a, b, experts, scale, layout)


def _grouped(a: Tensor, b: Tensor, _: Tensor | None, *, scale: float, layout: Layout) -> LowRank:
    return grouped_experts(a, b, scale, layout)


def take(value: Tensor, part: IndexSet) -> Tensor:
    """The part of a whole tensor, its runs one after the other in each dim."""
    for dim, spans in enumerate(part):
        if spans == ((0, value.shape[dim]),):
            continue
        runs = [value.narrow(dim, start, end - start) for start, end in spans]
        value = torch.cat(runs or [value.narrow(dim, 0, 0)], dim)
    return value


def low_rank_of(
    change: Change, held: IndexSet, value_of: Callable[[Factor, IndexSet], Tensor]
) -> LowRank:
    """The factors of the part `held` of a weight; `value_of` gives parts of factors."""
    assert change.form is not None and change.a is not None and change.b is not None
    a, b = (value_of(f, f.wanted(held)) for f in (change.a, change.b))
    magnitude = change.magnitude
    of_magnitude = None if magnitude is None else value_of(magnitude, magnitude.wanted(held))
    low_rank = change.form(a, b, of_magnitude)
    if change.is_cut:
        return low_rank
    experts, rows, columns = held
    return LowRank(
        left=take(low_rank.left, (experts, rows, ((0, low_rank.left.shape[-1]),))),
        right=take(low_rank.right, (experts, ((0, low_rank.right.shape[-2]),), columns)),
        scale=low_rank.scale,
    )

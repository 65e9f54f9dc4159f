"""Low-rank adapters of grouped experts, as a trainer declares them on its own modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from milepost.adapters.config import ExpertSettings, scaling
from milepost.errors import InvalidInputError

_ATTRIBUTE = "_milepost_expert_lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLora:
    """How the grouped experts of one module are adapted.

    `factors` gives for a projection, which is the name of a parameter of the module, the dotted
    names inside the module of its A, of global shape [experts, in, r], and its B, [experts, r, out]
    (matmul convention: `x @ W + scaling * (x @ A) @ B`). They are held like the weights: whole, as
    DTensors, or as slices that `declare_placement` knows. `is_transposed` says that the module's
    weights lie [experts, in, out], False that they lie [experts, out, in]; None leaves it to their
    shapes.
    """

    r: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    factors: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_transposed: bool | None = None

    @property
    def scaling(self) -> float:
        """What the product of the factors is multiplied by."""
        return scaling(self.r, self.alpha, use_rslora=self.use_rslora)

    @property
    def settings(self) -> ExpertSettings:
        """What a configuration says of it."""
        return ExpertSettings(
            r=self.r,
            alpha=self.alpha,
            use_rslora=self.use_rslora,
            dropout=self.dropout,
            projections=tuple(sorted(self.factors)),
        )


def declare_expert_lora(module: nn.Module, lora: ExpertLora) -> None:
    """Say that `lora` adapts the grouped experts that `module` holds.

    From then on a save with `Adapters.ALONE` writes the factors as an adapter of its own kind,
    `Adapters.MERGED` folds them into the experts, and a load restores them. Factors stay ordinary
    parameters of the module. Not collective. `InvalidInputError` when a projection or a factor is
    not there, or no rank is.
    """
    if lora.r < 1:
        raise InvalidInputError(f"r={lora.r}: the rank of an adapter is 1 or more")
    if not lora.factors:
        raise InvalidInputError(
            "factors is empty: name the A and B of at least one projection of the experts"
        )
    own = dict(module.named_parameters(recurse=False))
    below = dict(module.named_parameters())
    for projection, names in lora.factors.items():
        if projection not in own:
            raise InvalidInputError(
                f"{projection}: {type(module).__name__} has no parameter of this name; it has "
                f"{', '.join(own) or 'none'}"
            )
        for name in names:
            if name not in below:
                raise InvalidInputError(
                    f"{projection}: {type(module).__name__} has no factor {name!r}; give the "
                    "dotted name that named_parameters() shows"
                )
    object.__setattr__(module, _ATTRIBUTE, lora)


def expert_lora(module: nn.Module) -> ExpertLora | None:
    """What was declared on `module`."""
    found = vars(module).get(_ATTRIBUTE)
    return found if isinstance(found, ExpertLora) else None

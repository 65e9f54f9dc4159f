"""The `lora:` mapping of a run's YAML."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
EXPERT_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters that are trained in place of the weights; keys as peft's `LoraConfig` has them.

    `expert_projections` are grouped adapters of fused experts, one for each expert, which take part
    in expert parallelism; `target_parameters` are those of peft, which it loads by itself.
    `load_in_4bit` and `load_in_8bit` keep the weights quantised by bitsandbytes (QLoRA).
    """

    r: Positive = 8
    lora_alpha: Annotated[float, Meta(gt=0)] = 8
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    target_parameters: list[str] = []
    expert_projections: list[str] = []
    modules_to_save: list[str] = []
    rank_pattern: dict[str, Positive] = {}
    alpha_pattern: dict[str, Annotated[float, Meta(gt=0)]] = {}

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_use_double_quant: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.expert_projections) - set(EXPERT_PROJECTIONS))
        if unknown:
            raise ValueError(
                f"expert_projections: {', '.join(unknown)} is no projection of fused experts; "
                f"they are {', '.join(EXPERT_PROJECTIONS)}"
            )
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("give either load_in_4bit or load_in_8bit, and not both")
        if not self.load_in_4bit and (
            self.bnb_4bit_use_double_quant or self.bnb_4bit_quant_type != "nf4"
        ):
            raise ValueError(
                "bnb_4bit_quant_type and bnb_4bit_use_double_quant are about a base in 4 bit; set "
                "load_in_4bit: true too"
            )
        if self.target_parameters and self.lora_dropout:
            raise ValueError(
                "target_parameters: peft has no dropout for adapters of parameters; set "
                "lora_dropout: 0, or use expert_projections"
            )
        if self.adapts_experts_alone and (self.use_dora or self.bias != "none"):
            raise ValueError("use_dora and bias are about target_modules; experts have neither")

    @property
    def adapts_experts_alone(self) -> bool:
        """Whether there are adapters of experts and no others."""
        return bool(self.expert_projections) and not (
            self.target_modules or self.target_parameters or self.modules_to_save
        )

    @property
    def quantized(self) -> bool:
        """Whether the base is kept in 4 or 8 bit."""
        return self.load_in_4bit or self.load_in_8bit

    def peft_keywords(self) -> dict[str, Any]:
        """The keywords of peft's `LoraConfig`."""
        return {
            "r": self.r,
            "lora_alpha": _plain(self.lora_alpha),
            "lora_dropout": self.lora_dropout,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "bias": self.bias,
            "target_modules": self.target_modules,
            "exclude_modules": self.exclude_modules,
            "target_parameters": self.target_parameters or None,
            "modules_to_save": self.modules_to_save or None,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": {key: _plain(value) for key, value in self.alpha_pattern.items()},
        }


def _plain(alpha: float) -> float | int:
    """peft writes it as it gets it, and other programs expect a whole number where it is one."""
    return int(alpha) if alpha == int(alpha) else alpha

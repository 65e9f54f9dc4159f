"""Adapters on the model of a run: peft's LoRA, and grouped LoRA of fused experts.

They are put on the whole model, injected in place, before anything is cut, so that every kind of
parallelism finds them where it finds the weights: FSDP2 shards them with their layer, pipelines
carry them with it, tensor parallelism cuts a factor with the weight that it belongs to.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from milepost_trainer.expert_lora import put_expert_lora
from milepost_trainer.lora_settings import LoraSettings
from milepost_trainer.parallel.heads import VALUE_HEAD
from milepost_trainer.parallel.sizes import MeshSizes
from milepost_trainer.parameter_lora import compute_in_groups, require_experts_alone

_HEADS = ("score", "classifier", VALUE_HEAD)
_SEED_OFFSET = 104_729
logger = logging.getLogger(__name__)


def adapter(settings: LoraSettings, sizes: MeshSizes, seed: int) -> Callable[[nn.Module], None]:
    """What `build` calls with the whole model: puts adapters on it and freezes the rest.

    Factors are drawn from `seed`, the same on any mesh. `ValueError` when the settings do not fit
    the mesh, and, from the call, the model.
    """
    check_mesh(settings, sizes)

    def adapt(model: nn.Module) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + _SEED_OFFSET)
            _put(model, settings)
        if settings.target_parameters and sizes.tp * sizes.ep > 1:
            compute_in_groups(model)
        if settings.target_parameters and sizes.tp > 1:
            require_experts_alone(model)

    return adapt


def check_mesh(settings: LoraSettings, sizes: MeshSizes) -> None:
    """`ValueError` for adapters that the mesh cannot hold."""
    if settings.target_parameters and sizes.etp > 1:
        raise ValueError(
            "target_parameters needs whole experts or ranks that read the same tokens: leave out "
            "expert_tp_size"
        )
    if settings.expert_projections and sizes.etp > 1:
        raise ValueError(
            "expert_projections has no rule for expert tensor parallelism: leave out "
            "expert_tp_size, and use ep_size or tp_size"
        )


def quantization(
    settings: LoraSettings, dtype: torch.dtype, device: torch.device
) -> dict[str, Any] | None:
    """Keywords of `from_pretrained` for a base in 4 or 8 bit, None for one that is not.

    `ValueError` when bitsandbytes is not installed.
    """
    if not settings.quantized:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        key = "load_in_4bit" if settings.load_in_4bit else "load_in_8bit"
        raise ValueError(f"lora: {key} needs bitsandbytes: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    if settings.load_in_8bit:
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=settings.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=settings.bnb_4bit_use_double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"quantization_config": config, "device_map": {"": device}}


def _put(model: nn.Module, settings: LoraSettings) -> None:
    model.requires_grad_(False)
    of_experts: list[nn.Parameter] = []
    if settings.expert_projections:
        of_experts = put_expert_lora(model, settings)
    if not settings.adapts_experts_alone:
        _put_peft(model, settings)
    elif _heads_of(model):
        raise ValueError(
            f"lora: with expert_projections alone the head {_heads_of(model)[0]} would keep its "
            "random values; set target_modules too"
        )
    for param in of_experts:
        param.requires_grad_(True)


def _heads_of(model: nn.Module) -> list[str]:
    """The names of linear heads that a task has put on the model."""
    return [name for name in _HEADS if isinstance(getattr(model, name, None), nn.Linear)]


def _put_peft(model: nn.Module, settings: LoraSettings) -> None:
    import peft
    from peft.tuners.tuners_utils import cast_adapter_dtype

    keywords = settings.peft_keywords()
    heads = _heads_of(model)
    if heads:  # a head that was drawn at random must learn
        keywords["modules_to_save"] = sorted({*settings.modules_to_save, *heads})
    config = peft.LoraConfig(**keywords, task_type=_task_type(model, heads))
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        peft.inject_adapter_in_model(config, model)
    _require_no_idle_keys(said)
    cast_adapter_dtype(model, "default")
    _require_targets(model, settings)


def _task_type(model: Any, heads: list[str]) -> str:
    if model.get_output_embeddings() is not None:
        return "CAUSAL_LM"
    return "SEQ_CLS" if heads else "FEATURE_EXTRACTION"


def _require_no_idle_keys(said: list[warnings.WarningMessage]) -> None:
    """`ValueError` for a key that peft found nothing for, of which it only warns."""
    for warning in said:
        text = str(warning.message)
        if issubclass(warning.category, RuntimeWarning) or "exclude_modules" in text:
            raise ValueError(f"lora: {text}")
        logger.warning("peft: %s", text)


def _require_targets(model: nn.Module, settings: LoraSettings) -> None:
    """`ValueError` for a target that nothing of the model is called, which peft lets pass."""
    adapted = [name for name, module in model.named_modules() if _is_adapted(module)]
    if isinstance(settings.target_modules, list):
        for target in settings.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name in adapted):
                raise ValueError(
                    f"target_modules: no module of {type(model).__name__} is called {target!r}, "
                    "or all are excluded"
                )


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")

"""What config.json says about the weights that were quantised, in each layout's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from milepost.hf.expert_layouts import BANK
from milepost.tools.lowp.encode import Weight
from milepost.tools.lowp.selection import Apply, Scope, Selection, layer_of, left_modules, module_of
from milepost.tools.lowp.targets import Format, Layout, Target

Document = dict[str, Any]

_CT_FORMATS = {
    Format.NVFP4: "nvfp4-pack-quantized",
    Format.MXFP4: "mxfp4-pack-quantized",
    Format.MXFP8: "mxfp8-quantized",
    Format.FP8: "float-quantized",
}
_GPT_OSS_DENSE = [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
]  # fmt: skip


def document_of(
    target: Target,
    weights: Sequence[Weight],
    selection: Selection,
    scope: Scope,
    tied: dict[str, str],
    modules: Mapping[str, str],
) -> Document:
    """The `quantization_config` of an output. `modules` has the names that loaders give to tensors
    which have others in files."""
    match target.layout:
        case Layout.COMPRESSED_TENSORS:
            return _compressed_tensors(target.format, _ignored(selection, tied, modules))
        case Layout.MXFP8_INV:
            return {
                "quant_method": "mxfp8",
                "weight_block_size": [1, 32],
                "scale_fmt": "ue8m0",
                "modules_to_not_convert": left_modules(selection, tied),
            }
        case Layout.DEEPSEEK_FP8:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": left_modules(selection, tied),
            }
        case Layout.GPT_OSS:
            kept = [name for name in selection.left if BANK.fullmatch(name)]
            layers = [
                f"model.layers.{place[1]}.mlp.experts" for n in kept if (place := layer_of(n))
            ]
            return {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [*_GPT_OSS_DENSE, *dict.fromkeys(layers)],
            }
        case Layout.BLOCK_SCALED:
            return _block_scaled(target.format, weights, selection, scope)


def is_of_a_layout(stated: object) -> bool:
    """Whether a `quantization_config` is of the method and format of one that `document_of` writes:
    then all that its weights consist of is known here."""
    if not isinstance(stated, Mapping):
        return False
    method = stated.get("quant_method")
    if method != "compressed-tensors":
        return method in ("fp8", "mxfp8", "mxfp4", "block_scaled")
    is_more = any(stated.get(key) for key in ("sparsity_config", "transform_config"))
    return not is_more and stated.get("format") in _CT_FORMATS.values()


def _ignored(selection: Selection, tied: dict[str, str], modules: Mapping[str, str]) -> list[str]:
    """Modules that are not quantised; of a bank also the experts that readers split it into. Norms
    too: some readers look for scales beside every weight that is not listed. Some readers compare
    with names in files, some with those of modules."""
    norms = [name for name in selection.others if "norm" in name]
    found = ["re:.*norm"] if norms else []
    found += [module_of(name) for name in selection.others if name not in norms]
    for module in left_modules(selection, tied):
        bank = BANK.fullmatch(module)
        found += (
            [module] if bank is None else [bank["prefix"], f"re:{re.escape(bank['prefix'])}\\."]
        )
    loaded = {module_of(name): module_of(module) for name, module in modules.items()}
    return list(dict.fromkeys([*found, *(loaded[name] for name in found if name in loaded)]))


def _compressed_tensors(format: Format, ignore: list[str]) -> Document:
    """Only keys that readers of some years know."""
    weights: Document = {"num_bits": 4 if format.is_packed else 8, "type": "float"}
    activations: Document | None = None
    match format:
        case Format.NVFP4:
            weights |= {
                "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn",
            }  # fmt: skip
        case Format.MXFP4 | Format.MXFP8:
            weights |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        case Format.FP8:
            weights |= {"strategy": "channel"}
            activations = {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True,
                "dynamic": True,
            }  # fmt: skip
    weights |= {"symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "input_activations": activations,
        "output_activations": None,
        "weights": weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _CT_FORMATS[format],
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


def _block_scaled(
    format: Format, weights: Sequence[Weight], selection: Selection, scope: Scope
) -> Document:
    names = [weight.spec.name for weight in weights]
    is_nvfp4 = format is Format.NVFP4
    return {
        "quant_method": "block_scaled",
        "format": format.value,
        "weight_dtype": "uint8_packed_e2m1" if format.is_packed else "float8_e4m3fn",
        "scale_dtype": "float8_e4m3fn" if is_nvfp4 else "uint8_e8m0",
        "block_size": format.multiple,
        "contraction_axis": scope.axis,
        "weight_axes": {weight.spec.name: weight.axis for weight in weights},
        "layout": "<name>.weight_packed, .weight_scale and .weight_shape for each weight",
        "global_scale_key_suffix": ".weight_global_scale" if is_nvfp4 else None,
        "scope": {
            "apply_dense_mlp": Apply.DENSE_MLP in scope.apply,
            "apply_moe_experts": Apply.MOE_EXPERTS in scope.apply,
            "keep_first_blocks": scope.keep_first_blocks,
            "keep_last_blocks": scope.keep_last_blocks,
            "kept_blocks": selection.kept_blocks,
        },
        "quantized_weights": names,
        "note": "milepost dequantize makes floats of these weights; no server reads them as they "
        "are",
    }

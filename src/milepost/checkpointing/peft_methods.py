"""Adapter methods on a live model: which tensors are the adapter, and putting a method on.

`peft` is imported only where one of its methods is put on a model or named.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from milepost.errors import InvalidInputError, MissingExtraError
from milepost.state.names import FQN, canonical_names, own_tensors, places, unwrap

BITFIT = "bitfit"
# Methods of the library that first wrote these files, which nothing here can put on a model.
FOREIGN_METHODS = ("adapter", "pfeiffer_adapter")
_OF_PEFT = {
    "lora": "LORA",
    "qlora": "LORA",
    "adalora": "ADALORA",
    "prefix_tuning": "PREFIX_TUNING",
    "ia3": "IA3",
}
# What peft fills in itself, or what another machine would not want.
_NOT_RECORDED = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "parent_library",
    "peft_type",
    "peft_version",
    "revision",
}
_BASE_SEGMENTS = ("base_layer", "original_module")


class LiveAdapter(NamedTuple):
    """The adapter of `peft` that a model has: its name there, and its configuration."""

    name: str
    config: Any


def require_known(method: str) -> None:
    """Refuse a method that neither the document nor the installed `peft` knows."""
    if method in _OF_PEFT or method in FOREIGN_METHODS or method == BITFIT:
        return
    known = sorted(config.value.lower() for config in _peft().PEFT_TYPE_TO_CONFIG_MAPPING)
    if method not in known:
        raise InvalidInputError(
            f"method_name={method!r}: no adapter method; known are {BITFIT}, qlora, "
            f"{', '.join(FOREIGN_METHODS)} and those of the installed peft: {', '.join(known)}"
        )


def live_adapter(model: nn.Module) -> LiveAdapter | None:
    """The adapter that `peft` put on `model`, or None. Of several, the active one."""
    peft = sys.modules.get("peft")  # when it is not imported, nothing of it is in the model
    inner = unwrap(model)
    if peft is None or not (
        isinstance(inner, peft.PeftModel)
        or any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in inner.modules())
    ):
        return None
    configs: Any = getattr(inner, "peft_config", {})
    active = next(iter(configs)) if len(configs) == 1 else getattr(inner, "active_adapter", None)
    if not isinstance(active, str):
        raise InvalidInputError(
            f"the model has the adapters {', '.join(configs)} and not one active; "
            f"choose it with set_adapter(name)"
        )
    return LiveAdapter(active, configs[active])


def all_tensors(model: nn.Module) -> dict[FQN, Tensor]:
    """Parameters, then persistent buffers, by canonical name; tied ones under their first name."""
    canonical_names(model)  # refuses two tensors of one name
    found: dict[FQN, Tensor] = {}
    seen: set[int] = set()
    for place in places(model):
        for name, tensor in own_tensors(place.module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[place.canonical + name] = tensor
    flat = next((name for name in found if name.split(".")[-1] == "_flat_param"), None)
    if flat is not None:
        raise InvalidInputError(
            f"{flat}: the model is sharded by FSDP1, whose parameters have no shapes of their own; "
            f"call this inside FullyShardedDataParallel.summon_full_params(model)"
        )
    return dict(sorted(found.items(), key=lambda item: not isinstance(item[1], nn.Parameter)))


def adapter_tensors(model: nn.Module, method: str) -> dict[FQN, Tensor]:
    """The tensors of the adapter by canonical name, in module order.

    Of a model with an adapter of `peft`: what it counts to it, and all that is trained. Of another
    one: what is trained, while the rest is frozen.
    """
    tensors = all_tensors(model)
    live = live_adapter(model)
    if live is not None:
        _require_same_method(live, method)
        own = _ids_of_peft(unwrap(model), live, tensors)
        found = {n: t for n, t in tensors.items() if t.requires_grad or id(t) in own}
    else:
        found = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        if len(found) == sum(isinstance(t, nn.Parameter) for t in tensors.values()):
            raise InvalidInputError(
                "no parameter of the model is frozen, so its adapter cannot be told from its "
                "base; set requires_grad=False on the parameters of the base"
            )
    if not found:
        raise InvalidInputError(
            "the model has no adapter: no parameter is trainable; set requires_grad=True on those "
            "of the adapter"
        )
    return found


def _require_same_method(live: LiveAdapter, method: str) -> None:
    wanted = _OF_PEFT.get(method, method.upper())
    found = str(getattr(live.config.peft_type, "value", live.config.peft_type))
    if wanted != found:
        raise InvalidInputError(
            f"method_name={method!r}: the model has the adapter {live.name!r} of the method "
            f"{found.lower()}; pass that method's name"
        )


def _ids_of_peft(inner: nn.Module, live: LiveAdapter, tensors: Mapping[FQN, Tensor]) -> set[int]:
    if live.config.is_prompt_learning:
        return {id(t) for name, t in tensors.items() if name.startswith("prompt_encoder.")}
    by_runtime = {
        place.runtime + name: tensor
        for place in places(inner)
        for name, tensor in own_tensors(place.module)
    }
    # Embeddings are left out: to find out whether they were resized, peft asks the network.
    counted = _peft().get_peft_model_state_dict(
        inner, state_dict=by_runtime, adapter_name=live.name, save_embedding_layers=False
    )
    return {id(tensor) for tensor in counted.values()}


def base_record(model: nn.Module, adapter: Mapping[FQN, Tensor]) -> dict[str, Any]:
    """How many parameters the base has, and XXH3-128 over their names and shapes.

    Names are those of the model without what `peft` puts around its modules.
    """
    digest, count = xxhash.xxh3_128(), 0
    rows = []
    for name, tensor in all_tensors(model).items():
        if isinstance(tensor, nn.Parameter) and name not in adapter:
            rows.append(f"{_base_name(name)} {list(_logical_shape(tensor))}\n")
            count += 1
    digest.update("".join(sorted(rows)).encode())
    return {"parameters": count, "digest": f"xxh3-128:{digest.hexdigest()}"}


def _base_name(name: FQN) -> str:
    name = name.removeprefix("base_model.").removeprefix("model.")
    return ".".join(part for part in name.split(".") if part not in _BASE_SEGMENTS)


def _logical_shape(tensor: Tensor) -> Sequence[int]:
    """The shape; of a parameter packed into 4 bits, the one it had before."""
    packed = getattr(tensor, "quant_state", None)
    return tuple(getattr(packed, "shape", None) or tensor.shape)


def recorded_kwargs(model: nn.Module, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`given`, completed by what the live configuration says; and the fields left out.

    A number or flag in `given` that contradicts the live configuration is refused.
    """
    live = live_adapter(model)
    if live is None:
        return dict(given), []
    kept, left_out = {}, []
    fresh = type(live.config)
    for field in fields(live.config):
        value = getattr(live.config, field.name)
        if field.name in _NOT_RECORDED:
            continue
        if field.name in given:
            wanted = given[field.name]
            if isinstance(wanted, int | float) and wanted != value:
                raise InvalidInputError(
                    f"{field.name}={wanted!r}: the adapter of the model has {value!r}; leave the "
                    f"option out, it is recorded from the model"
                )
        elif value is not None and value != _default(fresh, field.name):
            plain = _plain(value)
            if plain is None:
                left_out.append(field.name)
            else:
                kept[field.name] = plain
    return kept | dict(given), left_out


def _default(config: type[Any], name: str) -> Any:
    try:
        return getattr(config(), name)
    except (TypeError, ValueError):  # a configuration that cannot be made without options
        return None


def _plain(value: Any) -> Any:
    """The value as plain data, sets in order; None when it is none."""
    match value:
        case Enum():
            return value.value
        case bool() | int() | float() | str():
            return value
        case dict():
            items = {key: _plain(item) for key, item in value.items()}
            return None if None in items.values() else items
        case list() | tuple() | set() | frozenset():
            each = [_plain(item) for item in value]
            if None in each:
                return None
            return each if isinstance(value, list | tuple) else sorted(each)
    return None


def lacks_method(model: nn.Module, method: str, names: Sequence[FQN] | None) -> bool:
    """Whether the method has to be put on the model first. `names` are those of the file."""
    if live_adapter(model) is not None:
        return False
    tensors = all_tensors(model)
    flags = {t.requires_grad for t in tensors.values() if isinstance(t, nn.Parameter)}
    if len(flags) < 2:
        return True
    if names is None or method == BITFIT:
        return False
    return not any(name in tensors for name in names)


def put_on(model: nn.Module, method: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model with a fresh adapter. torch's random state stays as it was."""
    if method in FOREIGN_METHODS:
        raise InvalidInputError(
            f"method_name={method!r}: peft has no such method, so it cannot be put on the model; "
            f"build the model with its adapter modules, freeze all other parameters, load again"
        )
    if unwrap(model) is not model:
        raise InvalidInputError(
            f"the model is wrapped in {type(model).__name__} and has no adapter yet; load the "
            f"adapter first, then wrap what load_peft returns"
        )
    if method == BITFIT:
        return _put_on_bitfit(model)
    peft = _peft()
    config_class = peft.PEFT_TYPE_TO_CONFIG_MAPPING[_OF_PEFT.get(method, method.upper())]
    with torch.random.fork_rng(devices=[]):
        try:
            adapted: nn.Module = peft.get_peft_model(model, config_class(**kwargs))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{method}: peft does not take the options {dict(kwargs)!r} for this model: "
                f"{error}; pass the right ones to load_peft, or put the adapter on yourself first"
            ) from error
    return adapted


def _put_on_bitfit(model: nn.Module) -> nn.Module:
    parameters = {n: t for n, t in all_tensors(model).items() if isinstance(t, nn.Parameter)}
    biases = [name for name in parameters if name.split(".")[-1].endswith("bias")]
    if not biases:
        raise InvalidInputError(f"{BITFIT}: the model has no parameter named bias")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in biases)
    return model


def _peft() -> Any:
    try:
        import peft
    except ImportError as e:
        raise MissingExtraError(
            "adapters other than bitfit need peft; pip install 'milepost[hf]'"
        ) from e
    return peft


class Structure:
    """What a model is made of, to be put back when an adapter does not fit after all."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, dict(vars(module))) for module in model.modules()]
        self._containers = [
            (value, value.copy())
            for _, attributes in self._modules
            for value in attributes.values()
            if isinstance(value, dict | set)
        ]
        self._parameters = [(p, p.data, p.requires_grad) for p in model.parameters()]

    def put_back(self) -> None:
        for container, content in self._containers:
            container.clear()
            container.update(content)
        for module, attributes in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
        for parameter, data, requires_grad in self._parameters:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            parameter.requires_grad_(requires_grad)

"""The adapters of a live model: their tensors under the names of files, and their configuration.

Peft is recognised by its classes where it is imported already, and is never imported here. An
adapter that was injected into a model in place is the same as one of a `PeftModel`: the names in
its file begin at the module into which it was injected.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from milepost.adapters.config import EXPERT_FIELD, EXPERT_LORA, MIXED_LORA, ExpertSettings
from milepost.adapters.expert import ExpertLora, expert_lora
from milepost.adapters.names import PREFIX, without_wrappers
from milepost.errors import InvalidInputError
from milepost.state.leaves import Leaves
from milepost.state.names import FQN, Model, own_tensors, places

DORA_NAME = "lora_magnitude_vector"


@dataclass(frozen=True, kw_only=True)
class LiveAdapter:
    """The adapter of a model. `name` is the one it has among those of peft, None without peft.

    `root` is the canonical prefix of the module into which peft put it, with the dot, and `adapted`
    is that module. `layers` are the adapted modules, `saved` those that are trained as a whole,
    `experts` the modules with grouped experts. `names` and `tied` give the names that the model's
    state dict has for a live tensor, by `id`: the first, and all.
    """

    name: str | None
    config: Any
    root: str
    adapted: nn.Module | None
    layers: Mapping[str, nn.Module]
    saved: Mapping[str, nn.Module]
    experts: Mapping[str, tuple[nn.Module, ExpertLora]]
    names: Mapping[int, FQN] = field(repr=False)
    tied: Mapping[int, list[FQN]] = field(repr=False)

    def names_of(self, tensor: Tensor) -> list[FQN]:
        """All names that a live tensor has in the state dict of the model."""
        return self.tied.get(id(tensor), [])

    @cached_property
    def tensors(self) -> dict[FQN, str]:
        """The tensors that make the adapter up: live name to the name in its file."""
        found: dict[FQN, str] = {}
        for place, tensor, stored in (*self._of_layers(), *self._of_saved(), *self._of_experts()):
            names = self.names_of(tensor)
            if not names:
                raise InvalidInputError(
                    f"{place}: the state dict of the model leaves this tensor of its adapter out, "
                    "so it could not be restored; save the model that is inside the wrapper"
                )
            found[place if place in names else names[0]] = stored
        return found

    @cached_property
    def inside(self) -> dict[int, str]:
        """Tensors of the adapted model by `id`, with their names in it."""
        if self.adapted is None:
            return dict(self.names)
        return {
            id(tensor): place.canonical + name
            for place in places(self.adapted)
            for name, tensor in own_tensors(place.module)
        }

    def _of_layers(self) -> Iterator[tuple[str, Tensor, str]]:
        for prefix, layer in self.layers.items():
            path = self.inner(prefix)
            for attribute in getattr(layer, "adapter_layer_names", ()):
                container = getattr(layer, attribute, None)
                if not isinstance(container, nn.ModuleDict | nn.ParameterDict):
                    continue
                if self.name is None or self.name not in container:
                    continue
                of_adapter = container[self.name]
                if isinstance(of_adapter, Tensor):
                    live = f"{prefix}{attribute}.{self.name}"
                    yield live, of_adapter, f"{PREFIX}{path}{attribute}"
                    continue
                for name, tensor in of_adapter.named_parameters():
                    stored = f"{PREFIX}{path}{attribute}.{name}"
                    if attribute == DORA_NAME:
                        stored = stored.removesuffix(".weight")
                    yield f"{prefix}{attribute}.{self.name}.{name}", tensor, stored

    def _of_saved(self) -> Iterator[tuple[str, Tensor, str]]:
        for prefix, module in self.saved.items():
            path = self.inner(prefix)
            for place in places(module):
                for name, tensor in own_tensors(place.module):
                    inner = place.canonical + name
                    live = f"{prefix}modules_to_save.{self.name}.{inner}"
                    yield live, tensor, f"{PREFIX}{path}{inner}"

    def _of_experts(self) -> Iterator[tuple[str, Tensor, str]]:
        for prefix, (module, lora) in self.experts.items():
            for projection, factors in lora.factors.items():
                for name, ending in zip(factors, ("lora_A", "lora_B"), strict=True):
                    tensor = module.get_parameter(name)
                    yield f"{prefix}{name}", tensor, f"{self.inner(prefix)}{projection}.{ending}"

    def inner(self, prefix: str) -> str:
        """A canonical prefix as it is called inside the adapted model."""
        return prefix.removeprefix(self.root)

    def scalings(self) -> Iterator[tuple[str, int, float]]:
        """For each module or parameter that has low-rank factors of peft, their rank and what
        scales them."""
        for prefix, layer in self.layers.items():
            scales = getattr(layer, "scaling", None)
            if isinstance(scales, Mapping) and self.name in scales:
                path = without_wrappers(self.inner(prefix)).rstrip(".")
                parameter = getattr(layer, "parameter_name", None)
                rank: Any = layer.r
                full = f"{path}.{parameter}" if parameter else path
                yield full, int(rank[self.name]), float(scales[self.name])

    @property
    def settings(self) -> ExpertSettings | None:
        """What the grouped experts have in common; `InvalidInputError` where they differ."""
        found: dict[ExpertSettings, str] = {}
        for prefix, (_, lora) in self.experts.items():
            found.setdefault(lora.settings, prefix)
        if len(found) > 1:
            raise InvalidInputError(
                f"the experts of {' and '.join(list(found.values())[:2])} are adapted in different "
                "ways (rank, scaling or projections), which one adapter file cannot say"
            )
        return next(iter(found), None)

    def document(self, base: str | None) -> dict[str, Any]:
        """`adapter_config.json`; `base` is the name or path of the model that was adapted."""
        settings = self.settings
        document: dict[str, Any] = {}
        if self.config is not None:
            document = {key: _plain(value) for key, value in self.config.to_dict().items()}
            document["inference_mode"] = True
            if not document.get("task_type") and not document.get("auto_mapping"):
                # Of a model of an unknown task, peft's automatic classes want to know the class.
                document["auto_mapping"] = {
                    "base_model_class": type(self.adapted).__name__,
                    "parent_library": type(self.adapted).__module__,
                }
        own = document.get("base_model_name_or_path") or base
        if settings is None:
            return {**document, "base_model_name_or_path": own}
        if not document:
            experts = {"peft_type": EXPERT_LORA, **settings.document()}
            return {**experts, "base_model_name_or_path": own}
        document |= {"peft_type": MIXED_LORA, EXPERT_FIELD: settings.document()}
        return {**document, "base_model_name_or_path": own}


def find_adapter(model: Model, leaves: Leaves) -> LiveAdapter | None:
    """The adapter that `model` carries, or None; of several of peft, refused unless one is all.

    `leaves` are those of the model. Looks at modules only.
    """
    experts = {
        place.canonical: (place.module, lora)
        for place in places(model)
        if (lora := expert_lora(place.module)) is not None
    }
    name, config, root, adapted = _of_peft(model)
    layers, saved = {}, {}
    if name is not None:
        for place in places(model):
            if _is_a(place.module, "peft.tuners.tuners_utils", "BaseTunerLayer"):
                layers[place.canonical] = place.module
            elif _is_a(place.module, "peft.utils.other", "ModulesToSaveWrapper"):
                copies: Any = place.module.modules_to_save
                if name in copies:
                    saved[place.canonical] = copies[name]
    if not layers and not saved and not experts:
        return None
    tied: dict[int, list[FQN]] = {}
    for fqn, tensor in leaves.tensors.items():
        tied.setdefault(id(tensor), []).append(fqn)
    return LiveAdapter(
        name=name,
        config=config,
        root=root,
        adapted=adapted,
        layers=layers,
        saved=saved,
        experts=experts,
        names={identity: found[0] for identity, found in tied.items()},
        tied=tied,
    )


def _of_peft(model: Model) -> tuple[str | None, Any, str, nn.Module | None]:
    """Name and configuration of peft's adapter, and the module in which its names begin."""
    configs: Mapping[str, Any] = {}
    root, adapted = "", None
    for place in places(model):
        found = vars(place.module).get("peft_config")
        if isinstance(found, Mapping) and found:  # the innermost is the model that was adapted
            configs, root, adapted = found, place.canonical, place.module
    if not configs or "peft" not in sys.modules:
        return None, None, "", None
    if len(configs) > 1:
        raise InvalidInputError(
            f"the model has {len(configs)} adapters ({', '.join(map(str, configs))}); one can be "
            "saved by itself: delete the others with delete_adapter(name), or save with "
            "adapters=Adapters.WITH_BASE"
        )
    ((name, config),) = configs.items()
    if getattr(config, "is_prompt_learning", False):
        raise InvalidInputError(
            f"{_plain(config.peft_type)}: a prompt is no part of the model's modules; save it with "
            "save_peft(), or with adapters=Adapters.WITH_BASE"
        )
    return name, config, root, adapted


def is_peft_model(module: nn.Module) -> bool:
    """Whether `module` is peft's wrapper around a whole model."""
    return _is_a(module, "peft.peft_model", "PeftModel")


def _is_a(module: nn.Module, source: str, name: str) -> bool:
    cls = getattr(sys.modules.get(source), name, None)
    return cls is not None and isinstance(module, cls)


def _plain(value: Any) -> Any:
    """The value as JSON has it: enums by their values, sets in order."""
    match value:
        case Enum():
            return value.value
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case set() | frozenset():
            return sorted(_plain(item) for item in value)
        case list() | tuple():
            return [_plain(item) for item in value]
    return value

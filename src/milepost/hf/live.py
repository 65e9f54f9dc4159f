"""What the live model is underneath its wrappers, and where it came from."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from milepost.hf.foreign_calls import attempt

# Modules that wrap or swap classes at run time; what they define is never the architecture.
_WRAPPERS = ("torch.", "peft.", "accelerate.", "deepspeed.")
_INNER = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
}


def unwrap(model: Any) -> Any:
    """The module inside the wrappers of torch.compile, DDP, FSDP1, DeepSpeed and PEFT."""
    while True:
        inner = _inner(model)
        if inner is None or inner is model:
            return model
        model = inner


def _inner(model: Any) -> Any | None:
    for cls in type(model).__mro__:
        if not cls.__module__.startswith(_WRAPPERS):
            continue
        if cls.__name__ == "PeftModel":
            return model.get_base_model()
        if cls.__name__ in _INNER:
            return getattr(model, _INNER[cls.__name__])
    return None


def live_class(model: Any) -> type | None:
    """The Hugging Face model class of an unwrapped model, None when it has none.

    `fully_shard` swaps the class for a subclass of its own (`FSDPLlamaForCausalLM`); the first
    class of the MRO that no wrapper defined is the one that can load the checkpoint.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:  # whoever made a Hugging Face model has imported it
        return None
    for candidate in type(model).__mro__:
        if candidate.__module__.startswith(_WRAPPERS):
            continue
        if issubclass(candidate, transformers.PreTrainedModel):
            return candidate
    return None


def hf_config(model: Any) -> Any | None:
    """The model's transformers configuration object, or None for any other model."""
    transformers = sys.modules.get("transformers")
    config = getattr(model, "config", None)
    if transformers is None or not isinstance(config, transformers.PretrainedConfig):
        return None
    return config


def source_directory(thing: Any) -> Path | None:
    """The directory a model, configuration, tokenizer or processor was loaded from, if it is here.

    For a model of the Hub that is its snapshot in the local cache; nothing is downloaded.
    """
    for holder in (thing, getattr(thing, "config", None), getattr(thing, "tokenizer", None)):
        for attribute in ("name_or_path", "_name_or_path"):
            name = getattr(holder, attribute, None)
            if not isinstance(name, str) or not name:
                continue
            if Path(name).is_dir():
                return Path(name)
            cached = _cached_snapshot(name, getattr(holder, "_commit_hash", None))
            if cached is not None:
                return cached
    return None


def _cached_snapshot(repository: str, revision: str | None) -> Path | None:
    if "transformers" not in sys.modules:
        return None
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "tokenizer_config.json"):
        found, _ = attempt(partial(try_to_load_from_cache, repository, file, revision=revision))
        if isinstance(found, str):
            return Path(found).parent
    return None

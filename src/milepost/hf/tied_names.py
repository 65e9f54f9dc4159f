"""Ties that a model's class and configuration declare, also where a module holds one side only.

A pipeline stage has the output layer and another the embedding; nothing in memory says that they
are one tensor. The Hugging Face class of the whole model does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from milepost.hf.live import hf_config, live_class, unwrap


def declared_ties(model: Any) -> dict[str, str]:
    """Alias to the name of the tensor that it shares, as `model` declares it.

    `model` is a module, whole or pruned to a stage, or a list of such modules. Empty for a
    configuration that does not tie, and for models that transformers does not know.
    """
    found: dict[str, str] = {}
    for part in model if isinstance(model, list | tuple) else [model]:
        inner = unwrap(part)
        config = hf_config(inner)
        if config is None or not _ties_words(config):
            continue
        expanded = vars(inner).get("all_tied_weights_keys")  # names of this very instance
        declared = expanded or getattr(whole_class(inner, config), "_tied_weights_keys", None)
        if isinstance(declared, Mapping):
            found.update({str(alias): str(source) for alias, source in declared.items()})
    return found


def _ties_words(config: Any) -> bool:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False))


def whole_class(model: Any, config: Any) -> type | None:
    """The class of the whole model: that of the module, or the one its configuration names."""
    own = live_class(model)
    if own is not None:
        return own
    transformers = sys.modules["transformers"]  # it made the configuration
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type):
            return found
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    found = mapping.get(type(config), None) if type(config) in mapping else None
    return found if isinstance(found, type) else None

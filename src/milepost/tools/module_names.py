"""The names that modules of transformers have for stored tensors, in families that have others.

Hub checkpoints of vision-language models, and of a few others, keep names of older classes
(`language_model.model.layers.0...`), and loaders rename them (`model.language_model.layers.0...`).
What names modules (adapters, lists of modules that are not quantised) needs the latter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from milepost.hf.foreign_calls import attempt
from milepost.hf.load_names import on_meta
from milepost.tools.rewrite.source import Source

_PARTS = ("vision_config", "audio_config")
_RENAMED = frozenset({"nemotron_h"})


def may_have_others(source: Source) -> bool:
    """Whether modules may be called otherwise: of a model of several parts, or of such a family."""
    has_parts = any(isinstance(source.config.get(key), dict) for key in _PARTS)
    return has_parts or not _RENAMED.isdisjoint(source.model_types)


def module_names(source: Source) -> Mapping[str, str]:
    """Stored name to module's name, of tensors that are one tensor in both.

    Empty where names are the same, and where transformers is not installed or does not know the
    configuration. The model is built on the meta device.
    """
    if not may_have_others(source) or not source.path.is_dir():
        return {}
    found, _ = attempt(partial(_asked, source))
    return found or {}


def _asked(source: Source) -> Mapping[str, str]:
    from milepost.hf.hub_family import family_of, names_on_load

    model = on_meta(source.path, source.config)
    own, family = set(model.state_dict()), family_of(model)
    if family is None:
        return {}
    loaded = names_on_load(family, source.tensors, own)
    single = {name: next(iter(found)) for name, found in loaded.items() if len(found) == 1}
    counts = Counter(single.values())
    return {name: place for name, place in single.items() if place in own and counts[place] == 1}

"""The `general.*` keys that say what a model is and what it was made of."""

from __future__ import annotations

from milepost.tools.gguf.hyperparameters import Keys
from milepost.tools.rewrite.cards import hub_id_of
from milepost.tools.rewrite.source import Source

_HUB = "https://huggingface.co"


def origin_keys(source: Source) -> Keys:
    """The name of the model, and the one that it started from where its configuration says so."""
    base = hub_id_of(source)
    path = source.path.resolve()
    found: Keys = {"general.name": path.stem if path.is_file() else path.name}
    if base is not None:
        owner, _, name = base.rpartition("/")
        found["general.base_model.count"] = 1
        found["general.base_model.0.name"] = name
        if owner:
            found["general.base_model.0.organization"] = owner
        found["general.base_model.0.repo_url"] = f"{_HUB}/{base}"
    return found

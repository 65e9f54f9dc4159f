"""The content of generation_config.json, for models that generate."""

from __future__ import annotations

import json
import warnings
from inspect import signature
from typing import Any

from milepost.hf.foreign_calls import attempt
from milepost.hf.live import live_class
from milepost.hf.model_config import encode


def generation_document(model: Any) -> tuple[bytes | None, list[str]]:
    """generation_config.json of an unwrapped model, None for one that does not generate.

    transformers refuses to save a configuration that contradicts itself (`do_sample=false` with
    `temperature=0.7`). Here the values are written as they are, and the contradiction is a note.
    """
    config = getattr(model, "generation_config", None)
    cls = live_class(model)
    if config is None or cls is None or not _generates(cls):
        return None, []
    text, problem = attempt(config.to_json_string)
    if text is None:
        return None, [f"generation_config.json: not written, it cannot be serialised ({problem})"]
    document = json.loads(text)
    document.pop("compile_config", None)  # of this process only; transformers drops it too
    return encode(document), _contradictions(config)


def _generates(cls: Any) -> bool:
    answer, _ = attempt(cls.can_generate)
    return bool(answer)


def _contradictions(config: Any) -> list[str]:
    _, problem = attempt(lambda: _validate(config))
    if problem is None:
        return []
    return [
        f"generation_config.json: written as it is, but transformers calls it invalid: {problem}"
    ]


def _validate(config: Any) -> None:
    """Raise for whatever transformers would refuse to save."""
    if "strict" in signature(config.validate).parameters:
        config.validate(strict=True)
        return
    with warnings.catch_warnings():  # before transformers 4.52 contradictions were warnings
        warnings.simplefilter("error")
        config.validate()

"""Where families have their text on disk: the data, against transformers' own models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milepost.hf.hub_family import family_of, revert
from milepost.tools.reattach_families import (
    WRAPPINGS,
    is_text_of_a_whole,
    supported_reattach_model_types,
)


def names_on_disk(model: Any) -> set[str]:
    """The names under which transformers would save the model."""
    family = family_of(model)
    state = model.state_dict()
    return set(state if family is None else revert(family, state))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(WRAPPINGS))
def test_text_has_the_names_in_the_whole_that_transformers_saves_it_under(family: str) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[family]()
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
        text = transformers.AutoModelForCausalLM.from_config(config.text_config)
    wrapping, saved = WRAPPINGS[family], names_on_disk(whole)
    alone = {wrapping.inner(name) for name in names_on_disk(text)}
    inside = {name for name in saved if wrapping.is_text(name)}
    head = f"{wrapping.head}weight"
    assert alone - {head} == inside - {head}
    if isinstance(getattr(config, "vision_config", None), transformers.PreTrainedConfig):
        assert saved - inside, "there is more than text"


def test_text_types_are_told_from_wholes() -> None:
    assert is_text_of_a_whole(["qwen3_5_text"])
    assert not is_text_of_a_whole(["qwen3_5", "llama"])
    assert list(supported_reattach_model_types()) == sorted(WRAPPINGS)

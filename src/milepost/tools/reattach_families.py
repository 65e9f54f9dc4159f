"""Where vision-language models have their language model on disk: data, by `model_type`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_OWN_BODY, _OWN_HEAD = "model.", "lm_head."


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """Prefixes that the language model has inside the whole.

    >>> NESTED.inner("model.layers.0.mlp.up_proj.weight")
    'model.language_model.layers.0.mlp.up_proj.weight'
    >>> NESTED.is_text("model.visual.merger.norm.weight")
    False
    """

    body: str
    head: str

    def is_text(self, name: str) -> bool:
        """Whether a tensor of the whole belongs to its language model."""
        return name.startswith((self.body, self.head))

    def inner(self, name: str) -> str:
        """The name in the whole of a tensor that the language model alone has under `name`.

        A language model that was loaded out of the whole may have been saved under the names of
        the whole; those stay, and so do names outside the body and the head.
        """
        if self.is_text(name):
            return name
        for own, wrapped in ((_OWN_BODY, self.body), (_OWN_HEAD, self.head)):
            if name.startswith(own):
                return wrapped + name.removeprefix(own)
        return name


NESTED = Wrapping(body="model.language_model.", head="lm_head.")
BESIDE = Wrapping(body="language_model.model.", head="language_model.lm_head.")
TEXT_MODEL = Wrapping(body="model.text_model.", head="lm_head.")

WRAPPINGS: dict[str, Wrapping] = {
    **dict.fromkeys(
        (
            "cohere2_vision", "deepseek_vl", "exaone4_5", "gemma4", "gemma4_unified", "lfm2_vl",
            "lighton_ocr", "ovis2", "qwen3_5", "qwen3_5_moe", "video_llama_3",
        ),
        NESTED,
    ),
    **dict.fromkeys(
        (
            "aria", "gemma3", "got_ocr2", "internvl", "llama4", "llava", "llava_next",
            "llava_next_video", "llava_onevision", "mistral3", "paligemma", "video_llava",
            "vipllava",
        ),
        BESIDE,
    ),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), TEXT_MODEL),
}  # fmt: skip
"""Models whose language model transformers also has as a model of its own."""

_TEXT_TYPES = frozenset(f"{kind}_text" for kind in WRAPPINGS)


def supported_reattach_model_types() -> tuple[str, ...]:
    """`model_type` of the bases that a language model can be put back into, sorted."""
    return tuple(sorted(WRAPPINGS))


def is_text_of_a_whole(config_types: Iterable[str]) -> bool:
    """Whether a `model_type` is that of a language model which belongs to a vision-language one."""
    return any(kind in _TEXT_TYPES for kind in config_types)

"""`adapter_config.json` is read strictly, and what a factor is scaled by follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from milepost.adapters.config import (
    parse_adapter_config,
    refuse_changed_base,
    refuse_unmergeable,
)
from milepost.errors import FormatError, InvalidInputError
from tests.adapters.lora_models import adapted

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
EXPERTS: dict[str, Any] = {"r": 2, "lora_alpha": 4, "expert_projections": ["down_proj"]}

WRONG = [
    ([], "expected an object"),
    ({"r": 4}, "peft_type is missing"),
    ({**PLAIN, "r": 0}, "r: 0 is not"),
    ({**PLAIN, "r": True}, "r: True is not"),
    ({**PLAIN, "lora_alpha": "8"}, "lora_alpha"),
    ({**PLAIN, "use_rslora": 1}, "use_rslora"),
    ({**PLAIN, "bias": "some"}, "bias"),
    ({**PLAIN, "rank_pattern": {"q": -1}}, "rank_pattern"),
    ({**PLAIN, "alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ({**PLAIN, "modules_to_save": "lm_head"}, "modules_to_save"),
    ({**PLAIN, "trainable_token_indices": {"embed_tokens": ["x"]}}, "trainable_token_indices"),
    ({"peft_type": "LORA_WITH_EP_EXPERT_LORA", "r": 4, "lora_alpha": 8}, "ep_expert_lora"),
    ({"peft_type": "EXPERT_LORA", "r": 4, "lora_alpha": 8}, "expert_projections is missing"),
]


@pytest.mark.parametrize(("document", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_a_field_that_is_wrong_is_named(document: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_adapter_config(document, where="adapter_config.json")


@pytest.mark.case("V46")
def test_the_first_pattern_that_fits_decides_rank_and_alpha() -> None:
    document = {
        **PLAIN,
        "rank_pattern": {"layers.1.*q_proj": 2, "q_proj": 16},
        "alpha_pattern": {"down_proj": 3},
    }
    lora = parse_adapter_config(document, where="here").lora
    assert lora is not None
    assert lora.scaling("model.layers.1.self_attn.q_proj") == 4.0
    assert lora.scaling("model.layers.0.self_attn.q_proj") == 0.5
    assert lora.scaling("model.layers.0.mlp.down_proj") == 0.75
    assert lora.scaling("model.layers.0.mlp.up_proj") == 2.0
    assert lora.scaling("model.layers.0.self_attn.my_q_proj") == 2.0


def test_patterns_mean_what_they_mean_to_peft() -> None:
    settings: dict[str, Any] = {
        "target_modules": ["q_proj", "down_proj", "o_proj"],
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2, "o_proj": 8},
        "alpha_pattern": {"layers.1.mlp.down_proj": 5, "q_proj": 6},
        "use_rslora": True,
    }
    model = adapted(**settings)
    document = {**PLAIN, **settings}
    lora = parse_adapter_config(document, where="here").lora
    assert lora is not None
    seen = 0
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "scaling") and hasattr(module, "lora_A"):
            assert lora.scaling(name) == module.scaling["default"], name
            seen += 1
    assert seen == 6


@pytest.mark.parametrize(
    "field",
    [
        {"use_qalora": True},
        {"alora_invocation_tokens": [1]},
        {"layer_replication": [[0, 1]]},
        {"arrow_config": {"top_k": 3}},
        {"something_of_tomorrow": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_variant_that_factors_alone_do_not_describe_is_not_merged(field: dict[str, Any]) -> None:
    config = parse_adapter_config({**PLAIN, **field}, where="here")
    with pytest.raises(InvalidInputError, match=next(iter(field))):
        refuse_unmergeable(config, where="here")


def test_a_whole_configuration_of_peft_is_understood() -> None:
    model = adapted(use_dora=True, rank_pattern={"q_proj": 2}, modules_to_save=["lm_head"])
    from milepost.adapters.live import find_adapter
    from milepost.state.leaves import collect_leaves

    live = find_adapter(model, collect_leaves(model))
    assert live is not None
    config = parse_adapter_config(live.document("base"), where="here")
    refuse_unmergeable(config, where="here")
    refuse_changed_base(config, where="here")
    assert config.base == "base" and config.lora is not None
    assert config.lora.use_dora and config.lora.modules_to_save == ("lm_head",)


def test_a_start_that_changed_the_base_is_no_adapter_of_the_base_on_disk() -> None:
    config = parse_adapter_config({**PLAIN, "init_lora_weights": "pissa_niter_4"}, where="here")
    refuse_unmergeable(config, where="here")
    with pytest.raises(InvalidInputError, match="pissa"):
        refuse_changed_base(config, where="here")


def test_other_methods_are_read_and_not_merged() -> None:
    config = parse_adapter_config({"peft_type": "IA3"}, where="here")
    assert config.lora is None and config.experts is None
    with pytest.raises(InvalidInputError, match="IA3"):
        refuse_unmergeable(config, where="here")


def test_both_kinds_of_experts_have_their_own_scaling() -> None:
    alone = parse_adapter_config({"peft_type": "EXPERT_LORA", **EXPERTS}, where="here")
    assert alone.experts is not None and alone.experts.scaling == 2.0 and alone.lora is None
    mixed = {**PLAIN, "peft_type": "LORA_WITH_EP_EXPERT_LORA", "ep_expert_lora": EXPERTS}
    both = parse_adapter_config(mixed, where="here")
    assert both.experts == alone.experts and both.lora is not None and both.lora.r == 4

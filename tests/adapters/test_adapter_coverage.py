"""Which modules a configuration covers, against peft's own answer."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from milepost.adapters.config import AdapterConfig, parse_adapter_config
from milepost.adapters.coverage import covers
from milepost.errors import FormatError

MODULES = [
    "lm_head",
    "layers.0.q_proj",
    *(f"model.layers.{n}.self_attn.{leaf}_proj" for n in (0, 1, 11) for leaf in "qko"),
    *(f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in (0, 1) for e in (0, 1)),
    "vision.blocks.1.attn.q_proj",
    "model.vision.tower.h.0.attn.my_q_proj",
]
CONFIGS: dict[str, dict[str, Any]] = {
    "ends": {"target_modules": ["q_proj", "up_proj"]},
    "whole": {"target_modules": ["model.layers.1.self_attn.q_proj", "lm_head"]},
    "expression": {"target_modules": r".*\.layers\.(0|11)\..*(q|up)_proj"},
    "layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 11]},
    "no-layers": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": []},
    "pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "blocks",
    },
    "patterns": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
        "layers_pattern": ["h", "layers"],
    },
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": ["1.self_attn.q_proj"]},
    "excluded-by-expression": {"target_modules": ["q_proj"], "exclude_modules": r"vision\..*"},
    "whole-besides": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    "parameters": {"target_modules": None, "target_parameters": ["mlp.experts.gate_up_proj"]},
}


def parsed(document: dict[str, Any]) -> AdapterConfig:
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    return parse_adapter_config({**known, **document}, where="adapter_config.json")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_modules_that_are_covered_are_those_that_peft_adapts(name: str) -> None:
    wanted = LoraConfig(**CONFIGS[name])
    own = parsed(CONFIGS[name])
    found = {module for module in MODULES if covers(own, module)}
    assert found == {module for module in MODULES if check_target_module_exists(wanted, module)}
    assert found or name == "parameters"


def test_an_expression_that_cannot_be_read_is_named() -> None:
    with pytest.raises(FormatError, match=r"target_modules: .*no regular expression"):
        covers(parsed({"target_modules": "q_proj("}), "lm_head")

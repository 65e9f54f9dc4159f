"""`merge-peft-adapters` of an adapter that is not all there, and of one that is for a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import milepost as mp
from milepost.errors import InvalidInputError
from milepost.tools.merge_peft import merge_peft_adapters
from tests.adapters.test_expert_lora import declare
from tests.tools.adapters.peft_oracle import (
    EXPERTS,
    PLAIN,
    QUICK,
    load,
    merged_by_peft,
    state,
    tensors_of,
    write_adapter,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice

ONE_LAYER = ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]


def keep(adapter: Path, part: str) -> None:
    """Leave the tensors out whose names do not have `part`."""
    file = adapter / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if part in n}, file)


def configure(adapter: Path, **fields: Any) -> None:
    place = adapter / "adapter_config.json"
    place.write_text(json.dumps({**json.loads(place.read_bytes()), **fields}))


@pytest.mark.case("V50")
def test_an_adapter_that_is_one_layer_short_is_refused_unless_its_configuration_says_so(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    keep(adapter, "layers.0.")
    with pytest.raises(InvalidInputError, match=r"factors of 2 modules .*nothing of 2 ") as caught:
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    for name in ("layers.0.mlp.down_proj", "layers.1.mlp.down_proj", "layers.1.self_attn.q_proj"):
        assert name in str(caught.value)
    assert not (tmp_path / "out").exists()
    configure(adapter, layers_to_transform=[0])
    report = merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert report.counts == {"changed": 2}
    assert all("layers.0." in name for name in report.differences)


@pytest.mark.case("V50")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"layers_to_transform": 1, "layers_pattern": "layers"}),
        ("llama", {"target_modules": r".*layers\.0\.(mlp\.up_proj|self_attn\.[qk]_proj)"}),
        ("llama", {"exclude_modules": ["layers.1.mlp.down_proj"]}),
        ("llama", {"target_modules": ["model.layers.0.self_attn.q_proj", "down_proj"]}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ONE_LAYER}),
    ],
    ids=["layer", "expression", "excluded", "whole-path", "banks"],
)
def test_an_adapter_that_peft_wrote_for_some_layers_is_complete(
    family: str, changes: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[family]
    adapter = write_adapter(tmp_path / "a", base, **{**PLAIN, **changes})
    merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    found, wanted = state(load(tmp_path / "out")), state(merged_by_peft(base, adapter))
    assert max(float((found[n] - wanted[n]).abs().max()) for n in wanted) < 1e-6


@pytest.mark.case("V50")
def test_banks_of_experts_of_one_layer_too_few_are_refused(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    settings = {**PLAIN, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    adapter = write_adapter(tmp_path / "a", bases["qwen3_moe"], **settings)
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    save_file({n: t for n, t in factors.items() if "layers.1.mlp" not in n}, file)
    with pytest.raises(InvalidInputError, match=r"nothing of 1 .*: model\.layers\.1\.mlp\.experts"):
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)


@pytest.mark.case("V50")
def test_a_module_that_was_trained_whole_and_is_not_in_the_file_is_missed(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(
        tmp_path / "a", bases["llama"], **PLAIN, modules_to_save=["lm_head", "score"]
    )
    merge_peft_adapters([adapter], tmp_path / "whole", options=QUICK)  # the base has no score
    keep(adapter, "layers.")
    with pytest.raises(InvalidInputError, match=r"nothing of 1 .*: lm_head"):
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)


def test_layers_that_the_class_of_the_base_does_not_load_need_no_factors(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """Layers that predict further tokens lie in the files, and peft never sees them."""
    base = tmp_path / "base"
    load(bases["llama"]).save_pretrained(base)
    tensors = tensors_of(base)
    extra = {n.replace("layers.1", "layers.2"): t.clone() for n, t in tensors.items() if "s.1" in n}
    save_file(tensors | extra, base / "model.safetensors", {"format": "pt"})
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    report = merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)
    assert report.counts == {"changed": 4}
    configure(adapter, layers_pattern="layers", layers_to_transform=[0, 1])
    keep(adapter, "layers.0.")
    with pytest.raises(InvalidInputError, match=r"nothing of 2 "):
        merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)


def test_factors_of_grouped_experts_are_complete_as_they_were_saved(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["qwen3_moe"])
    declare(model.requires_grad_(False).model.layers[1])
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": model}, step=1)
    report = merge_peft_adapters([place], tmp_path / "out", base=bases["qwen3_moe"], options=QUICK)
    assert {name.split(".")[2] for name in report.differences} == {"1"}
    (place / "milepost.json").unlink()  # now nobody says that it is all
    with pytest.raises(InvalidInputError, match=r"nothing of 2 .*layers\.0\.mlp\.experts\.down"):
        merge_peft_adapters([place], tmp_path / "two", base=bases["qwen3_moe"], options=QUICK)
    assert torch.equal(
        tensors_of(tmp_path / "out")["lm_head.weight"],
        tensors_of(bases["qwen3_moe"])["lm_head.weight"],
    )

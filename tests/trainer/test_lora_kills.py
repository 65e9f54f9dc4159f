"""What else LoRA has, all of it in one run: killed and resumed on ranks that share the model.

DoRA, rsLoRA, ranks and scalings of their own for some modules, an adapted embedding and a head that
is trained as a whole; beside fused experts, adapters of these too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import slow
from tests.states import same
from tests.trainer.lora_runs import EXPERTS, BaseOf, adapter_config, adapter_of, on_base
from tests.trainer.yaml_runs import SAVED, contents, losses, run, run_and_kill

EVERYTHING: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "use_rslora": True,
    "use_dora": True,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens"],
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 2},
    "modules_to_save": ["lm_head"],
}
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "llama-plain": EVERYTHING,
    "moe": {**EVERYTHING, "expert_projections": EXPERTS},
}
LAYER = "base_model.model.model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("mesh", "family"),
    [
        ("dp_shard2 ep2", "moe"),
        slow("dp_shard2", "llama-plain"),
        slow("cp2", "llama-plain"),
        slow("cp2 ep2", "moe"),
    ],
)
def test_a_killed_run_with_all_of_lora_ends_like_one_that_never_stopped(
    mesh: str, family: str, base_of: BaseOf, text: Path, tmp_path: Path
) -> None:
    changes = on_base(base_of(family), lora=OF_FAMILIES[family])
    end = run(tmp_path / "whole", text, mesh, **changes)
    run_and_kill(tmp_path / "killed", text, mesh, **changes)
    resumed = run(tmp_path / "killed", text, mesh, **changes)
    assert same(contents(resumed), contents(end))
    first, last = (
        adapter_of(end.with_name(f"checkpoint-{SAVED}")),
        adapter_of(resumed),
    )
    assert same(last, adapter_of(end))
    assert first.keys() == last.keys()
    assert not any(torch.equal(first[name], last[name]) for name in first)
    # and what the files hold is what those of one process hold, whole
    alone = run(tmp_path / "alone", text, **changes)
    assert losses(end) == pytest.approx(losses(alone), rel=1e-4)
    wanted = adapter_of(alone)
    assert {n: t.shape for n, t in last.items()} == {n: t.shape for n, t in wanted.items()}
    for name, value in wanted.items():
        assert torch.allclose(last[name], value, rtol=1e-2, atol=2e-3), name
    shapes = {name: tuple(value.shape) for name, value in last.items()}
    assert shapes[f"{LAYER}.q_proj.lora_A.weight"] == (8, 16)
    assert shapes[f"{LAYER}.v_proj.lora_A.weight"] == (4, 16)
    assert shapes[f"{LAYER}.v_proj.lora_magnitude_vector"] == (8,)
    assert shapes["base_model.model.lm_head.weight"][1:] == (16,)
    assert any("lora_embedding_A" in name for name in shapes)
    assert any("experts" in name for name in shapes) == ("ep" in mesh)
    asked = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
    written = adapter_config(resumed)
    assert {key: written[key] for key in asked} == {key: EVERYTHING[key] for key in asked}

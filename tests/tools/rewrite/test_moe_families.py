"""Single experts and banks of every family that transformers can build, against its own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.hf.expert_layouts import EXPERT_NAMES
from milepost.tools.moe_experts import fuse_moe_experts, unfuse_moe_experts
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits
from tests.tools.rewrite.moe_models import FAMILIES, build

KINDS = sorted(kind for kind in FAMILIES if kind in EXPERT_NAMES)


@pytest.mark.case("V54")
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_of_a_family_are_what_transformers_writes_and_loads(
    tmp_path: Path, kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = build(kind)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "banks", save_original_format=False)
    singles = read_hub(tmp_path / "single")
    assert not same_bits(singles, read_hub(tmp_path / "banks"))
    names = EXPERT_NAMES[kind]
    assert any(name.endswith(f".experts.3.{names.down}.weight") for name in singles)
    unfuse_moe_experts(tmp_path / "banks", tmp_path / "unfused", options=QUICK)
    assert same_bits(read_hub(tmp_path / "unfused"), singles)
    fuse_moe_experts(tmp_path / "single", tmp_path / "fused", options=QUICK)
    assert not any(".experts.3." in name for name in read_hub(tmp_path / "fused"))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fused", output_loading_info=True
    )
    assert not any(info.values()), info
    assert same_bits(loaded.state_dict(), model.state_dict())
    unfuse_moe_experts(tmp_path / "fused", tmp_path / "again", options=QUICK)
    assert same_bits(read_hub(tmp_path / "again"), singles)

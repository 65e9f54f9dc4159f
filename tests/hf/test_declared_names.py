"""Names that a model's class declares it may do without, or may leave: nothing else is excused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PegasusConfig, PegasusForConditionalGeneration

from milepost.errors import InvalidInputError
from milepost.hf.load_names import NameComparison, compare_with_class, unused_names
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import Check, RewriteOptions
from tests.parallel.expert_models import random_model

CHECKED = RewriteOptions(check=Check.LOAD, is_durable=False, threads=2)
PREDICTION = "model.layers.61.eh_proj.weight"  # of the class's own list
NOT_DECLARED = "model.layers.7.eh_proj.weight"


def pegasus(directory: Path) -> Any:
    """A class that may do without `final_logits_bias`."""
    config = PegasusConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    PegasusForConditionalGeneration(config).save_pretrained(directory)
    return directory


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> NameComparison:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return compare_with_class(directory, {name: t.shape for name, t in tensors.items()})


def test_a_missing_name_is_excused_where_the_class_declares_it_and_refused_elsewhere(
    tmp_path: Path,
) -> None:
    base = pegasus(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    assert tensors.pop("final_logits_bias").shape == (1, 32)
    assert rewrite(base, tensors).missing == ()
    report = reshard(base, tmp_path / "out", options=CHECKED)
    assert report.check is not None and report.check.problems == ()
    del tensors["model.encoder.layer_norm.bias"]
    assert rewrite(base, tensors).missing == ("model.encoder.layer_norm.bias",)
    with pytest.raises(InvalidInputError, match=r"1 tensors .*: model\.encoder\.layer_norm\.bias"):
        reshard(base, tmp_path / "other", options=CHECKED)
    assert not (tmp_path / "other").exists()


def test_an_unexpected_name_is_excused_where_the_class_declares_it_and_told_elsewhere(
    tmp_path: Path,
) -> None:
    model = random_model("DeepseekV3")
    model.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors[PREDICTION] = torch.ones(2, 2)
    assert rewrite(tmp_path / "base", tensors).unexpected == ()
    tensors[NOT_DECLARED] = torch.ones(2, 2)
    assert rewrite(tmp_path / "base", tensors).unexpected == (NOT_DECLARED,)
    report = reshard(tmp_path / "base", tmp_path / "out", options=CHECKED)
    assert report.check is not None
    assert any(NOT_DECLARED in note for note in report.check.notes)
    assert not any(PREDICTION in note for note in report.check.notes)
    found = unused_names(tmp_path / "base", model.config.to_dict(), tensors)
    assert found == {PREDICTION, NOT_DECLARED}

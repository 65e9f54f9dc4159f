"""The two verbs on the command line: every option arrives, and the report says what was done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from milepost.cli.app import make_app
from tests.tools.rewrite.hub import read_hub, write_hub


def ran(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(make_app(), [*map(str, arguments), "--json", "--quiet"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_model_is_quantised_with_options_in_either_spelling_and_dequantised(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    leaves = ("gate_proj", "up_proj", "down_proj")
    names = [f"model.layers.{n}.mlp.{leaf}.weight" for n in range(4) for leaf in leaves]
    names += ["model.layers.1.self_attn.o_proj.weight"]
    tensors = {name: torch.randn(64, 64) * 0.02 for name in names}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    report = ran(
        "quantize-to-lowp", "--input_dir", source, "--output-dir", tmp_path / "q",
        "--format", "nvfp4", "--layout", "block_scaled", "--scales", "max",
        "--include", "*.o_proj.weight", "--exclude", "*.2.mlp.up_proj.weight",
        "--lowp_keep_first_blocks", "1", "--lowp-keep-last-blocks", "1",
        "--lowp-apply-dense-mlp", "--no-lowp-apply-moe-experts", "--contraction-axis", "0",
        "--verify",
    )  # fmt: skip
    assert report["counts"] == {"quantised": 6, "left as they are": 7}
    assert report["notes"][0].startswith("relative error: mean 0.09")
    document = json.loads((tmp_path / "q/quantization_config.json").read_bytes())
    assert document["scope"] == {
        "apply_dense_mlp": True,
        "apply_moe_experts": False,
        "keep_first_blocks": 1,
        "keep_last_blocks": 1,
        "kept_blocks": [0, 3],
    }
    assert set(document["weight_axes"].values()) == {0}
    report = ran(
        "dequantize", "--input-dir", tmp_path / "q", "--output-dir", tmp_path / "back",
        "--dtype", "float32",
    )  # fmt: skip
    assert report["counts"] == {"dequantised": 6}
    back = read_hub(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert not (tmp_path / "back/quantization_config.json").exists()
    for name, tensor in back.items():
        error = float((tensor - tensors[name]).norm() / tensors[name].norm())
        assert (error == 0) == (name not in document["quantized_weights"]) and error < 0.11

"""Every family in every type of numbers, as the package gguf reads the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.gguf.gguf_models import CONFIGS, tensors_of, tiny, values_of, write

KINDS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_each_family_has_the_values_of_its_weights_in_each_type(
    tmp_path: Path, family: str, dtype: str
) -> None:
    tiny(family, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    write(tmp_path / "model", tmp_path / "wide.gguf", "f32")
    write(tmp_path / "model", tmp_path / "m.gguf", dtype)
    wanted, found = tensors_of(tmp_path / "wide.gguf"), tensors_of(tmp_path / "m.gguf")
    assert found.keys() == wanted.keys()
    assert sum(tensor.n_elements for tensor in found.values()) == sum(
        tensor.numel() for tensor in weights.values()
    )
    matrices = 0
    for name, tensor in found.items():
        exact, values = values_of(wanted[name]), values_of(tensor)
        if len(tensor.shape) == 1 or name.endswith("ffn_gate_inp.weight"):
            assert tensor.tensor_type.name == "F32", name
        if tensor.tensor_type.name == "F32":
            assert torch.equal(values, exact), name
            continue
        is_cut = dtype == "q8_0" and exact.shape[-1] % 32 != 0  # rows that blocks do not divide
        assert tensor.tensor_type.name == ("F16" if is_cut else KINDS[dtype]), name
        matrices += 1
        if dtype == "bf16":
            assert torch.equal(values, exact), name
        elif dtype == "f16" or is_cut:
            assert torch.equal(values, exact.half().float()), name
        else:
            step = exact.reshape(-1, 32).abs().amax(dim=1, keepdim=True) / 127
            error = (values - exact).reshape(-1, 32).abs()
            assert bool((error <= step * 0.57).all()), name
    assert matrices >= 15 or dtype == "f32"
    name = "model.layers.1.self_attn.v_proj.weight"
    made = values_of(found["blk.1.attn_v.weight"])
    torch.testing.assert_close(made, weights[name].float(), rtol=2e-2, atol=2e-2)

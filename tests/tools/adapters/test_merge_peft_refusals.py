"""What `merge-peft-adapters` refuses, and says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import milepost as mp
from milepost.errors import CheckpointIncompleteError, InvalidInputError
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.rewrite.options import Mode, RewriteOptions
from tests.tools.adapters.peft_oracle import (
    PLAIN,
    QUICK,
    llama,
    load,
    outputs,
    write_adapter,
    write_base,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice


REFUSED = {
    "init_lora_weights": "pissa",
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 2], [0, 2]],
    "peft_type": "LOHA",
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_no_plain_difference_is_refused_by_name(
    field: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_bytes()), field: REFUSED[field]}))
    with pytest.raises(InvalidInputError, match=field):
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)


def test_bases_that_are_quantised_missing_or_of_another_shape_are_refused(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    quantised = write_base(tmp_path / "q", llama())
    document = json.loads((quantised / "config.json").read_bytes())
    document["quantization_config"] = {"quant_method": "bitsandbytes"}
    (quantised / "config.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInputError, match=r"quantised \(bitsandbytes\).*16-bit"):
        merge_peft_adapters([adapter], tmp_path / "out", base=quantised, options=QUICK)
    larger = write_base(tmp_path / "l", llama(intermediate_size=32))
    dry = RewriteOptions(mode=Mode.DRY_RUN)
    report = merge_peft_adapters([adapter], tmp_path / "out", base=larger, options=dry)
    assert len(report.problems) == 2 and all("another model" in p for p in report.problems)
    config = adapter / "adapter_config.json"
    named = {**json.loads(config.read_bytes()), "base_model_name_or_path": "nobody/nothing"}
    config.write_text(json.dumps(named))
    with pytest.raises(InvalidInputError, match="nobody/nothing is neither"):
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    config.unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"adapter_config\.json: not there"):
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)


def on_checkpoint(directory: Path, seed: int) -> Path:
    """A base that Milepost saved: it has an id of its own."""
    torch.manual_seed(seed)
    model = load(write_base(directory.parent / f"hub{seed}", llama()))
    mp.save(directory, {"model": model}, step=1)
    return directory


@pytest.mark.parametrize("kind", ["checkpoint", "hub"])
def test_an_adapter_of_another_base_is_refused_and_a_moved_base_is_the_same(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    if kind == "checkpoint":
        base = on_checkpoint(tmp_path / "one/checkpoint-1", 1)
        other = on_checkpoint(tmp_path / "two/checkpoint-1", 1)
    else:
        base = bases["llama"]
        other = write_base(tmp_path / "other", llama(), torch.bfloat16)
    model = get_peft_model(load(base), LoraConfig(**PLAIN, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapter = tmp_path / "run/checkpoint-1"
    mp.save(adapter, {"model": model}, step=1)
    with pytest.raises(InvalidInputError, match=r"trained on another base than .*--base-model"):
        merge_peft_adapters([adapter], tmp_path / "out", base=other, options=QUICK)
    assert not (tmp_path / "out").exists()
    moved = tmp_path / "moved/checkpoint-1"
    shutil.copytree(base, moved)
    merge_peft_adapters([adapter], tmp_path / "merged", base=moved, options=QUICK)
    assert torch.allclose(outputs(load(tmp_path / "merged")), outputs(model), atol=1e-5)


def test_a_sum_that_is_too_large_for_the_stored_dtype_is_refused_naming_its_tensor(
    tmp_path: Path,
) -> None:
    base = write_base(tmp_path / "base", llama(), torch.float16)
    adapter = write_adapter(tmp_path / "a", base, **PLAIN)
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    factors[name] = factors[name] * 1e6
    save_file(factors, file)
    wanted = r"model\.layers\.1\.self_attn\.q_proj\.weight: \d+ values are too large for float16"
    with pytest.raises(InvalidInputError, match=wanted):
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()
    merge_peft_adapters([adapter], tmp_path / "out", dtype="bfloat16", options=QUICK)

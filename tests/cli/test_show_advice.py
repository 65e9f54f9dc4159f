"""`milepost show` says how one Hugging Face checkpoint is made of what lies there."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from milepost.adapters.kinds import marker_bytes
from milepost.cli.app import make_app
from milepost.layouts.trio import TrioContent, write_trio
from milepost.tools.convert_to_bf16 import convert_to_bf16
from tests.cli.conftest import Make, Milepost
from tests.tools.rewrite.hub import QUICK as REWRITE_QUICK
from tests.tools.rewrite.hub import write_hub

LLAMA = {"model_type": "llama"}
WEIGHTS = {"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)}


@pytest.fixture
def advice(milepost: Milepost) -> Any:
    """What is said of a path; the line for people says the same."""

    def ask(path: Path) -> dict[str, Any]:
        found: dict[str, Any] = milepost("show", path, "--json").json()["advice"]
        shown = "".join(milepost("show", path).out.split())
        assert "".join(f"hub {found['text']}".split()) in shown
        if found["command"] is not None:
            assert "".join(found["command"].split()) in shown
            check_command(found["command"])
        return found

    return ask


def check_command(line: str) -> None:
    """The verb exists and takes these options."""
    program, verb, *arguments = shlex.split(line)
    group: Any = typer.main.get_command(make_app())
    assert program == "milepost"
    group.commands[verb].make_context(verb, arguments)


def test_a_directory_that_from_pretrained_loads(tmp_path: Path, advice: Any) -> None:
    path = write_hub(tmp_path / "hub", WEIGHTS, config=LLAMA, parts=1)
    assert advice(path) == {
        "way": "loads",
        "text": "loads as it is with from_pretrained",
        "command": None,
    }


def test_fp32_weights_load_and_can_be_halved(tmp_path: Path, advice: Any) -> None:
    path = write_hub(tmp_path / "a name", {"w": torch.ones(8)}, config=LLAMA)
    found = advice(path)
    assert found["way"] == "loads"
    assert shlex.split(found["command"])[1:4] == ["convert-to-bf16", "--input-dir", str(path)]


def test_an_adapter_is_merged_into_its_base(tmp_path: Path, advice: Any) -> None:
    path = tmp_path / "adapter"
    path.mkdir()
    name = "base_model.model.q.lora_A.weight"
    save_file({name: torch.ones(2, 2)}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for place in (path, path / "adapter_model.safetensors"):
        found = advice(place)
        assert found["way"] == "adapter"
        assert f"merge-peft-adapters --adapter-dir {path} " in found["command"]


def test_weights_with_the_adapter_folded_in_are_not_merged_again(
    tmp_path: Path, advice: Any
) -> None:
    path = write_hub(tmp_path / "merged", WEIGHTS, config=LLAMA)
    (path / "resume_adapter.json").write_bytes(marker_bytes())
    (path / "resume_adapter").mkdir()
    save_file({"a": torch.ones(1)}, path / "resume_adapter/adapter_model.safetensors")
    found = advice(path)
    assert found["way"] == "merged" and found["command"] is None


def test_slices_of_experts_are_joined(tmp_path: Path, advice: Any) -> None:
    slices = {f"model.layers.0.mlp.experts.down_proj.shard_{r}": torch.ones(2) for r in range(2)}
    path = write_hub(tmp_path / "slices", slices, config={"model_type": "qwen3_moe"}, parts=2)
    index = path / "model.safetensors.index.json"
    document = json.loads(index.read_bytes())
    document["metadata"] = {"format": "ep_sharded", "ep_size": 2}
    index.write_text(json.dumps(document))
    found = advice(path)
    assert found["way"] == "ep-sharded"
    assert "milepost merge-ep-shards" in found["command"]


def test_a_text_model_goes_back_into_its_vision_language_base(tmp_path: Path, advice: Any) -> None:
    path = write_hub(tmp_path / "text", WEIGHTS, config={"model_type": "qwen3_5_text"})
    found = advice(path)
    assert found["way"] == "text-only"
    assert "reattach-vision-tower" in found["command"]


def test_fused_experts_are_taken_apart_for_servers(tmp_path: Path, advice: Any) -> None:
    banks = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 8).bfloat16()}
    path = write_hub(tmp_path / "moe", banks, config={"model_type": "qwen3_moe"})
    found = advice(path)
    assert found["way"] == "loads" and "unfuse-moe-experts" in found["command"]


def test_sidecars_are_applied_once(tmp_path: Path, advice: Any) -> None:
    path = write_hub(tmp_path / "trained", WEIGHTS, config=LLAMA)
    (path / "training_provenance.json").write_text('{"gpt_oss_attention_sinks": "live"}')
    found = advice(path)
    assert found["way"] == "sidecars"
    assert "training_provenance.json" in found["text"] and "convert-to-bf16" in found["command"]
    convert_to_bf16(path, tmp_path / "out", options=REWRITE_QUICK)
    assert advice(tmp_path / "out")["way"] == "loads"


def test_old_files_and_other_layouts_are_exported(tmp_path: Path, advice: Any) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt")
    write_trio(tmp_path, ["best"], TrioContent(model_state={"w": torch.ones(3)}, epoch=2))
    save_dcp({"w": torch.ones(3)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for place in (tmp_path / "old.pt", tmp_path / "best.meta.json", tmp_path / "dcp"):
        found = advice(place)
        assert found["way"] == "other-layout"
        assert shlex.split(found["command"])[1] == "export"
        assert "without a transformers configuration" in found["text"]


def test_a_model_that_is_none_of_transformers_needs_a_configuration(
    make: Make, advice: Any
) -> None:
    found = advice(make(1))
    assert found["way"] == "no-config" and found["command"] is None


def test_a_marker_that_cannot_be_read_is_told_and_the_rest_is_shown(
    tmp_path: Path, advice: Any
) -> None:
    path = write_hub(tmp_path / "merged", WEIGHTS, config=LLAMA)
    (path / "resume_adapter.json").write_text("{}")
    found = advice(path)
    assert found["way"] == "damaged" and "resume_adapter.json" in found["text"]


def test_advice_is_given_without_torch(tmp_path: Path) -> None:
    path = write_hub(tmp_path / "hub", WEIGHTS, config=LLAMA)
    code = (
        "import sys; from milepost.cli.app import make_app\n"
        f"make_app()(['show', {str(path)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "loads as it is" in done.stdout

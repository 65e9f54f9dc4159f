"""Experts are cut for another number of ranks, and come back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.errors import FormatError, InvalidInputError
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import read_manifest
from milepost.tools.merge_ep_shards import merge_ep_shards, supported_ep_merge_model_types
from milepost.tools.moe_experts import fuse_moe_experts, unfuse_moe_experts
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import Check, Mode, RewriteOptions
from tests.tools.rewrite.experts import (
    BASE,
    HIDDEN,
    INNER,
    REST,
    E,
    make_experts,
    save_slices,
    write_slices,
)
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits, write_hub
from tests.worlds import run_world

CHECKED = RewriteOptions(check=Check.LOAD, is_durable=False, threads=2)
INDEX = "model.safetensors.index.json"


def foreign(place: Path, kind: str, **config: Any) -> Path:
    """Slices of 2 ranks as another trainer writes them."""
    torch.manual_seed(0)
    up = "up_proj" if kind == "nemotron_h" else "gate_up_proj"
    width = INNER if kind == "nemotron_h" else 2 * INNER
    slices = {
        f"{BASE}.{up}": torch.randn(E, HIDDEN, width),
        f"{BASE}.down_proj": torch.randn(E, INNER, HIDDEN),
    }
    return write_slices(place, slices, REST, model_type=kind, **config)


@pytest.mark.parametrize("kind", supported_ep_merge_model_types())
def test_a_hub_directory_of_every_family_comes_back_from_slices_of_any_ranks(
    tmp_path: Path, kind: str
) -> None:
    merge_ep_shards(foreign(tmp_path / "in", kind), tmp_path / "hub", options=QUICK)
    hub = read_hub(tmp_path / "hub")
    reshard(tmp_path / "hub", tmp_path / "ep4", ep_size=4, options=CHECKED)
    reshard(tmp_path / "ep4", tmp_path / "ep2", ep_size=2, options=CHECKED)
    reshard(tmp_path / "ep2", tmp_path / "ep4-again", ep_size=4, options=CHECKED)
    for name in ("ep4", "ep2"):
        merge_ep_shards(tmp_path / name, tmp_path / f"{name}-hub", options=QUICK)
        assert same_bits(read_hub(tmp_path / f"{name}-hub"), hub)
    for path in (tmp_path / "ep4").glob("model*"):
        assert (tmp_path / "ep4-again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.spec("v1#slices-1")
@pytest.mark.spec("v1#slices-2")
def test_each_rank_has_a_file_with_its_rows_and_rank_0_everything_else(tmp_path: Path) -> None:
    source = make_experts("mixtral")
    source.save_pretrained(tmp_path / "hub")
    report = reshard(tmp_path / "hub", tmp_path / "out", ep_size=4, options=CHECKED)
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    assert index["metadata"]["ep_size"] == 4 and index["metadata"]["format"] == "ep_sharded"
    assert (
        sum(tensor.nbytes for tensor in read_hub(tmp_path / "out").values())
        == (index["metadata"]["total_size"])
    )
    name = "model.layers.1.mlp.experts.down_proj"
    whole = dict(source.named_parameters())[name]
    for rank in range(4):
        part = f"model-{rank:05d}-of-00004.safetensors"
        assert index["weight_map"][f"{name}.shard_{rank}"] == part
        assert torch.equal(
            read_hub(tmp_path / "out")[f"{name}.shard_{rank}"], whole[2 * rank : 2 * rank + 2]
        )
    others = {part for key, part in index["weight_map"].items() if ".shard_" not in key}
    assert others == {"model-00000-of-00004.safetensors"}
    manifest = read_manifest(tmp_path / "out")
    assert [entry.huggingface for entry in manifest.models.values()] == [False]
    assert report.counts == {"ranks": 4, "sliced tensors": 4}
    assert report.check is not None and "merge-ep-shards" in report.check.notes[0]
    assert Checkpoint.open(tmp_path / "out").verify().ok


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_what_is_cut_for_two_ranks_is_what_two_ranks_save(tmp_path: Path, family: str) -> None:
    make_experts(family).save_pretrained(tmp_path / "base")
    run_world(2, save_slices, tmp_path / "base", tmp_path)
    saved = tmp_path / "checkpoint-1"
    reshard(tmp_path / "base", tmp_path / "cut", ep_size=2, options=QUICK)
    assert same_bits(read_hub(tmp_path / "cut"), read_hub(saved))
    for size in (1, 4, 8):
        reshard(saved, tmp_path / f"ep{size}", ep_size=size, options=QUICK)
        merge_ep_shards(tmp_path / f"ep{size}", tmp_path / f"hub{size}", options=QUICK)
        assert same_bits(read_hub(tmp_path / f"hub{size}"), read_hub(tmp_path / "base"))


@pytest.mark.spec("v1#slices-3")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma4"])
def test_slices_with_the_input_dim_first_say_so_when_they_get_a_manifest(
    tmp_path: Path, kind: str
) -> None:
    source = foreign(tmp_path / "in", kind)
    merge_ep_shards(source, tmp_path / "hub", options=QUICK)
    reshard(source, tmp_path / "ep4", ep_size=4, options=QUICK)
    reshard(tmp_path / "ep4", tmp_path / "ep1", ep_size=1, options=QUICK)
    for name in ("ep4", "ep1"):
        metadata = json.loads((tmp_path / name / INDEX).read_bytes())["metadata"]
        assert metadata["expert_layout"] == "input_first"
        merge_ep_shards(tmp_path / name, tmp_path / f"{name}-hub", options=QUICK)
        assert same_bits(read_hub(tmp_path / f"{name}-hub"), read_hub(tmp_path / "hub"))


def test_banks_in_memory_order_are_cut_and_merged_to_single_experts(tmp_path: Path) -> None:
    make_experts("mixtral").save_pretrained(tmp_path / "hub")
    fuse_moe_experts(tmp_path / "hub", tmp_path / "banks", options=QUICK)
    reshard(tmp_path / "banks", tmp_path / "ep2", ep_size=2, options=QUICK)
    merge_ep_shards(tmp_path / "ep2", tmp_path / "out", options=QUICK)
    assert same_bits(read_hub(tmp_path / "out"), read_hub(tmp_path / "hub"))


def test_what_no_ranks_can_divide_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = foreign(tmp_path / "in", "qwen3_moe")
    out = tmp_path / "out"
    with pytest.raises(FormatError, match="merge-ep-shards"):
        reshard(source, out, options=QUICK)
    dry = reshard(source, out, ep_size=3, options=RewriteOptions(mode=Mode.DRY_RUN))
    assert len(dry.problems) == 2
    assert "4 experts cannot be divided among 3 ranks" in dry.problems[0]
    with pytest.raises(InvalidInputError, match="from 1 up"):
        reshard(source, out, ep_size=0, options=QUICK)
    limited = RewriteOptions(max_shard_size="1GB", is_durable=False)
    with pytest.raises(InvalidInputError, match="one file for each rank"):
        reshard(source, out, ep_size=2, options=limited)
    dense = write_hub(tmp_path / "dense", {"w": torch.ones(2)}, config={"model_type": "qwen3_moe"})
    with pytest.raises(InvalidInputError, match="there are no experts"):
        reshard(dense, out, ep_size=2, options=QUICK)
    other = write_hub(tmp_path / "other", {"w": torch.ones(2)}, config={"model_type": "step3p7"})
    with pytest.raises(InvalidInputError, match="none of those whose slices"):
        reshard(other, out, ep_size=2, options=QUICK)
    merge_ep_shards(foreign(tmp_path / "fused", "cohere2_moe"), tmp_path / "hub", options=QUICK)
    unfuse_moe_experts(tmp_path / "hub", tmp_path / "singles", options=QUICK)
    with pytest.raises(InvalidInputError, match="fuse-moe-experts"):
        reshard(tmp_path / "singles", out, ep_size=2, options=QUICK)
    assert not out.exists()

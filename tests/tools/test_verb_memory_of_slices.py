"""Memory of verbs over slices of experts, vision towers and sinks: bounded and flat."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tools.rewrite.hub import write_hub
from tests.tools.rewrite.memory import peak_anon_nbytes

MIB = 2**20
EXPERTS, HIDDEN, INNER = 8, 512, 512
BANK_NBYTES = 2 * EXPERTS * 2 * INNER * HIDDEN  # gate and up of one layer in bf16: 8 MiB
LAYER_NBYTES = BANK_NBYTES * 3 // 2
BOUND = 2 * BANK_NBYTES + 64 * MIB
SPREAD = 24 * MIB

IMPORTS = """
from milepost.tools.merge_ep_shards import merge_ep_shards
from milepost.tools.reattach_vision_tower import reattach_vision_tower
from milepost.tools.reset_sinks import reset_sinks
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import RewriteOptions
options = RewriteOptions(threads=int(sys.argv[2]), is_durable=False)
"""
MERGE = "merge_ep_shards(sys.argv[1] + '/in', sys.argv[1] + '/out', options=options)"
CUT = "reshard(sys.argv[1] + '/in', sys.argv[1] + '/out', ep_size=4, options=options)"
SINKS = "reset_sinks(sys.argv[1] + '/in', sys.argv[1] + '/out', options=options)"
REATTACH = """
place = sys.argv[1]
reattach_vision_tower(place + '/in', place + '/base', place + '/out', options=options)
"""


def write_sliced(place: Path, layers: int, kind: str, ranks: int = 2) -> None:
    """Slices of 2 ranks as other trainers write them, input dim first."""
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"model_type": kind}))
    gate_up = torch.full((EXPERTS // ranks, HIDDEN, 2 * INNER), 0.5).bfloat16()
    down = torch.full((EXPERTS // ranks, INNER, HIDDEN), 0.5).bfloat16()
    where: dict[str, str] = {}
    for rank in range(ranks):
        held = {}
        for layer in range(layers):
            stem = f"model.layers.{layer}.mlp.experts"
            held[f"{stem}.gate_up_proj.shard_{rank}"] = gate_up.clone()
            held[f"{stem}.down_proj.shard_{rank}"] = down.clone()
        part = f"model-{rank:05d}-of-{ranks:05d}.safetensors"
        save_file(held, place / part, metadata={"format": "pt"})
        where |= dict.fromkeys(held, part)
    index = {"metadata": {"format": "ep_sharded", "ep_size": ranks}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def write_with_sinks(place: Path, layers: int) -> None:
    tensors = {}
    for layer in range(layers):
        tensors[f"model.layers.{layer}.w"] = torch.full((LAYER_NBYTES // 1024, 512), 0.5).bfloat16()
        tensors[f"model.layers.{layer}.self_attn.sinks"] = torch.ones(8).bfloat16()
    write_hub(place / "in", tensors, config={"model_type": "gpt_oss"}, parts=2)


def write_wholes(place: Path, layers: int) -> None:
    """Two thirds text, one third tower."""
    matrix = torch.full((2048, 1024), 0.5).bfloat16()  # 4 MiB
    text: dict[str, torch.Tensor] = {"embed_tokens.weight": torch.ones(64, 1024).bfloat16()}
    text |= {f"layers.{layer}.{leaf}.weight": matrix.clone()
             for layer in range(layers) for leaf in ("a", "b")}  # fmt: skip
    tower = {f"model.visual.blocks.{layer}.weight": matrix.clone() for layer in range(layers)}
    inner = {"model_type": "qwen3_5_text", "vocab_size": 64, "tie_word_embeddings": True}
    whole = {"model_type": "qwen3_5", "text_config": inner, "vision_config": {}}
    inside = {f"model.language_model.{name}": tensor for name, tensor in text.items()}
    write_hub(place / "base", {**inside, **tower}, config=whole, parts=3)
    write_hub(place / "in", {f"model.{name}": t for name, t in text.items()}, config=inner, parts=2)


Write = Callable[[Path, int], None]
VERBS: dict[str, tuple[str, Write]] = {
    "merge-ep-shards": (MERGE, lambda place, n: write_sliced(place / "in", n, "qwen3_moe")),
    "merge-ep-shards to banks": (
        MERGE,
        lambda place, n: write_sliced(place / "in", n, "qwen3_5_moe"),
    ),
    "reshard --ep-size": (CUT, lambda place, n: write_sliced(place / "in", n, "qwen3_moe")),
    "reset-sinks": (SINKS, write_with_sinks),
    "reattach-vision-tower": (REATTACH, write_wholes),
}


def peaks_of(verb: str, root: Path, runs: Sequence[tuple[int, int]]) -> list[int]:
    """Peaks of runs over so many MiB with so many threads."""
    work, write = VERBS[verb]
    peaks = []
    for total, threads in runs:
        place = root / f"{total}-{threads}"
        place.mkdir()
        write(place, max(1, total * MIB // LAYER_NBYTES))
        peaks.append(peak_anon_nbytes(IMPORTS, work, place, threads))
        assert sum(path.stat().st_size for path in (place / "out").rglob("*")) > 0.9 * total * MIB
        shutil.rmtree(place)
    return peaks


@pytest.mark.parametrize("verb", VERBS)
def test_memory_does_not_grow_with_the_input(tmp_path: Path, verb: str) -> None:
    """By one thread: what two hold at once in a short run is a matter of chance."""
    short, long, by_two = peaks_of(verb, tmp_path, [(36, 1), (144, 1), (144, 2)])
    assert max(short, long, by_two) <= BOUND, (short, long, by_two)
    assert long - short <= SPREAD, (short, long)


@pytest.mark.slow  # the other verbs: test_verb_memory.py
def test_banks_are_merged_in_flat_memory_over_half_a_gigabyte_to_two(tmp_path: Path) -> None:
    runs = [(504, 2), (1008, 2), (2016, 2)]
    peaks = peaks_of("merge-ep-shards to banks", tmp_path, runs)
    assert max(peaks) <= BOUND, peaks
    assert max(peaks) - min(peaks) <= SPREAD, peaks

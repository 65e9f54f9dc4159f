"""Memory of every after-training verb is bounded by what it must see at once, however large inputs
are: twice the largest group and 64 MiB, and flat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tool_memory.py"
VERBS = [
    "reshard",
    "cast",
    "rename",
    "convert-to-bf16",
    "convert-to-bf16 mxfp4",
    "dequantize",
    "quantize-to-lowp nvfp4",
    "quantize-to-lowp nvfp4 of fp8",
    "quantize-to-lowp deepseek-fp8",
    "unfuse-moe-experts",
    "fuse-moe-experts",
    "average",
    "merge-models linear",
    "merge-models ties",
    "extract-lora",
    "to-gguf",
    "merge-ep-shards",
    "reshard --ep-size",
    "reset-sinks",
    "reattach-vision-tower",
    "merge-peft-adapters",
]
SPREAD_MIB = 24


def peaks_of(verb: str, megabytes: Sequence[int], directory: Path, threads: int = 2) -> list[float]:
    """MiB of anonymous memory above that of the process, for each size of the input; the bound of
    the verb holds."""
    out = directory / "peaks.json"
    first, *more = (f"{size}MiB" for size in megabytes)
    command = [sys.executable, str(SCRIPT), "--nbytes", first, "--rounds", "1", "--verbs", verb]
    command += ["--directory", str(directory), "--json", str(out)]
    command += ["--also", *more] if more else []
    environment = {**os.environ, "MILEPOST_IO_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert out.exists(), done.stderr
    content: dict[str, Any] = json.loads(out.read_text())
    (rows,) = content["tables"].values()
    assert [(row["verb"], row["input MiB"]) for row in rows] == [(verb, n) for n in megabytes]
    assert [bar["holds"] for bar in content["bars"]] == [True] * len(rows), content["bars"]
    return [float(row["peak MiB"]) for row in rows]


def test_a_merge_of_three_models_keeps_to_its_bound(tmp_path: Path) -> None:
    (peak,) = peaks_of("merge-models linear", [128], tmp_path)
    assert peak > 0


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_memory_is_flat_over_inputs_of_half_a_gigabyte_to_two(tmp_path: Path, verb: str) -> None:
    """With one thread: of several, it is a matter of chance whether all hold their most at once."""
    peaks = peaks_of(verb, [512, 1024, 2048], tmp_path, threads=1)
    assert max(peaks) - min(peaks) <= SPREAD_MIB, peaks


def test_every_verb_that_the_script_measures_is_in_the_list() -> None:
    """And the other way round: the choices that its help prints."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    choices = " ".join(done.stdout.split()).partition("{")[2].partition("}")[0]
    assert choices.split(",") == VERBS

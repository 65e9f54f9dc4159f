"""Folding an adapter into its base: `merge-peft-adapters` against peft; seconds and extra memory.

A synthetic Llama of bf16 (`--nbytes`) in four parts, and a LoRA of rank 16 on all linear layers.
peft loads the model in bf16, merges and saves, once as it is and once with fsync behind it;
Milepost streams, and its output is durable and has digests. A copy of the base with fsync is what
a tool that computes nothing takes. Every run is a process of its own, whose imports are not timed.
Bar: at least 3 times faster than peft without fsync.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from _anonymous import measured
from _common import (
    MIB,
    Options,
    Report,
    answer,
    find,
    parse_options,
    sync_all,
    work_directory,
)
from _processes import Process, run_processes
from merge_models import write_models

RANK = 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(directory: Path) -> None:
    """Random factors for every linear layer of the base, in the form in which peft saves them."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    place = directory / "adapter"
    place.mkdir()
    noise = torch.Generator().manual_seed(3)
    factors = {}
    for part in sorted((directory / "base").glob("*.safetensors")):
        with safe_open(part, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                module = name.removesuffix(".weight")
                if module.rpartition(".")[2] not in PROJECTIONS:
                    continue
                rows, columns = file.get_slice(name).get_shape()
                for key, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                    factor = torch.randn(shape, generator=noise).mul_(0.02)
                    factors[f"base_model.model.{module}.lora_{key}.weight"] = factor
    save_file(factors, place / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(directory / "base"),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(PROJECTIONS),
    }
    (place / "adapter_config.json").write_text(json.dumps(config))


def merge_by_milepost(directory: Path) -> dict[str, float]:
    from milepost.tools.merge_peft import merge_peft_adapters

    out = directory / "output" / "merged"
    return measured(partial(merge_peft_adapters, [directory / "adapter"], out))


def merge_by_peft(directory: Path) -> dict[str, float]:
    return measured(run_of_peft(directory))


def merge_by_peft_durably(directory: Path) -> dict[str, float]:
    run = run_of_peft(directory)

    def run_and_sync() -> None:
        run()
        sync_all(directory / "output" / "merged")

    return measured(run_and_sync)


def run_of_peft(directory: Path) -> Callable[[], None]:
    """What peft does; its imports come first."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def run() -> None:
        base = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(base, str(directory / "adapter"))
        model.merge_and_unload().save_pretrained(directory / "output" / "merged")

    return run


def copy(directory: Path) -> dict[str, float]:
    out = directory / "output" / "merged"

    def run() -> None:
        out.mkdir()
        for path in sorted((directory / "base").iterdir()):
            shutil.copyfile(path, out / path.name)
        sync_all(out)

    return measured(run)


CONTENDERS = {
    "milepost": merge_by_milepost,
    "peft": merge_by_peft,
    "peft + fsync": merge_by_peft_durably,
    "copy + fsync": copy,
}


def measure(report: Report, options: Options, directory: Path) -> None:
    processes = [
        Process(
            name=name,
            told=f"{name}/{directory}",
            synced="nothing" if name == "peft" else "everything",
            is_baseline=name == "peft",
        )
        for name in CONTENDERS
    ]
    results = run_processes(processes, options, directory)
    report.times("merge", results, nbytes=options.nbytes)
    own, peft = find(results, "milepost"), find(results, "peft")
    report.bar(
        "time of peft / merge-peft-adapters",
        found=peft.median / own.median,
        limit=3.0,
        higher_is_better=True,
    )
    durable = find(results, "peft + fsync").median / own.median
    print(f"\ntime of peft with its output fsynced / merge-peft-adapters: {durable:.3f}")
    report.bar(
        "extra memory of merge-peft-adapters, MiB",
        found=own.extra / MIB,
        limit=64,
        higher_is_better=False,
    )


def main() -> int:
    assert __doc__ is not None
    options = parse_options(__doc__, nbytes="1GiB", rounds=3)
    if options.child is not None:
        name, place = options.child.split("/", 1)
        answer(CONTENDERS[name](Path(place)))
        return 0
    report = Report(title="merge peft", options=options)
    with work_directory(options) as directory:
        write_models(directory, options.nbytes, ("base",))
        write_adapter(directory)
        measure(report, options, directory)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

"""After-training verbs against a plain copy: `reshard`, `cast` and `unfuse-moe-experts`.

Each reads a model of `--nbytes` from the page cache and writes a directory, durable on both sides:
the copy is of the same files, one after the other, with fsync of each and of the directory; verbs
also digest every byte. Rates count bytes read and written, so that a cast to half the size is not
called slow for writing less. Bars: 0.6 or more of the rate of the copy, and at most 64 MiB of
anonymous memory above that of the process with all imports, since no group of these verbs needs
more than a band of rows.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from _anonymous import measured
from _common import (
    MIB,
    Contender,
    Options,
    Report,
    answer,
    child,
    find,
    parse_options,
    run_rounds,
    sync_all,
    work_directory,
)
from _state import fill, llm_shapes
from milepost.tools.cast import cast
from milepost.tools.moe_experts import unfuse_moe_experts
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import RewriteOptions

PARTS = 4
EXPERTS = 16
HIDDEN = 1024
INNER = 768
RATE = 0.6
MEMORY_NBYTES = 64 * MIB


def dense(nbytes: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a Llama, `nbytes` together in this dtype."""
    shapes = llm_shapes(nbytes * 2 // dtype.itemsize)
    return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}


def experts(nbytes: int) -> dict[str, torch.Tensor]:
    """Fused banks of bf16, as many layers as it takes."""
    layer_nbytes = 3 * EXPERTS * HIDDEN * INNER * 2
    tensors = {}
    for layer in range(max(1, nbytes // layer_nbytes)):
        prefix = f"model.layers.{layer}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj"] = torch.empty(
            EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16
        )
        tensors[f"{prefix}.down_proj"] = torch.empty(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16)
    return tensors


def write_model(
    place: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object]
) -> None:
    """A hub directory in `PARTS` files."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    place.mkdir()
    for number, tensor in enumerate(tensors.values()):
        fill(tensor, number)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=nbytes // PARTS)
    for file, keys in split.filename_to_tensors.items():
        save_file({key: tensors[key] for key in keys}, place / file, {"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "config.json").write_text(json.dumps(config))


def write_models(directory: Path, nbytes: int) -> None:
    llama = {"model_type": "llama"}
    moe = {
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
    }
    write_model(directory / "reshard", dense(nbytes, torch.bfloat16), llama)
    write_model(directory / "cast", dense(nbytes, torch.float32), llama)
    write_model(directory / "unfuse-moe-experts", experts(nbytes), moe)


def copy(source: Path, place: Path) -> None:
    """The same files, durable."""
    out = place / "out"
    out.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, out / path.name)
    sync_all(out)


def run_reshard(source: Path, place: Path, nbytes: int) -> None:
    reshard(source, place / "out", options=RewriteOptions(max_shard_size=nbytes // 3))


def run_cast(source: Path, place: Path, nbytes: int) -> None:
    cast(source, place / "out", dtype="bfloat16")


def run_unfuse(source: Path, place: Path, nbytes: int) -> None:
    unfuse_moe_experts(source, place / "out")


VERBS: dict[str, Callable[[Path, Path, int], None]] = {
    "reshard": run_reshard,
    "cast": run_cast,
    "unfuse-moe-experts": run_unfuse,
}
WRITTEN = {"reshard": 1.0, "cast": 0.5, "unfuse-moe-experts": 1.0}
"""Bytes written for each byte read."""


def measure(report: Report, options: Options, directory: Path) -> None:
    for verb, run in VERBS.items():
        source = directory / verb
        contenders = [
            Contender(name="copy", run=partial(copy, source), synced="+ fsync", is_baseline=True),
            Contender(
                name=verb,
                run=partial(_run_verb, run, source, options.nbytes),
                synced="+ fsync, digests",
            ),
        ]
        results = run_rounds(contenders, directory, rounds=options.rounds)
        extra = None
        if options.memory:
            extra = child(options, f"{verb}/{source}")
            find(results, verb).more["extra MiB"] = round(extra / MIB, 1)
        report.times(verb, results, nbytes=options.nbytes)
        own, plain = find(results, verb), find(results, "copy")
        report.bar(
            f"{verb}: rate / rate of a copy",
            found=(1 + WRITTEN[verb]) / 2 * plain.median / own.median,
            limit=RATE,
            higher_is_better=True,
        )
        if extra is not None:
            report.bar(
                f"{verb}: anonymous memory, MiB",
                found=extra / MIB,
                limit=MEMORY_NBYTES / MIB,
                higher_is_better=False,
            )


def _run_verb(
    run: Callable[[Path, Path, int], None], source: Path, nbytes: int, place: Path
) -> None:
    run(source, place, nbytes)


def main() -> int:
    assert __doc__ is not None
    options = parse_options(__doc__, nbytes="1GiB")
    if options.child is not None:
        verb, name = options.child.split("/", 1)
        place = Path(name).with_name("memory")
        place.mkdir()
        run = partial(VERBS[verb], Path(name), place, options.nbytes)
        answer(measured(run)["extra"])
        shutil.rmtree(place)
        return 0
    report = Report(title="rates of after-training verbs", options=options)
    with work_directory(options) as directory:
        write_models(directory, options.nbytes)
        measure(report, options, directory)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

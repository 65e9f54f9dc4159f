"""Adapters over a head and an embedding that are one tensor, or should be, against peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from milepost.errors import InvalidInputError
from milepost.tools.merge_peft import merge_peft_adapters
from tests.tools.adapters.peft_oracle import (
    PLAIN,
    QUICK,
    load,
    outputs,
    tensors_of,
    write_adapter,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = [1, 5, 7]


def merged(adapter: Path, base: Path, out: Path) -> torch.Tensor:
    """Outputs of our merge, which must be those of the adapter on its base."""
    merge_peft_adapters([adapter], out, base=base, options=QUICK)
    found = outputs(load(out))
    adapted = PeftModel.from_pretrained(load(base), str(adapter))
    assert torch.allclose(found, outputs(adapted), atol=1e-5)
    return found


def is_tied(directory: Path) -> bool:
    return bool(json.loads((directory / "config.json").read_bytes())["tie_word_embeddings"])


def doubled(base: Path, directory: Path, *, by: float = 0.0) -> Path:
    """A copy of a base that stores its tied head, too; `by` is what it differs by."""
    shutil.copytree(base, directory)
    held = tensors_of(base)
    save_file({**held, HEAD: held[EMBEDDING] + by}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("rows", [ROWS, {"embed_tokens": ROWS, "lm_head": ROWS}])
def test_trained_rows_of_a_tied_embedding_are_rows_of_the_head_too(
    rows: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    settings = {**PLAIN, "trainable_token_indices": rows}
    adapter = write_adapter(tmp_path / "a", bases["tied"], **settings)
    merged(adapter, bases["tied"], tmp_path / "out")
    assert is_tied(tmp_path / "out") and HEAD not in tensors_of(tmp_path / "out")


def test_rows_of_the_head_that_were_trained_by_themselves_stay_by_themselves(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    settings = {**PLAIN, "trainable_token_indices": {"embed_tokens": ROWS, "lm_head": [2, 5, 9]}}
    adapter = write_adapter(tmp_path / "a", bases["tied"], **settings)
    merged(adapter, bases["tied"], tmp_path / "out")
    assert not is_tied(tmp_path / "out")
    file = adapter / "adapter_model.safetensors"
    held = load_file(file)
    one, other = sorted(name for name in held if "token_adapter" in name)
    save_file(held | {one: held[other].clone()}, file)
    merged(adapter, bases["tied"], tmp_path / "equal values of other rows")


@pytest.mark.parametrize("ensures_tie", [True, False])
def test_factors_of_embedding_and_head_with_copies_of_the_tensor_that_both_are(
    ensures_tie: bool, bases: dict[str, Path], tmp_path: Path
) -> None:
    modules = ["q_proj", "embed_tokens", "lm_head"]
    settings = {**PLAIN, "target_modules": modules, "ensure_weight_tying": ensures_tie}
    adapter = write_adapter(tmp_path / "a", bases["tied"], **settings)
    file = adapter / "adapter_model.safetensors"
    held = load_file(file)
    copies = [name for name in held if "base_layer" in name]
    assert len(copies) == 2
    merged(adapter, bases["tied"], tmp_path / "out")
    assert is_tied(tmp_path / "out") is ensures_tie
    save_file(held | {copies[0]: held[copies[0]] + 1}, file)
    with pytest.raises(InvalidInputError, match="bring base embeddings along that differ"):
        merge_peft_adapters([adapter], tmp_path / "x", base=bases["tied"], options=QUICK)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": ROWS},
    ],
    ids=lambda settings: str(*settings),
)
def test_a_head_that_is_stored_beside_its_embedding_is_tied_no_more_once_either_changes(
    settings: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    base = doubled(bases["tied"], tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", base, **{**PLAIN, **settings})
    merged(adapter, base, tmp_path / "out")
    assert not is_tied(tmp_path / "out")
    merged(write_adapter(tmp_path / "b", base, **PLAIN), base, tmp_path / "others")
    assert is_tied(tmp_path / "others")


def test_trained_rows_stay_away_from_a_head_that_differs_from_its_embedding(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = doubled(bases["tied"], tmp_path / "base", by=0.5)
    settings = {**PLAIN, "trainable_token_indices": ROWS}
    adapter = write_adapter(tmp_path / "a", bases["tied"], **settings)
    merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)
    made, before = tensors_of(tmp_path / "out"), tensors_of(base)
    assert torch.equal(made[HEAD], before[HEAD])
    assert not torch.equal(made[EMBEDDING], before[EMBEDDING])

"""Adapters of embeddings and heads that are one tensor."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from milepost.errors import InvalidInputError
from milepost.tools.merge_peft import Compare, merge_peft_adapters
from milepost.tools.merge_peft_source import open_with_adapter
from milepost.tools.rewrite.problems import Problems
from tests.tools.adapters.peft_oracle import (
    PLAIN,
    QUICK,
    load,
    merged_by_peft,
    outputs,
    state,
    tensors_of,
    write_adapter,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice


@pytest.mark.case("V52")
def test_a_tie_holds_only_while_head_and_embedding_are_the_same(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    settings = {**PLAIN, "modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = write_adapter(tmp_path / "a", bases["tied"], **settings)
    file = adapter / "adapter_model.safetensors"
    held = load_file(file)
    head, embedding = (
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.weight",
    )
    held[head] = held[embedding] + 1
    save_file(held, file)
    merge_peft_adapters([adapter], tmp_path / "apart", options=QUICK)
    found = tensors_of(tmp_path / "apart")
    assert torch.equal(found["lm_head.weight"], held[head])
    assert torch.equal(state(load(tmp_path / "apart"))["lm_head.weight"], held[head])
    assert json.loads((tmp_path / "apart/config.json").read_bytes())["tie_word_embeddings"] is False
    save_file(held | {head: held[embedding].clone()}, file)
    merge_peft_adapters([adapter], tmp_path / "same", options=QUICK)
    assert "lm_head.weight" not in tensors_of(tmp_path / "same")
    save_file({n: t for n, t in held.items() if n != head}, file)
    merge_peft_adapters([adapter], tmp_path / "one", options=QUICK)
    found = tensors_of(tmp_path / "one")
    assert torch.equal(found["model.embed_tokens.weight"], held[embedding])
    wanted = tensors_of(bases["tied"])["model.embed_tokens.weight"]
    assert torch.equal(found["lm_head.weight"], wanted)


def test_factors_of_a_tied_embedding_fold_into_one_tensor_or_keep_the_head_apart(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    settings = {**PLAIN, "target_modules": ["embed_tokens"]}
    adapter = write_adapter(tmp_path / "a", bases["tied"], **settings)
    merge_peft_adapters(
        [adapter], tmp_path / "apart", tied="separate", compare=Compare.OUTPUTS, options=QUICK
    )
    adapted = PeftModel.from_pretrained(load(bases["tied"]), str(adapter))
    assert torch.allclose(outputs(load(tmp_path / "apart")), outputs(adapted), atol=1e-5)
    with pytest.raises(InvalidInputError, match="more than rounding explains"):
        merge_peft_adapters([adapter], tmp_path / "x", compare=Compare.OUTPUTS, options=QUICK)
    assert not (tmp_path / "x").exists()


def without_flag(base: Path, directory: Path, **fields: Any) -> Path:
    """A copy of a base whose configuration does not say whether head and embedding are tied."""
    shutil.copytree(base, directory)
    config = json.loads((directory / "config.json").read_bytes())
    del config["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(config | fields))
    return directory


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_a_configuration_leaves_out_is_the_default_of_its_class(
    is_installed: bool, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"r": 2, "target_modules": ["lm_head"]}
    adapter = write_adapter(tmp_path / "a", bases["gpt2"], **settings)
    wanted = merged_by_peft(bases["gpt2"], adapter)
    base = without_flag(bases["gpt2"], tmp_path / "base")
    if not is_installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)
    monkeypatch.undo()
    found = state(load(tmp_path / "out"))["lm_head.weight"]
    assert torch.allclose(found, state(wanted)["lm_head.weight"], atol=1e-6)
    assert not torch.allclose(found, state(load(base))["lm_head.weight"], atol=1e-3)


def test_a_head_that_is_in_no_file_is_no_alias_where_the_class_does_not_tie(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], r=2, target_modules=["lm_head"])
    base = without_flag(bases["llama"], tmp_path / "base", architectures=["LlamaModel"])
    held = tensors_of(base)
    del held["lm_head.weight"]
    save_file(held, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInputError, match="3 of its 3 tensors find no place"):
        merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidInputError, match="3 of its 3 tensors find no place"):
        merge_peft_adapters([adapter], tmp_path / "out", base=base, options=QUICK)


@pytest.mark.parametrize("kind", ["the head apart", "the embedding apart", "more rows"])
def test_an_adapter_as_an_input_of_other_verbs_has_the_tensors_that_its_merge_has(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    key = "llama" if kind == "more rows" else "tied"
    saved = {"the head apart": ["lm_head"], "the embedding apart": ["embed_tokens"]}
    model = load(bases[key])
    if kind == "more rows":
        model.resize_token_embeddings(44)
    settings = {**PLAIN, "modules_to_save": saved.get(kind, ["embed_tokens", "lm_head"])}
    adapted = get_peft_model(model, LoraConfig(**settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "a")
    (tmp_path / "a/tokenizer.json").write_text("{}")
    merge_peft_adapters([tmp_path / "a"], tmp_path / "out", options=QUICK)
    problems = Problems()
    with open_with_adapter(tmp_path / "a", problems) as source:
        found = {name: tensor.read() for name, tensor in source.tensors.items()}
    problems.raise_if_any()
    wanted = tensors_of(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())

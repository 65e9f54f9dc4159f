"""A language model trained alone goes back into its vision-language base."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import make_app
from milepost.layouts.checkpoint import Checkpoint
from milepost.tools.reattach_families import WRAPPINGS
from milepost.tools.reattach_vision_tower import reattach_vision_tower
from milepost.tools.rewrite.options import Check, RewriteOptions
from tests.tools.reattach.wholes import edit_config, save_trained_text, save_whole
from tests.tools.rewrite.hub import QUICK, bits, content, read_hub, same_bits

CHECKED = RewriteOptions(is_durable=False, threads=2, check=Check.LOAD)
FAMILIES = ["gemma3", "qwen3_5", "qwen3_5_moe", "llava", "mistral3"]


def load_whole(path: Path) -> Any:
    """As a user would; every tensor must be found and used."""
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        path, output_loading_info=True, dtype="auto"
    )
    assert not any(info.values()), info
    return model


def text_of(family: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors.items() if WRAPPINGS[family].is_text(name)}


@pytest.mark.parametrize("is_tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_trained_one_and_the_rest_that_of_the_base_bit_by_bit(
    tmp_path: Path, family: str, is_tied: bool
) -> None:
    whole = save_whole(tmp_path / "base", family, tie_word_embeddings=is_tied)
    text = save_trained_text(tmp_path / "text", whole, family)
    before = content(tmp_path / "base")
    reattach_vision_tower(tmp_path / "text", tmp_path / "base", tmp_path / "out", options=CHECKED)
    base, out = read_hub(tmp_path / "base"), read_hub(tmp_path / "out")
    assert out.keys() == base.keys()
    trained = text_of(family, out)
    assert same_bits(
        {n: t for n, t in out.items() if n not in trained},
        {n: t for n, t in base.items() if n not in trained},
    )
    assert any(bits(t) != bits(base[name]) for name, t in trained.items())
    model = load_whole(tmp_path / "out")
    assert same_bits(model.model.language_model.state_dict(), text.model.state_dict())
    assert bits(model.lm_head.weight.detach()) == bits(text.lm_head.weight.detach())
    untouched = {n: t for n, t in whole.state_dict().items() if "language_model" not in n}
    untouched.pop("lm_head.weight")
    loaded = model.state_dict()
    assert same_bits({name: loaded[name] for name in untouched}, untouched)
    tokens = torch.arange(1, 25).reshape(2, 12)
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype="auto")
    with torch.no_grad():
        found, wanted = (m.eval()(input_ids=tokens).logits for m in (model, alone))
    assert torch.equal(found, wanted)
    assert content(tmp_path / "base") == before
    assert Checkpoint.open(tmp_path / "out").verify().ok


def test_files_of_the_tokenizer_are_the_trained_ones_and_those_of_the_processor_the_base_s(
    tmp_path: Path,
) -> None:
    whole = save_whole(tmp_path / "base", "gemma3")
    save_trained_text(tmp_path / "text", whole, "gemma3")
    (tmp_path / "text/training_provenance.json").write_text("{}")
    reattach_vision_tower(tmp_path / "text", tmp_path / "base", tmp_path / "out", options=QUICK)
    found = {
        n: raw for n, raw in content(tmp_path / "out").items() if n.endswith(("json", "jinja"))
    }
    assert json.loads(found["tokenizer.json"]) == {"of": "export"}
    assert json.loads(found["processor_config.json"]) == {"of": "base"}
    assert found["chat_template.jinja"] == b"base"
    assert found["training_provenance.json"] == b"{}"
    config, base = (
        json.loads((tmp_path / name / "config.json").read_bytes()) for name in ("out", "base")
    )
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert config["vision_config"] == base["vision_config"]
    manifest = Checkpoint.open(tmp_path / "out").info
    assert manifest.model_config is not None
    assert manifest.model_config["model_type"] == "gemma3"


def test_a_text_model_without_tokenizer_gets_that_of_the_base(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "base", "gemma3")
    save_trained_text(tmp_path / "text", whole, "gemma3")
    (tmp_path / "text/tokenizer.json").unlink()
    report = reattach_vision_tower(
        tmp_path / "text", tmp_path / "base", tmp_path / "out", options=QUICK
    )
    assert json.loads((tmp_path / "out/tokenizer.json").read_bytes()) == {"of": "base"}
    assert "the export has no tokenizer; it is that of the base" in report.notes


def test_a_text_model_that_was_loaded_out_of_the_whole_has_the_names_of_the_whole_already(
    tmp_path: Path,
) -> None:
    save_whole(tmp_path / "base", "qwen3_5")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    with torch.no_grad():
        text.model.norm.weight.add_(1)
    text.save_pretrained(tmp_path / "text")
    assert "model.language_model.norm.weight" in read_hub(tmp_path / "text")
    reattach_vision_tower(tmp_path / "text", tmp_path / "base", tmp_path / "out", options=CHECKED)
    model = load_whole(tmp_path / "out")
    assert same_bits(model.model.language_model.state_dict(), text.model.state_dict())


@pytest.mark.case("V15")
def test_prediction_layers_of_the_base_come_along(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "base", "qwen3_5")
    extra = {"mtp.fc.weight": torch.randn(32, 64), "mtp.norm.weight": torch.randn(32)}
    path = tmp_path / "base/model.safetensors"
    save_file({**read_hub(tmp_path / "base"), **extra}, path, metadata={"format": "pt"})
    save_trained_text(tmp_path / "text", whole, "qwen3_5")
    reattach_vision_tower(tmp_path / "text", tmp_path / "base", tmp_path / "out", options=QUICK)
    out = read_hub(tmp_path / "out")
    assert same_bits({name: out[name] for name in extra}, extra)


@pytest.mark.case("V52")
def test_a_head_that_training_set_free_stays_free_in_the_whole(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "base", "gemma3", tie_word_embeddings=True)
    whole.config.text_config.tie_word_embeddings = False
    text = save_trained_text(tmp_path / "text", whole, "gemma3")
    report = reattach_vision_tower(
        tmp_path / "text", tmp_path / "base", tmp_path / "out", options=CHECKED
    )
    assert any("the head is a tensor of its own" in note for note in report.notes)
    model = load_whole(tmp_path / "out")
    embedding = model.model.language_model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, embedding)
    assert torch.equal(model.lm_head.weight, text.lm_head.weight)


@pytest.mark.case("V51")
def test_a_vocabulary_that_grew_in_training_is_that_of_the_whole(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "base", "llava", tie_word_embeddings=False)
    save_trained_text(tmp_path / "text", whole, "llava")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype="auto")
    text.resize_token_embeddings(70)
    text.save_pretrained(tmp_path / "grown")
    report = reattach_vision_tower(
        tmp_path / "grown", tmp_path / "base", tmp_path / "out", options=CHECKED
    )
    assert "the vocabulary has 70 rows, that of the base 64" in report.notes
    model = load_whole(tmp_path / "out")
    assert model.lm_head.weight.shape == (70, 32)
    assert model.config.text_config.vocab_size == 70


def test_a_training_checkpoint_as_it_lies_is_taken(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "base", "gemma3", tie_word_embeddings=True)
    text = save_trained_text(tmp_path / "text", whole, "gemma3")
    optimizer = torch.optim.AdamW(text.parameters())
    mp.save(tmp_path / "checkpoint-5", {"model": text, "optimizer": optimizer}, step=5)
    reattach_vision_tower(
        tmp_path / "checkpoint-5", tmp_path / "base", tmp_path / "out", options=CHECKED
    )
    model = load_whole(tmp_path / "out")
    assert same_bits(model.model.language_model.state_dict(), text.model.state_dict())
    assert Checkpoint.open(tmp_path / "out").info.step == 5


def test_a_base_is_found_by_its_hub_id_and_revision(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "base", "gemma3")
    save_trained_text(tmp_path / "text", whole, "gemma3")
    commit = "0123456789abcdef0123456789abcdef01234567"
    stored = tmp_path / "hub/models--org--whole"
    (stored / "snapshots").mkdir(parents=True)
    (tmp_path / "base").rename(stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs/v1").write_text(commit)
    result = _command_line(
        tmp_path, "--model-id", "org/whole", "--revision", "v1", HF_HUB_CACHE=str(tmp_path / "hub")
    )
    assert result.returncode == 0, result.stderr
    load_whole(tmp_path / "out")
    assert "org/whole" in (tmp_path / "out/README.md").read_text()
    (stored / "refs/v1").unlink()
    result = _command_line(tmp_path, "--model-id", "org/whole", "--revision", "v1")
    assert result.returncode != 0 and "org/whole at v1" in result.stderr


def _command_line(tmp_path: Path, *arguments: str, **environment: str) -> Any:
    code = "from milepost.cli.app import make_app; make_app()()"
    command = ["reattach-vision-tower", "--input-dir", str(tmp_path / "text"), *arguments]
    return subprocess.run(
        [sys.executable, "-c", code, *command, "--output-dir", str(tmp_path / "out")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_takes_either_spelling_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "base", "gemma3")
    save_trained_text(tmp_path / "text", whole, "gemma3")
    edit_config(tmp_path / "text", vocab_size=63)
    given = [
        *("reattach-vision-tower", "--input_dir", str(tmp_path / "text"), "--model_id"),
        *(str(tmp_path / "base"), "--output_dir", str(tmp_path / "out"), "--json"),
    ]
    dry = CliRunner().invoke(make_app(), [*given, "--dry-run"])
    assert dry.exit_code == 1
    assert "vocab_size 63" in json.loads(dry.stdout)["problems"][0]
    assert not (tmp_path / "out").exists()
    edit_config(tmp_path / "text", vocab_size=64)
    done = CliRunner().invoke(make_app(), given)
    assert done.exit_code == 0, done.output
    load_whole(tmp_path / "out")

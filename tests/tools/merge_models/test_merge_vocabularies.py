"""Merges of models with different vocabularies, heads and integers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from milepost.errors import InvalidInputError
from milepost.tools.merge_models import Tokenizers, merge_models
from tests.tools.merge_models.merging import FAST, WORDS, command, weights, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write_model(tmp_path_factory.mktemp("models") / "m0", 0, dtype=torch.float32)]


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """A model with two tokens of its own and the others in another order."""
    return write_model(tmp_path / "grown", 11, [*reversed(WORDS), "new1", "new2"])


@pytest.mark.case("V59")
def test_vocabularies_that_differ_are_refused_without_a_choice(
    models: list[Path], grown: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="66 tokens, 2 of its own"):
        merge_models(command([models[0], grown]), tmp_path / "out", options=FAST)


@pytest.mark.case("V59")
@pytest.mark.parametrize("source", ["base", "union"])
def test_embeddings_are_brought_together_by_token(
    source: str, models: list[Path], grown: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    recipe = command([models[0], grown], tokenizer=source)
    out = merge_models(recipe, tmp_path / "out", options=FAST).path
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"))
    rows = 66 if source == "union" else 64
    assert len(tokenizer) == rows == model.config.vocab_size
    one, two = (weights(p)["model.embed_tokens.weight"] for p in (models[0], grown))
    mine = model.model.embed_tokens.weight
    for token in ("word7", "<s>"):
        number = WORDS.index(token)
        expected = (one[number].float() + two[63 - number].float()) / 2
        torch.testing.assert_close(mine[tokenizer.convert_tokens_to_ids(token)], expected)
    if source == "union":
        assert torch.equal(mine[tokenizer.convert_tokens_to_ids("new2")], two[65].float())


def test_a_model_without_a_tokenizer_is_refused_unless_that_is_allowed(
    models: list[Path], tmp_path: Path
) -> None:
    bare = write_model(tmp_path / "bare", 3)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(InvalidInputError, match=r"has no tokenizer\.json"):
        merge_models(command([bare, models[0]]), tmp_path / "out", options=FAST)
    report = merge_models(
        command([bare, models[0]]),
        tmp_path / "out",
        tokenizers=Tokenizers.ALLOW_MISSING,
        options=FAST,
    )
    assert "the output has no tokenizer" in report.notes


def test_a_tied_model_and_one_that_is_not_make_one_that_is_not(
    models: list[Path], tmp_path: Path
) -> None:
    tied = write_model(tmp_path / "tied", 5, tie_word_embeddings=True)
    assert "lm_head.weight" not in weights(tied)
    out = merge_models(command([tied, models[0]]), tmp_path / "out", options=FAST).path
    found = weights(out)
    head = weights(tied)["model.embed_tokens.weight"].float()
    expected = (head + weights(models[0])["lm_head.weight"].float()) / 2
    assert torch.equal(found["lm_head.weight"], expected.bfloat16())
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_integers_must_be_the_same(models: list[Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    places = []
    for number in range(2):
        place = write_model(tmp_path / f"i{number}", number)
        table = {"table": torch.tensor([1, 2, number])}
        save_file({**weights(place), **table}, place / "model.safetensors", {"format": "pt"})
        places.append(place)
    with pytest.raises(InvalidInputError, match="table: I64 cannot be merged"):
        merge_models(command(places), tmp_path / "out", options=FAST)
    assert not (tmp_path / "out").exists()

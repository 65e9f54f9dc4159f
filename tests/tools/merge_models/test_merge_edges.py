"""Merges where vocabularies have padding, where directions fail, and where layers are stacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from milepost.tools.merge_models import Tokenizers, merge_models
from milepost.tools.merging.layers import set_layers
from milepost.tools.merging.recipe import recipe_from_yaml
from tests.tools.merge_models.merging import (
    FAST,
    command,
    weights,
    write_model,
    write_tokenizer,
)
from tests.tools.rewrite.hub import same_bits

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# ---- V59: 40 rows for 37 tokens, and 44 rows for 39: two new ones, and two that changed places

FIRST = ["<s>", "</s>", *(f"word{n}" for n in range(35))]
SECOND = [*FIRST[:5], FIRST[6], FIRST[5], *FIRST[7:], "new1", "new2"]


def padded_model(place: Path, seed: int, words: list[str], rows: int) -> Path:
    """A model whose table has rows that belong to no token."""
    filled = [*words, *(f"[pad{n}]" for n in range(rows - len(words)))]
    write_model(place, seed, filled, dtype=torch.float32)
    write_tokenizer(place, words)
    return place


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("pair")
    return [padded_model(root / "a", 1, FIRST, 40), padded_model(root / "b", 2, SECOND, 44)]


def merged(pair: list[Path], out: Path, shares: tuple[float, float], source: str) -> Path:
    recipe = command([Path(f"{p}:{s}") for p, s in zip(pair, shares, strict=True)],
                     tokenizer=source)  # fmt: skip
    return merge_models(recipe, out, options=FAST).path


@pytest.mark.case("V59")
def test_the_whole_weight_on_one_model_gives_it_back_with_its_padding(
    pair: list[Path], tmp_path: Path
) -> None:
    out = merged(pair, tmp_path / "out", (1.0, 0.0), "base")
    assert same_bits(weights(out), weights(pair[0]))
    config = json.loads((out / "config.json").read_bytes())
    assert config["vocab_size"] == 40
    assert (out / "tokenizer.json").read_bytes() == (pair[0] / "tokenizer.json").read_bytes()


@pytest.mark.case("V59")
@pytest.mark.parametrize("source", ["base", "union"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rows_are_those_of_their_token_and_every_id_has_one(
    pair: list[Path], tmp_path: Path, source: str, share: float
) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    out = merged(pair, tmp_path / "out", (share, 1 - share), source)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(out)
    vocabulary = tokenizer.get_vocab()
    assert set(vocabulary) == set(FIRST if source == "base" else [*FIRST, "new1", "new2"])
    one, two = weights(pair[0]), weights(pair[1])
    for name, table in ((EMBEDDING, model.model.embed_tokens.weight), (HEAD, model.lm_head.weight)):
        assert max(vocabulary.values()) < len(table) == model.config.vocab_size
        for token in FIRST:
            wanted = share * one[name][FIRST.index(token)]
            wanted = wanted + (1 - share) * two[name][SECOND.index(token)]
            torch.testing.assert_close(table[vocabulary[token]], wanted, rtol=1e-6, atol=1e-7)
        for token in set(vocabulary) - set(FIRST):
            row = table[vocabulary[token]]
            assert torch.equal(row, two[name][SECOND.index(token)]), token


# ---- V60: directions that are none


def vectors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pairs on which an angle is not defined, or of no use."""
    torch.manual_seed(3)
    some = torch.randn(300)
    one = {"scalar": torch.tensor(2.0), "single": torch.tensor([3.0]), "zero": torch.zeros(300)}
    two = {"scalar": torch.tensor(4.0), "single": torch.tensor([-1.0]), "zero": some.clone()}
    one |= {"zeros": torch.zeros(5), "equal": some.clone(), "opposite": some.clone()}
    two |= {"zeros": torch.zeros(5), "equal": some.clone(), "opposite": -some}
    one |= {"longer": some.clone(), "empty": torch.zeros(0, 4)}
    two |= {"longer": some * 3, "empty": torch.zeros(0, 4)}
    return one, two


@pytest.mark.case("V60")
@pytest.mark.parametrize(
    ("method", "t"),
    [
        *(("slerp", t) for t in (0.0, 0.25, 0.5, 1.0)),
        *((method, t) for method in ("nuslerp", "multislerp", "linear") for t in (0.25, 0.5)),
        ("karcher", 0.5),
    ],
)
def test_where_there_is_no_angle_a_merge_is_the_straight_line_and_never_nan(
    tmp_path: Path, method: str, t: float
) -> None:
    both = vectors()
    places = []
    for name, tensors in zip("ab", both, strict=True):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        places.append(tmp_path / name)
    knobs: dict[str, float] = {"t": t} if method == "slerp" else {}
    if method not in ("slerp", "karcher"):
        places = [Path(f"{places[0]}:{1 - t}"), Path(f"{places[1]}:{t}")]
    recipe = command(places, method=method, knobs=knobs)
    found = weights(
        merge_models(
            recipe, tmp_path / "out", tokenizers=Tokenizers.ALLOW_MISSING, options=FAST
        ).path
    )
    one, two = both
    assert found.keys() == one.keys()
    for name, value in found.items():
        assert bool(value.isfinite().all()), name
        assert value.shape == one[name].shape
    for name in ("zeros", "equal", "longer"):  # parallel: every mean lies on the line
        line = (1 - t) * one[name] + t * two[name]
        torch.testing.assert_close(found[name], line, rtol=1e-4, atol=1e-6)
    if method in ("slerp", "nuslerp", "linear"):
        for name in ("scalar", "opposite", "single", "zero"):
            line = (1 - t) * one[name] + t * two[name]
            torch.testing.assert_close(found[name], line, rtol=1e-4, atol=1e-5)


# ---- V60: a model of layers 0-1 and 0-2


@pytest.mark.case("V60")
def test_lists_with_an_entry_for_each_layer_follow_the_layers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, use_sliding_window=True, sliding_window=4,
        layer_types=kinds, eos_token_id=[1, 2, 3],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "m")
    slices = [{"sources": [{"model": str(tmp_path / "m"), "layer_range": span}]}
              for span in ([0, 2], [0, 3])]  # fmt: skip
    document: dict[str, Any] = {"merge_method": "passthrough", "slices": slices}
    (tmp_path / "merge.yaml").write_text(yaml.safe_dump(document))
    recipe = recipe_from_yaml(tmp_path / "merge.yaml")
    out = merge_models(
        recipe, tmp_path / "out", tokenizers=Tokenizers.ALLOW_MISSING, options=FAST
    ).path
    made = json.loads((out / "config.json").read_bytes())
    assert made["num_hidden_layers"] == 5
    assert made["layer_types"] == [*kinds[:2], *kinds]
    assert made["eos_token_id"] == [1, 2, 3]  # as many as the layers were, and none of them
    deeper, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for layer, source in enumerate((0, 1, 0, 1, 2)):
        own, theirs = deeper.model.layers[layer], model.model.layers[source]
        assert same_bits(own.state_dict(), theirs.state_dict())


@pytest.mark.case("V60")
def test_lists_that_number_layers_follow_them_too() -> None:
    config = {
        "num_hidden_layers": 3, "mlp_only_layers": [0, 2], "no_rope_layers": [1, 0, 1],
        "bad_words_ids": [7, 8, 9], "intermediate_size": 24,
    }  # fmt: skip
    notes = set_layers(config, [0, 1, 0, 1, 2])
    assert config == {
        "num_hidden_layers": 5, "mlp_only_layers": [0, 2, 4], "no_rope_layers": [1, 0, 1, 0, 1],
        "bad_words_ids": [7, 8, 9], "intermediate_size": 24,
    }  # fmt: skip
    assert notes == ["num_hidden_layers: 3 became 5"]


# ---- V08


@pytest.mark.case("V08")
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32", "float16"])
def test_the_output_has_the_type_of_the_models_or_the_one_asked_for_in_both_spellings(
    tmp_path: Path, dtype: str | None
) -> None:
    models = [write_model(tmp_path / f"m{seed}", seed) for seed in range(2)]
    out = merge_models(command(models, dtype=dtype), tmp_path / "out", options=FAST).path
    wanted = getattr(torch, dtype or "bfloat16")
    assert {tensor.dtype for tensor in weights(out).values()} == {wanted}
    config = json.loads((out / "config.json").read_bytes())
    assert config["dtype"] == config["torch_dtype"] == (dtype or "bfloat16")
    before = (models[0] / "model.safetensors").stat().st_size
    after = (out / "model.safetensors").stat().st_size
    assert after == pytest.approx(before * (2 if dtype == "float32" else 1), rel=0.1)

"""What does not fit into a vision-language base is refused, all of it at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milepost.errors import CheckpointError, InvalidInputError, NotFoundError
from milepost.tools.reattach_vision_tower import reattach_vision_tower
from milepost.tools.rewrite.problems import SeveralProblems
from tests.tools.reattach.wholes import edit_config, save_trained_text, save_whole
from tests.tools.rewrite.hub import QUICK, read_hub


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a text model of it, which no test changes."""
    root = tmp_path_factory.mktemp("saved")
    whole = save_whole(root / "base", "llava", tie_word_embeddings=False)
    save_trained_text(root / "text", whole, "llava", steps=1)
    return root


@pytest.fixture
def models(saved: Path, tmp_path: Path) -> Path:
    """Copies of them."""
    for path in saved.rglob("*"):
        if path.is_file():
            place = tmp_path / path.relative_to(saved)
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(path.read_bytes())
    return tmp_path


def refused(models: Path, kind: type[CheckpointError] = InvalidInputError) -> str:
    """The message; nothing is left where the output would be."""
    with pytest.raises(kind) as caught:
        reattach_vision_tower(models / "text", models / "base", models / "out", options=QUICK)
    assert {path.name for path in models.iterdir()} <= {"text", "base", ".milepost.lock"}
    return str(caught.value)


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Put tensors in, or take them out where None is given; `__` stands for a point."""
    held = {**read_hub(directory), **{n.replace("__", "."): t for n, t in tensors.items()}}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_text_model_of_another_architecture(models: Path) -> None:
    edit_config(models / "text", model_type="mistral")
    assert "model_type mistral, and the text model of" in refused(models)


def test_a_model_that_is_the_whole_already(models: Path) -> None:
    edit_config(models / "text", vision_config={})
    assert "is a vision-language model already" in refused(models)


def test_a_base_without_a_vision_part(models: Path) -> None:
    edit_config(models / "base", vision_config=None)
    assert "no vision_config beside a text_config" in refused(models)


def test_a_base_with_nothing_but_text_in_its_files(models: Path) -> None:
    others = [n for n in read_hub(models / "base") if not n.startswith("language_model.")]
    change(models / "base", **{name.replace(".", "__"): None for name in others})
    assert "no vision tower to put on" in refused(models)


def test_a_base_of_a_family_that_is_not_known(models: Path) -> None:
    edit_config(models / "base", model_type="blip-2")
    message = refused(models)
    assert "model_type blip-2: where its text lies is not known" in message
    assert "gemma3" in message and "qwen3_5_moe" in message


@pytest.mark.parametrize("which", ["text", "base"])
def test_quantised_weights(models: Path, which: str) -> None:
    edit_config(models / which, quantization_config={"quant_method": "fp8"})
    assert "quantised (fp8)" in refused(models)


def test_all_names_and_shapes_that_do_not_fit_are_listed_at_once(models: Path) -> None:
    change(
        models / "text",
        model__layers__0__mlp__up_proj__weight=None,
        model__layers__1__mlp__up_proj__weight=None,
        model__norm__weight=torch.ones(31),
        model__layers__0__self_attn__k_proj__weight=torch.ones(2, 3),
        score__weight=torch.ones(2, 32),
    )
    message = refused(models, SeveralProblems)
    for text in (
        "2 text tensors of the base are not there: language_model.model.layers.0.mlp.up_proj",
        "language_model.model.layers.1.mlp.up_proj.weight",
        "the base has no place for 1 tensors: score.weight",
        "model.norm.weight: shape (31,), and (32,) is expected",
        "model.layers.0.self_attn.k_proj.weight: shape (2, 3), and (16, 32) is expected",
    ):
        assert text in message


def test_a_vocabulary_that_the_configuration_does_not_have(models: Path) -> None:
    edit_config(models / "text", vocab_size=65)
    assert "vocab_size 65, and the embedding has 64 rows" in refused(models)


def test_a_vocabulary_without_the_tokens_of_images(models: Path) -> None:
    rows = torch.ones(60, 32)
    change(models / "text", model__embed_tokens__weight=rows, lm_head__weight=rows.clone())
    edit_config(models / "text", vocab_size=60)
    assert "image_token_index is 60, and the trained embedding has 60 rows" in refused(models)


@pytest.mark.case("V51")
def test_a_head_with_another_number_of_tokens_than_the_embedding(models: Path) -> None:
    change(models / "text", lm_head__weight=torch.ones(65, 32))
    assert "lm_head.weight: shape (65, 32), and (64, 32) is expected" in refused(models)


@pytest.mark.case("V52")
def test_a_head_that_is_not_there_and_is_not_the_embedding(models: Path) -> None:
    change(models / "text", lm_head__weight=None)
    assert "tie_word_embeddings false, and there is no head" in refused(models)


def test_a_base_that_is_neither_on_disk_nor_an_id(models: Path) -> None:
    with pytest.raises(NotFoundError, match="no such directory, and no Hub id"):
        reattach_vision_tower(models / "text", models / "nowhere", models / "out")


def test_a_revision_of_a_directory(models: Path) -> None:
    with pytest.raises(InvalidInputError, match="--revision is for Hub ids"):
        reattach_vision_tower(models / "text", models / "base", models / "out", revision="main")


def test_an_output_inside_the_base(models: Path) -> None:
    with pytest.raises(InvalidInputError, match="lies in the input"):
        reattach_vision_tower(models / "text", models / "base", models / "base/out")
    assert not (models / "base/out").exists()
    assert json.loads((models / "base/config.json").read_bytes())["model_type"] == "llava"

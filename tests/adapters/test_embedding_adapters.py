"""LoRA inside an embedding model: folded in, its directory is one of sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import BertConfig, BertModel

import milepost as mp
from tests.adapters.lora_models import randomise
from tests.integrations.trainers import tiny_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:sentence_transformers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:sentence_transformers.*"),
]
TEXTS = ["w3 w4 w5", "w6 w7"]


def embedding_model(directory: Path) -> Any:
    """A tiny BERT with mean pooling, the same weights at every call."""
    from sentence_transformers.sentence_transformer import modules

    if not directory.exists():
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=32,
            max_position_embeddings=32,
        )
        BertModel(config).save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
    first = modules.Transformer(str(directory), max_seq_length=16)
    return sentence_transformers.SentenceTransformer(
        modules=[first, modules.Pooling(16)], device="cpu"
    )


def backbone(model: Any) -> Any:
    return getattr(model[0], "model", None) or model[0].auto_model


def encoded(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    return found


def adapt(model: Any, **settings: Any) -> Any:
    """An adapter on the backbone of an embedding model."""
    wanted = {"r": 4, "lora_alpha": 8, "target_modules": ["query", "value"], **settings}
    inject_adapter_in_model(LoraConfig(**wanted), backbone(model))
    randomise(backbone(model), 5)
    return backbone(model)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of an embedding model with the adapter folded in and beside it."""
    model = embedding_model(tmp_path / "bert")
    mp.save(
        tmp_path / "run" / "checkpoint-1",
        {"model": adapt(model)},
        step=1,
        adapters=mp.Adapters.MERGED,
        processing_class=model.tokenizer,
    )
    return tmp_path / "run" / "checkpoint-1"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other target modules": (
        {"target_modules": ["query", "key"]},
        r"missing: .*self\.key\.lora_A.*; unexpected: .*self\.value\.lora_A",
    ),
    "another rank": (
        {"r": 8, "lora_alpha": 16},
        r"another rank.*self\.query: saved with rank 4, has rank 8",
    ),
    "another scaling": ({"lora_alpha": 4}, r"scaled in another way.*saved with 2, is 1"),
    "stabilised": ({"use_rslora": True}, r"scaled in another way.*saved with 2, is 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_embedding_model_that_is_adapted_otherwise_is_refused(
    case: str, saved: Path, tmp_path: Path
) -> None:
    settings, told = REFUSED[case]
    model = embedding_model(tmp_path / "bert")
    inner = adapt(model, **settings)
    before = encoded(model)
    for weights in mp.Weights:
        with pytest.raises(mp.errors.MismatchError, match=told):
            mp.load(saved, {"model": inner}, weights=weights)
    assert torch.equal(encoded(model), before)


def test_an_embedding_run_that_is_built_from_its_merged_checkpoint_is_refused(saved: Path) -> None:
    model = sentence_transformers.SentenceTransformer(str(saved), device="cpu")
    inner = adapt(model)
    for weights in mp.Weights:
        with pytest.raises(mp.errors.MismatchError, match="which contain it already"):
            mp.load(saved, {"model": inner}, weights=weights)


def test_a_marked_embedding_checkpoint_without_its_adapter_is_refused(
    saved: Path, tmp_path: Path
) -> None:
    inner = adapt(embedding_model(tmp_path / "bert"))
    (saved / "resume_adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(mp.errors.DamagedError, match=r"adapter_model\.safetensors is missing"):
        mp.load(saved, {"model": inner})
    (saved / "milepost.json").unlink()  # as other programs leave such a directory
    with pytest.raises(mp.errors.CheckpointIncompleteError, match=r"adapter_model\.safetensors"):
        mp.load(saved, {"model": inner})


def test_a_marked_embedding_checkpoint_is_none_of_a_full_fine_tune_and_the_other_way_round(
    saved: Path, tmp_path: Path
) -> None:
    full = backbone(embedding_model(tmp_path / "bert"))
    state = {"model": full, "optimizer": torch.optim.AdamW(full.parameters())}
    with pytest.raises(mp.errors.MismatchError, match="no adapter to go on training"):
        mp.load(saved, state)
    unmarked = tmp_path / "full" / "checkpoint-1"
    mp.save(unmarked, state, step=1)
    inner = adapt(embedding_model(tmp_path / "bert"))
    for weights in mp.Weights:
        with pytest.raises(mp.errors.MismatchError, match="the checkpoint holds none"):
            mp.load(unmarked, {"model": inner}, weights=weights)


def test_an_adapter_folded_into_an_embedding_model_loads_as_one(tmp_path: Path) -> None:
    model = embedding_model(tmp_path / "bert")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"])
    inject_adapter_in_model(settings, backbone(model))
    randomise(backbone(model), 5)
    expected = encoded(model)
    embedding_model(tmp_path / "bert").save_pretrained(str(tmp_path / "stock"))
    documents = {
        str(path.relative_to(tmp_path / "stock")): path.read_bytes()
        for path in (tmp_path / "stock").rglob("*.json")
        if "sentence" in path.name or path.name == "modules.json" or path.parent.name != "stock"
    }
    place = tmp_path / "checkpoint-1"
    mp.save(
        place,
        {"model": backbone(model)},
        step=1,
        adapters=mp.Adapters.MERGED,
        processing_class=model.tokenizer,
        documents=documents,
    )
    loaded = sentence_transformers.SentenceTransformer(str(place), device="cpu")
    torch.testing.assert_close(encoded(loaded), expected, rtol=1e-4, atol=1e-5)
    second = embedding_model(tmp_path / "bert")
    assert not torch.allclose(encoded(second), expected, atol=1e-4)
    inject_adapter_in_model(settings, backbone(second))
    mp.load(place, {"model": backbone(second)})
    assert torch.equal(encoded(second), expected)

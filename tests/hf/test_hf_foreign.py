"""Tensors of the source that no module of the class holds are named, not lost in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milepost.format.index import Index, encode_index
from milepost.hf.aux_files import collect_model_files
from milepost.hf.foreign import drop_draft_layers, foreign_notes, foreign_weights
from tests.hf.conftest import make_model


@pytest.mark.case("V15")
def test_extra_prediction_layers_of_the_source_are_listed(tmp_path: Path) -> None:
    import transformers

    model = make_model("llama")
    tensors = dict(model.state_dict())
    tensors["mtp.0.proj.weight"] = torch.ones(2, 2)
    tensors["mtp.0.norm.weight"] = torch.ones(2)
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    names = foreign_weights(tmp_path, loaded.state_dict())
    assert names == ["mtp.0.norm.weight", "mtp.0.proj.weight"]
    loaded.config.num_nextn_predict_layers = 1
    saved = loaded.state_dict()
    aux = collect_model_files(loaded, ties={}, dtype_names=["float32"], saved_names=saved)
    assert json.loads(aux.files["config.json"])["num_nextn_predict_layers"] == 0
    assert aux.notes == [
        f"2 tensors of {tmp_path} are not part of this model and are not saved: "
        f"mtp.0.norm.weight, mtp.0.proj.weight; copy them from the source if they are needed",
        "config.json: num_nextn_predict_layers is set to 0 (was 1): not saved",
    ]
    carried = collect_model_files(
        loaded, ties={}, dtype_names=["float32"], saved_names=[*saved, *names]
    )
    assert json.loads(carried.files["config.json"])["num_nextn_predict_layers"] == 1
    assert carried.notes == []


@pytest.mark.case("V15")
def test_a_prediction_layer_is_known_by_its_number_too() -> None:
    document = {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    assert drop_draft_layers(document, ["model.layers.60.w", "vision.w"]) == []
    assert len(drop_draft_layers(document, ["model.layers.61.eh_proj.weight"])) == 1
    assert document["num_nextn_predict_layers"] == 0


@pytest.mark.case("V15")
def test_the_names_of_a_split_source_come_from_its_index(tmp_path: Path) -> None:
    weight_map = {
        "a.w": "model-00001-of-00002.safetensors",
        "b.w": "model-00002-of-00002.safetensors",
    }
    index = Index(weight_map=weight_map, total_size=8, metadata={})
    (tmp_path / "model.safetensors.index.json").write_bytes(encode_index(index))
    assert foreign_weights(tmp_path, ["a.w"]) == ["b.w"]


def test_a_base_model_prefix_on_one_side_is_no_difference(tmp_path: Path) -> None:
    names = ["model.layers.0.w", "model.norm.w", "lm_head.weight"]
    save_file({n: torch.zeros(1) for n in names}, tmp_path / "model.safetensors")
    assert foreign_weights(tmp_path, ["layers.0.w", "norm.w"]) == ["lm_head.weight"]
    (tmp_path / "bare").mkdir()
    bare = {"layers.0.w": torch.zeros(1), "norm.w": torch.zeros(1)}
    save_file(bare, tmp_path / "bare" / "model.safetensors")
    assert foreign_weights(tmp_path / "bare", names) == []


def test_a_source_without_safetensors_gives_nothing(tmp_path: Path) -> None:
    assert foreign_weights(tmp_path, ["a"]) == []
    assert foreign_notes(tmp_path, []) == []


def test_a_source_that_cannot_be_read_costs_a_note_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    model = make_model("llama")
    model.config._name_or_path = str(tmp_path)
    aux = collect_model_files(model, ties={}, dtype_names=[], saved_names=["a"])
    assert set(aux.files) == {"config.json", "generation_config.json", "README.md"}
    assert len(aux.notes) == 1
    assert aux.notes[0].startswith("weights of the source not compared: FormatError: ")

"""config.json, generation_config.json and tokenizer files, judged by from_pretrained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from milepost.hf.aux_files import AuxFiles, check_model_files, collect_model_files
from milepost.hf.model_config import check_tied_flag, set_dtype
from tests.hf.conftest import dtypes_of, make_model, ties_of, write_directory


def collect(model: Any, **options: Any) -> AuxFiles:
    return collect_model_files(model, ties=ties_of(model), dtype_names=dtypes_of(model), **options)


def config_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(files["config.json"])
    return document


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_directory_with_these_files_loads_as_the_same_model(
    family: str, tmp_path: Path, tokenizer: Any
) -> None:
    import transformers

    model = make_model(family)
    aux = collect(model, processing_class=tokenizer)
    write_directory(tmp_path, model, aux.files)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert aux.notes == []
    assert type(loaded) is type(model)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.tensor([[1, 5, 6]])
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    loaded_tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert loaded_tokenizer("the fox").input_ids == [4, 7]


def test_a_plain_module_gives_no_files_and_says_so() -> None:
    aux = collect(nn.Linear(2, 2))
    assert aux.files == {}
    assert aux.notes == ["not a Hugging Face model: Linear has no config.json"]


def test_collecting_changes_nothing_in_the_model() -> None:
    model = make_model("llama")
    before = model.config.to_json_string()
    collect(model)
    assert model.config.to_json_string() == before
    assert model.config.architectures is None


@pytest.mark.case("V08")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_is_that_of_the_saved_weights_in_both_spellings(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    import transformers

    model = make_model("llama", dtype="float32").to(dtype)
    aux = collect(model)
    name = str(dtype).removeprefix("torch.")
    assert config_of(aux.files)["dtype"] == config_of(aux.files)["torch_dtype"] == name
    write_directory(tmp_path, model, aux.files)
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == dtype
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == dtype


def test_among_several_dtypes_the_most_frequent_is_written_and_noted() -> None:
    document: dict[str, Any] = {"text_config": {"dtype": "float32"}, "other_config": {}}
    notes = set_dtype(document, ["BF16", "torch.bfloat16", "F32", "F8_E4M3", "int64"])
    assert document["dtype"] == document["text_config"]["torch_dtype"] == "bfloat16"
    assert document["other_config"] == {}
    assert notes == [
        "config.json: the weights have several dtypes (bfloat16, float32); dtype is set to bfloat16"
    ]


@pytest.mark.case("V01")
def test_a_head_that_was_untied_sets_the_flag_to_false(tmp_path: Path) -> None:
    import transformers

    model = make_model("llama", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.randn(32, 16))
    aux = collect(model)
    assert config_of(aux.files)["tie_word_embeddings"] is False
    assert [n for n in aux.notes if "are separate tensors, both saved" in n]
    write_directory(tmp_path, model, aux.files)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


@pytest.mark.case("V01")
def test_a_head_that_was_tied_by_hand_sets_the_flag_to_true(tmp_path: Path) -> None:
    import transformers

    model = make_model("llama", tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    aux = collect(model)
    assert config_of(aux.files)["tie_word_embeddings"] is True
    write_directory(tmp_path, model, aux.files)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.case("V01")
def test_the_tied_flag_of_files_falls_only_when_head_and_embedding_differ() -> None:
    shapes = {"lm_head.weight": (4, 2), "model.embed_tokens.weight": (4, 2)}
    same = {"tie_word_embeddings": True}
    assert check_tied_flag(same, shapes, same_values=lambda a, b: True) == []
    assert same == {"tie_word_embeddings": True}
    other: dict[str, Any] = {"tie_word_embeddings": True}
    notes = check_tied_flag(other, shapes, same_values=lambda a, b: False)
    assert other == {"tie_word_embeddings": False}
    assert notes == [
        "config.json: lm_head.weight and model.embed_tokens.weight differ; "
        "tie_word_embeddings is set to false"
    ]
    unsure: dict[str, Any] = {"tie_word_embeddings": True}
    two = {**shapes, "draft.lm_head.weight": (4, 2)}
    assert "2 heads" in check_tied_flag(unsure, two, same_values=lambda a, b: False)[0]
    assert unsure == {"tie_word_embeddings": True}


def test_wrappers_do_not_reach_the_architectures(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = make_model("llama")
    compiled = torch.compile(model)
    assert config_of(collect(compiled).files)["architectures"] == ["LlamaForCausalLM"]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        assert config_of(collect(wrapped).files)["architectures"] == ["LlamaForCausalLM"]
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert type(model).__name__ == "FSDPLlamaForCausalLM"
        files = collect(model).files
        assert config_of(files)["architectures"] == ["LlamaForCausalLM"]
        assert "generation_config.json" in files
    finally:
        dist.destroy_process_group()


def test_a_peft_model_gives_the_files_of_its_base() -> None:
    import peft

    model = make_model("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert config_of(collect(wrapped).files)["architectures"] == ["LlamaForCausalLM"]


def test_a_changed_task_head_changes_the_architectures_and_drops_the_generation_config() -> None:
    import transformers

    model = make_model("llama")
    config = model.config
    config.architectures = ["LlamaForCausalLM"]
    classifier = transformers.LlamaForSequenceClassification(config)
    files = collect(classifier).files
    assert config_of(files)["architectures"] == ["LlamaForSequenceClassification"]
    assert "generation_config.json" not in files


@pytest.mark.case("V12")
def test_an_invalid_generation_config_is_written_as_it_is_and_noted(
    tmp_path: Path, tokenizer: Any
) -> None:
    import transformers

    model = make_model("llama")
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.7
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "theirs")
    aux = collect(model, processing_class=tokenizer)
    document = json.loads(aux.files["generation_config.json"])
    assert (document["do_sample"], document["temperature"]) == (False, 0.7)
    assert len(aux.notes) == 1
    assert "transformers calls it invalid" in aux.notes[0] and "temperature" in aux.notes[0]
    write_directory(tmp_path / "ours", model, aux.files)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.generation_config.temperature == 0.7


@pytest.mark.case("V12")
def test_the_trouble_of_a_save_is_found_at_the_start_of_the_run(tokenizer: Any) -> None:
    model = make_model("llama")
    assert check_model_files(model, tokenizer) == []
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = False
    assert check_model_files(model, tokenizer) == collect(model).notes != []


def test_a_value_that_json_cannot_hold_is_left_out_and_named() -> None:
    model = make_model("llama")
    model.config.callback = print
    aux = collect(model)
    document = config_of(aux.files)
    assert "callback" not in document
    assert document["hidden_size"] == 16 and document["model_type"] == "llama"
    assert "written without callback" in aux.notes[0]


def test_a_configuration_class_without_a_model_type_takes_it_from_its_source(
    tmp_path: Path,
) -> None:
    import transformers

    class Vendor(transformers.LlamaConfig):  # type: ignore[misc]
        model_type = ""

    (tmp_path / "config.json").write_text('{"model_type": "bailing"}')
    config = Vendor(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1)
    model = transformers.LlamaForCausalLM(config)
    assert [n for n in collect(model).notes if "Vendor states no model_type" in n]
    config._name_or_path = str(tmp_path)
    aux = collect(model)
    assert config_of(aux.files)["model_type"] == "bailing"
    assert aux.notes == []

"""Hub names and shapes of live models, with transformers itself as the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from milepost.errors import InvalidInputError
from milepost.hf.hub_names import (
    HubState,
    apply_forward,
    derive_hub_map,
    hub_map_or_same_names,
    hub_state,
    hub_targets,
)
from milepost.state.model import capture_model
from tests.hf.hub_families import MULTIMODAL, TEXT, make_model, random_model

FAMILIES = [*TEXT, *MULTIMODAL]
PER_EXPERT = [
    "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Mixtral", "MiniMaxM2", "Phimoe", "Olmoe", "FlexOlmo",
    "DeepseekV2", "DeepseekV3", "Glm4Moe", "Glm4MoeLite", "Dots1", "Ernie4_5_Moe", "HunYuanMoEV1",
    "Lfm2Moe", "Jamba",
]  # fmt: skip
AS_IN_MEMORY = ["Llama", "Qwen3", "GptOss", "Qwen3VLMoe"]
INPUT = torch.tensor([[5, 9, 11, 3, 20, 7]])


def state_of(model: Any) -> HubState:
    captured = capture_model(model)
    return hub_state(model, captured.leaves, captured.ties)


def read(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(directory / "model.safetensors")
    return tensors


def write(directory: Path, model: Any, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    directory.mkdir()
    model.config.save_pretrained(directory)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_bytes_are_those_that_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    state = state_of(model)
    assert state.notes == []
    assert_same(state.tensors, read(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_loaded_from_a_hub_directory_is_written_as_that_directory(
    family: str, tmp_path: Path
) -> None:
    make_model(family).save_pretrained(tmp_path / "hub")
    loaded = type(make_model(family)).from_pretrained(tmp_path / "hub")
    loaded.save_pretrained(tmp_path / "again")
    assert_same(read(tmp_path / "again"), read(tmp_path / "hub"))
    assert_same(state_of(loaded).tensors, read(tmp_path / "hub"))


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_finds_every_weight_in_what_is_written(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    write(tmp_path / "ours", model, state_of(model).tensors)
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert_same(loaded.state_dict(), model.state_dict())
    model.save_pretrained(tmp_path / "theirs")
    theirs = type(model).from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        found, wanted = loaded(INPUT, use_cache=False), theirs(INPUT, use_cache=False)
    assert torch.equal(found.logits, wanted.logits)


@pytest.mark.parametrize("family", PER_EXPERT)
def test_experts_are_separate_on_disk_however_the_model_was_loaded(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    loaded = type(model).from_pretrained(tmp_path / "fused")
    hub = read(tmp_path / "hub")
    assert any(".experts.3." in name for name in hub)
    assert_same(state_of(loaded).tensors, hub)


def test_transformers_itself_writes_fused_experts_after_loading_fused_ones(tmp_path: Path) -> None:
    """The control of the test above: this is why the recorded conversions are not used."""
    model = make_model("Qwen3Moe")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    type(model).from_pretrained(tmp_path / "fused").save_pretrained(tmp_path / "again")
    assert set(read(tmp_path / "again")) == set(read(tmp_path / "fused"))


@pytest.mark.case("V53")
@pytest.mark.parametrize("family", FAMILIES)
def test_hub_files_fill_live_tensors_in_place_each_element_once(family: str) -> None:
    model = make_model(family)
    state = state_of(model)
    live = {name: torch.full_like(t, torch.nan) for name, t in capture_model(model).leaves.items()}
    fill(live, state)
    assert_same(live, capture_model(model).leaves)


def fill(live: Mapping[str, Tensor], state: HubState) -> None:
    for name, targets in hub_targets(state.hub_map, live).items():
        for target in targets:
            value = state.tensors[name].reshape(target.grid)
            box = tuple(slice(*span) for span in target.box)
            assert bool(target.view.isnan().all()), "no element is filled twice"
            target.view.copy_(value[box])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_of_the_model_is_in_one_place_on_disk(family: str) -> None:
    leaves = capture_model(make_model(family)).leaves
    numbers, start = {}, 0
    for name, tensor in leaves.items():
        count = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
        numbers[name], start = count, start + tensor.numel()
    hub = apply_forward(state_of(make_model(family)).hub_map, numbers)
    found = torch.cat([tensor.flatten() for tensor in hub.values()])
    assert torch.equal(found.sort().values, torch.arange(start))


@pytest.mark.parametrize("family", AS_IN_MEMORY)
def test_families_whose_hub_layout_is_that_of_the_model_keep_it(family: str) -> None:
    model = make_model(family)
    state = state_of(model)
    assert state.hub_map.is_identity
    for name, tensor in capture_model(model).leaves.items():
        assert state.tensors[name].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GraniteMoe", "DeepseekV3"])
def test_no_weight_is_copied(family: str) -> None:
    model = make_model(family)
    live = {t.untyped_storage().data_ptr() for t in capture_model(model).leaves.values()}
    for name, tensor in state_of(model).tensors.items():
        assert tensor.untyped_storage().data_ptr() in live, name


def test_tied_embeddings_are_written_once_under_the_hub_name(tmp_path: Path) -> None:
    model = make_model("Mixtral", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "hub")
    state = state_of(model)
    assert state.hub_map.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert_same(state.tensors, read(tmp_path / "hub"))
    write(tmp_path / "ours", model, state.tensors)
    loaded = type(model).from_pretrained(tmp_path / "ours")
    assert_same(loaded.state_dict(), model.state_dict())


def test_ties_of_a_multimodal_model_have_their_hub_spelling() -> None:
    ties = state_of(make_model("Gemma3")).hub_map.ties
    assert ties == {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"}


def test_a_text_model_cut_out_of_a_larger_one_has_names_of_its_own(tmp_path: Path) -> None:
    import transformers

    text = {**TEXT["Qwen3"], "head_dim": 4, "layer_types": ["full_attention"] * 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    text["rope_parameters"] = {**rope, "partial_rotary_factor": 1.0}
    vision = MULTIMODAL["Qwen2_5_VL"]["vision_config"]
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    whole = random_model(transformers.Qwen3_5ForConditionalGeneration, config)
    whole.save_pretrained(tmp_path / "whole")
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "whole")
    fresh = transformers.Qwen3_5ForCausalLM(model.config)
    assert set(state_of(model).tensors) == set(state_of(fresh).tensors)
    assert "model.layers.0.mlp.up_proj.weight" in state_of(model).tensors
    write(tmp_path / "text", model, state_of(model).tensors)
    loaded = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "text")
    assert_same(loaded.state_dict(), model.state_dict())


def test_wrappers_around_the_model_and_its_layers_change_nothing() -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    plain = state_of(make_model("Mixtral"))
    model = make_model("Mixtral")
    model.model.layers[1] = wrapper.checkpoint_wrapper(model.model.layers[1])
    model.model = wrapper.checkpoint_wrapper(model.model)
    assert_same(state_of(torch.compile(model)).tensors, plain.tensors)


def test_a_class_that_a_wrapper_made_at_run_time_is_looked_through() -> None:
    """`fully_shard` swaps the class for a subclass of another name in a module of torch."""
    plain = state_of(make_model("Gemma3"))
    model = make_model("Gemma3")
    for module in (model, model.model, model.model.language_model):
        kind = type(module)
        swapped = {"__module__": "torch.distributed.fsdp._fully_shard._fully_shard"}
        module.__class__ = type(f"FSDP{kind.__name__}", (kind,), swapped)
    assert_same(state_of(model).tensors, plain.tensors)


def test_the_stages_of_a_pipeline_make_the_hub_tensors_of_the_whole() -> None:
    model = make_model("Qwen3Moe")
    leaves = capture_model(model).leaves
    first = {name: t for name, t in leaves.items() if ".layers.1." not in name}
    second = {name: t for name, t in leaves.items() if ".layers.1." in name}
    with torch.device("meta"):
        family = type(model)(model.config)
    found = {**hub_state(family, first).tensors, **hub_state(family, second).tensors}
    assert_same(found, state_of(model).tensors)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_live_tensors_of_any_strides_are_written_and_filled(family: str) -> None:
    model = make_model(family)
    captured = capture_model(model)
    strided = {
        name: tensor.transpose(0, -1).contiguous().transpose(0, -1)
        for name, tensor in captured.leaves.items()
    }
    assert any(not tensor.is_contiguous() for tensor in strided.values())
    state = hub_state(model, strided)
    assert_same(state.tensors, state_of(model).tensors)
    live = {name: torch.full_like(t, torch.nan) for name, t in strided.items()}
    assert live["lm_head.weight"].stride() == strided["lm_head.weight"].stride()
    fill(live, state)
    assert_same(live, captured.leaves)


@pytest.mark.parametrize("family", PER_EXPERT)
def test_a_directory_with_fused_experts_is_read_as_well(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path, save_original_format=False)
    stored = read(tmp_path)
    hub_map = state_of(model).hub_map.as_stored(stored)
    live = {name: torch.full_like(t, torch.nan) for name, t in capture_model(model).leaves.items()}
    fill(live, HubState(stored, hub_map, []))
    assert_same(live, capture_model(model).leaves)


def test_targets_that_are_not_wanted_have_no_views() -> None:
    state = state_of(make_model("Qwen3Moe"))
    live = {"model.layers.1.mlp.experts.gate_up_proj": torch.empty(4, 24, 16)}
    targets = hub_targets(state.hub_map, live)
    assert sorted(targets) == [
        f"model.layers.1.mlp.experts.{expert}.{half}_proj.weight"
        for expert in range(4)
        for half in ("gate", "up")
    ]


def test_a_model_of_thirty_billion_parameters_is_mapped_without_data() -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=48,
        num_experts=128,
        hidden_size=2048,
        moe_intermediate_size=768,
        vocab_size=151936,
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    hub_map = derive_hub_map(model, dict(model.state_dict()))
    assert len(hub_map.tensors) == 18_867
    (part,) = hub_map.tensors["model.layers.3.mlp.experts.5.up_proj.weight"].slices()
    assert part.source == "model.layers.3.mlp.experts.gate_up_proj"
    assert part.grid == part.lengths == (768, 2048)
    assert (part.offset, part.strides) == ((5 * 2 + 1) * 768 * 2048, (2048, 1))


def test_a_model_that_is_not_of_transformers_keeps_its_names() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = state_of(model)
    assert state.notes == []
    assert state.hub_map.is_identity
    assert_same(state.tensors, model.state_dict())


def test_a_hub_tensor_that_would_be_joined_from_some_of_its_parts_only_is_refused() -> None:
    import transformers

    config = transformers.HrmTextConfig(vocab_size=32, hidden_size=24, intermediate_size=24)
    with torch.device("meta"):
        model = transformers.HrmTextModel(config)
    leaves = {name: t for name, t in model.state_dict().items() if "k_proj" not in name}
    with pytest.raises(InvalidInputError, match=r"HrmTextModel: .* is made of .* are not there"):
        derive_hub_map(model, leaves)


def test_a_conversion_that_computes_is_named_and_the_names_stay_as_they_are() -> None:
    import transformers

    config = transformers.Inkling2TextConfig(num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.Inkling2ForCausalLM(config)
    leaves = dict(model.state_dict())
    hub_map, (note,) = hub_map_or_same_names(model, leaves)
    assert hub_map.is_identity
    assert set(hub_map.tensors) == set(leaves)
    assert note == (
        "not in hub spelling: Inkling2ForCausalLM: no exact way to its hub names: "
        "model.llm.unembed.weight: aten::new_zeros does more than move elements"
    )


def test_two_tensors_that_would_get_one_hub_name_keep_their_own() -> None:
    """transformers would write one of them and say nothing."""
    model = make_model("Mixtral")
    model.extra = nn.ModuleDict({"mlp": nn.Linear(2, 2), "block_sparse_moe": nn.Linear(2, 2)})
    state = state_of(model)
    assert_same(state.tensors, capture_model(model).leaves)
    (note,) = state.notes
    assert note.startswith("not in hub spelling: MixtralForCausalLM: no exact way")
    assert note.endswith("0 of its 4 elements would be saved; each must be saved once")

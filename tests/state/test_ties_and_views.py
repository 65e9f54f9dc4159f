from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from milepost.errors import InvalidInputError, UnencodableError
from milepost.state.model import capture_model


class HeadFirst(nn.Module):
    """Declares its aliases as transformers does; the head comes first in module order."""

    _tied_weights_keys: Any = {"head.weight": "embed.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, bias=False)
        self.embed = nn.Embedding(16, 8)
        self.head.weight = self.embed.weight


class HeadFirst4(HeadFirst):
    _tied_weights_keys = [r"head\.weight"]


def tiny_llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return cast(nn.Module, LlamaForCausalLM(config))


@pytest.mark.case("V01")
def test_a_tied_head_is_one_leaf_under_the_name_in_module_order() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    model.head.weight = model.embed.weight
    state = capture_model(model)
    assert list(state.leaves) == ["embed.weight"]
    assert state.ties == {"head.weight": "embed.weight"}
    assert state.names[id(model.head.weight)] == "embed.weight"


@pytest.mark.case("V01")
@pytest.mark.parametrize("kind", [HeadFirst, HeadFirst4])
def test_the_name_a_model_declares_an_alias_is_not_the_kept_one(kind: type[nn.Module]) -> None:
    wrapper = nn.Module()
    wrapper.inner = cast(nn.Module, torch.compile(kind(), backend="eager"))
    assert capture_model(wrapper).ties == {"inner.head.weight": "inner.embed.weight"}


@pytest.mark.case("V01")
def test_a_transformers_model_keeps_its_embedding_name_and_leaves_rotary_buffers_out() -> None:
    tied = capture_model(tiny_llama(tied=True))
    assert tied.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    untied = capture_model(tiny_llama(tied=False))
    assert untied.ties == {}
    assert set(untied.leaves) == {*tied.leaves, "lm_head.weight"}
    assert not any("inv_freq" in name for name in untied.leaves)


@pytest.mark.case("V01")
def test_disjoint_slices_of_one_buffer_are_separate_leaves() -> None:
    flat = torch.arange(300.0)
    model = nn.Module()
    for index, name in enumerate("abc"):
        setattr(model, name, nn.Parameter(flat[100 * index : 100 * (index + 1)]))
    state = capture_model(model)
    assert state.ties == {}
    assert [leaf.numel() for leaf in state.leaves.values()] == [100, 100, 100]


@pytest.mark.case("V01")
def test_views_that_overlap_without_being_equal_are_separate_leaves() -> None:
    flat = torch.arange(12.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:8]), nn.Parameter(flat[4:])
    model.c, model.d = nn.Parameter(flat.view(3, 4)), nn.Parameter(flat.view(4, 3))
    model.e, model.f = nn.Parameter(flat.view(3, 4).t()), nn.Parameter(flat)
    state = capture_model(model)
    assert state.ties == {} and set(state.leaves) == set("abcdef")


def test_empty_tensors_are_never_tied() -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    assert capture_model(model).ties == {}


def test_parameters_that_share_memory_without_being_one_keep_their_own_optimizer_names() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(4))
    model.b = nn.Parameter(model.a.data)
    state = capture_model(model)
    assert state.ties == {"b": "a"}
    assert (state.names[id(model.a)], state.names[id(model.b)]) == ("a", "b")


@pytest.mark.case("V02")
def test_leaves_are_the_live_views_with_their_strides() -> None:
    model = nn.Module()
    model.transposed = nn.Parameter(torch.randn(5, 3).t())
    model.channels = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    model.strided = nn.Parameter(torch.randn(10)[::2])
    model.expanded = nn.Parameter(torch.randn(1).expand(7))
    state = capture_model(model)
    for name, parameter in model.named_parameters():
        leaf = state.leaves[name]
        assert leaf.stride() == parameter.stride() and leaf.data_ptr() == parameter.data_ptr()
        assert not leaf.requires_grad


def test_meta_tensors_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(InvalidInputError, match=r"2 of 2 tensors .* meta device .*: weight, bias"):
        capture_model(model)


def test_a_sparse_leaf_is_refused_by_name() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(UnencodableError, match=r"mask: a tensor of layout torch\.sparse_coo"):
        capture_model(model)

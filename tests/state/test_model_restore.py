from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from milepost.errors import (
    DtypeMismatchError,
    KeyMismatchError,
    MismatchError,
    ShapeMismatchError,
)
from milepost.state.mismatch import DtypeDifference, ShapeDifference
from milepost.state.model import ModelState, capture_model
from milepost.state.model_plan import ModelReport, plan_restore_model, restore_model
from milepost.state.policies import DtypePolicy, Missing, ShapePolicy, Unexpected


def net(width: int = 4) -> Any:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


def load(model: nn.Module, state: ModelState, **policies: Any) -> ModelReport:
    return restore_model(model, state.leaves, ties=state.ties, extra=state.extra, **policies)


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 2), nn.Linear(2, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_model_is_filled_in_place() -> None:
    source, target = net(), net()
    objects = {name: (p, p.data_ptr()) for name, p in target.named_parameters()}
    report = load(target, capture_model(source))
    assert same(bits(source), bits(target))
    assert {n: (p, p.data_ptr()) for n, p in target.named_parameters()} == objects
    assert report == ModelReport(
        asked=7, found=7, filled=7, missing=(), unexpected=(), cast=(), skipped=(), untied=()
    )


def test_renamed_tensors_are_reported_at_once_with_counts_and_closest_pairs() -> None:
    model = nn.Module()
    model.first, model.last = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    stored = {"model.first.weight": torch.ones(2, 2), "model.first.bias": torch.ones(2)}
    before = bits(model)
    with pytest.raises(KeyMismatchError) as caught:
        restore_model(model, stored)
    assert str(caught.value) == (
        "the model: 3 missing, 2 unexpected in the checkpoint; "
        "missing: first.weight, first.bias, last.weight; "
        "unexpected: model.first.weight, model.first.bias; "
        "closest pairs: first.weight ~ model.first.weight, first.bias ~ model.first.bias, "
        "last.weight ~ model.first.weight; "
        "rename the modules, or load with missing=Missing.KEEP, unexpected=Unexpected.IGNORE"
    )
    assert caught.value.missing == ("first.weight", "first.bias", "last.weight")
    assert caught.value.unexpected == ("model.first.weight", "model.first.bias")
    assert same(before, bits(model))


def test_missing_names_are_kept_and_unexpected_ones_ignored_only_when_asked() -> None:
    source, target = net(), net()
    leaves = dict(capture_model(source).leaves)
    leaves["extra"] = leaves.pop("0.bias")
    bias = target[0].bias.clone()
    with pytest.raises(KeyMismatchError):
        restore_model(target, leaves, missing=Missing.KEEP)
    with pytest.raises(KeyMismatchError):
        restore_model(target, leaves, unexpected=Unexpected.IGNORE)
    report = restore_model(target, leaves, missing=Missing.KEEP, unexpected=Unexpected.IGNORE)
    assert report.missing == ("0.bias",) and report.unexpected == ("extra",)
    assert torch.equal(target[0].bias, bias)
    assert torch.equal(target[0].weight, source[0].weight)


def test_all_shapes_that_differ_are_refused_in_one_error_before_anything_is_touched() -> None:
    target = net(5)
    before = bits(target)
    with pytest.raises(ShapeMismatchError) as caught:
        load(target, capture_model(net(4)))
    assert str(caught.value).startswith(
        "6 shapes differ; 0.weight: the model wants (5, 3), the checkpoint holds (4, 3); "
        "0.bias: the model wants (5,), the checkpoint holds (4,); "
    )
    assert same(before, bits(target))


def test_a_shape_that_differs_is_skipped_when_asked_and_reported() -> None:
    source, target = net(4), net(4)
    target[0] = nn.Linear(3, 5)
    weight = target[0].weight.clone()
    report = load(target, capture_model(source), shape=ShapePolicy.SKIP)
    assert report.skipped == (
        ShapeDifference(name="0.weight", stored=(4, 3), live=(5, 3)),
        ShapeDifference(name="0.bias", stored=(4,), live=(5,)),
    )
    assert torch.equal(target[0].weight, weight)
    assert torch.equal(target[1].running_mean, source[1].running_mean)


def test_a_dtype_that_differs_is_refused_and_cast_only_when_asked() -> None:
    source, target = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).bfloat16()
    with pytest.raises(DtypeMismatchError) as caught:
        load(target, capture_model(source))
    assert str(caught.value) == (
        "1 dtypes differ; weight: the model has BF16, the checkpoint holds F32; "
        "build the model in the saved dtype, or load with dtype=DtypePolicy.CAST"
    )
    report = load(target, capture_model(source), dtype=DtypePolicy.CAST)
    assert report.cast == (DtypeDifference(name="weight", stored="F32", live="BF16"),)
    assert torch.equal(target.weight, source.weight.bfloat16())


@pytest.mark.case("V01")
def test_a_stored_tie_fills_an_untied_model_twice_and_says_so() -> None:
    source, target = Tied(tied=True), Tied(tied=False)
    report = load(target, capture_model(source))
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert torch.equal(target.head.weight, source.embed.weight)
    assert report.untied == (("head.weight", "embed.weight"),) and report.filled == 2


@pytest.mark.case("V01")
def test_a_tie_is_still_a_tie_after_the_restore() -> None:
    source, target = Tied(tied=True), Tied(tied=True)
    report = load(target, capture_model(source))
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.head.weight, source.head.weight)
    assert report.untied == () and report.filled == 1


def test_a_tied_model_takes_a_checkpoint_that_holds_either_name() -> None:
    for name in ("embed.weight", "head.weight"):
        target = Tied(tied=True)
        report = restore_model(target, {name: torch.full((6, 2), 7.0)})
        assert bool((target.embed.weight == 7).all()) and report.missing == ()


def test_a_tied_model_refuses_two_stored_values_that_differ() -> None:
    separate = capture_model(Tied(tied=False))
    target = Tied(tied=True)
    before = bits(target)
    with pytest.raises(MismatchError, match=r"ties embed\.weight and head\.weight, but .* diff"):
        load(target, separate)
    assert same(before, bits(target))


def test_a_tied_model_takes_two_stored_values_that_agree_to_the_bit() -> None:
    separate = Tied(tied=False)
    with torch.no_grad():
        separate.embed.weight[0, 0] = float("nan")
        separate.head.weight.copy_(separate.embed.weight)
    target = Tied(tied=True)
    state = capture_model(separate)
    plan = plan_restore_model(
        target, {name: ("F32", tuple(t.shape)) for name, t in state.leaves.items()}, {}
    )
    assert plan.must_equal == (("embed.weight", "head.weight"),)
    assert list(plan.targets) == ["embed.weight"]
    load(target, state)


def test_a_model_on_meta_gets_memory_and_its_values() -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    load(target, capture_model(source))
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)


def test_strided_live_tensors_keep_their_strides() -> None:
    target = nn.Module()
    target.weight = nn.Parameter(torch.zeros(5, 3).t())
    restore_model(target, {"weight": torch.arange(15.0).view(3, 5)})
    assert target.weight.stride() == (1, 3)
    assert torch.equal(target.weight, torch.arange(15.0).view(3, 5))


class Counter(nn.Linear):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: dict[str, Any] = {"n": 0}

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


@pytest.mark.case("C2.14")
def test_module_extra_state_is_captured_apart_and_given_back() -> None:
    source, target = nn.Sequential(Counter()), nn.Sequential(Counter())
    cast(Counter, source[0]).calls = {"n": 5, "seen": (1, 2)}
    state = capture_model(torch.compile(source, backend="eager"))  # type: ignore[arg-type]
    assert list(state.leaves) == ["0.weight", "0.bias"]
    assert state.extra == {"0._extra_state": {"n": 5, "seen": (1, 2)}}
    load(target, state)
    assert cast(Counter, target[0]).calls == {"n": 5, "seen": (1, 2)}


@pytest.mark.case("C2.14")
def test_extra_state_that_is_not_stored_is_missing() -> None:
    state = capture_model(nn.Sequential(Counter()))
    with pytest.raises(KeyMismatchError) as caught:
        restore_model(nn.Sequential(Counter()), state.leaves)
    assert caught.value.missing == ("0._extra_state",)
    with pytest.raises(KeyMismatchError) as caught:
        restore_model(nn.Sequential(nn.Linear(2, 2)), state.leaves, extra=state.extra)
    assert caught.value.unexpected == ("0._extra_state",)


class Packed(nn.Module):
    """Stores codes that are made when asked, as quantised layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))
        self.values = [1, 2, 3]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "codes"] = torch.tensor(self.values, dtype=torch.uint8)
        destination[prefix + "kind"] = "packed"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.values = state_dict.pop(prefix + "codes").tolist()
        assert state_dict.pop(prefix + "kind") == "packed"
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_packs_its_weights_is_asked_and_gets_them_back() -> None:
    source, target = nn.Sequential(Packed()), nn.Sequential(Packed())
    cast(Packed, source[0]).values = [9, 8, 7]
    state = capture_model(source)
    assert list(state.leaves) == ["0.scale", "0.codes"]
    assert state.leaves["0.scale"].data_ptr() == cast(Packed, source[0]).scale.data_ptr()
    assert state.extra == {"0.kind": "packed"}
    load(target, state)
    assert cast(Packed, target[0]).values == [9, 8, 7]
    assert torch.equal(cast(Packed, target[0]).scale, cast(Packed, source[0]).scale)


class LeavesFrozenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(2, 2), nn.Linear(2, 2)
        self.base.requires_grad_(requires_grad=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if name.startswith("adapter")}


def test_a_model_that_leaves_weights_out_of_its_state_dict_is_taken_at_its_word() -> None:
    source, target = LeavesFrozenOut(), LeavesFrozenOut()
    state = capture_model(source)
    assert list(state.leaves) == ["adapter.weight", "adapter.bias"]
    load(target, state)
    assert torch.equal(target.adapter.weight, source.adapter.weight)


def test_a_hook_that_renames_decides_the_name_and_identity_decides_the_tensor() -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    source: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    target: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    for model in (source, target):
        model[0].register_state_dict_post_hook(rename)
    state = capture_model(source)
    assert list(state.leaves) == ["0.kernel"]
    assert state.names[id(source[0].weight)] == "0.kernel"
    load(target, state)
    assert torch.equal(target[0].weight, source[0].weight)


def test_load_hooks_run_after_the_tensors_are_filled() -> None:
    seen: list[float] = []
    model: Any = nn.Linear(1, 1, bias=False)
    model.register_load_state_dict_post_hook(lambda m, _: seen.append(m.weight.item()))
    restore_model(model, {"weight": torch.full((1, 1), 3.0)})
    assert seen == [3.0]


def test_a_peft_model_has_its_own_names_and_is_restored() -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> nn.Module:
        base = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
        config = LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False)
        return cast(nn.Module, get_peft_model(base, config))

    source, target = adapted(), adapted()
    state = capture_model(source)
    assert set(state.leaves) == set(source.state_dict())
    load(target, state)
    assert same(bits(source), bits(target))


@pytest.mark.usefixtures("process_group")
def test_fully_sharded_modules_stay_dtensors_also_after_an_unsharded_forward() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    source, target = net(), net()
    for model in (source, target):
        fully_shard(model, reshard_after_forward=False)
    source.eval()
    source(torch.randn(2, 3))
    state = capture_model(source)
    assert all(isinstance(state.leaves[n], DTensor) for n, _ in source.named_parameters())
    assert set(state.names.values()) == set(state.leaves)
    load(target, state)
    assert same(
        {n: cast(Any, p).full_tensor() for n, p in source.named_parameters()},
        {n: cast(Any, p).full_tensor() for n, p in target.named_parameters()},
    )

"""Buffers that no checkpoint holds are never left without their values by a load."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from milepost.errors import InvalidInputError
from milepost.state.model import capture_model
from milepost.state.model_plan import plan_restore_model
from milepost.state.tensors import stored_dtype, stored_shape


class Rotary(nn.Module):
    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)


@pytest.mark.case("V04")
def test_a_non_persistent_buffer_on_meta_is_refused_by_name() -> None:
    state = capture_model(Rotary())
    assert set(state.leaves) == {"weight"}
    stored = {name: (stored_dtype(t), stored_shape(t)) for name, t in state.leaves.items()}
    model = Rotary()
    model.inv_freq = torch.empty(4, device="meta")
    with pytest.raises(InvalidInputError, match=r"1 tensors .* values: inv_freq; build"):
        plan_restore_model(model, stored, state.ties)


@pytest.mark.case("V04")
def test_a_load_leaves_computed_buffers_as_the_model_made_them() -> None:
    state = capture_model(Rotary())
    stored = {name: (stored_dtype(t), stored_shape(t)) for name, t in state.leaves.items()}
    model = Rotary()
    plan = plan_restore_model(model, stored, state.ties)
    plan.fill(state.leaves)
    plan.finish()
    assert model.inv_freq.tolist() == [0.0, 1.0, 2.0, 3.0]

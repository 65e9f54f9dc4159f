"""Payloads of torch.save and how to compare them, for the tests of archives."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import nn

from milepost.format.lazy import ITEM_NBYTES

Same: TypeAlias = Callable[[Any, Any], None]
DTYPES = [getattr(torch, name) for name in ITEM_NBYTES if hasattr(torch, name)]


def assert_same(a: Any, b: Any) -> None:
    """Equal in type, structure and every bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert (a.requires_grad, a.storage_offset()) == (b.requires_grad, b.storage_offset())
        assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        assert bytes(a.untyped_storage()) == bytes(b.untyped_storage())
        assert_same(vars(a), vars(b))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
        assert_same(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def some_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape)) * ITEM_NBYTES[str(dtype).removeprefix("torch.")]
    raw = torch.arange(count, dtype=torch.int64).remainder(2 if dtype is torch.bool else 120)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def training() -> dict[str, Any]:
    """Model, optimizers, schedulers and scaler after a step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ]
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 10),
        torch.optim.lr_scheduler.MultiStepLR(optimizers[1], [2, 2, 5]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0]),
        torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.1, total_steps=10),
    ]
    model(torch.randn(5, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return {
        "model_state": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng": (torch.get_rng_state(), random.getstate()),
        "epoch": 3,
    }


def payloads() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    marked = torch.ones(2)
    marked.partition_dim = 0  # type: ignore[attr-defined]
    with_state = nn.Parameter(torch.ones(2))
    with_state.shared = True  # type: ignore[attr-defined]
    tied = nn.Parameter(torch.randn(3, 3))
    return {
        "dtypes": {str(dtype): some_tensor(dtype, 2, 3) for dtype in DTYPES},
        "empty": [some_tensor(dtype, 0, 3) for dtype in DTYPES],
        "scalars": [torch.tensor(1.5), torch.tensor(True), torch.tensor(3, dtype=torch.uint64)],
        "views": [base, base[1], base.t(), base[:, ::2], base[1:3, 2:], base.view(-1)[5:5]],
        "expanded": [torch.ones(1).expand(3, 4), base[:1].expand(5, 6)],
        "wrapped names": {"_orig_mod.module.w": base, "module._orig_mod.w": base, "": base, 0: 1},
        "tied": {"embed": tied, "head": tied},
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "trained": torch.ones(2, requires_grad=True),
        "attributes": [marked, with_state],
        "conjugate": [torch.randn(3, dtype=torch.cfloat).conj(), base.to(torch.cfloat).conj().imag],
        "values": [torch.Size([2, 3]), torch.device("cuda:1"), torch.strided, torch.bfloat16],
        "plain": [None, True, 2**70, -1, 1.5, float("inf"), "text", b"bytes", (1, (2,)), {1, 2}],
        "containers": [OrderedDict(b=1, a=2), Counter("aab"), {1: {(2, 3): [4]}}, bytearray(b"x")],
        "state dict": nn.BatchNorm1d(3).state_dict(),
        "training": training(),
    }  # fmt: skip


@pytest.fixture
def same() -> Same:
    """Asserts that two structures are equal in type, structure and every bit."""
    return assert_same


@pytest.fixture(params=list(payloads()))
def payload_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def payload(payload_name: str) -> Any:
    """Everything that people put into checkpoints, kind by kind."""
    return payloads()[payload_name]

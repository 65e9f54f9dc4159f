"""A block-quantised optimizer, built as those of torchao are: subclasses of plain tensors.

`Codes` keeps a byte for each element, `Packed` two elements in a byte of a flat buffer; both keep a
scale for every 16 elements of the local tensor and a table that turns codes into floats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import milepost as mp

BLOCK = 16
SMALLEST = 64  # tensors of fewer elements stay floats
aten = torch.ops.aten


class _Quantised(Tensor):
    """`levels` evenly spaced values between -1 and 1, times the scale of the block."""

    levels = 0
    codes: Tensor
    scale: Tensor
    table: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        raise NotImplementedError

    def to_codes(self, codes: Tensor) -> Tensor:
        raise NotImplementedError

    def from_codes(self) -> Tensor:
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        values = self.table[self.from_codes().int()].view(-1, BLOCK)
        return (values * self.scale.view(-1, 1)).view(self.shape)

    def quantise(self, values: Tensor) -> None:
        blocks = values.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-20)
        steps = (blocks / scale.view(-1, 1) + 1) / 2 * (self.levels - 1)
        self.codes.copy_(self.to_codes(steps.round().to(torch.uint8)))
        self.scale.copy_(scale)

    @classmethod
    def zeros(cls, like: Tensor) -> Any:
        table = torch.linspace(-1, 1, cls.levels)
        scale = torch.zeros(like.numel() // BLOCK)
        return cls.made(like, torch.zeros(like.numel(), dtype=torch.uint8), scale, table)

    @classmethod
    def made(cls, like: Tensor, codes: Tensor, scale: Tensor, table: Tensor) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is aten.copy_.default:
            args[0].quantise(args[1])
            return args[0]
        if function in (aten.detach.default, aten.view.default):
            parts, context = args[0].__tensor_flatten__()
            inner = {part: getattr(args[0], part) for part in parts}
            return type(args[0]).__tensor_unflatten__(inner, context, None, None)
        raise NotImplementedError(f"{cls.__name__}: {function}")


class Codes(_Quantised):
    levels = 255

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor, table: Tensor, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, table: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.table = codes, scale, table
        self.block_size = codes.numel() // scale.numel()  # no blocks, no tensor

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale", "table"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Codes:
        return cls(inner["codes"], inner["scale"], inner["table"], *context)

    def to_codes(self, codes: Tensor) -> Tensor:
        return codes.view(self.codes.shape)

    def from_codes(self) -> Tensor:
        return self.codes

    @classmethod
    def made(cls, like: Tensor, codes: Tensor, scale: Tensor, table: Tensor) -> Codes:
        return cls(codes.view(like.shape), scale, table, like.dtype)


class Packed(_Quantised):
    levels = 16

    @staticmethod
    def __new__(
        cls: Any, codes: Tensor, scale: Tensor, table: Tensor, signed: bool, shape: Any
    ) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, device=codes.device)

    def __init__(
        self, codes: Tensor, scale: Tensor, table: Tensor, signed: bool, shape: Any
    ) -> None:
        self.codes, self.scale, self.table, self.signed = codes, scale, table, signed
        self.block_size = codes.numel() * 2 // scale.numel()

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale", "table"], [self.signed, self.shape]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Packed:
        return cls(inner["codes"], inner["scale"], inner["table"], *context)

    def to_codes(self, codes: Tensor) -> Tensor:
        flat = codes.flatten()
        return (flat[::2] << 4) | flat[1::2]

    def from_codes(self) -> Tensor:
        return torch.stack([self.codes >> 4, self.codes & 15], dim=-1).flatten()

    @classmethod
    def made(cls, like: Tensor, codes: Tensor, scale: Tensor, table: Tensor) -> Packed:
        return cls(codes[: like.numel() // 2].clone(), scale, table, True, like.shape)


_PARTS = {"scale": mp.PartRole.RUNS, "table": mp.PartRole.TABLE}
mp.register_tensor_class(
    Codes,
    name="tests.Codes",
    parts={"codes": mp.PartRole.ELEMENTS, **_PARTS},
    attributes=("dtype",),
)
mp.register_tensor_class(
    Packed,
    name="tests.Packed",
    parts={"codes": mp.PartRole.RUNS, **_PARTS},
    attributes=("signed", "shape"),
)


class QuantisedAdam(torch.optim.Optimizer):
    """Adam with moments as `Codes` and `Packed` of each rank's own shard."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, self.state[param], group)

    def _update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = _zeros(param, Codes)
            state["exp_avg_sq"] = _zeros(param, Packed)
        state["step"] += 1
        grad, local = _local(param.grad), _local(param.detach())
        first, second = group["betas"]
        mean = _floats(state["exp_avg"]).lerp(grad, 1 - first)
        square = _floats(state["exp_avg_sq"]).abs().lerp(grad.square(), 1 - second)
        _local(state["exp_avg"]).copy_(mean)
        _local(state["exp_avg_sq"]).copy_(square)
        local -= group["lr"] * mean / (square.sqrt() + 1e-3) / (1 - first ** float(state["step"]))


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found


def _floats(tensor: Tensor) -> Tensor:
    local = _local(tensor)
    return local.dequantize() if isinstance(local, _Quantised) else local.clone()


def _zeros(param: Tensor, kind: type[_Quantised]) -> Tensor:
    local = _local(param.detach())
    small = local.numel() < SMALLEST or local.numel() % BLOCK
    made: Tensor = torch.zeros_like(local) if small else kind.zeros(local)
    if not isinstance(param, DTensor):
        return made
    return DTensor.from_local(
        made,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that this rank holds of a state, by part; "" for one that is plain."""
    local = _local(tensor)
    if not isinstance(local, _Quantised):
        return {"": local.detach().clone()}
    return {part: getattr(local, part).clone() for part in local.__tensor_flatten__()[0]}

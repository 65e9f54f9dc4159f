"""Linear layers whose weights bitsandbytes keeps in 4 or 8 bits, laid out so that a mesh cuts them.

bitsandbytes packs a weight into one column of bytes and keeps the scales of its blocks outside the
parameters. Here the packed weight and its scales are both frozen parameters with a row for each
output. So FSDP2 and tensor parallelism cut them like the weight that they stand for, and gather and
use them with it. They are the bytes of the weight that was quantised whole: a base has the same
values on every mesh.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from milepost_trainer.parallel.collectives import local

_SCALES = "scales"
_COLUMNS_MORE = 16  # as many as keep products of 8-bit matrices aligned


class FourBitLinear(nn.Linear):
    """A `Linear4bit` of bitsandbytes. `weight` has two columns a byte, `scales` one a block.

    Where blocks run on from row to row, both are a column, which FSDP2 can cut and tensor
    parallelism cannot. Scales that were quantised themselves are kept as the floats they stand for.
    """

    _hf_quantized_needs_local_tp = True  # transformers then gives `forward` plain tensors

    def __init__(self, quantized: Any) -> None:
        super().__init__(quantized.in_features, quantized.out_features, False, device="meta")
        state = quantized.weight.quant_state
        scales = state.absmax
        if state.nested:
            functional = importlib.import_module("bitsandbytes").functional
            scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        self.block_size, self.quant_type = state.blocksize, state.quant_type
        self.code, self.stored_dtype = state.code, state.dtype
        self.compute_dtype = quantized.compute_dtype
        self.has_rows = self.in_features % self.block_size == 0
        shape = (self.out_features if self.has_rows else -1, -1 if self.has_rows else 1)
        packed = quantized.weight.data.view(torch.uint8)
        self.weight = _frozen(packed.reshape(shape))
        self.scales = _frozen(scales.float().reshape(shape))
        self.bias = quantized.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bitsandbytes = importlib.import_module("bitsandbytes")
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        packed, state = self._packed(self.weight, self.scales)
        product: torch.Tensor = bitsandbytes.matmul_4bit(
            x.to(dtype), packed, bias=bias, quant_state=state
        )
        return product.to(x.dtype)

    def dequantized(self) -> torch.Tensor:
        """The weight, of this rank's rows and columns, in the dtype that it was quantised from."""
        functional = importlib.import_module("bitsandbytes").functional
        packed, state = self._packed(local(self.weight), local(self.scales))
        weight: torch.Tensor = functional.dequantize_4bit(packed, state)
        return weight

    def _packed(self, weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What bitsandbytes takes for the weight."""
        here = (self.out_features, self.in_features)
        if self.has_rows:
            here = (weight.shape[0], 2 * weight.shape[1])
        state = importlib.import_module("bitsandbytes").functional.QuantState(
            absmax=scales.view(-1),
            shape=torch.Size(here),
            code=self.code,
            blocksize=self.block_size,
            quant_type=self.quant_type,
            dtype=self.stored_dtype,
        )
        return weight.view(-1, 1), state


class EightBitLinear(nn.Linear):
    """A `Linear8bitLt` of bitsandbytes. `weight` is of its shape, `scales` has one a row.

    bitsandbytes rounds the inputs too, by the largest of each row, but in training on a CPU. Ranks
    with some of the columns round by the largest of all columns (`inputs_group`).
    """

    _hf_quantized_needs_local_tp = True
    inputs_group: dist.ProcessGroup | None = None

    def __init__(self, quantized: Any) -> None:
        super().__init__(quantized.in_features, quantized.out_features, False, device="meta")
        self.threshold = quantized.state.threshold
        self.weight = _frozen(quantized.weight.data)
        scales = quantized.weight.SCB  # moved to the state by the first forward
        self.scales = _frozen(quantized.state.SCB if scales is None else scales)
        self.bias = quantized.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bitsandbytes = importlib.import_module("bitsandbytes")
        weight = self.weight.data
        if self.inputs_group is not None and not (self.training and x.device.type == "cpu"):
            x, weight = self._with_largest_of_all(x, weight)
        state = bitsandbytes.MatmulLtState()
        state.has_fp16_weights = False
        state.is_training = self.training
        state.threshold = self.threshold
        state.CB, state.SCB = weight, self.scales.data
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product: torch.Tensor = bitsandbytes.matmul(x, weight, bias=bias, state=state)
        return product

    def dequantized(self) -> torch.Tensor:
        """The weight, of this rank's rows and columns, in fp32."""
        return _of_rows(local(self.weight), local(self.scales))

    def _with_largest_of_all(
        self, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs with the largest of all ranks in one column more, whose weights are zero."""
        sizes = x.detach().half().abs()  # bitsandbytes rounds what it has cast to float16
        sizes = sizes.masked_fill(sizes >= self.threshold, 0) if self.threshold else sizes
        largest = sizes.amax(dim=-1, keepdim=True).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.inputs_group)
        zeros = x.new_zeros(*x.shape[:-1], _COLUMNS_MORE - 1)
        weightless = weight.new_zeros(len(weight), _COLUMNS_MORE)
        return (
            torch.cat((x, largest.to(x.dtype), zeros), dim=-1),
            torch.cat((weight, weightless), dim=-1),
        )


def dequantized(layer: Any) -> torch.Tensor:
    """What the weight of a layer in few bits stands for, of this rank's rows and columns.

    The layer is one of the above, or a `Linear8bitLt`.
    """
    if isinstance(layer, FourBitLinear | EightBitLinear):
        return layer.dequantized()
    scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return _of_rows(layer.weight.data, scales)


def use_kernels_of_training(model: nn.Module) -> None:
    """Keeps bitsandbytes from repacking 4-bit weights of a whole model when it evaluates.

    It does so on a CPU with bfloat16, rounds the scales, and goes on to train without the gradients
    of what comes before.
    """
    layers = importlib.import_module("bitsandbytes").nn
    for module in model.modules():
        if isinstance(module, layers.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def lay_out_quantized(model: nn.Module) -> None:
    """Replaces the quantised layers of a whole model by layers that can be cut."""
    layers = importlib.import_module("bitsandbytes").nn
    for name, module in list(model.named_modules()):
        if isinstance(module, layers.Linear4bit):
            model.set_submodule(name, FourBitLinear(module))
        elif isinstance(module, layers.Linear8bitLt):
            model.set_submodule(name, EightBitLinear(module))


def prepare_cut(module: nn.Module, name: str, style: str, mesh: DeviceMesh) -> bool:
    """Whether tensor parallelism cuts the parameter `name` of `module` by `style` over `mesh`.

    Scales of rows stay whole where columns are cut. `ValueError` when a block would be divided.
    """
    by_columns = "rowwise" in style
    if isinstance(module, FourBitLinear):
        _require_whole_blocks(module, name, by_columns, mesh.size())
    elif isinstance(module, EightBitLinear) and by_columns:
        module.inputs_group = mesh.get_group()
        return not name.endswith(f".{_SCALES}")
    return True


def _require_whole_blocks(module: FourBitLinear, name: str, by_columns: bool, ways: int) -> None:
    columns, block = module.in_features, module.block_size
    unit = block * ways if by_columns else block
    if columns % unit:
        raise ValueError(
            f"load_in_4bit: {name} has {columns} columns, and tp={ways} would divide its blocks of "
            f"{block} weights: cut by {'columns' if by_columns else 'rows'}, it needs a multiple "
            f"of {unit}. Use dp_shard_size or cp_size in place of tp_size, or load_in_8bit"
        )


def _of_rows(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    functional = importlib.import_module("bitsandbytes").functional
    floats: torch.Tensor = functional.int8_vectorwise_dequant(weight, scales)
    return floats


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)

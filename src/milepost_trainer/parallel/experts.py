"""Expert parallelism: whole experts on each rank (EP), cut ones (ETP), or both.

The ranks of a group `(ep, etp)` hold different tokens. Each (token, expert) pair travels to the
`etp` ranks that hold the slices of that expert, in one all-to-all; the partial results come back
in another one and are summed where the token is. So it makes no difference where tokens come
from: data-, context- or tensor-parallel ranks, or a microbatch of a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

DOWN_BIAS = "down_proj_bias"
FACTORS = "expert_lora"
"""The module in a module of experts that has their grouped adapters, by projection."""

_JOINED_B = re.compile(r"(^|\.)lora_B\.[^.]+$")
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold fused experts, with their names."""
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "num_experts"):
            yield name, module


def cut_grouped_adapters(model: nn.Module) -> None:
    """Cuts the adapters of experts whose weights tensor parallelism has cut.

    Of a weight whose outputs are cut, `lora_B` is cut with them; of one whose inputs are cut,
    `lora_A`. The other factor stays whole on each rank.
    """
    for _, module in expert_modules(model):
        for projection, adapter in getattr(module, FACTORS, nn.ModuleDict()).items():
            weight = module.get_parameter(projection)
            if isinstance(weight, DTensor):
                _cut_factor(adapter, weight, is_transposed=bool(module.is_transposed))


def _cut_factor(adapter: nn.Module, weight: DTensor, *, is_transposed: bool) -> None:
    cut: Any = weight.placements[0]
    outputs, inputs = (2, 1) if is_transposed else (1, 2)
    name, dim = {outputs: ("lora_B", 2), inputs: ("lora_A", 1)}[cut.dim % weight.ndim]
    pieces = getattr(cut, "split_factor", 1)
    placement: Any = Shard(dim) if pieces == 1 else _StridedShard(dim=dim, split_factor=pieces)
    whole = adapter.get_parameter(name)
    sharded = distribute_tensor(whole.detach(), weight.device_mesh, [placement], src_data_rank=None)
    adapter.register_parameter(name, nn.Parameter(sharded, whole.requires_grad))


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    """Cuts the experts over `mesh`, `(ep, etp)`, and sends tokens to them.

    `tp_mesh` is the group of ranks that hold the same tokens. Raises `ValueError` when experts do
    not fit.
    """
    found = list(expert_modules(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no fused experts: use ep=1 and etp=1")
    group = (
        mesh._flatten("ep_etp").get_group() if mesh["etp"].size() > 1 else mesh["ep"].get_group()
    )
    for name, module in found:
        _cut(name, module, mesh)
        _Dispatch(module, group, tp_mesh, copies=mesh["etp"].size()).install()


def _cut(name: str, module: Any, mesh: DeviceMesh) -> None:
    ep, etp = mesh["ep"].size(), mesh["etp"].size()
    if module.num_experts % ep:
        raise ValueError(f"ep={ep} must divide the {module.num_experts} experts of {name}")
    for owner_name, owner in module.named_modules():  # itself, and adapters of its experts
        for param_name, param in list(owner.named_parameters(recurse=False)):
            placements = [_experts_of(owner_name, param, module.num_experts)]
            if etp > 1:
                placements.append(_inner_cut(name, module, param_name, etp))
            view = mesh if etp > 1 else mesh["ep"]
            sharded = distribute_tensor(param.detach(), view, placements, src_data_rank=None)
            owner.register_parameter(param_name, nn.Parameter(sharded, param.requires_grad))
    for owner in module.modules():
        if "num_experts" in vars(owner):
            owner.num_experts //= ep


def _experts_of(owner: str, param: torch.Tensor, experts: int) -> Any:
    """How ranks share the experts of a parameter: it counts them first.

    The second factor of peft's adapters of parameters, (outputs, r x experts), counts them last.
    """
    if _JOINED_B.search(owner) and param.ndim == 2:
        return _StridedShard(dim=1, split_factor=param.shape[1] // experts)
    return Shard(0)


def _inner_cut(name: str, module: Any, param_name: str, etp: int) -> Any:
    """How the `etp` ranks of an expert share a parameter: outputs of gate and up, inputs of down.

    Each adds a part of the bias of down, which so is added once.
    """
    param = getattr(module, param_name, None)
    is_transposed = getattr(module, "is_transposed", False)
    dims = {
        "gate_up_proj": 2 if is_transposed else 1,
        "gate_up_proj_bias": 1,
        "down_proj": 1 if is_transposed else 2,
        DOWN_BIAS: 1,
    }
    if param_name not in dims or param is None:
        raise ValueError(
            f"{name}.{param_name} has no rule for expert tensor parallelism, which knows "
            f"{', '.join(dims)}: use etp=1"
        )
    dim = dims[param_name]
    is_packed = param_name.startswith("gate_up")
    size = param.shape[dim] // (2 if is_packed else 1)
    if size % etp:
        raise ValueError(f"etp={etp} must divide the size {size} of {name}.{param_name}")
    if is_packed and getattr(module, "is_concatenated", True):
        return _StridedShard(dim=dim, split_factor=2)
    return Shard(dim)


class _Move(torch.autograd.Function):
    """Sends rows to the ranks of a group, `sends[i]` of them to rank i; gradients come back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sends: list[int],
        receives: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _moved(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _moved(gradients[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _moved(
    rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty((sum(receives), rows.shape[1]))
    dist.all_to_all_single(out, rows.contiguous(), receives, sends, group)
    return out


class _Dispatch:
    """The forward of one experts module, on tokens of all ranks of its group."""

    def __init__(
        self, module: Any, group: dist.ProcessGroup, tp_mesh: DeviceMesh, *, copies: int
    ) -> None:
        self.module = module
        self.experts: Experts = module.forward
        self.group, self.tp_mesh, self.copies = group, tp_mesh, copies
        self.local_experts: int = module.num_experts

    def install(self) -> None:
        self.module.forward = self

    def __call__(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted expert outputs `(tokens, hidden)` for `(tokens, top_k)` global expert ids."""
        count = hidden.shape[0]
        mine = [self._own_rows(tensor) for tensor in (hidden, expert_ids, weights)]
        with _local_parameters(self.module):
            output = self._exchange(*mine)
        if self.tp_mesh.size() == 1:
            return output
        shape = torch.Size((count, hidden.shape[1]))
        whole = DTensor.from_local(
            output.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)
        )
        return whole.full_tensor()

    def _own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensor-parallel ranks hold the same tokens; each sends its share of them."""
        if self.tp_mesh.size() == 1:
            return tensor
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _exchange(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ranks, top_k = self.group.size(), expert_ids.shape[1]
        chosen = expert_ids.reshape(-1)
        owner = chosen // self.local_experts
        # Pair p goes to ranks owner * copies ... owner * copies + copies - 1 of the group.
        targets = owner[:, None] * self.copies + torch.arange(self.copies, device=owner.device)
        order = torch.argsort(
            (targets * self.local_experts + (chosen % self.local_experts)[:, None]).reshape(-1),
            stable=True,
        )
        pairs = order // self.copies
        counts = torch.bincount(targets.reshape(-1), minlength=ranks)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        sends, receives = counts.tolist(), received.tolist()
        tokens = self._move(hidden[pairs // top_k], sends, receives)
        ids = torch.empty(sum(receives), dtype=chosen.dtype, device=chosen.device)
        dist.all_to_all_single(
            ids, (chosen % self.local_experts)[pairs].contiguous(), receives, sends, self.group
        )
        results = self._move(self._run(tokens, ids), receives, sends)
        # Sorted by pair again: the copies of a pair, which hold partial sums, lie side by side.
        back = torch.argsort(order)
        summed = results[back].view(-1, self.copies, hidden.shape[1]).sum(dim=1)
        return (summed.view(-1, top_k, hidden.shape[1]) * weights[..., None]).sum(dim=1)

    def _move(self, rows: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        moved: torch.Tensor = _Move.apply(rows, sends, receives, self.group)  # type: ignore[no-untyped-call]
        return moved

    def _run(self, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The local experts on `(rows, hidden)`; without rows, on one, to keep the graph whole."""
        rows = tokens.shape[0]
        if rows == 0:
            tokens, ids = tokens.sum(dim=0, keepdim=True), ids.new_zeros(1)
        output = self.experts(tokens, ids[:, None], tokens.new_ones((len(ids), 1)))
        return output[:rows]


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    owners: list[dict[str, Any]] = [part._parameters for part in module.modules()]
    originals = [dict(held) for held in owners]
    for held in owners:
        held.update({n: _local(n, p) for n, p in held.items() if isinstance(p, DTensor)})
    try:
        yield
    finally:
        for held, original in zip(owners, originals, strict=True):
            held.update(original)


def _local(name: str, param: DTensor) -> torch.Tensor:
    """What this rank has of a parameter; of the bias of down, zeros for what others have of it."""
    local = param.to_local()
    width = param.shape[-1]
    if name != DOWN_BIAS or local.shape[-1] == width:
        return local
    before = param.device_mesh.get_local_rank("etp") * local.shape[-1]
    return nn.functional.pad(local, (before, width - before - local.shape[-1]))

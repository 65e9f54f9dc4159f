"""What the sidecars of a training checkpoint ask of an output, as groups."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from milepost.engine.read import dtype_name, header_shape
from milepost.hf.training_sidecars import SidecarPlan, sidecar_actions
from milepost.layouts.checkpoint import TensorInfo
from milepost.storage.fileops import PathLike
from milepost.tools.rewrite.groups import Computed, TensorSpec
from milepost.tools.rewrite.source import Source, SourceTensor


def sidecar_plan(source: Source, trained: PathLike | None = None) -> SidecarPlan:
    """What the sidecars in `trained` (by default beside the weights of `source`) ask for.

    Empty for a source that is no directory: it has nothing beside its weights.
    """
    place = source.path if trained is None else trained
    if trained is None and not source.path.is_dir():
        return SidecarPlan()
    return sidecar_actions(place, infos(source.tensors.values()), source.config)


def infos(tensors: Iterable[SourceTensor]) -> dict[str, TensorInfo]:
    """Headers of tensors, as layouts list them."""
    return {
        tensor.name: TensorInfo(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            nbytes=tensor.nbytes,
            file="" if tensor.path is None else tensor.path.name,
        )
        for tensor in tensors
    }


def constant(name: str, value: Tensor, replaces: SourceTensor | None = None) -> Computed:
    """An output tensor of which the value is known, in place of an input or new."""
    dtype = dtype_name(value)
    assert dtype is not None, f"{name}: safetensors cannot hold {value.dtype}"
    spec = TensorSpec(name=name, dtype=dtype, shape=header_shape(value))
    inputs = {} if replaces is None else {replaces.name: replaces}
    return Computed(inputs=inputs, outputs=(spec,), make=lambda _: {name: value})

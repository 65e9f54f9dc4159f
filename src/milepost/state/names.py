"""Canonical names: what a tensor is called once every wrapper around its module is taken off.

A wrapper is told by looking at the module, never by its name: a model may well have a submodule
that it calls `module`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from milepost.errors import InvalidInputError
from milepost.format.names import COMPILE_SEGMENT
from milepost.format.names import strip_compile_prefix as strip_compile_prefix

FQN: TypeAlias = str
Model: TypeAlias = nn.Module | Sequence[nn.Module]

# (module that defines the wrapper, its class, the attribute that holds the wrapped module).
# A class can only be in use when its module has been imported, so nothing is imported here.
WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", COMPILE_SEGMENT),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


class Place(NamedTuple):
    """A module inside a model: dotted prefixes end in a dot or are empty."""

    canonical: str
    runtime: str
    module: nn.Module


def wrapped_attribute(module: nn.Module) -> str | None:
    """Name of the attribute under which `module` holds the module it wraps, or None."""
    for source, class_name, attribute in WRAPPERS:
        wrapper = getattr(sys.modules.get(source), class_name, None)
        if wrapper is not None and isinstance(module, wrapper):
            return attribute
    return None


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside any nesting of compile, DDP, FSDP1 and checkpoint wrappers."""
    while (attribute := wrapped_attribute(model)) is not None:
        inner = model._modules[attribute]
        assert inner is not None, f"a {type(model).__name__} wraps nothing"
        model = inner
    return model


def canonical_names(model: Model) -> dict[FQN, str]:
    """Canonical to runtime name of each parameter and persistent buffer, in module order.

    The runtime name is the path of attributes that leads to the tensor. Names tied to one tensor
    all appear. Two tensors that would get one name are refused, naming both.

    >>> canonical_names(nn.Sequential(nn.Linear(2, 2, bias=False)))
    {'0.weight': '0.weight'}
    """
    found: dict[FQN, str] = {}
    for place in places(model):
        for name, _ in own_tensors(place.module):
            canonical, runtime = place.canonical + name, place.runtime + name
            if canonical in found:
                raise InvalidInputError(
                    f"{found[canonical]} and {runtime} both become {canonical} once wrappers are "
                    f"taken off; rename one of the modules"
                )
            found[canonical] = runtime
    return found


def roots(model: Model) -> list[tuple[str, nn.Module]]:
    """(runtime prefix, module) of each part of a model; a list of modules is one model."""
    if isinstance(model, nn.Module):
        return [("", model)]
    return [(f"[{index}].", part) for index, part in enumerate(model)]


def places(model: Model) -> Iterator[Place]:
    """Every module below `model` that is not a wrapper, parents first."""
    for runtime, part in roots(model):
        yield from _walk(Place("", runtime, part))


def unwrapped(place: Place) -> Place:
    """`place` with the wrappers around its module taken off."""
    runtime, module = place.runtime, place.module
    while (attribute := wrapped_attribute(module)) is not None:
        inner = module._modules[attribute]
        assert inner is not None, f"{runtime or 'model'}: a {type(module).__name__} wraps nothing"
        runtime, module = f"{runtime}{attribute}.", inner
    return Place(place.canonical, runtime, module)


def children(place: Place) -> Iterator[Place]:
    """The direct submodules of `place`, which is no wrapper; wrappers around them are kept."""
    for name, child in place.module._modules.items():
        if child is not None:
            yield Place(f"{place.canonical}{name}.", f"{place.runtime}{name}.", child)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers that belong to `module` itself."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _walk(place: Place) -> Iterator[Place]:
    place = unwrapped(place)
    yield place
    for child in children(place):
        yield from _walk(child)

"""A sampler whose position outlives a change of the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from milepost.errors import FormatError, InvalidInputError, MismatchError

_COUNTS = ("epoch", "base", "taken", "left", "num_replicas", "length", "seed")


class SampleOrder(Enum):
    """In which order an epoch goes through the data."""

    SHUFFLED = "shuffled"
    """Drawn anew for each epoch, from the seed and the number of the epoch alone."""
    SEQUENTIAL = "sequential"


class EpochTail(Enum):
    """What happens at the end of an epoch to samples that are too few for all ranks."""

    UNEVEN = "uneven"
    """The first ranks get one more: every sample once."""
    DROP = "drop"
    """They are left out."""
    REPEAT = "repeat"
    """All ranks get as many: the first samples of the epoch come again."""


class ElasticSampler(Sampler[int]):
    """Indices of `data` for one of `num_replicas` data-parallel ranks, in one order for all.

    The ranks take turns: sample `p` of an epoch goes to rank `p % num_replicas`. So when all have
    made the same steps, what was read is the first part of the epoch, and a resume on any other
    number of ranks goes on from its end. Use it as `sampler=` of torchdata's `StatefulDataLoader`,
    any number of workers, and put the loader into the state; `num_replicas` and `rank` are those of
    the default process group unless given (under tensor parallelism: those of the data-parallel
    axis). Its epochs advance by themselves; `set_epoch` is not needed, and harmless.

    >>> sampler = ElasticSampler(range(10), num_replicas=2, rank=1, order=SampleOrder.SEQUENTIAL)
    >>> list(sampler)
    [1, 3, 5, 7, 9]
    """

    position_key = "elastic_sampler"

    def __init__(
        self,
        data: Sized,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        order: SampleOrder = SampleOrder.SHUFFLED,
        seed: int = 0,
        tail: EpochTail = EpochTail.UNEVEN,
    ) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if is_distributed else 1
        if rank is None:
            rank = dist.get_rank() if is_distributed else 0
        if not 0 <= rank < num_replicas:
            raise InvalidInputError(f"ElasticSampler: rank {rank} of {num_replicas} replicas")
        if seed < 0:
            raise InvalidInputError(f"ElasticSampler: seed {seed}: give one from 0 up")
        self.data, self.num_replicas, self.rank = data, num_replicas, rank
        self.order, self.seed, self.tail = order, seed, tail
        self.epoch = 0
        self._base = 0  # samples of the epoch that the whole job had read when this pass began
        self._taken = 0  # samples that this rank took since
        self._goes_on = False

    def __len__(self) -> int:
        """Samples of this rank in this pass: of an epoch that was resumed, those that are left."""
        return self._count()

    def __iter__(self) -> Iterator[int]:
        if self._taken >= self._count():
            self.epoch, self._base, self._taken = self.epoch + 1, 0, 0
        elif not self._goes_on:
            self._taken = 0
        self._goes_on = False
        return _Pass(self)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; nothing happens when it is the one under way."""
        if epoch != self.epoch:
            self.epoch, self._base, self._taken = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands; what `load_state_dict` takes, on any number of ranks."""
        return {
            self.position_key: 1,
            "epoch": self.epoch,
            "base": self._base,
            "taken": self._taken,
            "left": self._count() - self._taken,
            "num_replicas": self.num_replicas,
            "length": len(self.data),
            "seed": self.seed,
            "order": self.order.value,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. `MismatchError` when it is a place in other data, or another order."""
        self._check(state_dict)
        self.epoch, self._base = state_dict["epoch"], state_dict["base"]
        self._taken = state_dict["taken"]
        if state_dict["num_replicas"] != self.num_replicas:
            self._base, self._taken = self.position_of(state_dict)["base"], 0
        self._goes_on = True

    def position_of(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one rank as one of the whole job: as if a single rank stood there."""
        length = state_dict["length"]
        base = state_dict["base"] + state_dict["num_replicas"] * state_dict["taken"]
        base = min(base, length) if state_dict["left"] else length
        return {**state_dict, "base": base, "taken": 0, "left": length - base, "num_replicas": 1}

    def global_state_dict(self) -> dict[str, Any]:
        """The position of the whole job, when all ranks have taken as many samples as this one.

        In the last step of an `UNEVEN` epoch, in which some ranks have nothing left, they disagree.
        """
        return self.position_of(self.state_dict())

    def load_global_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a share of what the whole job has not read."""
        self.load_state_dict(state_dict)

    def _count(self) -> int:
        left = len(self.data) - self._base
        if self.tail is EpochTail.DROP:
            return left // self.num_replicas
        missing = 0 if self.tail is EpochTail.REPEAT else self.rank
        return max(0, -((missing - left) // self.num_replicas))

    def _indices(self) -> torch.Tensor | range:
        if self.order is SampleOrder.SEQUENTIAL:
            return range(len(self.data))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.data), generator=generator)

    def _check(self, state: Mapping[str, Any]) -> None:
        for name in _COUNTS:
            value = state.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise FormatError(f"ElasticSampler: {name}: expected a count, found {value!r:.60}")
        now = self.state_dict()
        for name in ("length", "seed", "order"):
            if state.get(name) != now[name]:
                raise MismatchError(
                    f"ElasticSampler: {name} is {state.get(name)!r} in the checkpoint and "
                    f"{now[name]!r} here; a position in one order means nothing in another: make "
                    "the sampler as it was, or leave the loader out of the state"
                )


class _Pass(Iterator[int]):
    """One pass over an epoch; its state is that of the sampler."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._epoch = -1
        self._indices: torch.Tensor | range = range(0)

    def __next__(self) -> int:
        sampler = self._sampler
        if sampler._taken >= sampler._count():
            raise StopIteration
        if self._epoch != sampler.epoch:
            self._indices, self._epoch = sampler._indices(), sampler.epoch
        place = sampler._base + sampler._taken * sampler.num_replicas + sampler.rank
        sampler._taken += 1
        return int(self._indices[place % len(sampler.data)])

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state_dict)
        self._sampler._goes_on = False

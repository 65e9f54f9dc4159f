"""A file written by many ranks on many hosts has every byte right, and each written once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.geometry.placement import IndexSet, Replicate, Shard
from milepost.plan import division as divisions
from milepost.plan import shares
from milepost.plan.byte_boxes import placed_boxes
from milepost.plan.division import FileDivision, FileTensor, Item, RankPlan
from milepost.plan.holding import Holding, PlacementClass, group_holdings
from milepost.plan.shares import TensorPlace, WriteRules
from tests.geometry.test_placement import placements_on

Bytes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
PAGE = 16


@contextmanager
def small_sizes(small: int) -> Iterator[None]:
    """Domains of 64 bytes and chunks of 32, so that small tensors meet all cases."""
    names = [(shares, "SMALL_NBYTES", small), (shares, "DOMAIN_NBYTES", 64)]
    names += [(shares, "PAGE_NBYTES", PAGE), (divisions, "DOMAIN_NBYTES", 64)]
    names += [(divisions, "CHUNK_NBYTES", 32)]
    before = [getattr(module, name) for module, name, _ in names]
    for module, name, value in names:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(names, before, strict=True):
            setattr(module, name, value)


@dataclass(frozen=True)
class World:
    """Tensors of a file, who holds them, and where the ranks are."""

    size: int
    tensors: tuple[FileTensor, ...]
    rules: WriteRules
    header_nbytes: int
    small: int
    turn: int = 0

    @property
    def nbytes(self) -> int:
        return self.tensors[-1].place.end if self.tensors else self.header_nbytes


@st.composite
def holdings(draw: st.DrawFn, world: int, shape: tuple[int, ...]) -> Holding:
    """One mesh over some of the ranks, or the same placements on two disjoint meshes."""
    copies = draw(st.integers(1, 2))
    mesh = draw(
        st.lists(st.integers(1, 4), max_size=3)
        .map(tuple)
        .filter(lambda m: prod(m) * copies <= world)
    )
    placements = draw(placements_on(mesh, shape)) if shape else (Replicate(),) * len(mesh)
    order = draw(st.permutations(range(world)))
    size = prod(mesh)
    classes = [
        PlacementClass(mesh, tuple(order[n * size : (n + 1) * size]), placements)
        for n in range(copies)
    ]
    (holding,) = group_holdings(classes)
    return holding


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.integers(1, 8))
    header = draw(st.sampled_from([16, 48, 23]))
    tensors, start = [], header
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        itemsize = draw(st.sampled_from([1, 2, 4]))
        place = TensorPlace(shape=shape, start=start, itemsize=itemsize)
        if place.nbytes:
            tensors.append(FileTensor(f"t{number}", place, draw(holdings(size, shape))))
        start = place.end
    hosts = tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    seeing = draw(st.sets(st.integers(1, size - 1)) if size > 1 else st.just(set()))
    writers = tuple(range(size)) if draw(st.booleans()) else (0, *sorted(seeing))
    rules = WriteRules(
        writers=writers,
        hosts=hosts,
        page_nbytes=PAGE,
        aggregate_below=draw(st.sampled_from([0, 24, 10**6])),
    )
    small = draw(st.sampled_from([1, 16, 10**6]))
    return World(size, tuple(tensors), rules, header, small, draw(st.integers(0, 9)))


class Run:
    """All ranks' plans of a world, and what each holds in the beginning."""

    def __init__(self, world: World, content: Bytes) -> None:
        self.world, self.content = world, content
        self.plans: list[RankPlan] = []
        for rank in range(world.size):
            self.file = FileDivision(
                0, world.tensors, world.rules, header_nbytes=world.header_nbytes, turn=world.turn
            )
            held = [
                number
                for number, tensor in enumerate(world.tensors)
                if tensor.holding.shard_coordinate(rank) is not None
            ]
            self.plans.append(self.file.plan(rank, held))

    def local(self, tensor: int, rank: int) -> tuple[Bytes, IndexSet]:
        """A shard as bytes, cut from the file by its index set, and what it has for the file."""
        _, place, holding = self.world.tensors[tensor]
        coordinate = holding.shard_coordinate(rank)
        assert coordinate is not None, f"rank {rank} holds nothing of tensor {tensor}"
        held = holding.held(place.shape, coordinate)
        whole = self.content[place.start : place.end].reshape(*place.shape, place.itemsize)
        if held:
            grid = np.ix_(*([i for a, b in spans for i in range(a, b)] for spans in held))
            whole = whole[grid]
        shape = whole.shape
        merged = (*shape[:-2], shape[-2] * shape[-1]) if len(shape) > 1 else shape
        return whole.reshape(merged), self.file.division(tensor).held(coordinate)

    def message(self, items: Sequence[Item], rank: int) -> bytes:
        """What a sender packs for items, from its own memory."""
        packed = b""
        for item in items:
            place = self.world.tensors[item.tensor].place
            local, held = self.local(item.tensor, rank)
            for box in placed_boxes(place, held, item.start, item.end):
                packed += local[tuple(slice(*span) for span in box.source)].tobytes()
        return packed

    def unpack(self, items: Sequence[Item], message: bytes, target: Bytes) -> None:
        """Put a message where the receiver wants it, by the receiver's own arithmetic."""
        for item in items:
            place = self.world.tensors[item.tensor].place
            held = self.file.division(item.tensor).held(item.coordinate)
            for box in placed_boxes(place, held, item.start, item.end):
                begin = item.start + box.offset
                view = target[begin : begin + prod(box.shape)].reshape(box.shape)
                part = view[tuple(slice(*span) for span in box.into)]
                part[...] = np.frombuffer(message[: box.nbytes], np.uint8).reshape(part.shape)
                message = message[box.nbytes :]
        assert not message

    def written(self, rank: int) -> list[tuple[int, bytes]]:
        """(offset, bytes) of every write of a rank, after all messages have come."""
        world, plan = self.world, self.plans[rank]
        found = []
        if rank == world.rules.leader:
            found.append((0, self.content[: world.header_nbytes].tobytes()))
        for start, end, tensor in plan.direct:
            item = Item(start, end, tensor, ())
            found.append((start, self.message([item], rank)))
        for key, step in plan.steps.items():
            target = np.full(world.nbytes, 255, np.uint8)
            own = self.message(step.own, rank)
            self.unpack(step.own, own, target)
            came = len(own)
            for sender, items in step.receives.items():
                sent = self.plans[sender].steps[key].sends[rank]
                assert [item[:3] for item in sent] == [item[:3] for item in items]
                message = self.message(sent, sender)
                self.unpack(items, message, target)
                came += len(message)
            assert came == sum(end - start for start, end, _ in step.chunks)
            found += [(start, target[start:end].tobytes()) for start, end, _ in step.chunks]
        return found


def random_content(world: World) -> Bytes:
    return np.random.default_rng(0).integers(0, 250, world.nbytes, dtype=np.uint8)


@given(worlds())
@settings(max_examples=1500, deadline=None)
def test_every_byte_has_one_writer_which_gets_the_right_one(world: World) -> None:
    with small_sizes(world.small):
        content = random_content(world)
        run = Run(world, content)
        count: Counter[int] = Counter()
        for rank in range(world.size):
            for start, data in run.written(rank):
                assert rank in world.rules.writers
                assert data == content[start : start + len(data)].tobytes()
                count.update(range(start, start + len(data)))
    assert count == Counter(range(world.nbytes))


@given(worlds())
@settings(max_examples=1000, deadline=None)
def test_whoever_sends_has_a_receiver_in_the_same_step(world: World) -> None:
    with small_sizes(world.small):
        plans = Run(world, random_content(world)).plans
    sent = {
        (key, rank, to, tuple(item[:3]))
        for rank, plan in enumerate(plans)
        for key, step in plan.steps.items()
        for to, items in step.sends.items()
        for item in items
    }
    received = {
        (key, origin, rank, tuple(item[:3]))
        for rank, plan in enumerate(plans)
        for key, step in plan.steps.items()
        for origin, items in step.receives.items()
        for item in items
    }
    assert sent == received


@given(worlds())
@settings(max_examples=600, deadline=None)
def test_a_writer_puts_at_most_one_chunk_together_in_a_step(world: World) -> None:
    with small_sizes(world.small):
        for plan in Run(world, random_content(world)).plans:
            for step in plan.steps.values():
                assert sum(end - start for start, end, _ in step.chunks) <= 32
                for one, other in pairwise(step.chunks):
                    assert one.end <= other.start


class HostCache:
    """The page cache of a host that knows nothing of others: it reads a page when it is first
    written to, changes its bytes, and writes all of it back some time later."""

    def __init__(self, disk: Bytes) -> None:
        self.disk = disk
        self.pages: dict[int, Bytes] = {}

    def write(self, offset: int, data: bytes) -> None:
        for position, value in enumerate(data, offset):
            page = position // PAGE * PAGE
            if page not in self.pages:
                self.pages[page] = self.disk[page : page + PAGE].copy()
            self.pages[page][position - page] = value

    def write_back(self, page: int) -> None:
        content = self.pages.pop(page)
        self.disk[page : page + len(content)] = content


def write_through_caches(world: World, run: Run, seed: int) -> Bytes:
    """All writes of all ranks through the caches of their hosts, in a random order."""
    order = random.Random(seed)
    disk = np.full(world.nbytes, 255, np.uint8)
    caches = {host: HostCache(disk) for host in world.rules.hosts}
    writes = [(rank, *write) for rank in range(world.size) for write in run.written(rank)]
    order.shuffle(writes)
    for rank, offset, data in writes:
        cache = caches[world.rules.hosts[rank]]
        cache.write(offset, data)
        for page in [page for page in cache.pages if order.random() < 0.3]:
            cache.write_back(page)
    left = [(cache, page) for cache in caches.values() for page in cache.pages]
    order.shuffle(left)
    for cache, page in left:
        cache.write_back(page)
    return disk


@given(worlds(), st.integers(0, 2**32))
@settings(max_examples=1500, deadline=None)
def test_hosts_that_write_back_whole_pages_do_not_undo_each_other(world: World, seed: int) -> None:
    with small_sizes(world.small):
        content = random_content(world)
        run = Run(world, content)
        assert (write_through_caches(world, run, seed) == content).all()


def test_without_rounded_borders_hosts_would_undo_each_other() -> None:
    mesh = PlacementClass((2,), (0, 1), (Shard(0),))
    (holding,) = group_holdings([mesh])
    tensor = FileTensor("t", TensorPlace(shape=(6, 4), start=16, itemsize=1), holding)
    lost = 0
    for hosts in ((0, 0), (0, 1)):
        rules = WriteRules(writers=(0, 1), hosts=hosts, page_nbytes=PAGE)
        world = World(2, (tensor,), rules, 16, 1)
        with small_sizes(1):
            content = random_content(world)
            run = Run(world, content)
            if hosts == (0, 0):  # as if it were one host; then the ranks are put on two
                rules = WriteRules(writers=(0, 1), hosts=(0, 1), page_nbytes=PAGE)
                world = World(2, (tensor,), rules, 16, 1)
                lost = sum(
                    (write_through_caches(world, run, seed) != content).any() for seed in range(50)
                )
            else:
                for seed in range(50):
                    assert (write_through_caches(world, run, seed) == content).all()
    assert lost > 10


@pytest.mark.parametrize("world_size", [64, 1024])
def test_a_rank_enumerates_its_own_pieces_only(world_size: int) -> None:
    """The work of a plan follows what a rank holds and writes: counted in items and chunks."""
    mesh = PlacementClass((world_size,), tuple(range(world_size)), (Shard(0),))
    (holding,) = group_holdings([mesh])
    tensors, start = [], 4096
    for number in range(40):
        place = TensorPlace(shape=(8192, 4096), start=start, itemsize=2)
        tensors.append(FileTensor(f"t{number}", place, holding))
        start = place.end
    rules = WriteRules(
        writers=tuple(range(world_size)),
        hosts=tuple(rank // 8 for rank in range(world_size)),
        aggregate_below=128 * 1024,
    )
    file = FileDivision(0, tensors, rules, header_nbytes=4096)
    plan = file.plan(5, range(len(tensors)))
    steps = plan.steps.values()
    items = sum(len(i) for s in steps for i in (*s.sends.values(), *s.receives.values()))
    rows = 8192 // world_size
    is_small = rows * 8192 < 128 * 1024
    written = sum(c.end - c.start for s in plan.steps.values() for c in s.chunks)
    written += sum(chunk.end - chunk.start for chunk in plan.direct)
    assert 0 < written <= 2 * (start - 4096) / world_size + shares.DOMAIN_NBYTES
    bound = 3 * len(tensors) + 2 * written // (rows * 8192)
    assert items <= bound if is_small else items == 0

"""Where a job stands in its data: on as many ranks exactly, on others without a gap or a repeat."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import milepost as mp
from milepost.errors import MismatchError
from tests.worlds import run_world


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(sampler: Any, batch: int, workers: int) -> Any:
    if workers:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return StatefulDataLoader(
        Numbers(len(sampler.data) if hasattr(sampler, "data") else 40),
        sampler=sampler,
        batch_size=batch,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        collate_fn=list,
    )


def elastic(count: int, batch: int, workers: int, **options: Any) -> Any:
    return loader_of(mp.ElasticSampler(Numbers(count), seed=3, **options), batch, workers)


def opaque(count: int, batch: int, workers: int) -> Any:
    sampler = StatefulDistributedSampler(Numbers(count), seed=3)
    return loader_of(sampler, batch, workers)


KINDS = {"elastic": elastic, "opaque": opaque}


def take(loader: Any, batches: int) -> list[list[int]]:
    found = iter(loader)
    return [next(found) for _ in range(batches)]


def rest(loader: Any) -> list[int]:
    return [index for batch in loader for index in batch]


# ---- the same number of ranks


def stop_and_go_on(rank: int, world_size: int, run: Path, kind: str, workers: int) -> Any:
    loader = KINDS[kind](40, 3, workers)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    mp.save(run / "checkpoint-4", {"data": loader}, step=4)
    expected = [index for batch in batches for index in batch] + rest(loader)
    other = KINDS[kind](40, 3, workers)
    report = mp.load(run / "checkpoint-4", {"data": other})
    return expected, rest(other) + rest(other), report.notes


@pytest.mark.case("V26")
@pytest.mark.case("V28")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["elastic", "opaque"])
def test_every_rank_goes_on_in_the_middle_of_an_epoch(
    kind: str, workers: int, tmp_path: Path
) -> None:
    results = run_world(2, stop_and_go_on, tmp_path, kind, workers)
    for expected, found, _ in results:
        assert len(expected) == 8 + 20
        assert found == expected
    assert set(results[0][0][:8]).isdisjoint(results[1][0][:8])


# ---- another number


def read_and_save(rank: int, world_size: int, run: Path, kind: str, workers: int) -> list[int]:
    loader = KINDS[kind](40, 1, workers)
    read = [index for batch in take(loader, 3) for index in batch]
    mp.save(run / "checkpoint-3", {"data": loader}, step=3)
    return read


def go_on(rank: int, world_size: int, run: Path, kind: str, workers: int) -> Any:
    loader = KINDS[kind](40, 1, workers)
    report = mp.load(run / "checkpoint-3", {"data": loader})
    return rest(loader), rest(loader), report.notes


@pytest.mark.case("V27")
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 2), (3, 0), (8, 0)])
def test_what_four_ranks_left_is_read_once_by_any_other_number(
    world_size: int, workers: int, tmp_path: Path
) -> None:
    first = run_world(4, read_and_save, tmp_path, "elastic", 0)
    read = [index for indices in first for index in indices]
    assert len(set(read)) == 12
    results = run_world(world_size, go_on, tmp_path, "elastic", workers)
    left = [index for indices, _, _ in results for index in indices]
    assert sorted(read + left) == list(range(40))
    again = [index for _, indices, _ in results for index in indices]
    assert sorted(again) == list(range(40)), "and the next epoch is a whole one"
    note = f"data: saved by 4 ranks; the {world_size} that load it share"
    assert any(text.startswith(note) for text in results[0][2])


def try_to_go_on(rank: int, world_size: int, run: Path) -> Any:
    loader = opaque(40, 1, 0)
    with pytest.raises(MismatchError) as raised:
        mp.load(run / "checkpoint-3", {"data": loader})
    report = mp.load(run / "checkpoint-3", {"data": loader}, missing=mp.Missing.KEEP)
    return str(raised.value), report.kept, report.lines(), len(rest(loader))


@pytest.mark.case("V27")
def test_a_loader_that_knows_its_rank_alone_is_refused_on_another_number(tmp_path: Path) -> None:
    run_world(4, read_and_save, tmp_path, "opaque", 0)
    for refused, kept, lines, left in run_world(2, try_to_go_on, tmp_path):
        assert "data was saved by 4 ranks" in refused and "2 ranks load it" in refused
        assert kept == ["data"] and left == 20
        assert any("data was saved by 4 ranks" in line for line in lines)
    with pytest.raises(MismatchError, match="data was saved by 4 ranks"):
        mp.load(tmp_path / "checkpoint-3", {"data": opaque_alone()})


def opaque_alone() -> Any:
    sampler = StatefulDistributedSampler(Numbers(40), 1, 0)
    return loader_of(sampler, 1, 0)


# ---- the sampler, and the seam


def walk(widths: list[tuple[int, int]], length: int, batch: int) -> Iterator[list[int]]:
    """The samples that jobs of given (ranks, steps) read, each going on where the last stopped."""
    position: Any = None
    for ranks, steps in widths:
        loaders = [elastic(length, batch, 0, num_replicas=ranks, rank=r) for r in range(ranks)]
        for loader in loaders if position is not None else ():
            loader.sampler.load_global_state_dict(position)
        read: list[int] = []
        for loader in loaders:
            for number, indices in enumerate(loader, start=1):
                read += indices
                if number == steps:
                    break
        yield read
        position = loaders[0].sampler.global_state_dict()


@pytest.mark.parametrize("length", [40, 41, 47])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_chain_of_jobs_of_changing_width_reads_every_sample_once(length: int, batch: int) -> None:
    read = [i for part in walk([(4, 1), (2, 1), (3, 1), (1, 99)], length, batch) for i in part]
    assert sorted(read) == list(range(length))


@pytest.mark.parametrize(
    ("tail", "counts"),
    [(mp.EpochTail.UNEVEN, [3, 3, 2]), (mp.EpochTail.DROP, [2, 2, 2]),
     (mp.EpochTail.REPEAT, [3, 3, 3])],
)  # fmt: skip
def test_the_end_of_an_epoch_goes_as_asked(tail: mp.EpochTail, counts: list[int]) -> None:
    samplers = [
        mp.ElasticSampler(
            range(8), num_replicas=3, rank=rank, order=mp.SampleOrder.SEQUENTIAL, tail=tail
        )
        for rank in range(3)
    ]
    for epoch in (0, 1):
        found = [list(sampler) for sampler in samplers]
        assert [len(indices) for indices in found] == counts
        assert found[0][:2] == [0, 3]
        assert {sampler.epoch for sampler in samplers} == {epoch}
        assert {sampler.global_state_dict()["base"] for sampler in samplers} == {8}


@pytest.mark.case("V26")
@pytest.mark.parametrize("stop", range(1, 16))
def test_a_loader_stopped_after_any_step_goes_on_in_the_same_order(
    stop: int, tmp_path: Path
) -> None:
    def steps(loader: Any, count: int) -> list[list[int]]:
        found: list[list[int]] = []
        while len(found) < count:
            for batch in loader:
                found.append(batch)
                if len(found) == count:
                    break
        return found

    expected = steps(elastic(10, 2, 0), 15)
    epochs = [expected[n : n + 5] for n in (0, 5, 10)]
    assert [sorted(chain.from_iterable(epoch)) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(map(tuple, epoch)) for epoch in epochs}) == 3
    loader = elastic(10, 2, 0)
    seen = steps(loader, stop)
    mp.save(tmp_path / "checkpoint-1", {"data": loader}, step=1)
    other = elastic(10, 2, 0)
    mp.load(tmp_path / "checkpoint-1", {"data": other})
    assert seen + steps(other, 15 - stop) == expected


def test_a_position_in_other_data_is_refused() -> None:
    state = mp.ElasticSampler(range(8), num_replicas=1, rank=0).state_dict()
    for other in (
        mp.ElasticSampler(range(9), num_replicas=1, rank=0),
        mp.ElasticSampler(range(8), num_replicas=1, rank=0, seed=1),
        mp.ElasticSampler(range(8), num_replicas=1, rank=0, order=mp.SampleOrder.SEQUENTIAL),
    ):
        with pytest.raises(MismatchError, match=r"ElasticSampler: (length|seed|order) is"):
            other.load_state_dict(state)
    with pytest.raises(mp.errors.FormatError, match="taken: expected a count"):
        mp.ElasticSampler(range(8)).load_state_dict({**state, "taken": -1})


class Lines:
    """A reader of one's own that knows the place of the whole job."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.line, self.rank, self.ranks = 0, rank, ranks

    def next(self) -> int:
        self.line += self.ranks
        return self.line - self.ranks + self.rank

    def state_dict(self) -> dict[str, int]:
        return {"line": self.line, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.line = state["line"]

    def global_state_dict(self) -> dict[str, int]:
        return {"line": self.line}

    def load_global_state_dict(self, state: dict[str, int]) -> None:
        self.line = state["line"]


def read_lines(rank: int, world_size: int, run: Path, step: int, ahead: int) -> list[int]:
    reader = Lines(rank, world_size)
    state = {"reader": reader}
    if step > 1:
        mp.load(run / f"checkpoint-{step - 1}", state)
    found = [reader.next() for _ in range(2 + ahead * rank)]
    mp.save(run / f"checkpoint-{step}", state, step=step)
    return found


def test_an_object_of_ones_own_says_where_the_job_stands(tmp_path: Path) -> None:
    first = run_world(3, read_lines, tmp_path, 1, 0)
    second = run_world(2, read_lines, tmp_path, 2, 0)
    assert sorted(chain.from_iterable(first + second)) == list(range(10))
    third = run_world(1, read_lines, tmp_path, 3, 0)
    assert third == [[10, 11]]


@pytest.mark.spec("v1#rank-3")
@pytest.mark.case("V27")
def test_ranks_that_say_different_positions_are_not_resplit(tmp_path: Path) -> None:
    run_world(2, read_lines, tmp_path, 1, 5)
    with pytest.raises(MismatchError, match="reader was saved by 2 ranks"):
        mp.load(tmp_path / "checkpoint-1", {"reader": Lines(0, 1)})
    state: Any = mp.Checkpoint.open(tmp_path / "checkpoint-1")
    assert "positions" not in state.whole_document()


class WithTensor(Lines):
    def global_state_dict(self) -> Any:
        return {"line": torch.tensor(self.line)}


@pytest.mark.spec("v1#rank-3")
def test_a_position_with_a_tensor_is_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(mp.errors.UnencodableError, match="position of reader"):
        mp.save(tmp_path / "checkpoint-1", {"reader": WithTensor(0, 1)}, step=1)

"""Snapshots: copies of live tensors in host memory that is made once and used again."""

from __future__ import annotations

import threading

import pytest
import torch

from milepost.engine.host_buffers import SLAB_NBYTES, HostBuffers
from milepost.engine.snapshot import bit_digests, take_snapshot
from milepost.errors import InvalidInputError

MIB = 2**20


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _every_kind() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(64, 48, generator=generator)
    return [
        base,
        base.t(),
        base[::2, 1:7],
        torch.randn(9, generator=generator).to(torch.bfloat16),
        torch.randn(6, 4, generator=generator).to(torch.float8_e4m3fn).t(),
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 5),
        torch.tensor([True, False, True]),
        torch.randn(3, generator=generator).expand(4, 3),
        torch.view_as_complex(torch.randn(5, 2, generator=generator)).conj(),
        torch.nn.Parameter(torch.tensor([float("nan"), -0.0])),
        torch.randn(40 * MIB // 4, generator=generator),
    ]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_snapshot_has_the_bits_of_tensors_of_any_strides_and_dtype(threads: int) -> None:
    tensors = _every_kind()
    snapshot = take_snapshot(tensors, HostBuffers(), threads=threads)
    snapshot.wait()
    for tensor, copy in zip(tensors, snapshot.copies, strict=True):
        assert copy is not None and copy.is_contiguous()
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert _bits(copy) == _bits(tensor.detach().resolve_conj())


def test_a_snapshot_does_not_follow_the_live_tensors() -> None:
    live = torch.arange(10.0)
    before = bit_digests([live])
    snapshot = take_snapshot([live], HostBuffers(), threads=1)
    live.zero_()
    assert snapshot.copies[0] is not None
    assert snapshot.copies[0].tolist() == list(range(10))
    assert snapshot.differing(before) == [0]


def test_tensors_that_changed_while_they_were_copied_are_told_by_their_bits() -> None:
    same, negative_zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    before = bit_digests([same, negative_zero])
    snapshot = take_snapshot([same, negative_zero], HostBuffers(), threads=1)
    assert snapshot.differing(before) == []
    negative_zero.neg_()
    assert snapshot.differing(before) == [1]


def test_a_tensor_that_changed_before_it_was_copied_is_told_too() -> None:
    same, early = torch.ones(4), torch.zeros(4)
    before = bit_digests([same, early])
    early.add_(1)
    snapshot = take_snapshot([same, early], HostBuffers(), threads=1, later=[0, 1])
    snapshot.hold()
    assert snapshot.copies[1] is not None and torch.equal(snapshot.copies[1], early)
    assert snapshot.differing(before) == [1]


def test_digests_are_those_of_the_bits_whatever_the_strides() -> None:
    for tensor in _every_kind():
        whole = tensor.detach().resolve_conj().contiguous()
        assert bit_digests([tensor]) == bit_digests([whole])
    zero = torch.tensor([0.0])
    assert bit_digests([zero]) != bit_digests([-zero])


def test_what_is_left_for_later_is_copied_before_hold_returns() -> None:
    now, later = torch.ones(5), torch.full((3 * MIB,), 2.0)
    tensors = [now, later, later.view(-1, 4).t()]
    before = bit_digests(tensors)
    snapshot = take_snapshot(tensors, HostBuffers(), threads=2, later=[1, 2])
    snapshot.hold()
    later.zero_()
    for copy in snapshot.copies[1:]:
        assert copy is not None and bool((copy == 2).all())
    assert snapshot.differing(before) == [1, 2]


def test_later_snapshots_use_the_memory_of_earlier_ones() -> None:
    buffers = HostBuffers()
    tensors = [torch.randn(1000) for _ in range(5)]
    first = take_snapshot(tensors, buffers, threads=1)
    taken = buffers.nbytes
    place = first.copies[0].data_ptr() if first.copies[0] is not None else 0
    first.release()
    second = take_snapshot(tensors, buffers, threads=1)
    assert second.copies[0] is not None and second.copies[0].data_ptr() == place
    assert buffers.nbytes == taken


def test_two_snapshots_at_a_time_do_not_share_memory() -> None:
    buffers = HostBuffers()
    first = take_snapshot([torch.ones(1000)], buffers, threads=1)
    second = take_snapshot([torch.zeros(1000)], buffers, threads=1)
    assert first.copies[0] is not None and bool((first.copies[0] == 1).all())
    assert second.copies[0] is not None and bool((second.copies[0] == 0).all())


def test_what_is_reserved_before_the_first_save_is_what_the_save_uses() -> None:
    buffers = HostBuffers()
    buffers.reserve(3 * MIB)
    taken = buffers.nbytes
    assert 3 * MIB <= taken < 3 * MIB + SLAB_NBYTES
    take_snapshot([torch.zeros(MIB // 4), torch.ones(2 * MIB // 4 - 8)], buffers, threads=1)
    assert buffers.nbytes == taken


def test_a_tensor_beyond_the_bound_is_not_copied_and_the_bound_holds() -> None:
    buffers = HostBuffers(max_nbytes=4 * MIB)
    tensors = [torch.zeros(MIB // 4), torch.zeros(8 * MIB // 4), torch.ones(MIB // 4)]
    snapshot = take_snapshot(tensors, buffers, threads=1)
    assert [copy is None for copy in snapshot.copies] == [False, True, False]
    assert buffers.nbytes <= 4 * MIB
    assert snapshot.nbytes == 2 * MIB


def test_memory_is_given_back_to_the_system_when_the_buffers_are_closed() -> None:
    buffers = HostBuffers()
    snapshot = take_snapshot([torch.zeros(10)], buffers, threads=1)
    buffers.close()
    assert buffers.nbytes > 0, "memory on lease stays"
    later = take_snapshot([torch.zeros(10)], buffers, threads=1)
    snapshot.release()
    assert buffers.nbytes > 0, "memory that was taken since stays"
    later.release()
    assert buffers.nbytes > 0
    buffers.close()
    assert buffers.nbytes == 0


def test_the_memory_of_a_second_snapshot_is_that_of_the_first_whatever_the_sizes() -> None:
    buffers = HostBuffers()
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 900_000, (40,), generator=generator).tolist()
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (SLAB_NBYTES, *sizes)]
    take_snapshot(tensors, buffers, threads=1).release()
    taken = buffers.nbytes
    for _ in range(3):
        take_snapshot(tensors, buffers, threads=1).release()
        assert buffers.nbytes == taken


def test_memory_is_given_back_when_no_thread_can_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    buffers = HostBuffers()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            take_snapshot([torch.zeros(100)], buffers, threads=1, later=[0])
    nbytes = buffers.nbytes
    take_snapshot([torch.zeros(100)], buffers, threads=1).release()
    assert buffers.nbytes == nbytes, "the same memory"


def test_copied_tensors_are_let_go() -> None:
    live = torch.ones(10)
    before = bit_digests([live])
    snapshot = take_snapshot([live], HostBuffers(), threads=1)
    snapshot.let_go()
    live.zero_()
    assert snapshot.tensors == [] and snapshot.differing(before) == []
    assert snapshot.copies[0] is not None and bool((snapshot.copies[0] == 1).all())


def test_a_bound_below_zero_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_nbytes=-1"):
        HostBuffers(max_nbytes=-1)

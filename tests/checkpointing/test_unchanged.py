"""Frozen weights have parts of their own, which later saves link and do not write again."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import milepost as mp
from milepost.format.header import read_header
from milepost.layouts.directory import read_manifest
from milepost.manager.prune import prune_run
from milepost.manager.retention import KeepLast
from milepost.storage import fileops
from tests.states import flip

FAST = mp.WriteOptions(durability=mp.Durability.PAGE_CACHE)
FROZEN = "model-00001-of-00002.safetensors"
TRAINED = "model-00002-of-00002.safetensors"


def state() -> dict[str, Any]:
    """A model of which only the norms are trained, and their optimizer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16384,
            hidden_size=256,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=0.1)}


def train(live: dict[str, Any]) -> None:
    for parameter in live["model"].parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    live["optimizer"].step()


def save(run: Path, step: int, live: dict[str, Any], **options: Any) -> mp.SaveReport:
    return mp.save(run / f"checkpoint-{step}", live, step=step, **{"options": FAST, **options})


def save_behind(run: Path, step: int, live: dict[str, Any], **options: Any) -> mp.SaveReport:
    options = {"options": FAST, **options}
    return mp.save_async(run / f"checkpoint-{step}", live, step=step, **options).wait()


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes written, by operation."""
    found: list[int] = []

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "write":
            found.append(memoryview(arguments[1]).nbytes)
        return function(*arguments)

    with fileops.hooked(hook):
        yield found


@contextmanager
def refusing_links(number: int) -> Iterator[None]:
    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "link":
            raise OSError(number, os.strerror(number), target)
        return False if name == "clone" else function(*arguments)

    with fileops.hooked(hook):
        yield


def weights(live: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in live["model"].state_dict().items()}


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """It verifies, and Hugging Face and Milepost load these weights from it."""
    assert not mp.Checkpoint.open(path).verify().problems
    model = LlamaForCausalLM.from_pretrained(path)
    other = state()
    with torch.no_grad():
        for parameter in other["model"].parameters():
            parameter.zero_()
    mp.load(path, other)
    for name, tensor in expected.items():
        assert torch.equal(model.state_dict()[name], tensor)
        assert torch.equal(other["model"].state_dict()[name], tensor)


def is_shared(run: Path, one: int, two: int) -> bool:
    first, second = (run / f"checkpoint-{step}" / FROZEN for step in (one, two))
    return first.samefile(second)


@pytest.mark.spec("v1#link-1", "v1#link-2", "v1#link-3")
@pytest.mark.parametrize("second_save", [save, save_behind])
def test_a_second_save_writes_only_what_is_trained(
    tmp_path: Path, second_save: Callable[..., mp.SaveReport]
) -> None:
    live = state()
    train(live)
    before = weights(live)
    first = save(tmp_path, 1, live)
    assert first.linked == () and first.linked_nbytes == 0
    train(live)
    with counted() as written:
        second = second_save(tmp_path, 2, live)
    frozen = tmp_path / "checkpoint-2" / FROZEN
    assert is_shared(tmp_path, 1, 2)
    assert frozen.stat().st_nlink == 2 and frozen.stat().st_mode & 0o777 == 0o444
    assert second.linked == (FROZEN,) and second.linked_nbytes == frozen.stat().st_size
    assert "link" in second.phases
    assert second.phase_nbytes["write"] <= sum(written) < 0.02 * second.nbytes
    assert read_manifest(tmp_path / "checkpoint-2").linked == [FROZEN]
    assert read_manifest(tmp_path / "checkpoint-1").linked == []
    assert_holds(tmp_path / "checkpoint-1", before)
    report = prune_run(tmp_path, [KeepLast(1)])
    assert [removal.entry.step for removal in report.removed] == [1]
    assert report.nbytes < 0.02 * first.nbytes, "the shared part is still there"
    assert frozen.stat().st_nlink == 1 and frozen.stat().st_mode & 0o777 == 0o444
    assert_holds(tmp_path / "checkpoint-2", weights(live))


def test_no_part_has_frozen_and_trained_tensors_and_the_index_knows_both(tmp_path: Path) -> None:
    live = state()
    save(tmp_path, 1, live, max_shard_size="17MB")
    path = tmp_path / "checkpoint-1"
    trained = {name for name, p in live["model"].named_parameters() if p.requires_grad}
    parts = sorted(path.glob("model-*.safetensors"))
    assert [part.name for part in parts] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    held = [set(read_header(part).tensors) for part in parts]
    assert held[2] == trained
    assert trained.isdisjoint(held[0] | held[1])
    index = json.loads((path / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert index == {name: part.name for part, own in zip(parts, held, strict=True) for name in own}


def test_a_frozen_weight_that_was_changed_in_place_is_written_anew(tmp_path: Path) -> None:
    live = state()
    save(tmp_path, 1, live)
    before = weights(live)
    live["model"].model.embed_tokens.weight.data[5, 5] += 1
    report = save(tmp_path, 2, live)
    assert report.linked == () and not is_shared(tmp_path, 1, 2)
    assert_holds(tmp_path / "checkpoint-1", before)
    assert_holds(tmp_path / "checkpoint-2", weights(live))
    assert save(tmp_path, 3, live).linked == (FROZEN,)
    assert is_shared(tmp_path, 2, 3)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_links_are_refused_the_part_is_written(tmp_path: Path, number: int) -> None:
    live = state()
    save(tmp_path, 1, live)
    with refusing_links(number):
        report = save(tmp_path, 2, live)
    assert report.linked == () and not is_shared(tmp_path, 1, 2)
    assert_holds(tmp_path / "checkpoint-2", weights(live))


@pytest.mark.parametrize(
    ("unchanged", "keeps_time", "links"),
    [
        (mp.Unchanged.LINK_VERIFIED, True, False),
        (mp.Unchanged.LINK_VERIFIED, False, False),
        (mp.Unchanged.LINK, False, False),
        (mp.Unchanged.LINK, True, True),  # what the disk did by itself is not seen
    ],
)
def test_a_part_that_was_damaged_is_not_linked_as_far_as_that_is_looked_at(
    tmp_path: Path, unchanged: mp.Unchanged, keeps_time: bool, links: bool
) -> None:
    live = state()
    save(tmp_path, 1, live)
    place = tmp_path / "checkpoint-1" / FROZEN
    status = place.stat()
    flip(place, status.st_size - 1)
    later = status.st_mtime_ns if keeps_time else status.st_mtime_ns + 10**10
    os.utime(place, ns=(later, later))
    report = save(tmp_path, 2, live, unchanged=unchanged)
    assert report.linked == ((FROZEN,) if links else ())
    assert mp.Checkpoint.open(tmp_path / "checkpoint-2").verify().ok is not links


@pytest.mark.parametrize("unchanged", [mp.Unchanged.LINK, mp.Unchanged.WRITE])
def test_an_intact_part_is_linked_by_its_records_and_written_where_that_is_wanted(
    tmp_path: Path, unchanged: mp.Unchanged
) -> None:
    live = state()
    save(tmp_path, 1, live)
    report = save(tmp_path, 2, live, unchanged=unchanged)
    assert is_shared(tmp_path, 1, 2) is bool(report.linked) is (unchanged is mp.Unchanged.LINK)
    assert_holds(tmp_path / "checkpoint-2", weights(live))


@pytest.mark.spec("v1#link-1")
def test_the_run_is_leased_from_the_comparison_to_the_commit(tmp_path: Path) -> None:
    live = state()
    save(tmp_path, 1, live)
    seen: list[str] = []

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name in ("link", "rename"):
            with open(tmp_path / ".milepost.lock", "rb") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append(name)
        return function(*arguments)

    with fileops.hooked(hook):
        assert save(tmp_path, 2, live).linked == (FROZEN,)
    assert seen == ["link", "rename"]


def test_a_part_whose_file_goes_meanwhile_is_written(tmp_path: Path) -> None:
    live = state()
    save(tmp_path, 1, live)

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "link":
            (tmp_path / "checkpoint-1" / FROZEN).unlink()
        return function(*arguments)

    with fileops.hooked(hook):
        assert save(tmp_path, 2, live).linked == ()
    assert_holds(tmp_path / "checkpoint-2", weights(live))


def test_a_manager_links_too_and_its_retention_keeps_what_is_shared(tmp_path: Path) -> None:
    live = state()
    with mp.CheckpointManager(tmp_path, keep=mp.KeepLast(1), options=FAST) as manager:
        manager.save(1, live)
        manager.save(2, live)
        assert manager.save(3, live).linked == (FROZEN,)
        assert manager.save(4, live, unchanged=mp.Unchanged.WRITE).linked == ()
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [4]
    assert_holds(tmp_path / "checkpoint-4", weights(live))


def test_a_checkpoint_that_is_replaced_hands_its_part_on(tmp_path: Path) -> None:
    live = state()
    save(tmp_path, 1, live)
    inode = (tmp_path / "checkpoint-1" / FROZEN).stat().st_ino
    train(live)
    save(tmp_path, 1, live, on_existing=mp.OnExisting.REPLACE)
    kept = (tmp_path / "checkpoint-1" / FROZEN).stat()
    assert (kept.st_ino, kept.st_nlink) == (inode, 1)
    assert_holds(tmp_path / "checkpoint-1", weights(live))


def test_a_part_is_freed_with_the_last_checkpoint_that_links_it(tmp_path: Path) -> None:
    live = state()
    for step in (1, 2):
        save(tmp_path, step, live)
    save(tmp_path, 3, live, unchanged=mp.Unchanged.WRITE)
    report = prune_run(tmp_path, [KeepLast(1)])
    size = (tmp_path / "checkpoint-3" / FROZEN).stat().st_size
    first, second = (removal.nbytes for removal in report.removed)
    assert first < size < second


def test_what_is_trained_again_is_written_again(tmp_path: Path) -> None:
    live = state()
    save(tmp_path, 1, live)
    live["model"].requires_grad_(True)
    report = save(tmp_path, 2, live)
    assert report.linked == ()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


class Wide(nn.Module):
    """Frozen and trained tensors that are small, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(1024, 1024), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(8))
        self.register_buffer("seen", torch.zeros(2048, 2048))


def test_little_that_is_frozen_and_buffers_stay_with_the_rest(tmp_path: Path) -> None:
    for step in (1, 2):
        assert save(tmp_path, step, {"model": Wide()}).linked == ()
        assert (tmp_path / f"checkpoint-{step}" / "model.safetensors").exists()

"""A merge that is cut short anywhere: weights and the record of what is in them, or nothing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import milepost as mp
from milepost.errors import InvalidInputError
from milepost.layouts.run import list_run
from milepost.testing.faults import Ending, Fault
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.rewrite.options import RewriteOptions
from tests.adapters.lora_models import adapted, base, logits
from tests.crash.conftest import split, tell_points
from tests.tools.adapters.peft_oracle import llama, tensors_of, write_adapter, write_base

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice

Explore: TypeAlias = Callable[[CrashMatrix, Callable[[Attempt], None]], None]

CAREFUL = RewriteOptions(threads=1)


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """A base and an adapter, which no merge writes into."""
    model = write_base(tmp_path / "base", llama(num_hidden_layers=1))
    return model, write_adapter(tmp_path / "adapter", model, r=2, target_modules=["q_proj"])


@pytest.fixture
def _without_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a merge computes, without a library of threads that a fork leaves behind."""

    def added(base: Any, left: Any, right: Any, *, alpha: float, out: Any = None) -> Any:
        low_rank = (left.unsqueeze(2) * right.unsqueeze(0)).sum(1)
        return torch.add(base, low_rank, alpha=alpha, out=out)

    monkeypatch.setattr(torch, "addmm", added)


def merge(root: Path, model: Path, adapter: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merge_peft_adapters([adapter], root / "merged", base=model, options=CAREFUL)


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*"))
            if p.is_file()}  # fmt: skip


@pytest.mark.case("V48")
@pytest.mark.usefixtures("_without_blas")
def test_a_merge_cut_short_anywhere_leaves_weights_with_their_record_or_nothing(
    sources: tuple[Path, Path], scratch: Path, explore: Explore
) -> None:
    model, adapter = sources
    untouched = bytes_of(model), bytes_of(adapter)
    merge(scratch / "wanted", model, adapter)
    wanted = tensors_of(scratch / "wanted" / "merged")
    once = {name: tensor.clone() for name, tensor in wanted.items()}

    def check(attempt: Attempt) -> None:
        output = attempt.root / "merged"
        assert (bytes_of(model), bytes_of(adapter)) == untouched
        assert attempt.outcome.struck
        if attempt.plan.fault.kills:
            assert attempt.outcome.ending is Ending.KILLED
        elif attempt.outcome.ending is Ending.FINISHED:
            assert output.exists()
        if output.exists():
            made = mp.Checkpoint.open(output)
            assert made.verify().problems == ()
            folded = made.info.extra["provenance"]["adapters"]
            assert [entry["name"] for entry in folded] == ["adapter"]
            with pytest.raises(InvalidInputError, match="folded into these weights already"):
                merge(attempt.root / "again", output, adapter)
        else:
            merge(attempt.root, model, adapter)  # run again
        found = tensors_of(output)
        assert found.keys() == once.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in once.items())
        left = [name for name in os.listdir(attempt.root) if name.startswith(".milepost-staging")]
        assert left == [] or attempt.outcome.ending is not Ending.FINISHED

    action = partial(_merge_into, model=model, adapter=adapter)
    matrix = CrashMatrix(lambda root: None, action, scratch=scratch / "copies")
    assert {"write", "fsync", "rename"} <= {one.name for one in matrix.operations}
    explore(matrix, check)


def _merge_into(root: Path, model: Path, adapter: Path) -> None:
    merge(root, model, adapter)


# ---- merged on save: the adapter goes on being trained, so it must be folded in exactly once


def save_merged(root: Path, seed: int, step: int) -> None:
    mp.save(
        root / f"checkpoint-{step}",
        {"model": adapted(seed)},
        step=step,
        adapters=mp.Adapters.MERGED,
        rng=mp.Rng.LEAVE_OUT,
        options=mp.WriteOptions(threads=1),
    )


def resumed_from(path: Path) -> Any:
    live = adapted(77)
    mp.load(path, {"model": live})
    return live


@pytest.mark.slow
@pytest.mark.case("V48")
def test_a_merged_save_cut_short_anywhere_is_resumed_with_the_adapter_folded_in_once(
    scratch: Path, request: pytest.FixtureRequest
) -> None:
    seeds = {1: 5, 2: 6}
    expected = {step: logits(adapted(seed)) for step, seed in seeds.items()}

    def check(attempt: Attempt) -> None:
        assert attempt.outcome.struck
        entries = list_run(attempt.root).committed
        assert [entry.step for entry in entries] in ([1], [1, 2])
        if attempt.outcome.ending is Ending.FINISHED:
            assert len(entries) == 2
        for entry in entries:
            assert mp.Checkpoint.open(entry.path).verify().problems == ()
            assert torch.equal(logits(resumed_from(entry.path)), expected[entry.step])
            plain = base()
            mp.load(entry.path, {"model": plain})
            torch.testing.assert_close(logits(plain), expected[entry.step], rtol=1e-5, atol=1e-6)
        save_merged(attempt.root, 6, 50)
        assert torch.equal(logits(resumed_from(attempt.root / "checkpoint-50")), expected[2])

    matrix = CrashMatrix(
        lambda root: save_merged(root, 5, 1),
        lambda root: save_merged(root, 6, 2),
        scratch=scratch / "copies",
    )
    chosen, _ = split(matrix)
    killed = {matrix.operations[p.nth].name for p in chosen if p.fault is Fault.KILL_BEFORE}
    assert {"open", "write", "fsync", "rename", "fsync-directory"} <= killed
    for attempt in matrix.attempts(chosen):
        check(attempt)
    tell_points(request, 1, [(0, matrix.operations, plan) for plan in chosen])

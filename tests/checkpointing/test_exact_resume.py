"""A run that stopped and resumed has the bits of one that never stopped."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import milepost as mp
from tests.states import TinyLM, bits, same, snapshot

STEPS = 6
DATA = torch.arange(16 * 8).view(16, 8) % 29


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attention_dropout=0.2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def tiny() -> Any:
    """A model that needs no transformers, which a process is quicker to import."""
    return TinyLM(vocabulary=29)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(model, TinyLM):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


class Run:
    """A run of six steps over two epochs of shuffled data, noise and dropout included."""

    def __init__(self, seed: int, build: Callable[[], Any] = llama) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        model = build().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9),
            "loader": StatefulDataLoader(TensorDataset(DATA), batch_size=4, shuffle=True),
        }
        self.losses: list[float] = []
        self.batches: list[Any] = []

    def train(self, steps: int, report: mp.LoadReport | None = None) -> None:
        batches = self._batches(report)
        for _ in range(steps):
            self._step(next(batches)[0])

    def _batches(self, report: mp.LoadReport | None) -> Iterator[Any]:
        """Making an iterator draws from the global generator, so random state comes after it."""
        iterator = iter(self.state["loader"])
        if report is not None:
            report.restore_rng()
        yield from iterator
        while True:
            yield from self.state["loader"]

    def _step(self, ids: torch.Tensor) -> None:
        noise = random.random() * 1e-3 + float(np.random.rand()) * 1e-3
        loss = loss_of(self.state["model"], ids) * (1 + noise)
        self.state["optimizer"].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.state["optimizer"].step()
        self.state["scheduler"].step()
        self.losses.append(loss.item())
        self.batches.append(ids.tolist())


@pytest.fixture(scope="module")
def never() -> Run:
    """The run that nobody stopped."""
    run = Run(seed=1)
    run.train(STEPS)
    return run


def test_two_uninterrupted_runs_are_equal_which_is_the_control(never: Run) -> None:
    again = Run(seed=1)
    again.train(STEPS)
    assert again.losses == never.losses
    assert same(snapshot(again.state), snapshot(never.state))
    other = Run(seed=2)
    other.train(STEPS)
    assert other.losses != never.losses


@pytest.mark.case("V26")
@pytest.mark.case("V29")
@pytest.mark.parametrize("cut", range(1, STEPS))
def test_a_run_cut_after_any_step_goes_on_with_the_same_bits(
    cut: int, never: Run, tmp_path: Path
) -> None:
    first = Run(seed=1)
    first.train(cut)
    path = tmp_path / f"checkpoint-{cut}"
    mp.save(path, first.state, step=cut)
    second = Run(seed=77)
    report = mp.load(path, second.state, rng=mp.RngRestore.LATER)
    assert report.level is mp.Level.EXACT
    second.train(STEPS - cut, report)
    assert first.batches + second.batches == never.batches
    assert first.losses + second.losses == never.losses
    assert same(snapshot(second.state), snapshot(never.state))


def test_a_loader_without_state_resumes_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """`torch.utils.data.DataLoader` has no position; its next epoch comes from the generator."""

    def epochs(state: dict[str, Any], count: int) -> list[Any]:
        seen = []
        for _ in range(count):
            for (ids,) in DataLoader(TensorDataset(DATA), batch_size=4, shuffle=True):
                loss = loss_of(state["model"], ids)
                state["optimizer"].zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                state["optimizer"].step()
                seen.append((ids.tolist(), loss.item()))
        return seen

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = llama().train()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}

    expected = epochs(build(3), 2)
    state = build(3)
    seen = epochs(state, 1)
    mp.save(tmp_path / "checkpoint-1", state, step=1)
    live = build(4)
    mp.load(tmp_path / "checkpoint-1", live)
    assert seen + epochs(live, 1) == expected


@pytest.mark.case("V26")
@pytest.mark.parametrize("cut", range(1, 15))
def test_the_loader_of_torchdata_repeats_no_batch_and_skips_none(cut: int, tmp_path: Path) -> None:
    """Ten ids in batches of two, three shuffled epochs, cut after each of the steps."""

    def build() -> Any:
        return StatefulDataLoader(list(range(10)), batch_size=2, shuffle=True)

    def ids(loader: Any, steps: int) -> Iterator[list[int]]:
        while steps:
            for batch in loader:
                yield batch.tolist()
                steps -= 1
                if not steps:
                    return

    torch.manual_seed(5)
    expected = list(ids(build(), 15))
    assert sorted(i for batch in expected[5:10] for i in batch) == list(range(10))
    torch.manual_seed(5)
    loader = build()
    seen = list(ids(loader, cut))
    mp.save(tmp_path / "checkpoint-1", {"loader": loader}, step=1)
    torch.manual_seed(99)
    resumed = build()
    mp.load(tmp_path / "checkpoint-1", {"loader": resumed})
    assert seen + list(ids(resumed, 15 - cut)) == expected


CHILD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.checkpointing.test_exact_resume import Run, bits, tiny
    import milepost as mp

    run = Run(seed=5, build=tiny)
    report = mp.load(sys.argv[1], run.state)
    assert report.level is mp.Level.EXACT, report.lines()
    run.train(3, report)
    print(run.losses)
    print([bits(p).hex() for p in run.state["model"].parameters()])
    """
)


def test_another_process_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    never = Run(seed=1, build=tiny)
    never.train(STEPS)
    first = Run(seed=1, build=tiny)
    first.train(3)
    path = tmp_path / "checkpoint-3"
    mp.save(path, first.state, step=3)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    losses, weights = done.stdout.splitlines()
    assert losses == str(never.losses[3:])
    assert weights == str([bits(p).hex() for p in never.state["model"].parameters()])

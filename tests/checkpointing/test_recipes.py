"""What training scripts do with `save_checkpoint` and `load_checkpoint`, task by task."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from milepost.checkpointing import load_checkpoint, save_checkpoint
from tests.states import same


@dataclass
class Config:
    vocab_size: int = 7
    d_model: int = 4
    n_layers: int = 2


class Decoder(nn.Module):
    """A few layers over an embedding that is also the head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.n_layers))
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden)
        return logits


class Trainer:
    """A decoder, its AdamW, and steps whose batches follow from their numbers alone."""

    def __init__(self, *, seed: int = 0, lr: float = 0.05, config: Config | None = None) -> None:
        torch.manual_seed(seed)
        self.config = config or Config()
        self.model = Decoder(self.config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def step(self, number: int, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        ids = (torch.arange(6).view(2, 3) + number) % self.config.vocab_size
        logits = (self.model if model is None else model)(ids)
        targets = (ids + 1) % self.config.vocab_size
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def save(self, path: Path, **metadata: Any) -> None:
        save_checkpoint(
            path=path,
            model_state=self.model.state_dict(),
            optimizer_state=self.optimizer.state_dict(),
            config=vars(self.config),
            **metadata,
        )


def restored_model(checkpoint: Mapping[str, Any]) -> Decoder:
    """A model of the saved configuration, initialised otherwise, with the saved weights."""
    torch.manual_seed(99)
    model = Decoder(Config(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model_state"])
    return model


@pytest.fixture
def trainer() -> Trainer:
    """Two steps into its training, so that the optimizer has moments."""
    trainer = Trainer(config=Config(d_model=6, n_layers=1))
    trainer.step(0)
    trainer.step(1)
    return trainer


@pytest.fixture
def saved(tmp_path: Path, trainer: Trainer) -> Path:
    path = tmp_path / "saved.pt"
    trainer.save(path, step=1, loss=1.25)
    return path


def test_a_save_creates_the_directories_above_it(tmp_path: Path, trainer: Trainer) -> None:
    path = tmp_path / "a" / "b" / "c.pt"
    trainer.save(path, step=1)
    assert [entry.name for entry in path.parent.iterdir()] == ["c.pt"]


def test_a_file_has_state_and_metadata_with_a_mirror_at_the_top(
    saved: Path, trainer: Trainer
) -> None:
    raw = torch.load(saved, weights_only=True)
    assert set(raw) == {"model_state", "optimizer", "metadata", "config", "step", "loss"}
    assert raw["metadata"] == {"config": vars(trainer.config), "step": 1, "loss": 1.25}
    assert {key: raw[key] for key in raw["metadata"]} == raw["metadata"]
    assert same(dict(raw["model_state"]), dict(trainer.model.state_dict()))
    assert same(raw["optimizer"], trainer.optimizer.state_dict())


def test_without_an_optimizer_the_file_has_no_such_key(tmp_path: Path, trainer: Trainer) -> None:
    save_checkpoint(path=tmp_path / "w.pt", model_state=trainer.model.state_dict())
    raw = torch.load(tmp_path / "w.pt", weights_only=True)
    assert set(raw) == set(load_checkpoint(tmp_path / "w.pt")) == {"model_state", "metadata"}
    assert raw["metadata"] == {}


def test_any_keyword_becomes_metadata(tmp_path: Path, trainer: Trainer) -> None:
    metadata = {
        "step": 40,
        "epoch": 3,
        "train_loss": 0.75,
        "val_loss": 1.5,
        "learning_rate": 1e-3,
        "timestamp": "2031-07-01T00:00:00",
        "git_commit": "0" * 7,
        "tags": ["short", "wide"],
        "seed": None,
    }
    trainer.save(tmp_path / "m.pt", **metadata)
    checkpoint = load_checkpoint(tmp_path / "m.pt")
    assert checkpoint["metadata"] == {"config": vars(trainer.config), **metadata}
    assert {key: checkpoint[key] for key in metadata} == metadata


def test_a_load_gives_the_keys_and_values_of_the_file(saved: Path) -> None:
    checkpoint = load_checkpoint(saved)
    assert same(checkpoint, torch.load(saved, weights_only=True))
    assert (checkpoint["step"], checkpoint["loss"]) == (1, 1.25)


def test_a_training_loop_leaves_a_file_every_few_steps_and_a_final_one(tmp_path: Path) -> None:
    trainer = Trainer()
    losses = []
    for step in range(7):
        losses.append(trainer.step(step).item())
        if step % 3 == 0:
            trainer.save(tmp_path / f"checkpoint_{step}.pt", step=step, loss=losses[-1])
    trainer.save(tmp_path / "run_final.pt", step=6, loss=losses[-1], final=True)

    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint_0.pt",
        "checkpoint_3.pt",
        "checkpoint_6.pt",
        "run_final.pt",
    }
    for step in (0, 3, 6):
        checkpoint = load_checkpoint(tmp_path / f"checkpoint_{step}.pt")
        assert (checkpoint["step"], checkpoint["loss"]) == (step, losses[step])
        assert "final" not in checkpoint
    final = load_checkpoint(tmp_path / "run_final.pt")
    assert final["final"] is True
    assert same(final["model_state"], load_checkpoint(tmp_path / "checkpoint_6.pt")["model_state"])


def test_a_model_is_built_again_from_the_saved_configuration(saved: Path, trainer: Trainer) -> None:
    checkpoint = load_checkpoint(saved)
    model = restored_model(checkpoint)
    assert len(model.layers) == 1
    assert model.embedding.weight.shape == (7, 6)
    assert model.head.weight is model.embedding.weight
    assert same(dict(model.state_dict()), dict(trainer.model.state_dict()))


def test_inference_gives_the_same_logits_without_an_optimizer(
    saved: Path, trainer: Trainer
) -> None:
    model = restored_model(load_checkpoint(saved)).eval()
    ids = torch.arange(5)
    with torch.inference_mode():
        assert torch.equal(model(ids), trainer.model(ids))


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(
    tmp_path: Path, stop: int
) -> None:
    whole, first = Trainer(), Trainer()
    for step in range(6):
        whole.step(step)
    for step in range(stop):
        first.step(step)
    first.save(tmp_path / "stop.pt", step=stop - 1)

    second = Trainer(seed=1, lr=1.0)
    checkpoint = load_checkpoint(tmp_path / "stop.pt")
    second.model.load_state_dict(checkpoint["model_state"])
    if "optimizer" in checkpoint:
        second.optimizer.load_state_dict(checkpoint["optimizer"])
    for step in range(checkpoint["step"] + 1, 6):
        second.step(step)

    assert same(dict(second.model.state_dict()), dict(whole.model.state_dict()))
    assert same(second.optimizer.state_dict(), whole.optimizer.state_dict())


def test_a_resume_without_saved_optimizer_state_starts_a_new_one(
    tmp_path: Path, trainer: Trainer
) -> None:
    save_checkpoint(path=tmp_path / "w.pt", model_state=trainer.model.state_dict(), step=1)
    checkpoint = load_checkpoint(tmp_path / "w.pt")
    with pytest.raises(KeyError):
        checkpoint["optimizer"]
    assert checkpoint["step"] + 1 == 2


def test_fine_tuning_takes_the_weights_and_a_new_optimizer(saved: Path, trainer: Trainer) -> None:
    before = saved.read_bytes()
    tuned = Trainer(seed=5, lr=0.2, config=trainer.config)
    tuned.model.load_state_dict(load_checkpoint(saved)["model_state"])
    assert same(dict(tuned.model.state_dict()), dict(trainer.model.state_dict()))
    assert tuned.optimizer.state_dict()["state"] == {}
    assert tuned.optimizer.param_groups[0]["lr"] == 0.2
    tuned.step(0)
    assert not same(dict(tuned.model.state_dict()), dict(trainer.model.state_dict()))
    assert saved.read_bytes() == before


@pytest.mark.case("C7.32")
def test_a_compiled_model_and_a_plain_one_share_checkpoints(
    tmp_path: Path, trainer: Trainer
) -> None:
    compiled: Any = torch.compile(trainer.model, backend="eager")
    trainer.step(2, compiled)
    assert all(name.startswith("_orig_mod.") for name in compiled.state_dict())
    path = tmp_path / "compiled.pt"
    save_checkpoint(path=path, model_state=compiled.state_dict(), config=vars(trainer.config))

    raw = torch.load(path, weights_only=True)
    assert list(raw["model_state"]) == list(trainer.model.state_dict())
    plain = restored_model(load_checkpoint(path))
    assert same(dict(plain.state_dict()), dict(trainer.model.state_dict()))
    again: Any = torch.compile(plain, backend="eager")
    assert same(dict(again.state_dict()), dict(compiled.state_dict()))


def test_the_best_checkpoint_is_replaced_only_by_a_better_one(tmp_path: Path) -> None:
    trainer, best_path, best = Trainer(), tmp_path / "best.pt", float("inf")
    written = []
    for step, val_loss in enumerate([3.0, 2.0, 2.5, 1.0, 4.0, 1.0]):
        train_loss = trainer.step(step)
        if val_loss < best:
            best = val_loss
            best_path.unlink(missing_ok=True)
            trainer.save(best_path, step=step, train_loss=train_loss, val_loss=val_loss)
            written.append((step, train_loss, trainer.model.embedding.weight.detach().clone()))
    assert [step for step, *_ in written] == [0, 1, 3]

    checkpoint = load_checkpoint(best_path)
    step, train_loss, weight = written[-1]
    assert (checkpoint["step"], checkpoint["val_loss"]) == (step, 1.0)
    assert torch.equal(checkpoint["train_loss"], train_loss)
    assert torch.equal(checkpoint["model_state"]["embedding.weight"], weight)
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_a_loss_that_is_still_part_of_the_graph_is_saved_as_its_value(
    tmp_path: Path, trainer: Trainer
) -> None:
    loss = trainer.model(torch.arange(3)).square().mean()
    assert loss.requires_grad
    trainer.save(tmp_path / "x.pt", loss=loss)
    assert torch.equal(load_checkpoint(tmp_path / "x.pt")["loss"], loss)


def test_the_last_few_checkpoints_are_kept_and_still_load(tmp_path: Path) -> None:
    trainer = Trainer()
    kept: deque[Path] = deque(maxlen=3)
    (tmp_path / "notes.txt").write_text("stays")
    for step in range(8, 13):  # 9 and 10: names must not be ordered as text
        loss = trainer.step(step).item()
        kept.append(tmp_path / f"checkpoint_{step}.pt")
        trainer.save(kept[-1], step=step, loss=loss)
        for old in set(tmp_path.glob("checkpoint_*.pt")) - set(kept):
            old.unlink()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoint_10.pt", "checkpoint_11.pt", "checkpoint_12.pt", "notes.txt"}
    assert [load_checkpoint(path)["step"] for path in kept] == [10, 11, 12]


def test_each_stage_starts_from_the_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    final: Path | None = None
    for number, (stage, steps, reward) in enumerate(
        [("pretrain", 4, None), ("sft", 2, 0.5), ("dpo", 1, 0.9)]
    ):
        trainer = Trainer(seed=number)
        if final is not None:
            trainer.model.load_state_dict(load_checkpoint(final)["model_state"])
        for step in range(steps):
            loss = trainer.step(step)
        final = tmp_path / f"tiny-{stage}" / f"tiny-{stage}_final.pt"
        trainer.save(final, stage=stage, step=steps, loss=loss.item(), reward=reward)

    found = [load_checkpoint(path) for path in sorted(tmp_path.glob("*/*_final.pt"))]
    assert [(each["stage"], each["step"], each["reward"]) for each in found] == [
        ("dpo", 1, 0.9),
        ("pretrain", 4, None),
        ("sft", 2, 0.5),
    ]
    losses = {each["stage"]: each["loss"] for each in found}
    assert losses["dpo"] < losses["sft"] < losses["pretrain"]


def start_of(candidates: list[Path], said: list[str]) -> tuple[int, Path | None]:
    """The first step to do, and the first of the candidates that can be used."""
    for path in candidates:
        try:
            return load_checkpoint(path)["step"] + 1, path
        except FileNotFoundError:
            said.append(f"missing {path.name}")
        except Exception as error:
            said.append(str(error))
    return 0, None


def test_a_missing_file_and_a_damaged_one_are_told_apart(tmp_path: Path, saved: Path) -> None:
    missing, cut, garbage = (tmp_path / f"{name}.pt" for name in ("missing", "cut", "garbage"))
    cut.write_bytes(saved.read_bytes()[:-300])
    garbage.write_bytes(b"no checkpoint")
    said: list[str] = []
    assert start_of([missing, cut, garbage], said) == (0, None)
    assert said[0] == "missing missing.pt"
    assert said[1].startswith(f"{cut}: ") and said[2].startswith(f"{garbage}: ")


def test_a_script_falls_back_to_the_next_older_checkpoint(tmp_path: Path, saved: Path) -> None:
    newest = tmp_path / "newest.pt"
    raw = bytearray(saved.read_bytes())
    raw[len(raw) // 2] ^= 1
    newest.write_bytes(raw)
    said: list[str] = []
    assert start_of([newest, saved], said) == (2, saved)
    assert len(said) == 1


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def complete_run(directory: Path, steps: int, interrupt: Iterator[bool]) -> int:
    """Initialise or resume, save the latest every other step, then the final; the first step."""
    trainer, start, latest = Trainer(), 0, directory / "latest_checkpoint.pt"
    if latest.exists():
        checkpoint = load_checkpoint(latest)
        trainer.model.load_state_dict(checkpoint["model_state"])
        trainer.optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["step"] + 1
    for step in range(start, steps):
        if next(interrupt):
            raise Interrupted
        loss = trainer.step(step)
        if step % 2 == 0:
            lr = trainer.optimizer.param_groups[0]["lr"]
            trainer.save(latest, step=step, loss=loss.item(), learning_rate=lr)
    trainer.save(directory / "tiny_final.pt", step=steps - 1, loss=loss.item(), final=True)
    return start


def test_a_complete_run_that_was_interrupted_twice_ends_like_one_that_was_not(
    tmp_path: Path,
) -> None:
    never = itertools.repeat(False)
    assert complete_run(tmp_path / "whole", 9, never) == 0
    for survives in (4, 3):
        with pytest.raises(Interrupted):
            complete_run(tmp_path / "run", 9, itertools.chain([False] * survives, [True]))
        assert not (tmp_path / "run" / "tiny_final.pt").exists()
    assert load_checkpoint(tmp_path / "run" / "latest_checkpoint.pt")["learning_rate"] == 0.05
    assert complete_run(tmp_path / "run", 9, never) == 5

    final = load_checkpoint(tmp_path / "run" / "tiny_final.pt")
    assert final["final"] is True and final["step"] == 8
    assert same(final, load_checkpoint(tmp_path / "whole" / "tiny_final.pt"))

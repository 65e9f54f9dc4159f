"""Run the commands of the console blocks of a page, and compare what they print.

    python tools/console_blocks.py docs/guides/command-line.md [--write]

A line `$ command` is run by bash in a directory with a small run; the lines below it are its
output. Numbers, ids, times and line breaks may differ; a line `...` stands for any output. With
`--write` the page gets the output of now, except where it has such a line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
ELLIPSIS = "..."
FENCE = "```"
_LOOSE = (
    (re.compile(r"\b[0-9a-f]{32}\b"), "ID"),
    (re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z"), "TIME"),
    (re.compile(r"[0-9][0-9,]*(?:\.[0-9]+)?(?:e-?[0-9]+)?"), "#"),
    (re.compile(r"(?<![\w.])(?:# (?:s|min|h|d)|now)\b"), "AGE"),
    (re.compile(r"# (?:B|KiB|MiB|GiB)\b"), "SIZE"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a page and its output; `first` and `end` are the lines of the output."""

    text: str
    output: tuple[str, ...]
    first: int
    end: int


def commands(lines: Sequence[str]) -> Iterator[Command]:
    """The commands in the console blocks of a page."""
    inside, text, first = False, "", 0
    for number, line in enumerate(lines):
        closes = inside and line == FENCE
        if text and (closes or (inside and line.startswith("$ "))):
            output = tuple(lines[first:number])
            yield Command(text=text, output=output, first=first, end=number)
            text = ""
        if line == f"{FENCE}console":
            inside = True
        elif closes:
            inside = False
        elif inside and line.startswith("$ "):
            text, first = line[2:], number + 1


def run(command: str, directory: Path) -> list[str]:
    """The lines that a command prints, errors among them."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "90",
            "OMP_NUM_THREADS": "1",
            "TQDM_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return [line.rstrip() for line in done.stdout.rstrip("\n").split("\n")]


def loosely(lines: Sequence[str]) -> str:
    """The text without what differs from run to run."""
    text = "\n".join(lines)
    for pattern, word in _LOOSE:
        text = pattern.sub(word, text)
    return text.strip()


def fits(expected: Sequence[str], found: Sequence[str]) -> bool:
    """Whether the output is as the page says, up to what may differ."""
    whole, position = loosely(found), 0
    chunks: list[list[str]] = [[]]
    for line in expected:
        if line.strip() == ELLIPSIS:
            chunks.append([])
        else:
            chunks[-1].append(line)
    if len(chunks) == 1:
        return loosely(expected) == whole
    for chunk in chunks:
        at = whole.find(loosely(chunk), position)
        if at < 0:
            return False
        position = at + len(loosely(chunk))
    return True


def make_run(directory: Path) -> None:
    """What the commands look at: a run, an older `.pt`, and one flipped bit."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import milepost as mp

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.model.layers.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    tokens = torch.randint(0, 512, (2, 16))
    state = {"model": model, "optimizer": optimizer}
    for step in (100, 200, 300):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mp.save(
            directory / f"run/checkpoint-{step}",
            state,
            step=step,
            epoch=step / 200,
            metrics={"loss": round(float(loss.detach()), 4)},
        )
    (directory / "run/checkpoint-400").mkdir()
    mp.save(directory / "broken/checkpoint-100", state, step=100)
    with open(directory / "broken/checkpoint-100/model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    (directory / "old").mkdir()
    old = {"epoch": 3, "loss": 2.5, "best_loss": 2.25, "model_state": model.state_dict()}
    states = {"optimizer_state": optimizer.state_dict(), "scheduler_state": None}
    torch.save({**old, **states, "scaler_state": None}, directory / "old/latest.pt")


def main(arguments: Sequence[str]) -> int:
    page = Path(arguments[0])
    lines = page.read_text(encoding="utf-8").split("\n")
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        make_run(Path(temporary))
        written: list[tuple[Command, list[str]]] = []
        for command in commands(lines):
            found = run(command.text, Path(temporary))
            if fits(command.output, found):
                continue
            wrong += 1
            written.append((command, found))
            report = [f"{page}:{command.first}: $ {command.text}", *found]
            sys.stdout.write("\n".join(report) + "\n\n")
    if "--write" in arguments:
        for command, found in reversed(written):
            if ELLIPSIS not in command.output:
                lines[command.first : command.end] = found
        page.write_text("\n".join(lines), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Training files become rows of equal length, with labels where there is loss.

`pretrain`: documents (a text file, or the `text` of each line of a `.jsonl`), each ended by the end
token, put end to end and cut into rows. `sft`: one row for each line of a `.jsonl`, either
`{"prompt": ..., "completion": ...}` or `{"messages": [{"role": ..., "content": ...}, ...]}`; only
completions and what the assistant says have labels. `tasks/rows.py` reads the other tasks' lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from milepost_trainer.config import ConfigError

NO_LOSS = -100
Spans = list[tuple[int, int]]
Row = tuple[list[int], list[int]]
"""Tokens and labels of one row; a token without loss has the label `NO_LOSS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """All samples: `input_ids` and `labels`, both (samples, length), or (samples, rows, length) for
    a task whose samples have several rows. `others` have the samples along dimension 0 too. `notes`
    are for the log."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    def columns(self) -> dict[str, torch.Tensor]:
        """Everything that a batch has, by name."""
        return {"input_ids": self.input_ids, "labels": self.labels, **self.others}

    def with_others(self, **others: torch.Tensor) -> Samples:
        """The same samples, with more in each."""
        return replace(self, others={**self.others, **others})

    def digest(self) -> str:
        """Of all samples, in order: a position means something in these only."""
        hasher = hashlib.sha256(str(tuple(self.input_ids.shape)).encode())
        for tensor in self.columns().values():
            hasher.update(tensor.numpy().tobytes())
        return hasher.hexdigest()[:32]

    def digests(self) -> torch.Tensor:
        """Of each sample for itself; int64 (samples,)."""
        columns = [tensor.numpy() for tensor in self.columns().values()]
        each = (
            hashlib.blake2b(b"".join(c[n].tobytes() for c in columns), digest_size=8).digest()
            for n in range(len(self))
        )
        return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in each])


class Rows:
    """Collects the rows of samples, cuts them to `length` and pads them.

    A sample of which some row has no label left is left out; both are counted for the log. The
    label of a row's first token does not count, as nothing predicts it; with `first=0` it does.
    """

    def __init__(self, tokenizer: Any, length: int, *, first: int = 1) -> None:
        self.length, self._first = length, first
        end = tokenizer.eos_token_id
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
        self._samples: list[list[Row]] = []
        self._cut = self._empty = 0

    def add(self, *rows: Row, cut_to: Sequence[int] = ()) -> bool:
        """One sample; whether it is taken. `cut_to` cuts its rows shorter than `length`."""
        stops = [min(stop, self.length) for stop in cut_to] or [self.length] * len(rows)
        pairs = list(zip(rows, stops, strict=True))
        self._cut += any(len(ids) > stop for (ids, _), stop in pairs)
        short = [(ids[:stop], labels[:stop]) for (ids, labels), stop in pairs]
        if any(all(label == NO_LOSS for label in labels[self._first :]) for _, labels in short):
            self._empty += 1
            return False
        self._samples.append(short)
        return True

    def samples(self) -> Samples:
        """All that was taken; `ConfigError` when nothing was."""
        notes = self._notes()
        return Samples(
            input_ids=self._stacked(0, self._pad), labels=self._stacked(1, NO_LOSS), notes=notes
        )

    def packed(self) -> Samples:
        """The rows put end to end where they fit, longest first, each into the first row with room.

        `others` has `positions`, (samples, length), which begin anew where a text does; its first
        token predicts nothing and has no label.
        """
        notes = self._notes()
        bins: list[list[Row]] = []
        left: list[int] = []
        texts = [row for rows in self._samples for row in rows]
        for ids, labels in sorted(texts, key=lambda row: -len(row[0])):
            place = next((n for n, room in enumerate(left) if room >= len(ids)), len(bins))
            if place == len(bins):
                bins.append([])
                left.append(self.length)
            bins[place].append((ids, [NO_LOSS, *labels[1:]]))
            left[place] -= len(ids)
        self._samples = [
            [([i for ids, _ in row for i in ids], [i for _, labels in row for i in labels])]
            for row in bins
        ]
        positions = [[n for ids, _ in row for n in range(len(ids))] for row in bins]
        filled = [row + list(range(self.length - len(row))) for row in positions]
        return Samples(
            input_ids=self._stacked(0, self._pad),
            labels=self._stacked(1, NO_LOSS),
            others={"positions": torch.tensor(filled)},
            notes=(*notes, f"{len(texts)} lines were packed into {len(bins)} rows"),
        )

    def _notes(self) -> tuple[str, ...]:
        if not self._samples:
            raise ConfigError(f"no line has an answer within max_seq_length {self.length}")
        notes = []
        if self._cut:
            notes.append(
                f"{self._cut} lines are longer than max_seq_length {self.length} and were cut"
            )
        if self._empty:
            notes.append(
                f"{self._empty} lines have no answer within max_seq_length and were left out"
            )
        return tuple(notes)

    def _stacked(self, which: int, filler: int) -> torch.Tensor:
        stacked = torch.tensor(
            [
                [row[which] + [filler] * (self.length - len(row[which])) for row in rows]
                for rows in self._samples
            ]
        )
        return stacked.squeeze(1)


class Packing(Enum):
    """Whether several texts of `sft` share a row."""

    OFF = "off"
    ON = "on"


def read_samples(
    task: str,
    files: Sequence[str],
    tokenizer: Any,
    length: int,
    packing: Packing = Packing.OFF,
) -> Samples:
    """All rows of `files` for `pretrain` or `sft`. `ConfigError` names the file, and the line,
    that cannot be used."""
    paths = existing(files)
    if task == "pretrain":
        return _packed(paths, tokenizer, length)
    rows = Rows(tokenizer, length)
    for where, line in lines_of(paths, task):
        rows.add(labelled(*_answer_spans(line, tokenizer, where), tokenizer))
    return rows.packed() if packing is Packing.ON else rows.samples()


def existing(files: Sequence[str]) -> list[Path]:
    """The paths; `ConfigError` for one that is no file."""
    paths = [Path(name) for name in files]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is not there")
    return paths


def lines_of(paths: Sequence[Path], task: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of `.jsonl` files with their places, file after file."""
    for path in paths:
        if path.suffix != ".jsonl":
            raise ConfigError(f"{path}: task {task} reads .jsonl files")
        yield from _lines(path)


def labelled(text: str, spans: Spans, end: list[int], tokenizer: Any) -> Row:
    """A token has loss when its text begins inside one of `spans`; so have those of `end`."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    labels = [
        token if any(start <= place < stop for start, stop in spans) else NO_LOSS
        for token, (place, _) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return ids + end, labels + end


def answered(prompt: str, answer: str, tokenizer: Any) -> Row:
    """A prompt and an answer, ended by the end token; the answer has loss."""
    text = prompt + answer
    return labelled(text, [(len(prompt), len(text))], [tokenizer.eos_token_id], tokenizer)


def _packed(paths: Sequence[Path], tokenizer: Any, length: int) -> Samples:
    tokens: list[int] = []
    for path in paths:
        for text in _documents(path):
            tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens.append(tokenizer.eos_token_id)
    rows = len(tokens) // length
    if rows == 0:
        raise ConfigError(f"{len(tokens)} tokens are less than one row of max_seq_length {length}")
    ids = torch.tensor(tokens[: rows * length]).view(rows, length)
    return Samples(input_ids=ids, labels=ids.clone())


def _documents(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    for where, line in _lines(path):
        if not isinstance(line.get("text"), str):
            raise ConfigError(f"{where}: expected a key text, found {', '.join(line)}")
        yield line["text"]


def _answer_spans(line: dict[str, Any], tokenizer: Any, where: str) -> tuple[str, Spans, list[int]]:
    """The whole text, the character spans that are answers, and tokens to add at its end."""
    prompt, completion = line.get("prompt"), line.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        return text, [(len(prompt), len(text))], [tokenizer.eos_token_id]
    messages = line.get("messages")
    if not isinstance(messages, list):
        raise ConfigError(
            f"{where}: expected prompt and completion, or messages; found {', '.join(line)}"
        )
    if not tokenizer.chat_template:
        raise ConfigError(f"{where}: the tokenizer has no chat template to put messages into text")
    text = _templated(tokenizer, messages)
    spans: Spans = []
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _templated(tokenizer, messages[:number], add_generation_prompt=True)
        through = _templated(tokenizer, messages[: number + 1])
        if not (through.startswith(before) and text.startswith(through)):
            raise ConfigError(
                f"{where}: the chat template rewrites earlier messages, so that the answer of "
                f"message {number} cannot be found in the whole; use prompt and completion"
            )
        spans.append((len(before), len(through)))
    return text, spans, []


def _templated(tokenizer: Any, messages: Any, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Non-blank lines of a `.jsonl` with their place; `ConfigError` for what is no JSON object."""
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{number}"
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ConfigError(f"{where}: expected a JSON object")
        yield where, line

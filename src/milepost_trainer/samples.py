"""Training files become rows of equal length, with labels where there is loss.

`pretrain`: documents (a text file, or the `text` of each line of a `.jsonl`), each ended by the end
token, put end to end and cut into rows. `sft`: one row for each line of a `.jsonl`, either
`{"prompt": ..., "completion": ...}` or `{"messages": [{"role": ..., "content": ...}, ...]}`; only
completions and what the assistant says have labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milepost_trainer.config import ConfigError

NO_LOSS = -100
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Rows of tokens: `input_ids` and `labels`, both (rows, length); `notes` are for the log."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    def digest(self) -> str:
        """Of all rows with their labels, in order: a position means something in these only."""
        hasher = hashlib.sha256(str(tuple(self.input_ids.shape)).encode())
        for tensor in (self.input_ids, self.labels):
            hasher.update(tensor.numpy().tobytes())
        return hasher.hexdigest()[:32]


def read_samples(task: str, files: Sequence[str], tokenizer: Any, length: int) -> Samples:
    """All rows of `files`. `ConfigError` names the file, and the line, that cannot be used."""
    paths = [Path(name) for name in files]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"train_files: {path} is not there")
    if task == "pretrain":
        return _packed(paths, tokenizer, length)
    return _masked(paths, tokenizer, length)


def _packed(paths: Sequence[Path], tokenizer: Any, length: int) -> Samples:
    tokens: list[int] = []
    for path in paths:
        for text in _documents(path):
            tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens.append(tokenizer.eos_token_id)
    rows = len(tokens) // length
    if rows == 0:
        raise ConfigError(
            f"train_files: {len(tokens)} tokens are less than one row of max_seq_length {length}"
        )
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


def _masked(paths: Sequence[Path], tokenizer: Any, length: int) -> Samples:
    rows: list[tuple[list[int], list[int]]] = []
    cut = empty = 0
    for path in paths:
        if path.suffix != ".jsonl":
            raise ConfigError(f"train_files: {path}: task sft reads .jsonl files")
        for where, line in _lines(path):
            ids, labels = _labelled(line, tokenizer, where)
            cut += len(ids) > length
            ids, labels = ids[:length], labels[:length]
            if all(label == NO_LOSS for label in labels[1:]):
                empty += 1
                continue
            rows.append((ids, labels))
    if not rows:
        raise ConfigError(f"train_files: no line has an answer within max_seq_length {length}")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    notes = []
    if cut:
        notes.append(f"{cut} lines are longer than max_seq_length {length} and were cut")
    if empty:
        notes.append(f"{empty} lines have no answer within max_seq_length and were left out")
    return Samples(
        input_ids=torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows]),
        labels=torch.tensor([row + [NO_LOSS] * (length - len(row)) for _, row in rows]),
        notes=tuple(notes),
    )


def _labelled(line: dict[str, Any], tokenizer: Any, where: str) -> tuple[list[int], list[int]]:
    """Tokens and labels of one line; a token has loss when its text begins inside an answer."""
    text, spans, end = _answer_spans(line, tokenizer, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    labels = [
        token if any(start <= place < stop for start, stop in spans) else NO_LOSS
        for token, (place, _) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return ids + end, labels + end


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

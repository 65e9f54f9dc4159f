"""The rows of tasks whose losses are over whole samples: lines of `.jsonl` files, one sample each.

| task | keys of a line | rows of a sample |
|---|---|---|
| `dpo` | `prompt`, `chosen`, `rejected` | chosen, rejected |
| `kto` | `prompt`, `completion`, `label` (true: desirable) | its own, a foreign completion |
| `sdpg` | `prompt`, `completion`, `teacher_prompt` | what the policy sees, what the teacher sees |
| `reward` | `chosen`, `rejected`, and `prompt` or not | chosen, rejected |
| `classification` | `text`, `label` (a number from 0) | the text |
| `value` | `prompt`, `completion`, `value` (a number) | the completion after the prompt |
| `embedding` | `anchor`, `positive` | anchor, positive |

Labels are the tokens that count: answers where log-probabilities are compared, all but padding
where a model reads a whole text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from milepost_trainer.config import ConfigError
from milepost_trainer.samples import NO_LOSS, Row, Rows, Samples, answered, existing, lines_of


def dpo_samples(files: Sequence[str], tokenizer: Any, length: int) -> Samples:
    """Both answers of each line, each after the prompt."""
    rows = Rows(tokenizer, length)
    for _, line in _texts(files, "dpo", "prompt", "chosen", "rejected"):
        rows.add(
            *(answered(line["prompt"], line[key], tokenizer) for key in ("chosen", "rejected"))
        )
    return rows.samples()


def kto_samples(files: Sequence[str], tokenizer: Any, length: int) -> Samples:
    """Each line's prompt with its own completion, and with that of the line before it.

    `others` has `desirable`, bool (samples,). The foreign completions are for the baseline of the
    loss; which one a prompt gets depends on the files alone, so on any mesh it is the same one.
    """
    own, foreign = Rows(tokenizer, length), Rows(tokenizer, length)
    kept = []
    for where, line in _texts(files, "kto", "prompt", "completion"):
        if not isinstance(line.get("label"), bool):
            raise ConfigError(f"{where}: label: expected true (desirable) or false")
        if own.add(answered(line["prompt"], line["completion"], tokenizer)):
            kept.append(line)
    mine = own.samples()
    if len(kept) < 2:
        raise ConfigError("task kto needs two lines, to compare completions")
    for line, other in zip(kept, [kept[-1], *kept[:-1]], strict=True):
        foreign.add(_cut_prompt(answered(line["prompt"], other["completion"], tokenizer), length))
    theirs = foreign.samples()
    return Samples(
        input_ids=torch.stack((mine.input_ids, theirs.input_ids), dim=1),
        labels=torch.stack((mine.labels, theirs.labels), dim=1),
        others={"desirable": torch.tensor([line["label"] for line in kept])},
        notes=mine.notes,
    )


def _cut_prompt(row: Row, length: int) -> Row:
    """A row with a label in it also when its prompt alone fills it."""
    ids, labels = row
    first = next(n for n, label in enumerate(labels) if label != NO_LOSS)
    over = max(first - (length - 1), 0)
    return ids[over:], labels[over:]


def sdpg_samples(files: Sequence[str], tokenizer: Any, length: int) -> Samples:
    """The completion after the prompt, and the same tokens of it after the teacher's prompt."""
    rows = Rows(tokenizer, length)
    for _, line in _texts(files, "sdpg", "prompt", "completion", "teacher_prompt"):
        completion = [*_ids(line["completion"], tokenizer), tokenizer.eos_token_id]
        prompts = [_ids(line[key], tokenizer) for key in ("prompt", "teacher_prompt")]
        room = max(length - max(map(len, prompts)), 0)
        pair = [(ids + completion, [NO_LOSS] * len(ids) + completion) for ids in prompts]
        rows.add(*pair, cut_to=[len(ids) + room for ids in prompts])
    return rows.samples()


def reward_samples(files: Sequence[str], tokenizer: Any, length: int) -> Samples:
    """Both texts of each line, ended by the end token."""
    rows = Rows(tokenizer, length, first=0)
    for where, line in _texts(files, "reward", "chosen", "rejected"):
        prompt = line.get("prompt", "")
        if not isinstance(prompt, str):
            raise ConfigError(f"{where}: prompt: expected text")
        texts = (_ids(prompt + line[key], tokenizer) for key in ("chosen", "rejected"))
        rows.add(*(([*ids, tokenizer.eos_token_id],) * 2 for ids in texts))
    return rows.samples()


def classification_samples(
    files: Sequence[str], tokenizer: Any, length: int, classes: int
) -> Samples:
    """The text of each line, ended by the end token. `others` has `class`, int64 (samples,)."""
    rows, found = Rows(tokenizer, length, first=0), []
    for where, line in _texts(files, "classification", "text"):
        label = line.get("label")
        if type(label) is not int or not 0 <= label < classes:
            raise ConfigError(
                f"{where}: label: expected a whole number from 0 to {classes - 1} (num_labels is "
                f"{classes}), found {label!r}"
            )
        ids = [*_ids(line["text"], tokenizer), tokenizer.eos_token_id]
        if rows.add((ids, ids)):
            found.append(label)
    return rows.samples().with_others(**{"class": torch.tensor(found)})


def value_samples(files: Sequence[str], tokenizer: Any, length: int) -> Samples:
    """The completion after the prompt. `others` has `value`, float32 (samples,)."""
    rows, found = Rows(tokenizer, length), []
    for where, line in _texts(files, "value", "prompt", "completion"):
        value: Any = line.get("value")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"{where}: value: expected a number, found {value!r}")
        if rows.add(answered(line["prompt"], line["completion"], tokenizer)):
            found.append(float(value))
    return rows.samples().with_others(value=torch.tensor(found))


def embedding_samples(files: Sequence[str], tokenizer: Any, length: int) -> Samples:
    """Both texts of each line, with the special tokens that the tokenizer adds."""
    rows = Rows(tokenizer, length, first=0)
    for _, line in _texts(files, "embedding", "anchor", "positive"):
        encoded = tokenizer([line["anchor"], line["positive"]], truncation=True, max_length=length)[
            "input_ids"
        ]
        rows.add(*((list(ids), list(ids)) for ids in encoded))
    return rows.samples()


def _texts(files: Sequence[str], task: str, *keys: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines with text under each of `keys`; `ConfigError` names the line that lacks one."""
    for where, line in lines_of(existing(files), task):
        missing = [key for key in keys if not isinstance(line.get(key), str)]
        if missing:
            raise ConfigError(
                f"{where}: task {task}: expected text under {', '.join(keys)}; there is none under "
                f"{', '.join(missing)}, the line has {', '.join(line) or 'nothing'}"
            )
        yield where, line


def _ids(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])

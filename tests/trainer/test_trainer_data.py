"""Rows, labels and the cursor: what a run reads, and where it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost_trainer.batches import GlobalBatches
from milepost_trainer.config import ConfigError
from milepost_trainer.samples import NO_LOSS, Samples, read_samples
from milepost_trainer.tokens import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer()


def jsonl(path: Path, *lines: object) -> str:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return str(path)


def trained_text(samples: Samples, row: int, tokenizer: Any) -> str:
    """The text of a row that has labels."""
    labels = samples.labels[row]
    return str(tokenizer.decode(labels[labels != NO_LOSS]))


def test_the_byte_level_tokenizer_gives_back_any_text(tokenizer: Any) -> None:
    text = "naïve  café\n\t東京 🙂 <end"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 258


def test_documents_are_put_end_to_end_and_cut_into_rows(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("abcdefg")
    lines = jsonl(tmp_path / "b.jsonl", {"text": "hij"}, {"text": "klmnopq"})
    samples = read_samples("pretrain", [str(tmp_path / "a.txt"), lines], tokenizer, 6)
    assert [tokenizer.decode(row) for row in samples.input_ids] == [
        "abcdef",
        "g<end>hij<end>",
        "klmnop",
    ]
    assert torch.equal(samples.labels, samples.input_ids)


def test_only_the_completion_has_loss(tmp_path: Path, tokenizer: Any) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "2+2=", "completion": "4 é"})
    samples = read_samples("sft", [file], tokenizer, 16)
    assert trained_text(samples, 0, tokenizer) == "4 é<end>"
    kept = samples.labels[0] != NO_LOSS
    assert kept.nonzero().flatten().tolist() == [4, 5, 6, 7, 8]
    assert torch.equal(samples.labels[0][kept], samples.input_ids[0][kept])
    assert samples.input_ids[0, 9:].tolist() == [tokenizer.pad_token_id] * 7


def test_only_what_the_assistant_says_has_loss(tmp_path: Path, tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "assistant: no"},
        {"role": "assistant", "content": "bye"},
    ]
    file = jsonl(tmp_path / "a.jsonl", {"messages": messages})
    samples = read_samples("sft", [file], tokenizer, 96)
    assert trained_text(samples, 0, tokenizer) == "hello<end>bye<end>"


def test_answers_that_do_not_fit_are_cut_or_left_out_and_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    file = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "p", "completion": "long answer"},
        {"prompt": "a prompt that fills the row", "completion": "x"},
    )
    samples = read_samples("sft", [file], tokenizer, 8)
    assert len(samples) == 1 and trained_text(samples, 0, tokenizer) == "long an"
    assert [note.split(" ", 1)[0] for note in samples.notes] == ["2", "1"]


REWRITING = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        ("sft", ["{"], r"data\.jsonl:1: not JSON"),
        ("sft", ["[1]"], r"data\.jsonl:1: expected a JSON object"),
        ("sft", ['{"text": "a"}'], r"data\.jsonl:1: expected prompt and completion, or messages"),
        ("sft", ["", '{"prompt": "a", "completion": ""}'], None),
        ("pretrain", ['{"prompt": "a"}'], r"data\.jsonl:1: expected a key text, found prompt"),
        ("pretrain", ['{"text": "a"}'], r"2 tokens are less than one row of max_seq_length 8"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(
    task: str, lines: list[str], message: str | None, tmp_path: Path, tokenizer: Any
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(lines))
    if message is None:  # an empty completion still has its end token
        assert len(read_samples(task, [str(file)], tokenizer, 8)) == 1
        return
    with pytest.raises(ConfigError, match=message):
        read_samples(task, [str(file)], tokenizer, 8)


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = jsonl(tmp_path / "a.jsonl", {"messages": messages})
    tokenizer.chat_template = REWRITING
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the chat template rewrites"):
        read_samples("sft", [file], tokenizer, 64)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the tokenizer has no chat template"):
        read_samples("sft", [file], tokenizer, 64)


def test_files_of_another_kind_or_not_there_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"a\.txt: task sft reads \.jsonl files"):
        read_samples("sft", [str(tmp_path / "a.txt")], tokenizer, 8)
    with pytest.raises(ConfigError, match=r"b\.txt is not there"):
        read_samples("pretrain", [str(tmp_path / "b.txt")], tokenizer, 8)


# ---- the cursor


def numbered(rows: int = 10) -> Samples:
    """Rows that say which they are."""
    ids = torch.arange(rows)[:, None].expand(rows, 2).contiguous()
    return Samples(input_ids=ids, labels=ids.clone())


def batches(rank: int = 0, world: int = 1, *, size: int = 4, samples: Samples | None = None) -> Any:
    return GlobalBatches(
        samples or numbered(), batch_size=size, seed=3, data_rank=rank, data_world=world
    )


def rows_of(readers: list[GlobalBatches], steps: int) -> list[int]:
    """The rows of each global batch in order of rank."""
    return [
        int(row)
        for _ in range(steps)
        for reader in readers
        for row in reader.next()["labels"][:, 0]
    ]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    found = rows_of([batches()], 5)  # 20 rows: two epochs, a batch across the border
    assert sorted(found[:10]) == sorted(found[10:]) == list(range(10))
    assert found[:10] != found[10:]


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_another_width_and_batch_size_go_on_where_the_run_stopped(stop: int, width: int) -> None:
    whole = rows_of([batches()], 9)
    first = [batches(rank, 2) for rank in range(2)]
    seen = rows_of(first, stop)
    second = [batches(rank, width, size=8) for rank in range(width)]
    for reader in second:
        reader.load_state_dict(json.loads(json.dumps(first[0].state_dict())))
        reader.check()
    assert first[0].state_dict() == first[1].state_dict()
    assert seen + rows_of(second, 3) == whole[: 4 * stop + 24]


def test_a_position_in_other_data_is_refused() -> None:
    reader = batches(samples=numbered(12))
    reader.load_state_dict(batches().state_dict())
    with pytest.raises(ConfigError, match="give other samples than those"):
        reader.check()

"""The files of tasks: what their rows are, and which lines and keys are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost_trainer.batches import GlobalBatches
from milepost_trainer.config import ConfigError, parse_config
from milepost_trainer.samples import NO_LOSS, Samples
from milepost_trainer.tasks import TASKS
from milepost_trainer.tokens import byte_level_tokenizer
from milepost_trainer.training import Run, train
from tests.trainer.task_runs import task_config, write_lines, yaml_changes
from tests.trainer.yaml_runs import yaml_of

TOKENIZER = byte_level_tokenizer()


def read(directory: Path, task: str, *lines: Any, length: int = 16) -> Samples:
    file = directory / "data.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    config = task_config(directory, file, task, max_seq_length=length)
    return TASKS[task].read(config, [str(file)], TOKENIZER)


def texts(samples: Samples, number: int) -> list[tuple[str, str]]:
    """Each row of a sample without padding, and what of it has labels."""
    found = []
    rows = (
        tensor[number].view(-1, tensor.shape[-1]) for tensor in (samples.input_ids, samples.labels)
    )
    for ids, labels in zip(*rows, strict=True):
        shown = TOKENIZER.decode(ids[ids != TOKENIZER.pad_token_id])
        found.append((shown, TOKENIZER.decode(labels[labels != NO_LOSS])))
    return found


def test_a_pair_has_both_answers_after_the_prompt(tmp_path: Path) -> None:
    samples = read(tmp_path, "dpo", {"prompt": "2+2=", "chosen": "4", "rejected": "five"})
    assert texts(samples, 0) == [("2+2=4<end>", "4<end>"), ("2+2=five<end>", "five<end>")]


def test_a_foreign_completion_is_that_of_the_line_before(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n}:", "completion": f"c{n}", "label": n == 1} for n in range(3)]
    samples = read(tmp_path, "kto", *lines)
    assert texts(samples, 0) == [("0:c0<end>", "c0<end>"), ("0:c2<end>", "c2<end>")]
    assert texts(samples, 2) == [("2:c2<end>", "c2<end>"), ("2:c1<end>", "c1<end>")]
    assert samples.others["desirable"].tolist() == [False, True, False]


def test_a_foreign_completion_after_a_prompt_that_fills_the_row_keeps_a_token(
    tmp_path: Path,
) -> None:
    lines = [
        {"prompt": "p", "completion": "long enough", "label": True},
        {"prompt": "thirteen char", "completion": "x", "label": False},
    ]
    samples = read(tmp_path, "kto", *lines, length=15)
    assert texts(samples, 1)[1] == ("thirteen charlo", "lo")
    assert [label for _, label in texts(samples, 1)] == ["x<end>", "lo"]
    short = read(tmp_path, "kto", lines[0], {**lines[1], "prompt": "p" * 13}, length=14)
    assert texts(short, 1) == [("p" * 13 + "x", "x"), ("p" * 13 + "l", "l")]


def test_teacher_and_policy_have_the_same_tokens_of_the_completion(tmp_path: Path) -> None:
    line = {"prompt": "q:", "completion": "answer", "teacher_prompt": "hint answer q:"}
    samples = read(tmp_path, "sdpg", line, length=24)
    assert texts(samples, 0) == [
        ("q:answer<end>", "answer<end>"),
        ("hint answer q:answer<end>", "answer<end>"),
    ]
    cut = read(tmp_path, "sdpg", line, length=18)
    assert texts(cut, 0) == [("q:answ", "answ"), ("hint answer q:answ", "answ")]
    assert cut.notes[0].startswith("1 lines are longer")


def test_a_reward_model_reads_whole_texts_with_or_without_a_prompt(tmp_path: Path) -> None:
    samples = read(
        tmp_path,
        "reward",
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"chosen": "a", "rejected": "b"},
    )
    assert texts(samples, 0) == [("pa<end>", "pa<end>"), ("pb<end>", "pb<end>")]
    assert texts(samples, 1) == [("a<end>", "a<end>"), ("b<end>", "b<end>")]


def test_a_classifier_reads_whole_texts_and_their_classes(tmp_path: Path) -> None:
    lines = [{"text": "ab", "label": 2}, {"text": "c" * 30, "label": 0}]
    samples = read(tmp_path, "classification", *lines)
    assert texts(samples, 0) == [("ab<end>", "ab<end>")]
    assert samples.others["class"].tolist() == [2, 0]
    assert samples.notes[0].startswith("1 lines are longer")


def test_the_value_of_a_line_stays_with_its_answer(tmp_path: Path) -> None:
    lines = [
        {"prompt": "p" * 20, "completion": "does not fit", "value": 7},
        {"prompt": "p:", "completion": "a", "value": 0.5},
        {"prompt": "q:", "completion": "b", "value": 1},
    ]
    samples = read(tmp_path, "value", *lines)
    assert texts(samples, 0) == [("p:a<end>", "a<end>")]
    assert samples.others["value"].tolist() == [0.5, 1.0]


def test_texts_to_embed_are_cut_by_the_tokenizer(tmp_path: Path) -> None:
    samples = read(tmp_path, "embedding", {"anchor": "abc", "positive": "x" * 30}, length=8)
    assert texts(samples, 0) == [("abc", "abc"), ("x" * 8, "x" * 8)]


def test_answers_that_do_not_fit_leave_a_pair_out(tmp_path: Path) -> None:
    full = {"prompt": "p" * 20, "chosen": "a", "rejected": "b"}
    fits = {"prompt": "p", "chosen": "a", "rejected": "b"}
    samples = read(tmp_path, "dpo", full, fits)
    assert len(samples) == 1 and samples.notes[1].startswith("1 lines have no answer")
    with pytest.raises(ConfigError, match="no line has an answer within max_seq_length 16"):
        read(tmp_path, "dpo", full)


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("dpo", {"prompt": "a", "chosen": "b"}, r"data\.jsonl:1: .* none under rejected"),
        ("dpo", {"prompt": 1, "chosen": "b", "rejected": "c"}, r"none under prompt"),
        ("kto", {"prompt": "a", "completion": "b"}, r"label: expected true \(desirable\) or false"),
        ("kto", {"prompt": "a", "completion": "b", "label": 1}, r"label: expected true"),
        ("kto", {"prompt": "a", "completion": "b", "label": True}, r"kto needs two lines"),
        ("sdpg", {"prompt": "a", "completion": "b"}, r"none under teacher_prompt"),
        ("reward", {"chosen": "a", "rejected": None}, r"none under rejected, the line has chosen"),
        ("reward", {"prompt": 3, "chosen": "a", "rejected": "b"}, r"prompt: expected text"),
        ("classification", {"label": 1}, r"none under text, the line has label"),
        ("classification", {"text": "a"}, r"data\.jsonl:1: label: .* from 0 to 2 .* found None"),
        ("classification", {"text": "a", "label": 3}, r"num_labels is 3\), found 3"),
        ("classification", {"text": "a", "label": True}, r"label: expected a whole number"),
        ("value", {"prompt": "a", "completion": "b"}, r"value: expected a number, found None"),
        ("value", {"prompt": "a", "completion": "b", "value": True}, r"expected a number"),
        ("embedding", {}, r"none under anchor, positive, the line has nothing"),
    ],
)
def test_a_line_that_lacks_something_is_named(
    task: str, line: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, task, line)


def test_a_text_file_is_no_file_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"data\.txt: task dpo reads \.jsonl files"):
        TASKS["dpo"].read(
            task_config(tmp_path, tmp_path / "data.txt", "dpo"),
            [str(tmp_path / "data.txt")],
            TOKENIZER,
        )


def test_texts_are_packed_longest_first_and_positions_begin_anew(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * n, "completion": "a"} for n in (1, 5, 3)]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    config = task_config(tmp_path, file, "sft", max_seq_length=12, packing=True)
    samples = TASKS["sft"].read(config, [str(file)], TOKENIZER)
    assert [TOKENIZER.decode(row) for row in samples.input_ids] == [
        "pppppa<end>pppa<end>",
        "pa<end>" + "<pad>" * 9,
    ]
    assert samples.others["positions"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4],
        [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    ]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_pass_in_order_has_every_sample_once(width: int, tmp_path: Path) -> None:
    line = {"prompt": "p", "chosen": "a", "rejected": "b"}
    samples = read(tmp_path, "dpo", *[{**line, "prompt": str(n)} for n in range(6)])
    ranks = [
        GlobalBatches(samples, batch_size=4, seed=0, data_rank=rank, data_world=width)
        for rank in range(width)
    ]
    seen = []
    for parts in zip(*(reader.in_order() for reader in ranks), strict=True):
        rows = [row for batch, _ in parts for row in batch["input_ids"][:, 0].tolist()]
        seen += rows[: parts[0][1]]
    assert seen == samples.input_ids[:, 0].tolist()


# ---- keys of the YAML


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("sft", {"beta": 0.2}, "beta is about task dpo and kto and sdpg; leave it out of task sft"),
        ("kto", {"label_smoothing": 0.1}, "label_smoothing is about task dpo"),
        ("dpo", {"desirable_weight": 2.0}, "desirable_weight is about task kto"),
        ("reward", {"precompute_reference_logps": True}, "precompute_reference_logps is about"),
        ("dpo", {"similarity_scale": 10.0}, "similarity_scale is about task embedding"),
        ("reward", {"num_labels": 3}, "num_labels is about task classification"),
        ("classification", {"num_labels": None}, "task classification needs num_labels"),
        ("classification", {"num_labels": 1}, "num_labels: expected `int` >= 2"),
        ("dpo", {"packing": True}, "packing is about task sft"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing: expected `float` < 0.5"),
        ("embedding", {"global_batch_size": 1}, "set global_batch_size to more than 1"),
        *(
            (task, {"pipeline_parallel_size": 2}, f"task {task} cannot run with pipeline_parallel")
            for task in TASKS
            if task not in ("pretrain", "sft")
        ),
        ("sft", {"packing": True, "cp_size": 2}, "packing needs attention that stops"),
        ("sft", {"eval_steps": 2}, "eval_steps is about eval_files"),
        ("sft", {"greater_is_better": True}, "greater_is_better is about metric_for_best_model"),
        ("sft", {"metric_for_best_model": "eval_loss"}, "eval_loss is measured on eval_files"),
        (
            "sft",
            {"eval_files": ["x"], "eval_steps": 2, "save_steps": 3},
            "save_steps 3 is no multiple of eval_steps 2",
        ),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(
    task: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path, task)
    with pytest.raises(ConfigError, match=message):
        parse_config(yaml_of(tmp_path, lines, **{**yaml_changes(task), **changes}), "run.yaml")


def test_a_sentence_transformer_of_another_make_is_refused(tmp_path: Path) -> None:
    lines = write_lines(tmp_path, "embedding")
    train(task_config(tmp_path, lines, "embedding", max_steps=1))
    base = tmp_path / "checkpoint-1"
    start: dict[str, Any] = {"model_config": None, "model_name_or_path": str(base)}
    pooling = json.loads((base / "1_Pooling" / "config.json").read_text())
    for change, message in (
        ({"pooling_mode_cls_token": True}, "with cls_token pooling"),
        ({"pooling_mode": "lasttoken"}, "with lasttoken pooling"),
    ):
        (base / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, **change}))
        with pytest.raises(ConfigError, match=message):
            Run(task_config(tmp_path / "b", lines, "embedding", **start))

"""The YAML of a run is parsed strictly: what cannot be meant is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost_trainer.config import ConfigError, TrainerConfig, parse_config, read_config
from milepost_trainer.models import build_model

LEAST = """
model_config: {model_type: llama, hidden_size: 16, num_attention_heads: 2, num_hidden_layers: 1}
train_files: [text.txt]
max_steps: 10
output_dir: run
"""


def parse(more: str = "", *, without: str | None = None) -> TrainerConfig:
    """The least YAML, without the line of a key, with lines added."""
    lines = [line for line in LEAST.splitlines() if without is None or without not in line]
    return parse_config("\n".join([*lines, more]), "run.yaml")


def test_the_least_yaml_is_one_process_with_adamw() -> None:
    config = parse()
    assert set(config.mesh_sizes().values()) == {1}
    assert config.optimizer == "adamw" and config.resume_from_checkpoint is False


def test_numbers_with_an_exponent_are_numbers() -> None:
    assert parse("learning_rate: 3e-4").learning_rate == 3e-4
    assert parse("learning_rate: 1").learning_rate == 1.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rat: 0.1", r"run\.yaml: unknown key 'learning_rat'; did you mean learning_rate"),
        ("tensor_parallel: 2", r"unknown key 'tensor_parallel'"),
        ("tp_size: 0", r"run\.yaml: tp_size: expected `int` >= 1"),
        ("tp_size: '2'", r"tp_size: expected `int`, got `str`"),
        ("max_seq_length: 1.5", r"max_seq_length: expected `int`, got `float`"),
        ("save_only_model: 1", r"save_only_model: expected `bool`, got `int`"),
        ("task: chat", r"task: invalid enum value 'chat'"),
        ("optimizer: lion", r"optimizer: invalid enum value 'lion'"),
        ("pipeline_schedule: zigzag", r"pipeline_schedule: invalid enum value 'zigzag'"),
        ("moe_balancing: auxiliary", r"moe_balancing: invalid enum value 'auxiliary'"),
        ("learning_rate: 0", r"learning_rate: expected `float` > 0"),
        ("learning_rate: fast", r"learning_rate: expected `float`, got `str`"),
        ("resume_from_checkpoint: 3", r"resume_from_checkpoint: expected `bool \| str`, got `int`"),
        ("save_max_shard_size: 0", r"save_max_shard_size: expected `int` >= 1"),
        ("model_name_or_path: base", r"either model_name_or_path or model_config, and not both"),
        ("microbatches: 2", r"microbatches is about pipelines; set pipeline_parallel_size"),
        ("dp_shard_size: 3", r"global_batch_size 8 cannot be cut .* for 3 data-parallel ranks"),
        (
            "dp_shard_size: 4\npipeline_parallel_size: 2",
            r"the 2 rows of a rank .* cannot be cut into 4 microbatches",
        ),
        ("use_grouped_gemm: false\nep_size: 2", r"use_grouped_gemm: false .* ep_size"),
        ("allow_optimizer_warm_restart: true", r"is about a resume; set resume_from_checkpoint"),
        ("seed: 1\nseed: 2", r"not YAML: .*the key seed comes twice"),
        ("seed: [", r"run\.yaml: not YAML"),
        ("seed: !!python/object/apply:os.getcwd []", r"not YAML"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse(line)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("train_files", r"missing required field `train_files`"),
        ("max_steps", r"missing required field `max_steps`"),
        ("output_dir", r"missing required field `output_dir`"),
        ("model_config", r"give either model_name_or_path or model_config"),
    ],
)
def test_what_every_run_needs_is_asked_for_by_name(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(without=key)


def test_a_model_config_names_its_family() -> None:
    with pytest.raises(ConfigError, match="model_config needs model_type"):
        parse("model_config: {hidden_size: 16}", without="model_config")


def test_an_empty_list_of_files_and_a_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train_files: expected `array` of length >= 1"):
        parse("train_files: []", without="train_files")
    with pytest.raises(ConfigError, match=r"run\.yaml: expected keys and values, found str"):
        parse_config("just text", "run.yaml")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        read_config(tmp_path / "nothing.yaml")


def test_the_guide_has_every_key_and_its_yaml_is_one() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "trainer.md").read_text()
    table = guide.partition("## Keys")[2].partition("\n## ")[0]
    named = {word for line in table.splitlines() for word in line.split("`")[1::2]}
    assert set(TrainerConfig.__struct_fields__) <= named
    parse_config(guide.partition("```yaml\n")[2].partition("```")[0], "guide")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("tp_size: 2", r"tp=2 needs 2 ranks, but the job has 1"),
        ("ep_size: 3", r"ep=3 times etp=1 must divide"),
        ("use_grouped_gemm: true", r"LlamaForCausalLM does not support .*experts"),
    ],
)
def test_a_mesh_or_kernel_that_does_not_fit_is_refused(lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(parse(lines), 300)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("model_config: {model_type: llama, vocab_size: 9}", r"vocab_size: 9 is less than the 258"),
        ("model_config: {model_type: quux}", r"model_config: .*quux"),
        (
            "model_config: {model_type: llama, hiden_size: 8}",
            r"llama has no field 'hiden_size'; did you mean hidden_size\?",
        ),
        (
            "model_config: {model_type: llama, hidden_size: 10, num_attention_heads: 4}",
            r"model_config: .*10.* is not a multiple",
        ),
        ("model_name_or_path: nowhere", r"nowhere is no directory with a config\.json"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build_model(parse(model, without="model_config"), 258)

"""Every flag that older after-training programs are documented to take has its place here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from milepost.cli.app import make_app

PAGE = Path(__file__).parents[2] / "docs/guides/tools.md"

# Flags that a verb takes by the same name; `--no-` stands for a switch that is on.
TAKEN: dict[str, str] = {
    "merge-ep-shards": "input_dir output_dir quiet max_shard_size delete_input_shards",
    "merge-peft-adapters": "adapter_dir output_dir task dtype num_labels max_shard_size quiet",
    "convert-to-bf16": "input_dir output_dir max_shard_size",
    "quantize-to-lowp": "input_dir output_dir format contraction_axis include exclude verify "
    "lowp_apply_dense_mlp no_lowp_apply_dense_mlp lowp_apply_moe_experts "
    "no_lowp_apply_moe_experts lowp_keep_first_blocks lowp_keep_last_blocks",
    "merge-models": "models output_dir method base_model dtype density lambda t tokenizer_source "
    "max_shard_size allow_missing_tokenizer quiet",
    "unfuse-moe-experts": "input_dir output_dir max_shard_size",
    "reset-sinks": "output_dir in_place dry_run",
    "reattach-vision-tower": "input_dir model_id revision output_dir max_shard_size",
}
# Flags that have no use where no model is built, or another name; the table says which.
REPLACED: dict[str, str] = {
    "merge_peft_adapters.py": "device_map attn_implementation trust_remote_code",
    "convert_to_bf16.py": "model_type peft merge_adapter device_map verify check_inference "
    "trust_remote_code",
    "merge_models.py": "trust_remote_code",
    "reset_sinks.py": "model_id max_shard_size trust_remote_code",
    "reattach_vision_tower.py": "trust_remote_code",
}
CONVERTERS = ("convert_glm5_bf16.py", "convert_mistral4_bf16.py", "convert_deepseek_v4_bf16.py")


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(make_app())
    return dict(group.commands)


def options_of(verb: str) -> set[str]:
    return {
        word.lstrip("-")
        for parameter in commands()[verb].params
        for word in (*parameter.opts, *parameter.secondary_opts)
    }


def table() -> str:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Flags by their older names") :]
    return section[: section.index("\n## ", 1)]


@pytest.mark.parametrize("verb", TAKEN)
def test_a_verb_takes_the_flag_in_both_spellings(verb: str) -> None:
    command = commands()[verb]
    known = options_of(verb)
    for flag in TAKEN[verb].split():
        assert flag.replace("_", "-") in known, f"{verb} --{flag}"
        context = command.context_class(command, **command.context_settings)
        assert context.token_normalize_func(flag) == flag.replace("_", "-")


@pytest.mark.parametrize("verb", TAKEN)
def test_the_table_names_each_flag_that_is_the_same_beside_its_verb(verb: str) -> None:
    program = f"{verb.replace('-', '_')}.py"
    (row,) = re.findall(rf"^\| .*`{program}`.*$", table(), re.MULTILINE)
    more = re.findall(rf"^\| .*`{program}`.*\n((?:\| \.\.\. .*\n)*)", table(), re.MULTILINE)
    named = set(re.findall(r"--([a-z_-]+)", row + "".join(more)))
    for flag in TAKEN[verb].split():
        assert flag.replace("no_lowp", "no-lowp") in named or flag in named, f"{program} --{flag}"
    for flag in REPLACED.get(program, "").split():
        assert flag in named, f"{program} --{flag}"


def test_the_table_leads_from_every_converter_to_a_verb() -> None:
    for program in CONVERTERS:
        (row,) = [line for line in table().splitlines() if f"`{program}`" in line]
        assert "`dequantize`" in row

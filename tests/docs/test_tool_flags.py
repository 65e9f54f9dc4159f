"""Flags that older programs had: what the page says of them is true of the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from milepost.cli.app import make_app
from tests.tools.rewrite.hub import read_hub, write_hub

PAGE = Path(__file__).parents[2] / "docs/guides/tools.md"
FLAG = re.compile(r"--[a-z][a-z0-9_-]*|(?<![\w-])-[a-z](?![\w-])")
SAME = "the same"

# What the older programs are documented to take. Those of adapters and low precision have pages of
# their own, and rows that name their flags are read like all others.
DOCUMENTED = {
    "merge_ep_shards.py": "input_dir output_dir quiet max_shard_size delete_input_shards",
    "convert_to_bf16.py": "input_dir output_dir model_type peft merge_adapter device_map verify "
    "check_inference max_shard_size trust_remote_code",
    "merge_models.py": "models output_dir method base_model dtype density lambda t "
    "tokenizer_source max_shard_size allow_missing_tokenizer trust_remote_code quiet",
    "unfuse_moe_experts.py": "input_dir output_dir max_shard_size",
    "reset_sinks.py": "model_id output_dir in_place dry_run max_shard_size trust_remote_code",
    "reattach_vision_tower.py": "input_dir model_id revision output_dir max_shard_size "
    "trust_remote_code",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table: flags of the older programs, and the text about what is here."""

    programs: tuple[str, ...]
    flags: tuple[str, ...]
    text: str


def rows() -> list[Row]:
    page = PAGE.read_text(encoding="utf-8")
    section = page[page.index("## Flags by their older names") :]
    section = section[: section.index("\n## ", 1)]
    found: list[Row] = []
    for old, new in re.findall(r"^\| (.*?) \| (.*?) \|$", section, re.MULTILINE):
        programs = tuple(re.findall(r"`([a-z0-9_]+\.py)`", old))
        if old.startswith("..."):
            programs = found[-1].programs
        if programs:
            found.append(Row(programs=programs, flags=tuple(FLAG.findall(old)), text=new))
    return found


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(make_app())
    return dict(group.commands)


def accepts(command: str, flag: str) -> bool:
    """Whether the command line of `command` knows the option; what it needs besides is left out."""
    try:
        commands()[command].make_context(command, [flag, "1"])
    except Exception as error:
        return type(error).__name__ != "NoSuchOption"
    return True


def verbs_in(text: str) -> list[str]:
    """Commands that a text names: `verb`, or `milepost verb --option`."""
    known = commands()
    words = [word for code in re.findall(r"`([^`]+)`", text) for word in code.split()]
    return [word for word in words if word in known]


def verb_of(row: Row) -> str:
    """The verb that takes the place of the row's program: the first that its rows name."""
    texts = [other.text for other in rows() if other.programs == row.programs]
    return next(verb for text in texts for verb in verbs_in(text))


def test_what_is_no_option_is_not_accepted() -> None:
    assert not accepts("reshard", "--nonsense")
    assert accepts("reshard", "--input_dir")


def test_a_dry_run_of_reset_sinks_needs_no_output(tmp_path: Path) -> None:
    source = write_hub(tmp_path / "in", {"a.sinks": torch.ones(2)}, config={"model_type": "x"})
    given = ["reset-sinks", "--input-dir", str(source), "--quiet"]
    assert CliRunner().invoke(make_app(), [*given, "--dry-run"]).exit_code == 0
    assert CliRunner().invoke(make_app(), given).exit_code != 0
    assert torch.equal(read_hub(source)["a.sinks"], torch.ones(2))


@pytest.mark.parametrize("spelling", ["kebab", "underscore"])
def test_flags_that_are_said_to_be_the_same_are_accepted(spelling: str) -> None:
    checked = 0
    for row in rows():
        if SAME not in row.text:
            continue
        for flag in row.flags:
            stem = flag.lstrip("-")
            word = stem.replace("_", "-") if spelling == "kebab" else stem.replace("-", "_")
            written = flag[: len(flag) - len(stem)] + word
            assert accepts(verbs_in(row.text)[0], written), f"{row.programs}: {written}"
            checked += 1
    assert checked > 30


def test_what_is_said_to_take_the_place_of_a_flag_is_there() -> None:
    for row in rows():
        named = verbs_in(row.text)
        for flag in FLAG.findall(row.text):
            verb = named[0] if named else verb_of(row)
            assert accepts(verb, flag), f"{row.programs}: {verb} {flag}"


def test_every_program_leads_to_a_verb() -> None:
    for row in rows():
        assert verb_of(row) in commands(), row


def test_each_documented_flag_is_in_the_table() -> None:
    named: dict[str, set[str]] = {}
    for row in rows():
        for program in row.programs:
            named.setdefault(program, set()).update(flag.lstrip("-") for flag in row.flags)
    for program, flags in DOCUMENTED.items():
        assert set(flags.split()) == named[program], program

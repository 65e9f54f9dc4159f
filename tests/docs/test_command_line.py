"""The page about the command line has every command and option, and its output is real."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from milepost.cli.app import make_app
from milepost.cli.exit_codes import ExitCode
from milepost.cli.llm_migrate import make_llm_app

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/command-line.md"
LEGACY = ROOT / "docs/guides/legacy.md"
TEXT = PAGE.read_text(encoding="utf-8")
PAGES = [PAGE, *sorted(PAGE.parent.glob("tools*.md"))]  # those of what comes after training
SECTION = re.compile(r"^## `([a-z0-9-]+)`\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
SECTIONS = {
    name: text for page in PAGES for name, text in SECTION.findall(page.read_text(encoding="utf-8"))
}


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(make_app())
    return dict(group.commands)


SHARED = ("max_shard_size", "dry_run", "check", "threads", "memory", "quiet", "as_json")


def is_tool(command: Any) -> bool:
    """Whether it is an after-training verb, which has the options that the page says once."""
    return set(SHARED) <= {parameter.name for parameter in command.params}


def test_the_options_that_all_tools_share_are_explained_once() -> None:
    text = (PAGE.parent / "tools.md").read_text(encoding="utf-8")
    section = text[text.index("## What all verbs share") :]
    for name in SHARED:
        assert f"`--{name.removeprefix('as_').replace('_', '-')}" in section, name


def test_the_page_has_every_command() -> None:
    assert set(SECTIONS) == set(commands())


def test_each_command_is_shown_with_all_its_options() -> None:
    for name, command in commands().items():
        for parameter in command.params:
            if parameter.name == "help" or (is_tool(command) and parameter.name in SHARED):
                continue
            word = parameter.opts[-1] if parameter.opts[0].startswith("-") else parameter.metavar
            assert word in SECTIONS[name], f"{name}: {word}"


def test_the_older_command_is_shown_with_all_its_options() -> None:
    command: Any = typer.main.get_command(make_llm_app())
    text = LEGACY.read_text(encoding="utf-8")
    section = text[text.index("### One file, the old way") :]
    options = [p.opts[-1] for p in command.params if p.opts[-1].startswith("--")]
    assert [word for word in options if word not in section and word != "--help"] == []


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    section = TEXT[TEXT.index("## Exit codes") :]
    found = re.findall(r"^\| ([0-9]+) \|", section, re.MULTILINE)
    assert found == [str(int(code)) for code in ExitCode]


@pytest.mark.parametrize("page", [PAGE, LEGACY], ids=lambda page: page.name)
def test_the_output_on_a_page_is_what_the_commands_print(page: Path) -> None:
    script = ROOT / "tools" / "console_blocks.py"
    done = subprocess.run(
        [sys.executable, str(script), str(page)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

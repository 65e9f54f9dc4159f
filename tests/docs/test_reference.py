"""The reference page has every public name, with the signature that it has."""

from __future__ import annotations

import ast
import enum
import inspect
import re
from pathlib import Path

import pytest

import milepost as mp

PAGE = (Path(__file__).parents[2] / "docs/reference/index.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))
SIGNATURES = {
    name: match[1].strip()
    for name, text in SECTIONS.items()
    if (match := re.search(r"```py\n(.*?)```", text, re.DOTALL))
}


def test_the_page_has_the_public_names_and_no_others() -> None:
    assert sorted(SECTIONS) == sorted(mp.__all__)


def test_every_name_has_a_paragraph() -> None:
    for name, text in SECTIONS.items():
        assert re.search(r"[a-z]{3}", re.sub(r"```.*?```", "", text, flags=re.DOTALL)), name


def test_an_enum_is_listed_with_all_its_members() -> None:
    for name in mp.__all__:
        value = getattr(mp, name)
        if isinstance(value, enum.EnumMeta):
            members = set(value.__members__)
            assert members <= set(re.findall(r"`([A-Z_]+)`", SECTIONS[name])), name


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "Checkpoint"])
def test_a_signature_has_the_parameters_of_the_code(name: str) -> None:
    text = SIGNATURES[name].partition(" -> ")[0]
    (statement,) = ast.parse(f"def {text.replace(name, 'f', 1)}: ...").body
    assert isinstance(statement, ast.FunctionDef)
    found = statement.args
    real = inspect.signature(getattr(mp, name)).parameters.values()
    kinds = inspect.Parameter
    shown = [p for p in real if not p.name.startswith("_")]
    assert [a.arg for a in found.args] == [
        p.name for p in shown if p.kind is kinds.POSITIONAL_OR_KEYWORD
    ]
    assert [a.arg for a in found.kwonlyargs] == [
        p.name for p in shown if p.kind is kinds.KEYWORD_ONLY
    ]
    required = {p.name for p in shown if p.default is kinds.empty and p.kind in _NAMED}
    written = [*found.args[: len(found.args) - len(found.defaults)]]
    written += [a for a, d in zip(found.kwonlyargs, found.kw_defaults, strict=True) if d is None]
    assert {a.arg for a in written} == required


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def test_functions_and_plain_classes_have_a_signature() -> None:
    for name in mp.__all__:
        value = getattr(mp, name)
        is_protocol = getattr(value, "_is_protocol", False)
        if inspect.isfunction(value) or (
            inspect.isclass(value) and not isinstance(value, enum.EnumMeta) and not is_protocol
        ):
            assert name in SIGNATURES or name == "State", name

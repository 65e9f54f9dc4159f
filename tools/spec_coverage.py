"""Which rules of docs/spec/v1.md no test shows: every MUST without `@pytest.mark.spec("v1#id")`.

    python tools/spec_coverage.py

Exits with 1 when a rule has no test, or a test names a rule that is not on the page.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "spec" / "v1.md"
TESTS = ROOT / "tests"
PREFIX = "v1#"
_RULE = re.compile(r"(?ms)^- \*\*\[([a-z]+-[0-9]+)\]\*\* (.*?)(?=\n\n|\n- |\Z)")


def rules(page: str) -> dict[str, str]:
    """The text of each rule of the page, by id. ValueError for an id that stands twice.

    >>> rules("- **[run-1]** A reader MUST\\n  look.\\n- **[run-2]** It MAY not.")
    {'run-1': 'A reader MUST look.', 'run-2': 'It MAY not.'}
    """
    found: dict[str, str] = {}
    for name, text in _RULE.findall(page):
        if name in found:
            raise ValueError(f"the rule {name} stands twice on the page")
        found[name] = " ".join(text.split())
    return found


def is_must(text: str) -> bool:
    """Whether a rule binds: SHOULD and MAY alone do not."""
    return re.search(r"\bMUST\b", text) is not None


def marked(tests: Path) -> dict[str, list[str]]:
    """The tests that show each rule, as `file:line`, by id."""
    shown: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for name, line in _marks(ast.parse(path.read_text(encoding="utf-8"))):
            shown.setdefault(name, []).append(f"{path.relative_to(tests.parent)}:{line}")
    return shown


def _marks(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_spec_mark(node.func):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value.removeprefix(PREFIX), node.lineno


def _is_spec_mark(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "spec"
        and isinstance(function.value, ast.Attribute)
        and function.value.attr == "mark"
    )


def report(page: Mapping[str, str], shown: Mapping[str, list[str]]) -> tuple[list[str], bool]:
    """The lines to print, and whether every MUST has a test and every mark a rule."""
    musts = {name: text for name, text in page.items() if is_must(text)}
    without = {name: text for name, text in musts.items() if name not in shown}
    unknown = {name: places for name, places in shown.items() if name not in page}
    lines = [f"{len(musts) - len(without)} of {len(musts)} rules are shown by a test"]
    lines += [f"no test: [{name}] {text[:90]}" for name, text in without.items()]
    lines += [f"no such rule: {name} ({', '.join(at)})" for name, at in unknown.items()]
    return lines, not without and not unknown


def main() -> int:
    lines, is_complete = report(rules(PAGE.read_text(encoding="utf-8")), marked(TESTS))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())

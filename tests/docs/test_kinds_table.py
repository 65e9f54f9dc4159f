"""The page of kinds and modes has a cell for each case of its tests, and no others."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.parallel import qlora_runs
from tests.trainer.kind_runs import CELLS, KINDS, MODES, REFUSED_BY_PEFT, name_of

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "kinds-and-modes.md"
COLUMNS = ("save", "exact", "reshard", "loads")


def rows() -> list[list[str]]:
    """The four cells of each row below a head with `exact resume`, without their marks."""
    found, inside = [], False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
        elif "| exact resume | reshard |" in line:
            inside = True
        elif inside and not set(line) <= set("|-"):
            found.append([cell.strip(" `") for cell in line.strip("|").split("|")[1:]])
    return found


def cases() -> list[str]:
    """What the cases of test_kinds_and_modes.py and of test_qlora_modes.py are called."""
    return [name_of(*cell) for cell in (*CELLS, *qlora_runs.CELLS)]


def test_the_cells_are_the_cases() -> None:
    cells = [cell for row in rows() for cell in row]
    assert Counter(cells) == Counter(cases())


def test_there_is_a_row_for_each_kind_on_each_mode() -> None:
    found = [row[0].rpartition("-")[0] for row in rows()]
    kinds = (*KINDS, *qlora_runs.KINDS)
    assert found == [f"{kind}-{mode}" for kind in kinds for mode in MODES]


def test_a_cell_is_under_the_head_that_it_names() -> None:
    for row in rows():
        for column, cell in zip(COLUMNS, row, strict=True):
            check = re.sub(r"^[a-z]+-[a-z0-9+]+-", "", cell)
            assert check in (column, REFUSED_BY_PEFT), cell

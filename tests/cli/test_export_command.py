"""`milepost export`, as a person calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Make, Milepost


@pytest.mark.parametrize("layout", ["directory", "trio", "single-file"])
def test_a_checkpoint_is_written_in_the_layout_asked_for(
    make: Make, milepost: Milepost, tmp_path: Path, layout: str
) -> None:
    source = make(1)
    out = tmp_path / "out" / "x.pt"
    result = milepost("export", source, out, "--to", layout, "--json")
    assert result.code == 0
    found = result.json()
    assert found["layout"] == layout
    assert milepost("verify", found["path"]).code == 0
    same = milepost("diff", source, found["path"], "--values", "--json").json()
    assert all(row["same"] for row in same["values"])
    again = milepost("export", source, out, "--to", layout)
    assert again.code == 5
    assert "an export replaces nothing" in again.err


def test_what_was_left_out_is_said(make: Make, milepost: Milepost, tmp_path: Path) -> None:
    result = milepost("export", make(1), tmp_path / "out")
    assert result.out.splitlines()[0].startswith(f"wrote {tmp_path}/out: directory, ")
    assert "from_pretrained cannot load this directory" in result.out


def test_a_size_that_is_none_is_refused(make: Make, milepost: Milepost, tmp_path: Path) -> None:
    result = milepost("export", make(1), tmp_path / "out", "--max-shard-size", "big")
    assert result.code == 5
    assert "expected a number of bytes" in result.err

"""The benchmarks keep running: each script, on a state that is too small to measure anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("[!_]*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs_and_writes_its_tables(tmp_path: Path, script: str) -> None:
    options = ["--nbytes", "4MiB", "--rounds", "1", "--skip-memory", "--directory", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *options]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True
    )
    # 1: a bar of speed is missed, which is no matter here
    assert done.returncode in (0, 1) and (tmp_path / "out.json").exists(), done.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["environment"]["machine"]
    assert all(rows for rows in content["tables"].values())
    assert content["tables"]
    exact = [bar for bar in content["bars"] if "bytes of" in bar["bar"]]
    assert all(bar["holds"] for bar in exact), exact


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_says_in_its_first_line_what_it_measures(script: str) -> None:
    first = (BENCHMARKS / f"{script}.py").read_text().splitlines()[0]
    assert first.startswith('"""') and first.endswith(".")


def test_every_benchmark_is_in_the_list() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    assert [script for script in SCRIPTS if f"`{script}.py`" not in text] == []

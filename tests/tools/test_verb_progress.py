"""Progress of a long verb: a bar with rate and time left on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from milepost.cli import rewrite_answer
from milepost.cli.app import make_app
from milepost.tools.cast import cast
from milepost.tools.moe_experts import fuse_moe_experts
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import RewriteOptions
from tests.tools.rewrite.hub import content, write_hub

MIB = 2**20
RATE = re.compile(r"[0-9.]+ [kKMG]i?B/s")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    tensors = {f"model.layers.{n}.w": torch.ones(512, 1024) for n in range(8)}  # 16 MiB
    return write_hub(tmp_path / "in", tensors, config={"model_type": "x"}, parts=2)


@pytest.mark.parametrize("verb", ["reshard", "cast", "fuse"])
def test_bytes_are_told_as_they_are_written_up_to_all_of_them(
    hub: Path, tmp_path: Path, verb: str
) -> None:
    told: list[tuple[int, int]] = []
    options = RewriteOptions(
        threads=2, is_durable=False, on_progress=lambda done, total: told.append((done, total))
    )
    out = tmp_path / "out"
    if verb == "reshard":
        reshard(hub, out, options=options)
    elif verb == "cast":
        cast(hub, out, dtype="bfloat16", options=options)
    else:
        fuse_moe_experts(hub, out, options=options)
    parts = sum(len(raw) for name, raw in content(out).items() if name.endswith(".safetensors"))
    assert {total for _, total in told} == {parts}
    done = [each for each, _ in told]
    assert done == sorted(done) and done[-1] == parts
    assert len(done) >= 8  # not only at the end


def test_a_line_has_the_bytes_the_rate_and_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("milepost.cli.rewrite_answer.time.monotonic", lambda: now[0])
    with rewrite_answer.progress(is_shown=True) as tell:
        assert tell is not None
        for seconds, done in ((5, 10 * MIB), (10, 20 * MIB), (12, 24 * MIB), (40, 80 * MIB)):
            now[0] = 100.0 + seconds
            tell(done, 100 * MIB)
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert len(lines) == 2  # at 10 s and at 40 s: no more than one in ten seconds
    for line, left in zip(lines, (40, 10), strict=True):
        assert RATE.search(line) is not None and line.endswith(f"/s, {left} s left")
    assert lines[0].startswith("20") and "of 100" in lines[0]


def test_a_verb_that_is_not_quiet_prints_lines_on_stderr_and_its_report_alone_on_stdout(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite_answer, "_LINE_EVERY_S", 0.0)

    def run(name: str, *more: str) -> Any:
        words = ["cast", "--input-dir", str(hub), "--output-dir", str(tmp_path / name)]
        return CliRunner().invoke(make_app(), [*words, "--dtype", "bf16", "--json", *more])

    loud, quiet = run("loud"), run("quiet", "--quiet")
    assert loud.exit_code == quiet.exit_code == 0
    assert json.loads(loud.stdout)["tensors"] == json.loads(quiet.stdout)["tensors"] == 8
    assert RATE.search(loud.stderr) is not None and " s left" in loud.stderr
    assert quiet.stderr == ""


def test_on_a_terminal_there_is_a_bar_with_rate_and_time_left(hub: Path, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    words = ["cast", "--input-dir", str(hub), "--output-dir", str(tmp_path / "out")]
    code = "from milepost.cli.app import make_app; make_app()()"
    done = subprocess.Popen(
        [sys.executable, "-c", code, *words, "--dtype", "bf16"],
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"},
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    assert done.wait(timeout=120) == 0, shown
    text = shown.decode()
    assert "━" in text
    assert RATE.search(text) is not None
    assert re.search(r"[0-9.]+/[0-9.]+ MB", text) is not None
    assert re.search(r"\d:\d\d:\d\d", text) is not None

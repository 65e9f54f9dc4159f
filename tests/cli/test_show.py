"""`milepost show`: what a checkpoint holds, read from documents and headers alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from milepost.checkpointing.save import save
from milepost.layouts.trio import TrioContent, write_trio
from milepost.plan import parts
from tests.cli.conftest import QUICK, Make, Milepost

READ_BY = """
import sys
from milepost.cli.app import make_app
app = make_app()
def read():
    return int(open("/proc/self/io").read().split()[1])
for _ in range(2):  # what the first run reads includes modules
    before = read()
    try:
        app(sys.argv[1:], standalone_mode=False)
    except SystemExit:
        pass
print(read() - before, file=sys.stderr)
"""


def test_state_sizes_dtypes_and_origin_are_shown(make: Make, milepost: Milepost) -> None:
    path = make(7, loss=1.5)
    found = milepost("show", path, "--json").json()
    assert found["layout"] == "directory"
    assert found["step"] == 7
    assert found["metrics"] == {"loss": 1.5}
    assert found["weights"]["parameters"] == 16 * 8 + 8 * 8 + 8
    assert found["weights"]["dtypes"]["BF16"]["parameters"] == 72
    assert found["tied"] == {"head.weight": "embed.weight"}
    assert found["state"]["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert found["state"]["optimizer"]["tensors"] == 2
    assert found["provenance"]["host"]
    assert found["exactness"]["torch"] == torch.__version__
    assert found["problems"] == []
    out = milepost("show", path).out
    assert "200 parameters in 3 tensors" in out
    assert "head.weight = embed.weight" in out
    assert all(len(line) <= 80 for line in out.split("\n")[1:])


def test_files_that_were_linked_are_named(
    tmp_path: Path, milepost: Milepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FROZEN_NBYTES", 1)
    model = torch.nn.Linear(4, 4)
    model.weight.requires_grad_(False)
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", {"model": model}, step=step, options=QUICK)
    name = "model-00001-of-00002.safetensors"
    assert milepost("show", tmp_path / "checkpoint-2", "--json").json()["linked"] == [name]
    assert f"linked {name}" in " ".join(milepost("show", tmp_path / "checkpoint-2").out.split())


def test_every_tensor_is_listed_when_asked(make: Make, milepost: Milepost) -> None:
    found = milepost("show", make(1), "--tensors", "--json").json()["tensors"]
    rows = {row["name"]: row for row in found}
    assert rows["body.weight"] == {
        "name": "body.weight",
        "dtype": "BF16",
        "shape": [8, 8],
        "nbytes": 128,
        "part": "model.safetensors",
        "role": "weights",
    }
    assert rows["optimizer.embed.weight.exp_avg"]["part"] == "training/optimizer.safetensors"
    assert "body.weight" in milepost("show", make(2), "--tensors").out


def test_a_trio_with_a_broken_extra_state_is_shown_with_the_problem(
    milepost: Milepost, tmp_path: Path
) -> None:
    content = TrioContent(model_state={"w": torch.ones(3)}, epoch=2, best_loss=float("inf"))
    write_trio(tmp_path, ["best"], content)
    (tmp_path / "best.extra_state.pt").unlink()
    result = milepost("show", tmp_path / "best.meta.json", "--json")
    found = result.json()
    assert result.code == 0
    assert found["epoch"] == 2
    assert found["best_loss"] == "inf"
    assert "best.extra_state.pt: missing" in found["problems"][0]


def test_a_damaged_manifest_and_a_newer_version_have_codes_of_their_own(
    make: Make, milepost: Milepost
) -> None:
    manifest = make(1) / "milepost.json"
    raw = manifest.read_bytes()
    manifest.write_bytes(raw.replace(b'"step": 1', b'"step": 2'))
    assert milepost("show", manifest.parent).code == 4
    manifest.write_bytes(raw.replace(b'"format_version": "1.0"', b'"format_version": "2.0"'))
    result = milepost("show", manifest.parent)
    assert result.code == 8
    assert "upgrade milepost" in result.err


@pytest.mark.case("C4.22")
@pytest.mark.parametrize("command", [("ls",), ("show", "--tensors"), ("diff",)])
def test_looking_reads_no_tensor_byte(tmp_path: Path, command: tuple[str, ...]) -> None:
    big = torch.nn.Linear(2**22, 1, bias=False)
    path = save(tmp_path / "checkpoint-1", {"model": big}, step=1, options=QUICK).path
    verb, *options = command
    paths = {"ls": [tmp_path], "show": [path], "diff": [path, path]}[verb]
    arguments = [verb, *options, *map(str, paths)]
    done = subprocess.run(
        [sys.executable, "-c", READ_BY, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(done.stderr) < 256 * 1024 < 2**24

"""`average`: equal, weighted, exponential; what is no float must be the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import make_app
from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Checkpoint
from milepost.tools.average import average
from milepost.tools.rewrite.options import Mode, RewriteOptions

QUICK = RewriteOptions(is_durable=False, threads=2)


def steps(root: Path, count: int = 3) -> list[Path]:
    paths = []
    for number in range(count):
        torch.manual_seed(number)
        path = root / f"checkpoint-{number}"
        path.mkdir()
        tensors = {
            "w": torch.randn(300, 7).bfloat16(),
            "scalar": torch.tensor(float(number)),
            "count": torch.tensor([4, 5]),
        }
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        paths.append(path)
    return paths


def found(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path / "model.safetensors")
    return tensors


@pytest.mark.parametrize(
    ("keywords", "shares"),
    [
        ({}, [1 / 3, 1 / 3, 1 / 3]),
        ({"weights": [1, 1, 2]}, [0.25, 0.25, 0.5]),
        ({"ema": 0.9}, [0.81, 0.09, 0.1]),
    ],
)
def test_an_average_is_summed_wide_and_rounded_once(
    keywords: dict[str, object], shares: list[float], tmp_path: Path
) -> None:
    paths = steps(tmp_path)
    average(paths, tmp_path / "out", options=QUICK, **keywords)  # type: ignore[arg-type]
    values = [found(path)["w"].double() for path in paths]
    exact = sum(share * value for share, value in zip(shares, values, strict=True))
    made = found(tmp_path / "out")
    assert isinstance(exact, torch.Tensor) and made["w"].dtype == torch.bfloat16
    half_a_step = exact.abs() * 2**-8 / (1 + 2**-8) + 1e-6
    assert bool(((made["w"].double() - exact).abs() <= half_a_step).all())
    assert torch.equal(made["count"], torch.tensor([4, 5]))
    assert float(made["scalar"]) == pytest.approx(shares[1] + 2 * shares[2])


def test_steps_of_a_run_stand_in_the_provenance(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    paths = [tmp_path / "run/checkpoint-4", tmp_path / "run/checkpoint-8"]
    for path, step in zip(paths, (4, 8), strict=True):
        mp.save(path, {"model": model}, step=step)
        with torch.no_grad():
            model.weight.add_(1)
    average(paths, tmp_path / "out", options=QUICK)
    made = Checkpoint.open(tmp_path / "out")
    assert torch.allclose(made.read("weight"), model.weight - 1.5)
    averaged = made.info.extra["provenance"]["averaged"]
    assert [(entry["step"], entry["weight"]) for entry in averaged] == [(4, 0.5), (8, 0.5)]
    assert made.info.step == 8 and made.verify().ok


def test_integers_that_differ_and_other_models_are_refused(tmp_path: Path) -> None:
    one, two, _ = steps(tmp_path)
    tensors = found(two)
    save_file({**tensors, "count": torch.tensor([4, 6])}, two / "model.safetensors")
    with pytest.raises(InvalidInputError, match="count: I64 cannot be averaged"):
        average([one, two], tmp_path / "out", options=QUICK)
    save_file({"w": torch.zeros(2), "more": torch.zeros(1)}, two / "model.safetensors")
    dry = RewriteOptions(mode=Mode.DRY_RUN)
    report = average([one, two], tmp_path / "out", options=dry)
    assert len(report.problems) == 3 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [["--weights", "1,x"], ["--weights", "1"], ["--ema", "1"], []]
)
def test_the_command_averages_and_refuses_numbers_that_do_not_fit(
    arguments: list[str], tmp_path: Path
) -> None:
    paths = steps(tmp_path)[:2]
    inputs = [word for path in paths for word in ("--input-dir", str(path))]
    words = ["average", *inputs, "--output_dir", str(tmp_path / "out"), "--quiet", *arguments]
    result = CliRunner().invoke(make_app(), words)
    assert (result.exit_code == 0) is (not arguments), result.output
    assert (tmp_path / "out").exists() is (not arguments)

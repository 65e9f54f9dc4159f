"""How long the command line takes to start, against an application of bare typer and rich.

`--help` of the four verbs that never import torch, and these verbs at work on a small run. The bar:
no more than 1.5 times a typer application that prints one line with rich, and no torch.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

import milepost as mp
from _common import Contender, Report, find, parse_options, run_rounds, work_directory

VERBS = ("ls", "show", "verify", "diff")
BARE = """
import typer
from rich.console import Console
app = typer.Typer(add_completion=False)
@app.command()
def ls(run: str) -> None:
    "List."
    Console().print(run)
@app.command()
def show(run: str) -> None:
    "Show."
    Console().print(run)
app(prog_name="bare")
"""
HEAVY = ("torch", "transformers", "safetensors")


def run(command: list[str], place: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")


def milepost(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "milepost", *map(str, arguments)]


def heavy_modules(command: list[str]) -> set[str]:
    """Which of the heavy packages a command imports."""
    _, *rest = command
    done = subprocess.run([command[0], "-X", "importtime", *rest], capture_output=True, text=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return {name for name in HEAVY if name in modules}


def commands(base: Path) -> dict[str, list[str]]:
    first, second = base / "checkpoint-1", base / "checkpoint-2"
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "bare typer, ls --help": [sys.executable, "-c", BARE, "ls", "--help"],
        "bare typer and rich, ls RUN": [sys.executable, "-c", BARE, "ls", "run"],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
        **{f"milepost {verb} --help": milepost(verb, "--help") for verb in VERBS},
        "milepost ls RUN": milepost("ls", base),
        "milepost show PATH": milepost("show", first),
        "milepost verify PATH": milepost("verify", first),
        "milepost diff A B": milepost("diff", first, second),
    }


def main() -> int:
    options = parse_options(__doc__ or "", nbytes="1MiB", rounds=10)
    report = Report(title="command line, start", options=options)
    with work_directory(options) as directory:
        base = directory / "run"
        base.mkdir()
        for step in (1, 2):
            model = torch.nn.Linear(options.nbytes // 1024, 256)
            mp.save(base / f"checkpoint-{step}", {"model": model}, step=step)
        known = commands(base)
        contenders = [
            Contender(name=name, run=partial(run, command), is_baseline=name.startswith("bare t"))
            for name, command in known.items()
            if name != "bare typer and rich, ls RUN"
        ]
        name = "bare typer and rich, ls RUN"
        contenders.append(Contender(name=name, run=partial(run, known[name])))
        results = run_rounds(contenders, directory, rounds=options.rounds)
        heavy = {
            name: heavy_modules(command)
            for name, command in known.items()
            if name.startswith("milepost")
        }
    for result in results:
        if result.name in heavy:
            result.more["heavy imports"] = ", ".join(sorted(heavy[result.name])) or "none"
    report.times("wall time of a process", results)
    base_s = find(results, "bare typer, ls --help").median
    for verb in VERBS:
        report.bar(
            f"milepost {verb} --help / bare typer --help",
            found=find(results, f"milepost {verb} --help").median / base_s,
            limit=1.5,
            higher_is_better=False,
        )
    count = sum(len(found) for found in heavy.values())
    report.bar("commands that import torch", found=count, limit=0, higher_is_better=False)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

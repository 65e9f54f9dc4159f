"""What both acts of the demo share: how they speak, and how they fail."""

from __future__ import annotations

import subprocess
import sys

from rich.console import Console

console = Console(highlight=False, soft_wrap=True)


class DemoFailedError(Exception):
    """The demo did not show what it promises."""


def say(title: str, why: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    console.print(f"[dim]{why}[/dim]")


def milepost(*arguments: str) -> None:
    console.print(f"  $ milepost {' '.join(arguments)}")
    command = [sys.executable, "-m", "milepost", *arguments]
    result = subprocess.run(command, text=True, capture_output=True, check=False)
    console.print(result.stdout.rstrip(), markup=False)
    if result.returncode != 0:
        raise DemoFailedError(f"milepost {arguments[0]} failed: {result.stderr[-2000:]}")

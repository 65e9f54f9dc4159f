"""The command line: `milepost`, also `python -m milepost`."""

from __future__ import annotations


def main() -> None:
    """Run the command that `sys.argv` names; ends the process with an exit code of the table."""
    from milepost.cli.app import make_app

    make_app()(prog_name="milepost")

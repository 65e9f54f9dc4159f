"""`python -m milepost` is the command `milepost`."""

from __future__ import annotations

from milepost.cli import main

if __name__ == "__main__":
    main()

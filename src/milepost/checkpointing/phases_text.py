"""The phases of a save in words, for the log and for `milepost show`."""

from __future__ import annotations

from collections.abc import Mapping

from milepost.storage.space import human


def phases_text(seconds: Mapping[str, float], nbytes: Mapping[str, int]) -> str:
    """`capture 0.01 s, write 0.50 s (1.0 GiB, 2.00 GiB/s)`."""
    texts = []
    for name, value in seconds.items():
        moved = nbytes.get(name, 0)
        rate = f" ({human(moved)}, {moved / 2**30 / value:.2f} GiB/s)" if moved and value else ""
        texts.append(f"{name} {value:.2f} s{rate}")
    return ", ".join(texts)

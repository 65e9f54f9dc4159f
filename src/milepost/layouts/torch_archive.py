"""Archives of `torch.save`: read lazily and safely, written so that they load and verify.

One import for the other layouts; the parts are `archive_reader`, `archive_payload` (what may be
saved), `archive_write` and `archive_verify`. Importing this needs no torch.
"""

from __future__ import annotations

from typing import Any

from milepost.layouts.archive_reader import TorchArchive, walk_tensors
from milepost.layouts.archive_verify import verify_archive
from milepost.layouts.archive_write import WrittenArchive, write_archive

__all__ = [
    "TorchArchive",
    "WrittenArchive",
    "check_loadable",
    "verify_archive",
    "walk_tensors",
    "write_archive",
]


def check_loadable(payload: Any) -> None:
    """Refuse values that torch's safe loading, or ours, would not give back.

    Raises `UnencodableError` that lists all such places with what to save instead.
    """
    from milepost.layouts.archive_payload import check_loadable as check

    check(payload)

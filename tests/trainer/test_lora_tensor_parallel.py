"""DoRA beside tensor parallelism: norms and magnitudes of weights that are cut."""

from __future__ import annotations

from tests.trainer.modes import mode

CASES = [
    ("dora", mode("TP", tp=2)),
    ("dora-everywhere", mode("FSDP2+TP", dp_shard=2, tp=2)),
    ("dora-everywhere", mode("TP", tp=2)),
]

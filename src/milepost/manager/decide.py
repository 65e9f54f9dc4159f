"""What the coordinator alone decides, told to every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import together


def decide(decision: Callable[[], Any]) -> Any:
    """What `decision`, run by the coordinator alone, returns, as JSON can hold it; collective.

    What it raises is raised on all ranks.
    """
    found: list[Any] = []
    with converse() as talk:
        with together(talk, "decided"):
            if talk.is_coordinator:
                found.append(decision())
        raw = json.dumps(found[0]).encode() if talk.is_coordinator else None
        return json.loads(talk.broadcast("decision", raw))

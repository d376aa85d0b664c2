"""The routers' document when it is too large for a ConfigMap: it is not sent, the API server would refuse it again and again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from fleet_operator.cluster.interface import Object
from fleet_planner.document import MOST_BYTES
from fleet_planner.types import Problem

TOO_LARGE: Final = "DocumentTooLarge"


def too_large(documents: Object, workers: int) -> Problem | None:
    """Why it cannot be written; None: it can. `workers`: how many it is about."""
    data: dict[str, Any] = documents["data"]
    size = sum(len(value.encode()) for value in data.values())
    if size <= MOST_BYTES:
        return None
    words = (
        f"ConfigMap {documents['metadata']['name']} would have {size} bytes for {workers} workers, more than {MOST_BYTES}: "
        "routers go on with the last one that fitted, and use no worker that is not in it; have fewer workers or adapters, a "
        "smaller rollout.maxSurgeGpus, or a second fleet; a rollout is taken back by fleet rollout undo"
    )
    return Problem(TOO_LARGE, words)


def fits(problems: Iterable[Problem]) -> bool:
    """It was not too large in this pass: whom routers still use is told nothing else either."""
    return all(problem.reason != TOO_LARGE for problem in problems)

"""What the operator wrote on a WorkerPool about its size, told from what somebody edited there. Pure.

A `planned` of 3 on a pool of two read as one worker less by a user's wish, and a worker was drained for it. So all three counts
are in one more annotation, with a digest over them and the pool's name: while that is right they count, and the others are put
back. It keeps out mistakes, not malice: who may edit pools may scale them. Operators before it write none, and an apply of
theirs takes it away: what they wrote, and what has no digest any more, is believed as it stands.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

from fleet_operator.cluster.interface import Object
from fleet_operator.names import WRITTEN

DIGEST_DIGITS = 12
CACHED = 8_192
"""Every pass reads and renders every pool of its fleet, and few have changed."""
NONE = "-"


class Sizes(NamedTuple):
    """See ObservedPool; None: it is not said."""

    planned: int | None
    size: int | None
    wish: int | None


@lru_cache(maxsize=CACHED)
def sealed(namespace: str, name: str, sizes: Sizes) -> str:
    """The annotation: the counts, and their digest."""
    counts = " ".join(NONE if count is None else str(count) for count in sizes)
    digest = hashlib.sha256(f"{namespace}/{name} {counts}".encode()).hexdigest()
    return f"{counts} {digest[:DIGEST_DIGITS]}"


def written_on(pool: Object) -> Sizes | None:
    """What the operator wrote; None: it has no such annotation, or somebody edited that."""
    meta = pool["metadata"]
    text = (meta.get("annotations") or {}).get(WRITTEN)
    return _opened(meta.get("namespace", ""), meta["name"], text) if text is not None else None


@lru_cache(maxsize=CACHED)
def _opened(namespace: str, name: str, text: str) -> Sizes | None:
    counts = text.split(" ")[:-1]
    if len(counts) != len(Sizes._fields) or not all(each == NONE or (each.isascii() and each.isdigit()) for each in counts):
        return None
    try:
        found = Sizes(*(None if each == NONE else int(each) for each in counts))
    except ValueError:  # more digits than Python reads
        return None
    return found if sealed(namespace, name, found) == text else None

"""GET /held?wait_s=N: how many requests wait for a worker; the answer comes when some do, at the latest after N seconds.

The operator asks this of the routers of a fleet at zero, so that it hears of a held request at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from urllib.parse import parse_qs

from fleet_router.errors import RequestError
from fleet_router.holding import LISTEN_MOST_S, Holding


class Asker(Protocol):
    """The connection that asks."""

    def tell(self, body: bytes) -> None:
        """The answer."""
        ...

    def refuse(self, error: RequestError) -> None:
        """There will be none."""
        ...


def wait_of(url: bytes) -> float:
    """Seconds that the query asks for; RequestError when that is no number of 0 to 30."""
    found = parse_qs(url.partition(b"?")[2].decode("latin-1")).get("wait_s", ["0"])
    try:
        seconds = float(found[-1])
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LISTEN_MOST_S:
        raise RequestError(400, f"wait_s must be a number between 0 and {LISTEN_MOST_S:g}", param="wait_s")
    return seconds


class Listening:
    """One question; the connection treats it as it treats a request that runs."""

    __slots__ = ("_asker", "_holding", "_over", "deadline", "started")

    def __init__(self, holding: Holding, asker: Asker, clock: Callable[[], float], wait_s: float) -> None:
        self._holding, self._asker = holding, asker
        self._over = False
        self.started = False
        self.deadline = clock() + wait_s

    def begin(self, wait_s: float) -> None:
        """Wait, unless something waits already or nobody wants to."""
        if wait_s <= 0:
            self.hear(len(self._holding))
        else:
            self._holding.listen(self)

    def hear(self, held: int) -> None:
        """The answer."""
        if self._end():
            self._asker.tell(b"%d\n" % held)

    def expire(self, _now: float) -> None:
        """Nothing came."""
        self.hear(len(self._holding))

    def cancel(self) -> None:
        """Whoever asked has left."""
        self._end()

    def cut(self, error: RequestError) -> None:
        """The router goes."""
        if self._end():
            self._asker.refuse(error)

    def pause(self) -> None:
        """A few bytes fit anyhow."""

    def resume(self) -> None:
        """A few bytes fit anyhow."""

    def _end(self) -> bool:
        """False when it was over before."""
        before, self._over = self._over, True
        self._holding.unlisten(self)
        return not before

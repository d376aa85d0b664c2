"""Bugs of ours in what is done for one request: it ends and is told so, and nobody else's does.

What runs for many requests at once (deadlines, the queue, silent workers, the drain) does each of them under this guard. A bug in
such a loop itself is of all of them: it ends the process, which is started anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from fleet_router.errors import RequestError

MOST_PLACES = 4
"""Innermost places of the traceback that are told."""


class Faults:
    """Those of a process. `tell`: gets request id, kind of exception and places; its words may be a client's and are not told."""

    def __init__(self) -> None:
        self.count = 0
        self.tell: Callable[[str, str, list[str]], None] | None = None

    def end(self, error: Exception, ends: Callable[[RequestError], None], request_id: str = "") -> None:
        """`error` came out of what was done for one request: `ends` ends it. A bug in that, too, is counted, and nothing more."""
        self._count(error, request_id)
        told = "the router failed while it worked on this request; send it again, and report what the router logged of it"
        try:
            ends(RequestError(500, told, code="router_failed"))
        except Exception as again:
            self._count(again, request_id)

    def run(self, act: Callable[[], None], ends: Callable[[RequestError], None]) -> None:
        """What the loop calls later for one connection: a bug in it would leave the connection as it is, for ever."""
        try:
            act()
        except Exception as error:
            self.end(error, ends)

    def _count(self, error: Exception, request_id: str) -> None:
        self.count += 1
        if self.tell is not None:
            self.tell(request_id, type(error).__name__, places(error.__traceback__))


def places(trace: TracebackType | None) -> list[str]:
    """file:line of the innermost frames, the last one first."""
    found: list[str] = []
    while trace is not None:
        found.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return found[: -MOST_PLACES - 1 : -1]

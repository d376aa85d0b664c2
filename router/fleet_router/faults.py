"""Bugs of ours in what is done for one request: it ends and is told so, and nobody else's does.

What runs for many requests at once (deadlines, the queue, silent workers, the drain) does each of them under this guard. A bug in
such a loop itself is of all of them: it ends the process, which is started anew. What the event loop calls and nobody guards is
counted and told like the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fleet_router.errors import RequestError

MOST_PLACES = 4
"""Innermost places of the traceback that are told."""


class Faults:
    """Those of a process. `tell` gets the request's id, the kind of exception and places, `tell_unguarded` the latter two: the
    words of an exception may be a client's and are not told."""

    def __init__(self) -> None:
        self.count = 0
        self.tell: Callable[[str, str, list[str]], None] | None = None
        self.tell_unguarded: Callable[[str, list[str]], None] | None = None

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

    def unguarded(self, _loop: object, context: Mapping[str, Any]) -> None:
        """For the event loop, which else writes a dozen lines with a client's words, and waits for whoever reads them."""
        self.count += 1
        if self.tell_unguarded is not None:
            error = context.get("exception")
            kind = type(error).__name__ if error is not None else str(context.get("message"))
            self.tell_unguarded(kind, places(error.__traceback__) if error is not None else [])

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

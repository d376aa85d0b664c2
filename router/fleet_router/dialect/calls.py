"""Calls of tools as a stream tells them, one after the other: engines may send the pieces of several by turns, and neither
dialect's clients expect that of its blocks.

The first call goes out as it comes. What comes of others meanwhile waits until the arguments of the one before are whole JSON, or
until the stream is at its end; so that calls that do come one after the other wait for nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fleet_router.dialect.chat import Function, ToolCall
from fleet_router.errors import RequestError
from fleet_wire.unreadable import UNREADABLE

MOST_BYTES: Final = 1024 * 1024
"""Of arguments: of the call that is open, and of all that wait."""


class _Waiting:
    """One call's pieces."""

    def __init__(self, call: ToolCall) -> None:
        self.id, self.name = call.id, call.function.name
        self.arguments: list[str] = []

    def whole(self, index: int) -> ToolCall:
        """All that came of it."""
        return ToolCall(index, self.id, Function(self.name, "".join(self.arguments)))


class Calls:
    """Of one stream."""

    def __init__(self) -> None:
        self._open: int | None = None
        self._said: list[str] = []
        """Arguments of the open one."""
        self._depth = 0
        """Braces that opened in them and did not close, those inside of strings among them: to look closer is worth it at 0."""
        self._waiting: dict[int, _Waiting] = {}
        self._bytes = 0

    def feed(self, call: ToolCall) -> list[ToolCall]:
        """One piece; those that may go out now, each call's together. RequestError 502 beyond bounds."""
        self._bytes += len(call.function.arguments or "")
        if self._bytes > MOST_BYTES:
            raise RequestError(502, f"the worker sent calls of tools longer than {MOST_BYTES} bytes")
        if self._open is None or call.index == self._open:
            self._say(call)
            return [call, *(self._next() if self._waiting else ())]
        waiting = self._waiting.get(call.index)
        if waiting is None and not (call.id or call.function.name or (call.function.arguments or "").strip()):
            return []  # space behind one that was whole
        if waiting is None:
            waiting = self._waiting[call.index] = _Waiting(call)
        waiting.arguments.append(call.function.arguments or "")
        return self._next()

    def rest(self) -> list[ToolCall]:
        """The stream goes on with something else, or ends: all that waits."""
        found = [waiting.whole(index) for index, waiting in self._waiting.items()]
        self._open, self._said, self._depth, self._waiting, self._bytes = None, [], 0, {}, 0
        return found

    def _say(self, call: ToolCall) -> None:
        said = call.function.arguments or ""
        self._open, self._depth = call.index, self._depth + said.count("{") - said.count("}")
        self._said.append(said)

    def _next(self) -> list[ToolCall]:
        """Those whose turn it is because the one before is whole."""
        found: list[ToolCall] = []
        while self._waiting and self._is_whole():
            index = next(iter(self._waiting))
            call = self._waiting.pop(index).whole(index)
            self._said, self._depth = [], 0
            self._say(call)
            found.append(call)
        return found

    def _is_whole(self) -> bool:
        if self._depth or not any(self._said):
            return False
        try:
            msgspec.json.decode("".join(self._said), type=dict[str, msgspec.Raw])
        except UNREADABLE:
            return False
        return True

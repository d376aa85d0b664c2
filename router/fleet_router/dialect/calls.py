"""Calls of tools as a stream tells them, one after the other: engines may send the pieces of several by turns, and neither
dialect's clients expect that of its blocks.

The first call goes out as it comes. What comes of others meanwhile waits until the arguments of the one before are whole JSON, or
until the stream is at its end; so that calls that do come one after the other wait for nothing. So does what is said in between,
as engines do that tell of text and of a call's end at once: it would end the call's block, and the rest would be a call without a
name.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fleet_router.dialect.chat import Function, Message, ToolCall
from fleet_router.errors import RequestError
from fleet_wire.unreadable import UNREADABLE

MOST_BYTES: Final = 1024 * 1024
"""Of arguments: of the call that is open, and of all that wait."""
HELD_MOST: Final = 4_096
"""Characters of what is said in the midst of a call. More is no gap: the call has ended, whatever its arguments are."""


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
        self._whole: bool | None = False
        """The open one is; None: nobody has looked since more of it came."""
        self._waiting: dict[int, _Waiting] = {}
        self._held: list[Message] = []
        self._bytes = self._held_chars = 0

    def said(self, delta: Message) -> list[ToolCall | Message]:
        """Something else than calls; what may go out now, in its order."""
        if self._open is None:
            return [delta]
        self._held.append(delta)
        self._held_chars += len(delta.thought) + len(delta.content or "")
        return self.rest() if self._held_chars > HELD_MOST or self._is_whole() else []

    def feed(self, call: ToolCall) -> list[ToolCall | Message]:
        """One piece; what may go out now, each call's together. RequestError 502 beyond bounds."""
        found: list[ToolCall | Message] = [*self._fed(call)]
        return found + self.rest() if self._held and self._is_whole() else found

    def _fed(self, call: ToolCall) -> list[ToolCall]:
        self._bytes += len(call.function.arguments or "")
        if self._bytes > MOST_BYTES:
            raise RequestError(502, f"the worker sent calls of tools longer than {MOST_BYTES} bytes")
        if call.index == self._open:
            self._say(call)
            return [call, *(self._next() if self._waiting else ())]
        waiting = self._waiting.get(call.index)
        if waiting is None and not (call.id or call.function.name or (call.function.arguments or "").strip()):
            return []  # space behind one that was whole
        if self._open is None:
            self._say(call)
            return [call]
        if waiting is None:
            waiting = self._waiting[call.index] = _Waiting(call)
        waiting.arguments.append(call.function.arguments or "")
        return self._next()

    def rest(self) -> list[ToolCall | Message]:
        """The stream goes on with something else, or ends: all that waits."""
        found: list[ToolCall | Message] = [*(waiting.whole(index) for index, waiting in self._waiting.items()), *self._held]
        self._open, self._said, self._depth, self._waiting, self._held = None, [], 0, {}, []
        self._bytes, self._held_chars, self._whole = 0, 0, False
        return found

    def _say(self, call: ToolCall) -> None:
        said = call.function.arguments or ""
        self._open, self._depth = call.index, self._depth + said.count("{") - said.count("}")
        self._said.append(said)
        self._whole = None if said else self._whole

    def _next(self) -> list[ToolCall]:
        """Those whose turn it is because the one before is whole."""
        found: list[ToolCall] = []
        while self._waiting and self._is_whole():
            index = next(iter(self._waiting))
            call = self._waiting.pop(index).whole(index)
            self._said, self._depth, self._whole = [], 0, False
            self._say(call)
            found.append(call)
        return found

    def _is_whole(self) -> bool:
        if self._depth:
            return False
        if self._whole is None:
            self._whole = _is_object("".join(self._said))
        return self._whole


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return False
    return True

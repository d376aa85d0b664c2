"""Streams that will not end well: a loop of the same tokens, no stop, control tokens as text.

Works on the spliced bytes: an event is compared as a whole, because engines send the same envelope for the same token. Where they
do not (logprobs, a clock in each event) a loop is not found; nothing is ever taken for a loop that does not repeat byte for byte.
"""

from __future__ import annotations

import re
from array import array
from typing import Final, Literal

MOST_PERIOD: Final = 256
LEAST_EVENTS: Final = 256
LEAST_TURNS: Final = 8
"""A loop is so many events in a row that equal those one period before, and so many periods: tables and code repeat, too."""
KEPT_PLACES: Final = 1024
CONTEXT: Final = 16
CONTROL_MOST: Final = 8
"""A text about chat templates has a few of them."""
SLACK: Final = 64
"""Events above the limit of output tokens: role, usage, finish and [DONE] are events without a token."""
EVENT_BYTES: Final = 65_536
CHUNK_END: Final = b"\n\n\r\n"
"""A read that ends so ends a chunk after a whole event: the only place where something else may follow."""
CONTROL: Final = re.compile(
    rb"<\|(?:im_start|im_end|endoftext|eot_id|eom_id|end_of_text|begin_of_text|start_header_id|end_header_id|user|assistant)\|>"
    rb"|<(?:start|end)_of_turn>|\[/?INST\]"
)

Why = Literal["repetition", "no_stop", "control_tokens"]
FINISH: Final[dict[Why, tuple[str, str]]] = {
    "repetition": ("repetition", "repetition_detected"), "no_stop": ("length", "no_stop"),
    "control_tokens": ("stop", "control_tokens"),
}  # fmt: skip
"""(finish_reason, stop_reason) in the stream's last event; the first pair as vLLM's own detector says it."""


class Runaway:
    """The detector of one stream: a few KB, one comparison and now and then a look-up per event."""

    __slots__ = ("_control", "_events", "_most", "_period", "_places", "_rest", "_run", "_symbols", "_why")

    def __init__(self, max_output_tokens: int) -> None:
        self._most = max_output_tokens + SLACK
        self._symbols = array("q", bytes(8 * MOST_PERIOD))
        """Hashes of the last events, in a ring."""
        self._places: dict[int, int] = {}
        """Some events in a row → where they ended last, as far as a loop was looked for there."""
        self._period = 0
        self._run = 0
        """Events in a row that equal those one period before."""
        self._control = 0
        self._events = 0
        self._why: Why | None = None
        self._rest = b""
        """An event that has not ended yet."""

    def saw(self, data: bytes) -> Why | None:
        """More bytes of the stream, with their transfer framing; why it should end right behind them, if it should."""
        self._why = self._why or self._judge(data)
        return self._why if self._why is not None and data.endswith(CHUNK_END) else None

    def _judge(self, data: bytes) -> Why | None:
        *events, rest = (self._rest + data).split(b"\n\n") if self._rest else data.split(b"\n\n")
        self._rest = b"" if rest == b"\r\n" else rest[-EVENT_BYTES:]
        for event in events:
            if self._loops(hash(event[event.find(b"data: ") :])):
                return "repetition"
        if self._events > self._most:
            return "no_stop"
        if b"<" in data or b"[" in data:
            self._control += len(CONTROL.findall(data))
        return "control_tokens" if self._control > CONTROL_MOST else None

    def _loops(self, symbol: int) -> bool:
        """One more event. Where the period at hand is wrong, the next one tried is the distance to the last place where the same
        events made one wrong, too: in a loop that is soon the loop's length, or a multiple of it. Sixteen events tell places of a
        loop apart that three cannot (aaaabaab), and three find a short loop sooner."""
        at, symbols, period = self._events, self._symbols, self._period
        self._events = at + 1
        matches = period and symbols[(at - period) % MOST_PERIOD] == symbol
        symbols[at % MOST_PERIOD] = symbol
        if matches:
            self._run += 1
            return self._run >= LEAST_EVENTS and self._run >= LEAST_TURNS * period
        places, end = self._places, at % MOST_PERIOD + 1
        wide = symbols[end - CONTEXT : end] if end >= CONTEXT else symbols[end - CONTEXT :] + symbols[:end]
        near, far = hash((symbols[(at - 2) % MOST_PERIOD], symbols[(at - 1) % MOST_PERIOD], symbol)), hash(wide.tobytes())
        last = places.get(far) or places.get(near)
        if len(places) >= KEPT_PLACES:
            self._places = places = {known: place for known, place in places.items() if place > at - MOST_PERIOD}
        places[near] = places[far] = at
        self._run = 0
        self._period = at - last if last is not None and at - last <= MOST_PERIOD else 0
        return False

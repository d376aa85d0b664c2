"""Streams that will not end well: a loop of the same tokens, no stop, control tokens as text.

Works on the spliced bytes: an event is compared as a whole, because engines send the same envelope for the same token. Where they
do not (logprobs, a clock in each event) a loop is not found; nothing is ever taken for a loop that does not repeat byte for byte.
Looked at is a few dozen events at a time, which took 1 us per event and takes less than a third of it.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import xxhash

MOST_PERIOD: Final = 256
LEAST_EVENTS: Final = 256
LEAST_TURNS: Final = 8
"""A loop is so many events in a row that equal those one period before, and so many periods: tables and code repeat, too."""
CONTEXT: Final = 4
"""A period is tried where so many events stand that stand at the end, too."""
JUDGED_READS: Final = 32
JUDGED_BYTES: Final = 8_192
"""A stream is looked at when so much of it has come: a look costs less per event than 32 of them, and a loop is found so much
later."""
CONTROL_MOST: Final = 8
"""A text about chat templates has a few of them."""
SLACK: Final = 64
"""Events above the limit of output tokens: role, usage, finish and [DONE] are events without a token."""
EVENT_BYTES: Final = 65_536
EVENT_END: Final = b"\n\n"
LINE_END: Final = b"\r\n"
CHUNK_END: Final = b"\n\n\r\n"
"""A read that ends so ends a chunk after a whole event: the only place where something else may follow."""
CRLF_EVENT_END: Final = b"\r\n\r\n"
CRLF_CHUNK_END: Final = b"\r\n\r\n\r\n"
"""Of engines whose lines end so (sse-starlette): as their first events have it."""
BODY_END: Final = b"\r\n0\r\n\r\n"
"""Looks like the end of such an event."""
CONTROL: Final = re.compile(
    rb"<\|(?:im_start|im_end|endoftext|eot_id|eom_id|end_of_text|begin_of_text|start_header_id|end_header_id|user|assistant)\|>"
    rb"|<(?:start|end)_of_turn>|\[/?INST\]"
)

LOGPROBS: Final = re.compile(rb'"logprobs":\s*\{')
"""Behind it stand tokens of which most were not taken, ends among them; engines write what was said before it. In a text its
quotes would be escaped."""

Why = Literal["repetition", "no_stop", "control_tokens"]
FINISH: Final[dict[Why, tuple[str, str]]] = {
    "repetition": ("repetition", "repetition_detected"), "no_stop": ("length", "no_stop"),
    "control_tokens": ("stop", "control_tokens"),
}  # fmt: skip
"""(finish_reason, stop_reason) in the stream's last event; the first pair as vLLM's own detector says it."""


SYMBOL_BYTES: Final = 8
KEPT_SYMBOLS: Final = (LEAST_TURNS + 1) * MOST_PERIOD
SPARE_SYMBOLS: Final = 256
"""More than are looked at, so that few looks move all of them."""
NEAR_SYMBOLS: Final = MOST_PERIOD + CONTEXT
"""The last ones, in which the end of a loop stands once more."""
_DIGEST: Final = xxhash.xxh3_64_digest
_LESS_THAN: Final = ord("<")
_CAPITAL_I: Final = ord("I")


class Runaway:
    """The detector of one stream: some ten KB, and of most reads only that they are kept for the next look."""

    __slots__ = (
        "_chunk_end", "_control", "_controls", "_event_end", "_events", "_held", "_held_bytes", "_most", "_regular", "_symbols",
        "_why",
    )  # fmt: skip

    def __init__(self, max_output_tokens: int, *, controls: bool = True) -> None:
        """`controls`: control tokens are signs of it, which those of a prompt that is told again are not."""
        self._most, self._controls = max_output_tokens + SLACK, controls
        self._symbols = bytearray()
        """Hashes of the last events, of SYMBOL_BYTES each: as numbers they took twice as many
        instructions to make and to put together."""
        self._regular = True
        """As far as was seen, every event stands in a chunk of its own, or none in any: then it is hashed with its framing, which
        is the same for the same event."""
        self._events = 0
        self._event_end, self._chunk_end = EVENT_END, CHUNK_END
        self._control = 0
        self._why: Why | None = None
        self._held: list[bytes] = []
        """Reads that nobody has looked at yet, after the beginning of an event that has not ended."""
        self._held_bytes = 0

    @property
    def events(self) -> int:
        """Events that have ended, to the last byte seen."""
        held = b"".join(self._held)
        return self._events + held.count(self._event_end) - (self._event_end == CRLF_EVENT_END and held.endswith(BODY_END))

    def saw(self, data: bytes) -> Why | None:
        """More bytes of the stream, with their transfer framing; why it should end right behind them, if it should."""
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= JUDGED_BYTES or len(self._held) >= JUDGED_READS:
            why = self._judge()
            self._why = self._why or why
        return self._why if self._why is not None and data.endswith(self._chunk_end) else None

    def _judge(self) -> Why | None:
        data = b"".join(self._held)
        if not self._events and data.find(EVENT_END) < 0 and data.find(CRLF_EVENT_END) >= 0:
            self._event_end, self._chunk_end = CRLF_EVENT_END, CRLF_CHUNK_END
        events = data.split(self._event_end)
        rest = events.pop()
        if self._event_end == CRLF_EVENT_END and data.endswith(BODY_END):
            events.pop()
        self._held, self._held_bytes = [rest[-EVENT_BYTES:]], 0
        if not events:
            return None
        first = not self._events
        self._events += len(events)
        if self._repeats(self._symbols_of(events, first)):
            return "repetition"
        if self._events > self._most:
            return "no_stop"
        may = self._controls and (_LESS_THAN in data or (_CAPITAL_I in data and data.find(b"INST]") >= 0))
        if may:  # the pattern takes longer than all the rest
            self._control += _controls(data, len(data) - len(rest), events)
        return "control_tokens" if self._control > CONTROL_MOST else None

    def _symbols_of(self, events: list[bytes], first: bool) -> list[bytes]:
        """A hash of each. Whether chunks are cut in the same way everywhere is looked at by two of them, another place each time:
        once they are not, loops are looked for anew, in the events without their framing."""
        if self._regular:
            some = events[self._events % len(events)]
            self._regular = first or some.startswith(LINE_END) == events[-1].startswith(LINE_END)
        if self._regular:
            return list(map(_DIGEST, events))
        return [_DIGEST(event[event.find(b"data: ") :]) for event in events]

    def _repeats(self, symbols: list[bytes]) -> bool:
        """Whether these, which are new, or some of them end a loop: one read may be hundreds of events, and its end none."""
        for at in range(0, len(symbols), JUDGED_READS):
            self._symbols += b"".join(symbols[at:][:JUDGED_READS])
            if self._loops():
                return True
        return False

    def _loops(self) -> bool:
        """Whether the stream ends in a loop, of whatever period: each that the last few events allow is tried, the shortest
        first, by comparing bytes with themselves one period before."""
        if len(self._symbols) > (KEPT_SYMBOLS + SPARE_SYMBOLS) * SYMBOL_BYTES:
            del self._symbols[: -KEPT_SYMBOLS * SYMBOL_BYTES]
        if len(self._symbols) <= LEAST_EVENTS * SYMBOL_BYTES:
            return False
        near = bytes(self._symbols[-NEAR_SYMBOLS * SYMBOL_BYTES :])
        end, size = near[-CONTEXT * SYMBOL_BYTES :], len(near)
        at, all_of_them = size - SYMBOL_BYTES, b""
        while True:
            at = near.rfind(end, 0, at)
            if at < 0:
                return False
            shift = size - CONTEXT * SYMBOL_BYTES - at
            if shift % SYMBOL_BYTES == 0:
                all_of_them = all_of_them or bytes(self._symbols)
                run = max(LEAST_EVENTS * SYMBOL_BYTES, LEAST_TURNS * shift)
                if run + shift <= len(all_of_them) and all_of_them[-run:] == all_of_them[-run - shift :][:run]:
                    return True
            at += len(end) - 1  # the next match ends before this one


def _controls(data: bytes, end: int, events: list[bytes]) -> int:
    """Control tokens in what these events, which are the data up to there, say."""
    many = len(CONTROL.findall(data, 0, end))
    if not many or LOGPROBS.search(data, 0, end) is None:
        return many
    many = 0
    for event in events:
        told = LOGPROBS.search(event)
        many += len(CONTROL.findall(event, 0, len(event) if told is None else told.start()))
    return many

"""Log lines: one JSON object each, on standard error. Never a prompt, a key or what a client wrote: ids, names and numbers.

Lines about requests are bounded per second; how many were left out is said by the next one. Where nobody reads what is written,
lines are left out, too: a full pipe would hold up the loop, and with it every stream.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from fleet_router.admission.bucket import Bucket
from fleet_router.config import ExplainBounds
from fleet_router.explain.record import Record

_ENCODER = msgspec.json.Encoder(enc_hook=str)
LINE_MOST_BYTES = select.PIPE_BUF - 1
"""With its line break what a pipe takes whole that says that it has room: of a longer line the rest would wait for a reader."""
SHORTER = (1024, 256, 64, 16, 4)
"""Characters that a text may have in a line that is longer than that: the first number with which the line is not."""


def write(line: str) -> bool:
    """To standard error; False: there is no room, or nobody who reads it. Neither is a reason to fail or to wait."""
    out = sys.stderr
    try:
        if out is None or not _takes(out):  # None: it was closed when the process began
            return False
        print(line, file=out, flush=True)
    except (OSError, ValueError):  # a closed file is a ValueError
        return False
    return True


def _takes(out: TextIO) -> bool:
    """A line can be written without waiting: a pipe says so as long as it has room for PIPE_BUF bytes."""
    try:
        number = out.fileno()
    except (OSError, ValueError):
        return True  # no file: a test's
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return bool(poll.poll(0))


BUGS_PER_S = 20
"""Lines about what our own faults ended."""


class Journal:
    """One per process."""

    def __init__(self, out: Callable[[str], object] = write) -> None:
        self._out = out
        self._left_out = 0
        self._bucket, self._bugs = Bucket(1.0, 1), Bucket(BUGS_PER_S, BUGS_PER_S)
        self.requests = "none"

    def follow(self, bounds: ExplainBounds) -> None:
        """Which requests get a line, and how many of them in a second."""
        self.requests = bounds.log
        if bounds.log_lines_per_s != self._bucket.size:  # else every change of the endpoints would give a second's lines more
            self._bucket = Bucket(bounds.log_lines_per_s, bounds.log_lines_per_s)

    def say(self, event: str, **fields: object) -> None:
        """One line."""
        at = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        if self._out(_line({"time": at, "event": event}, fields)) is False:
            self._left_out += 1

    def request(self, record: Record, now: float) -> None:
        """A request ended."""
        if self._bucket.take_if(1, int(now * 1e9)):
            self._counted("request", _fields(record))
        else:
            self._left_out += 1

    def bug(self, event: str, **fields: object) -> None:
        """One of ours, which each request may meet."""
        if self._bugs.take_if(1, time.monotonic_ns()):
            self._counted(event, fields)
        else:
            self._left_out += 1

    def _counted(self, event: str, fields: dict[str, Any]) -> None:
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        self.say(event, **fields)


def _line(head: dict[str, object], fields: dict[str, object]) -> str:
    """JSON of at most LINE_MOST_BYTES; where fields were cut for that it says `cut`."""
    raw = _ENCODER.encode(head | fields)
    for most in SHORTER:
        if len(raw) <= LINE_MOST_BYTES:
            break
        raw = _ENCODER.encode(head | {name: _shorter(value, most) for name, value in fields.items()} | {"cut": True})
    return raw.decode()


def _shorter(value: object, most: int) -> object:
    text = value if isinstance(value, str) else _ENCODER.encode(value).decode()
    return value if len(text) <= most else f"{text[:most]}..."


def _fields(record: Record) -> dict[str, Any]:
    last = record.tries[-1] if record.tries else None
    found = {
        "request_id": record.request_id,
        "path": record.path.decode("latin-1"),
        "tenant": record.lane.account.name,
        "class": record.lane.slo_class.name,
        "adapter": record.adapter,
        "ended": record.ended,
        "status": record.status or (record.error.status if record.error is not None else 0),
        "code": record.error.code if record.error is not None else "",
        "tries": len(record.tries),
        "reason": last.reason if last is not None else "",
        "prefill": last.prefill.endpoint.name if last is not None and last.prefill is not None else "",
        "decode": last.decode.endpoint.name if last is not None and last.decode is not None else "",
        "why": next((one.why for one in reversed(record.tries) if one.why), ""),
        "first_byte_s": round(record.first_at - record.came_at, 6) if record.first_at else "",
        "took_s": round(record.ended_at - record.came_at, 6),
        "trace_id": record.trace.trace_id if record.trace is not None else "",
    }
    return {name: value for name, value in found.items() if value != ""}

"""Spans to a collector: OTLP over HTTP in its JSON form, from a thread of its own, never on the loop.

The data path appends a record to a bounded queue; rendering and sending happen here, in batches. What does not fit is dropped and
counted: a collector that is slow or gone costs spans, never requests. Headers for the collector (a token, say) come from the
environment as for every OpenTelemetry program: OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote, urlsplit

from fleet_router.config import TraceConfig
from fleet_router.explain.record import Record
from fleet_router.explain.spans import request_of, spans_of
from fleet_router.explain.trace import Trace

BATCH: Final = 128
SETTLE_S: Final = 0.01
"""From a batch that is full to the first of it that is rendered. It is full when a burst of streams ends, which is when their
clients send what comes next: rendering and sending stood in the first tokens of that."""
SLICE: Final = 32
"""Records that are rendered at a stretch: the loop waits for the interpreter meanwhile."""
PAUSE_S: Final = 0.001
WAIT_S: Final = 1.0
TIMEOUT_S: Final = 5.0
TRIES: Final = 3
AGAIN: Final = frozenset({429, 502, 503, 504})
"""What OTLP allows to be sent again."""
PATH: Final = "/v1/traces"


def headers_of(text: str) -> dict[str, str]:
    """`name=value,name=value`, percent-encoded, as in the environment."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {unquote(name).strip(): unquote(value).strip() for name, _, value in pairs}


class Exported:
    """Counts of a process, whatever collectors it had."""

    __slots__ = ("dropped", "failed", "sent")

    def __init__(self) -> None:
        self.sent = self.dropped = self.failed = 0
        """Requests whose spans were sent; dropped because the queue was full or the collector refused; attempts that failed."""


class Exporter:
    """One per process and collector."""

    def __init__(self, config: TraceConfig, service: str, clock: Callable[[], float], counts: Exported) -> None:
        self._config, self._service, self._clock = config, service, clock
        self._waiting: deque[tuple[Record, Trace]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._instance = socket.gethostname()
        self._headers = headers_of(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._counts = counts

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def put(self, record: Record) -> None:
        """A request has ended."""
        if record.trace is None:
            return
        if len(self._waiting) >= self._config.queue:
            self._counts.dropped += 1
            return
        self._waiting.append((record, record.trace))
        if len(self._waiting) >= BATCH:
            self._wake.set()

    def stop(self) -> None:
        """No more; what waits is sent once, in the thread."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Until what waits is sent, at most so long."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping:
            if self._wake.wait(WAIT_S) and not self._stopping:
                time.sleep(SETTLE_S)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            epoch_ns = time.time_ns() - int(self._clock() * 1e9)
            body = request_of(self._rendered(batch, epoch_ns), self._service, self._instance)
            if self._post(body):
                self._counts.sent += len(batch)
            else:
                self._counts.dropped += len(batch)

    def _rendered(self, batch: list[tuple[Record, Trace]], epoch_ns: int) -> list[bytes]:
        """Their spans; between slices the interpreter is the loop's."""
        found: list[bytes] = []
        for at in range(0, len(batch), SLICE):
            if at and not self._stopping:
                time.sleep(PAUSE_S)
            for record, trace in batch[at : at + SLICE]:
                found += spans_of(record, trace, epoch_ns)
        return found

    def _post(self, body: bytes) -> bool:
        """True when the collector took it. Tried again after 0.1 and 0.2 s, unless it says that it never will."""
        for number in range(TRIES):
            status = self._post_once(body)
            if 200 <= status < 300:
                return True
            self._counts.failed += 1
            if (status and status not in AGAIN) or self._stopping:
                return False
            if number < TRIES - 1:
                time.sleep(0.1 * 2**number)
        return False

    def _post_once(self, body: bytes) -> int:
        """Status; 0 when nobody answered."""
        try:
            url = urlsplit(self._config.endpoint)
            kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            connection = kind(url.hostname or "", url.port, timeout=TIMEOUT_S)
        except (ValueError, http.client.HTTPException):  # a port that is none
            return 0
        path = url.path.rstrip("/")
        try:
            connection.request(
                "POST", path if path.endswith(PATH) else path + PATH, body, {"content-type": "application/json", **self._headers}
            )
            return connection.getresponse().status  # of its body nobody wants anything, and it may have no end
        except (OSError, http.client.HTTPException, ValueError):
            return 0
        finally:
            connection.close()

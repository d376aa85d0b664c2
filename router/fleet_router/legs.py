"""Who listens to a worker's answer: the two legs of a request, and nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_router.dialect.chat import worker_error
from fleet_router.ending import END, framed
from fleet_router.errors import RequestError

if TYPE_CHECKING:
    from fleet_router.dialect.translation import Translation
    from fleet_router.flow import Flow
    from fleet_router.workers import Worker

MAX_PREFILL_ANSWER_BYTES = 8 * 1024 * 1024
NOT_FOUND = 404
MAX_ERROR_BYTES = 64 * 1024


class Ignored:
    """An answer that nobody waits for."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...
    def on_head_alone(self) -> None: ...
    def on_raw(self, data: bytes) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self, reason: str) -> None: ...


class PrefillLeg:
    """Collects the prefill answer."""

    __slots__ = ("_answer", "_decode", "_flow", "_headers", "_status", "_worker", "body")

    def __init__(self, flow: Flow, worker: Worker, decode: Worker) -> None:
        self._flow, self._worker, self._decode = flow, worker, decode
        self._status, self._headers, self._answer = 0, list[tuple[bytes, bytes]](), bytearray()
        self.body = b""
        """What is sent, for a second time on a fresh connection."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status, self._headers = status, headers

    def on_head_alone(self) -> None:
        """The client sees nothing of it."""

    def on_raw(self, data: bytes) -> None:
        """The framing does not matter here."""

    def on_body(self, data: bytes) -> None:
        if len(self._answer) < MAX_PREFILL_ANSWER_BYTES:
            self._answer += data

    def on_end(self) -> None:
        if self._status == 200:
            self._flow.prefilled(self._worker, self._decode, bytes(self._answer))
        elif self._status == NOT_FOUND and self._flow.adapter:
            self._flow.adapter_missing(self._worker)
        elif 400 <= self._status < 500:
            self._flow.refuse_with(self._status, self._headers, bytes(self._answer))
        else:
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, f"prefill answered {self._status}")

    def on_lost(self, reason: str) -> None:
        if not self._flow.resend(self._worker, self):
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, reason)


class DecodeLeg:
    """Hands the decode answer on; a 5xx before the first byte is kept back and retried."""

    __slots__ = ("_answer", "_flow", "_held", "_worker", "body")

    def __init__(self, flow: Flow, worker: Worker) -> None:
        self._flow, self._worker = flow, worker
        self._held = 0
        self._answer = bytearray()
        self.body = b""
        """What is sent, for a second time on a fresh connection."""

    def _kept_back(self, status: int) -> bool:
        """An answer that the client need not see: another worker may have a better one."""
        return status >= 500 or (status == NOT_FOUND and bool(self._flow.adapter))

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self._kept_back(status):
            self._held = status
            return
        self._worker.succeeded()
        self._flow.head(status, headers)

    def on_head_alone(self) -> None:
        if not self._held:
            self._flow.send_head()

    def on_raw(self, data: bytes) -> None:
        if not self._held:
            self._flow.raw(data)
        elif len(self._answer) < MAX_ERROR_BYTES:
            self._answer += data

    def on_body(self, data: bytes) -> None:
        """Nothing here depends on the framing."""

    def on_end(self) -> None:
        if not self._held:
            self._flow.end()
        elif self._held == NOT_FOUND:
            self._flow.adapter_missing(self._worker)
        elif b"KvTransferError" in self._answer:
            self._flow.transfer_failed(self._worker)
        else:
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, f"decode answered {self._held}")

    def on_lost(self, reason: str) -> None:
        if not self._flow.resend(self._worker, self):
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, reason)


class TranslatedLeg(DecodeLeg):
    """Reads the answer and hands it on in another dialect; on a connection that collects."""

    __slots__ = ("_out", "_refused", "_translation")

    def __init__(self, flow: Flow, worker: Worker, translation: Translation) -> None:
        super().__init__(flow, worker)
        self._translation = translation
        self._refused = 0
        self._out = b""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if status >= 400:
            self._held = status if self._kept_back(status) else 0
            self._refused = 0 if self._held else status
            return
        self._worker.succeeded()
        if self._translation.stream:
            self._flow.head(status, [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")])

    def on_head_alone(self) -> None:
        if self._translation.stream and not self._held and not self._refused:
            self._flow.send_head()

    def on_body(self, data: bytes) -> None:
        if self._held or self._refused:
            if len(self._answer) < MAX_ERROR_BYTES:
                self._answer += data
            return
        try:
            self._out += self._translation.feed(data)
        except RequestError as error:
            self._flow.cut(error)

    def on_raw(self, data: bytes) -> None:
        """After `on_body` of the same bytes."""
        if not self._held and not self._refused and not self._flow.done:
            shown, self._out = framed(self._out), b""
            if self._translation.stream:
                self._flow.raw(data, shown)

    def on_end(self) -> None:
        if self._flow.done:
            return
        if self._held:
            super().on_end()
        elif self._refused:
            self._flow.cut(RequestError(self._refused, worker_error(bytes(self._answer))))
        else:
            self._finish()

    def on_lost(self, reason: str) -> None:
        self._translation.collected.clear()  # whoever is asked next answers from the beginning
        super().on_lost(reason)

    def _finish(self) -> None:
        try:
            rest = self._translation.end()
        except RequestError as error:
            self._flow.cut(error)
            return
        if self._translation.stream:
            self._flow.raw(b"", framed(rest) + END)
        else:
            length = str(len(rest)).encode()
            self._flow.head(200, [(b"content-type", b"application/json"), (b"content-length", length)])
            self._flow.raw(bytes(self._translation.collected), rest)
        self._flow.end()

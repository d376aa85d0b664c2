"""Who listens to a worker's answer: the two legs of a request, and nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet_router.flow import Flow
    from fleet_router.workers import Worker

MAX_PREFILL_ANSWER_BYTES = 8 * 1024 * 1024
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

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if status >= 500:
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
        elif b"KvTransferError" in self._answer:
            self._flow.transfer_failed(self._worker)
        else:
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, f"decode answered {self._held}")

    def on_lost(self, reason: str) -> None:
        if not self._flow.resend(self._worker, self):
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, reason)

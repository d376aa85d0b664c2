"""What one tenant may still do, and what it has used: requests a second, tokens a minute, requests at the same time.

A request is charged when it is admitted, with its prompt's estimated tokens, and settled once when it ends:

| it ended | request | tokens |
|---|---|---|
| answered: with an answer, whole or broken after its first byte | stays | what was used |
| refused: a worker refused it (4xx) | stays | given back |
| left: the client left before the first byte | stays; given back where no work had begun | given back |
| failed: 5xx, the client got nothing of us | given back | given back |
"""

from __future__ import annotations

from math import ceil
from typing import Final, Literal

from fleet_router.admission.bucket import SECOND_NS, Bucket
from fleet_router.admission.refused import Over
from fleet_router.admission.tenants import Tenant

MINUTE_S: Final = 60
BUSY_RETRY_S: Final = 1
"""Nobody knows when one of a tenant's own requests ends."""


Outcome = Literal["answered", "refused", "left", "failed"]
"""How a request ended; see the module. Not an Enum: its values would be looked up on every request."""
OUTCOMES: Final[tuple[Outcome, ...]] = ("answered", "refused", "left", "failed")


Told = tuple[bytes, bytes]
"""Of one limit's header lines what stands before and between what is left and when it is full again."""
NOTHING_TOLD: Final[Told] = (b"", b"")


class Account:
    """One tenant's quotas and counts; the time comes in as nanoseconds of any clock that never goes back."""

    __slots__ = ("_of_requests", "_of_tokens", "changed", "concurrency", "counts", "elsewhere", "inflight", "input_tokens",
                 "name", "output_tokens", "requests", "tokens", "waiting")  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.concurrency: int | None = None
        self.inflight = 0
        """Waiting or running."""
        self.elsewhere = 0
        """The same at other routers, as far as they say."""
        self.waiting = 0
        self.changed = True
        """What other routers hear of it may be another than when it was last looked at."""
        self.counts = dict.fromkeys((*REASONS, *OUTCOMES), 0)
        self.input_tokens = self.output_tokens = 0
        self._of_requests = self._of_tokens = NOTHING_TOLD

    @property
    def running(self) -> int:
        """Slots that it holds."""
        return self.inflight - self.waiting

    def follow(self, tenant: Tenant, now_ns: int) -> None:
        """New limits; what was used stays used."""
        self.changed = True
        self.concurrency = tenant.concurrency
        rps, tpm = tenant.requests_per_second, tenant.tokens_per_minute
        burst = tenant.requests_burst or max(1, ceil(rps or 0))
        self.requests = None if rps is None else _sized(self.requests, rps, burst, now_ns)
        self.tokens = None if tpm is None else _sized(self.tokens, tpm / MINUTE_S, tpm, now_ns)
        self._of_requests, self._of_tokens = _head_of(b"requests", self.requests), _head_of(b"tokens", self.tokens)

    def charge(self, tokens: int, now_ns: int) -> Over | None:
        """Take one request and its tokens, or say why not and take nothing."""
        if self.concurrency is not None and self.inflight + self.elsewhere >= self.concurrency:
            return self._over("concurrency", f"{self.inflight + self.elsewhere} requests at the same time", BUSY_RETRY_S)
        requests, budget = self.requests, self.tokens
        if requests is not None and (wait_ns := requests.wait_ns(1, now_ns)) > 0:
            return self._over("requests_per_second", "requests per second", ceil(wait_ns / SECOND_NS))
        if budget is not None and tokens and not budget.take_if(tokens, now_ns):
            if tokens > budget.size:
                return self._over("request_too_large", f"about {tokens} prompt tokens of {budget.size} tokens per minute", None)
            return self._over("tokens_per_minute", "tokens per minute", ceil(budget.wait_ns(tokens, now_ns) / SECOND_NS))
        if requests is not None:
            requests.take(1, now_ns)
        self.inflight += 1
        self.changed = True
        return None

    def settle(self, charged: int, outcome: Outcome, used: tuple[int, int], now_ns: int, begun: bool = True) -> None:
        """The request ended; `used` are its (input, output) tokens, looked at when it was answered. `begun`: it did not only
        wait. Exactly once per charge."""
        self.inflight -= 1
        self.changed = True
        self.counts[outcome] += 1
        if outcome == "answered":
            self.input_tokens += used[0]
            self.output_tokens += used[1]
            if self.tokens is not None:
                self.tokens.exchange(charged, used[0] + used[1], now_ns)
            return
        if self.tokens is not None:
            self.tokens.give(charged)
        if (outcome == "failed" or not begun) and self.requests is not None:
            self.requests.give(1)

    def used_elsewhere(self, inflight: int, requests: int, tokens: int, routers: int, now_ns: int) -> None:
        """Of the same quotas: what other routers run now, and what they charged since they said it last. One of `routers` others
        can have taken no more than a whole bucket before it heard of it."""
        self.elsewhere = inflight
        if requests and (bucket := self.requests) is not None:
            bucket.drain(requests, routers * bucket.size, now_ns)
        if tokens and (bucket := self.tokens) is not None:
            bucket.drain(tokens, routers * bucket.size, now_ns)

    def headers(self, now_ns: int) -> bytes:
        """OpenAI's x-ratelimit-* header lines, each with its line break before it; empty for a tenant without limits."""
        requests, tokens = self.requests, self.tokens
        told = b"" if requests is None else _told(self._of_requests, requests, now_ns)
        return told if tokens is None else told + _told(self._of_tokens, tokens, now_ns)

    def _over(self, reason: str, what: str, retry_after_s: int | None) -> Over:
        self.counts[reason] += 1
        return Over(reason, f"tenant {self.name} is over its quota: {what}", retry_after_s)


REASONS: Final[tuple[str, ...]] = (
    "concurrency", "requests_per_second", "tokens_per_minute", "request_too_large", "queue_share", "overloaded", "queue_timeout",
    "model", "class",
)  # fmt: skip
"""Why a request was refused by admission; each is a count per tenant, and `code` in the answer."""


def _sized(known: Bucket | None, per_s: float, size: int, now_ns: int) -> Bucket:
    return Bucket(per_s, size) if known is None else known.resized(per_s, size, now_ns)


def _head_of(name: bytes, bucket: Bucket | None) -> Told:
    """Everything but what changes from request to request."""
    if bucket is None:
        return NOTHING_TOLD
    limit = b"\r\nx-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: " % (name, bucket.size, name)
    return limit, b"\r\nx-ratelimit-reset-%b: " % name


def _told(lines: Told, bucket: Bucket, now_ns: int) -> bytes:
    """Times are whole ms, which every reader of Go's durations reads. The format stands here, where the compiler sees it: Python
    formats numbers into bytes at 500 instructions each."""
    left, reset_ms = bucket.left_and_reset(now_ns)
    return b"%b%d%b%dms" % (lines[0], left, lines[1], reset_ms)

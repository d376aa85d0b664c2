"""The bounded memory of decisions of one process, and who is told when a request is over.

Three rings, so that what went wrong is not pushed out by what went well, and neither by a flood of refusals.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Final, NamedTuple

from fleet_router.admission.bucket import Bucket
from fleet_router.admission.gate import Ticket
from fleet_router.ask import Ask
from fleet_router.config import ExplainBounds, RouterConfig, TraceConfig
from fleet_router.errors import RequestError, remembered
from fleet_router.explain.export import Exported, Exporter
from fleet_router.explain.inference_metrics import Counts
from fleet_router.explain.journal import Journal
from fleet_router.explain.record import Ended, Record
from fleet_router.explain.trace import PARENT, STATE, Trace, passed_on, read
from fleet_router.policy.chosen import Choice
from fleet_router.workers import Worker

ENDED: Final[Mapping[str, Ended]] = {"answered": "answered", "refused": "refused", "failed": "failed", "left": "left"}
STOP_S: Final = 5.0


class Refused(NamedTuple):
    """A request that was turned away before anything was decided."""

    at: float
    request_id: str
    path: bytes
    tenant: str
    error: RequestError


class Recorder:
    """One per process."""

    def __init__(self, clock: Callable[[], float], journal: Journal) -> None:
        self._clock = clock
        self._random = random.Random()  # noqa: S311 - ids of traces are no secrets
        self._bounds = ExplainBounds()
        self._traces = TraceConfig()
        self._rate = Bucket(1.0, 1)
        self._journal = journal
        self.counts = Counts()
        self.exporter: Exporter | None = None
        self.exported = Exported()
        self.running: set[Record] = set()
        self.smooth: deque[Record] = deque(maxlen=self._bounds.records)
        self.troubled: deque[Record] = deque(maxlen=self._bounds.troubled)
        self.refusals: deque[Refused] = deque(maxlen=self._bounds.refused)

    def follow(self, config: RouterConfig) -> None:
        """New sizes, another collector; what is remembered stays as far as it fits."""
        bounds, traces = config.explain, config.traces
        self.counts.live = frozenset(config.adapters)
        if bounds != self._bounds:
            self._bounds = bounds
            self.smooth = deque(self.smooth, bounds.records)
            self.troubled = deque(self.troubled, bounds.troubled)
            self.refusals = deque(self.refusals, bounds.refused)
        self._journal.follow(bounds)
        if traces != self._traces:
            self._traces = traces
            self._rate = Bucket(traces.per_second, traces.per_second)
            if self.exporter is not None:
                self.exporter.stop()
            self.exporter = Exporter(traces, config.fleet, self._clock, self.exported) if traces.endpoint else None
            if self.exporter is not None:
                self.exporter.start()

    def stop(self) -> None:
        """Send what is left; takes some seconds at most."""
        if self.exporter is not None:
            self.exporter.stop()
            self.exporter.join(STOP_S)

    # -- one request ------------------------------------------------------------------------------------------------
    def open(self, ids: tuple[str, str], path: bytes, ask: Ask, ticket: Ticket, kept: Mapping[bytes, bytes]) -> Record:
        """A request was admitted, or waits to be. `ids`: the client's name of it and the workers'; `kept`: its headers."""
        record = Record(ids, path, ask, ticket.lane, ticket.at, ticket.waiting)
        if kept or self.exporter is not None:
            self._trace(record, kept.get(PARENT, b""), kept.get(STATE, b""))
        self.running.add(record)
        return record

    def _trace(self, record: Record, parent: bytes, state: bytes) -> None:
        """Is it one whose spans we make? Who sends a context decides that, within our rate."""
        found = read(parent, state) if parent else None
        wanted = self.exporter is not None and (found[2] if found is not None else self._random.random() < self._traces.sample)
        if not (wanted and self._rate.take_if(1, int(record.came_at * 1e9))):
            record.onward = passed_on(parent, state) if found is not None else b""
            return
        trace_id, span = (found[0], found[1]) if found is not None else (f"{self._random.getrandbits(128) or 1:032x}", "")
        record.trace = Trace(trace_id, span, self._random.getrandbits(64), found[3] if found is not None else b"")

    def decided(
        self, record: Record, at: float, now: float, found: Choice, prefill: Worker | None, decode: Worker
    ) -> None:  # fmt: skip
        """An attempt begins; the decision began `at`."""
        counts, ask = self.counts, found.ask
        one = record.tried(now, now - at, found.reason, prefill, decode)
        counts.decisions.observe(now - at)
        if found.offer is not None and ask is not None:
            one.weighed(found.offer, ask)
            if ask.tokens > 0:
                cached = 1.0 - found.offer.missing / ask.tokens
                counts.hits.observe(cached if cached > 0.0 else 0.0)

    def close(self, record: Record, outcome: str, last_at: float, writes: int, now: float) -> None:
        """It ended, however; once."""
        record.ended_at = now
        record.last_at, record.writes = last_at, writes
        record.ended = ENDED[outcome]
        self.running.discard(record)
        for one in record.tries:
            one.pack()
        smooth = record.smooth
        (self.smooth if smooth else self.troubled).append(record)
        self.counts.ended(record)
        if record.trace is not None and self.exporter is not None:
            self.exporter.put(record)
        if self._journal.requests == "all" or (self._journal.requests == "troubled" and not smooth):
            self._journal.request(record, record.ended_at)

    def refused(self, request_id: str, path: bytes, tenant: str, error: RequestError) -> None:
        """It was turned away at the door."""
        self.refusals.append(Refused(self._clock(), request_id, path, tenant, remembered(error)))

    # -- what is known ----------------------------------------------------------------------------------------------
    def records(self) -> Iterator[Record]:
        """Newest first of each kind, the kinds in turn: more run on a busy router than anybody asks for."""
        for turn in zip_longest(reversed(self.troubled), self.running, reversed(self.smooth)):
            yield from (record for record in turn if record is not None)

    def lines(self, config: RouterConfig, ready: int, index_keys: int, waiting: int) -> list[str]:
        """Prometheus text."""
        kept = {
            "running": len(self.running),
            "answered": len(self.smooth),
            "troubled": len(self.troubled),
            "refused": len(self.refusals),
        }
        out = ["# TYPE fleet_router_records gauge"]
        out += [f'fleet_router_records{{kind="{kind}"}} {count}' for kind, count in kept.items()]
        out.append("# TYPE fleet_router_traced_requests_total counter")
        out += [f'fleet_router_traced_requests_total{{result="{result}"}} {count}' for result, count in self._traced().items()]
        running = (record.adapter for record in self.running)
        return out + self.counts.lines(config.served_name, config.fleet, running, ready, index_keys, waiting)

    def _traced(self) -> dict[str, int]:
        told = self.exported
        return {"sent": told.sent, "dropped": told.dropped, "failed": told.failed}

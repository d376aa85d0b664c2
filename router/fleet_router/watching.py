"""Twice a second: which workers have fallen silent, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fleet_router.cascade.climb import Climb
from fleet_router.context import Context
from fleet_router.flow import Flow
from fleet_router.health.silence import Waits, silent


class Connection(Protocol):
    """A client's connection."""

    @property
    def flow(self) -> object: ...


def watch(context: Context, connections: Iterable[Connection], now: float) -> None:
    """Put silent workers out, and move those requests of theirs that no client has seen a byte of."""
    flows: list[tuple[Flow, Waits]] = []
    for connection in connections:
        flow = connection.flow
        if isinstance(flow, Climb):
            flow = flow.flow
        if isinstance(flow, Flow) and (leg := flow.leg()) is not None:
            flows.append((flow, leg))
    if not flows:
        return
    workers, silent_s = context.table.workers, context.config.silent_s
    heard = {uid: max(worker.heard_at, worker.free_at) for uid, worker in workers.items()}
    found = silent((leg for _, leg in flows), heard, now, silent_s)
    for uid in found:
        if workers[uid].breaker.allows(now, 0):
            workers[uid].put_out(now)
    for flow, leg in flows:
        if leg.worker in found and now - leg.heard_at > silent_s:
            flow.silent()

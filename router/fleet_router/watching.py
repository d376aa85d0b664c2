"""Twice a second: which workers have fallen silent, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from fleet_router.cascade.climb import Climb
from fleet_router.context import Context
from fleet_router.flow import Flow
from fleet_router.follow.liveness import alive
from fleet_router.health.silence import SILENT, Waits, silent
from fleet_router.workers import Worker
from fleet_wire.endpoints import Endpoint

RETURN_STEP_S = 0.25
RETURN_TIMEOUT_S = 2.0
RETURN_MOST = 16
"""Workers that are asked at once."""


class Connection(Protocol):
    """A client's connection."""

    @property
    def flow(self) -> object: ...


def watch(context: Context, connections: Iterable[Connection], now: float) -> list[Worker]:
    """Put silent workers out, and move those requests of theirs that no client has seen a byte of. Returns those that must be
    asked whether they are there: they may be silent, or at work on answers that come as a whole."""
    workers, silent_s = context.table.workers, context.config.silent_s
    context.overtaken.look(workers, now, silent_s)
    flows = _waiting(connections)
    if not flows:
        return []
    asked = {leg.worker: flow.sent_to(leg) for flow, leg in flows if leg.worker not in workers}
    gone = {uid: worker for uid, worker in asked.items() if worker is not None}
    workers = {**workers, **gone}  # who hangs is soon not ready, and left out of the document
    heard = {uid: max(worker.heard_at, worker.free_at) for uid, worker in workers.items()}
    legs = [leg for _, leg in flows]
    found = silent(legs, heard, now, silent_s)
    heard |= {uid: max(heard[uid], workers[uid].alive_at) for uid in {leg.worker for leg in legs} & heard.keys()}
    unheard = silent(legs, heard, now, silent_s, whole=True) - found
    _leave_alone(context, found, flows, now)
    return [workers[uid] for uid in unheard]


def not_there(context: Context, connections: Iterable[Connection], worker: Worker, asked_at: float, now: float) -> None:
    """It was asked, and has neither answered nor said anything to anybody since."""
    flows = _waiting(connections)
    heard = max([worker.heard_at, *(leg.heard_at for _, leg in flows if leg.worker == worker.uid and leg.heard_at > leg.sent_at)])
    known = context.table.workers.get(worker.uid)
    if heard < asked_at and (known is worker or known is None):
        if known is worker:
            _put_out(worker, now)
        _leave_alone(context, {worker.uid}, flows, now)


def _waiting(connections: Iterable[Connection]) -> list[tuple[Flow, Waits]]:
    found: list[tuple[Flow, Waits]] = []
    for connection in connections:
        flow = connection.flow
        if isinstance(flow, Climb):
            flow = flow.flow
        if isinstance(flow, Flow):
            legs = (flow.second_leg(), flow.leg())  # in this order: when both are silent, somebody else is asked
            found += [(flow, leg) for leg in legs if leg is not None]
    return found


def _leave_alone(context: Context, found: set[str], flows: list[tuple[Flow, Waits]], now: float) -> None:
    for flow, leg in flows:
        if leg.worker in found and now - leg.heard_at > context.config.silent_s:
            worker = context.table.workers.get(leg.worker)
            if worker is not None and worker is flow.sent_to(leg):
                _put_out(worker, now)
            try:
                if leg.second:
                    flow.hedge_failed(SILENT)
                else:
                    flow.silent()
            except Exception as error:
                context.desk.faults.end(error, flow.cut, flow.record.request_id)


def _put_out(worker: Worker, now: float) -> None:
    if worker.breaker.allows(now, 0):
        worker.put_out(now)


class Returns:
    """While requests wait for decode workers that could not be reached: these are asked whether they are there again, and what
    waits goes on when one is."""

    def __init__(self, context: Context, probe: Callable[[Endpoint, float], Awaitable[bool]] = alive) -> None:
        self._context, self._probe = context, probe
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._asked_at = -RETURN_STEP_S

    def look(self, now: float) -> None:
        """Called some times a second."""
        holding, table = self._context.holding, self._context.table
        if not holding.returning:
            holding.lost.clear()
            return
        known = {uid: worker for uid in holding.lost if (worker := table.workers.get(uid)) is not None}
        holding.lost = {uid for uid, worker in known.items() if worker.is_lost}
        if len(holding.lost) < len(known):
            holding.returned(now)
        if now - self._asked_at >= RETURN_STEP_S:
            self._asked_at = now
            lost = [worker for worker in table.by_role["decode"] if worker.is_lost and worker.uid not in self._asked]
            for worker in sorted(lost, key=lambda one: one.asked_at)[: RETURN_MOST - len(self._asked)]:
                worker.asked_at = now
                self._asked[worker.uid] = asyncio.get_running_loop().create_task(self._ask(worker))

    async def _ask(self, worker: Worker) -> None:
        try:
            if await self._probe(worker.endpoint, RETURN_TIMEOUT_S):
                worker.alive_at = self._context.clock()
        finally:
            del self._asked[worker.uid]


class Probes:
    """Asks workers whether they are there: each by one question at a time, and so seldom that no bound is needed but theirs."""

    def __init__(self, context: Context, connections: Callable[[], Iterable[Connection]]) -> None:
        self._context, self._connections = context, connections
        self._asked: dict[str, asyncio.Task[None]] = {}

    def ask(self, workers: Iterable[Worker], probe: Callable[[Endpoint], Awaitable[bool]] = alive) -> None:
        """Those who are not being asked already."""
        for worker in workers:
            if worker.uid not in self._asked:
                task = asyncio.get_running_loop().create_task(self._one(worker, probe))
                self._asked[worker.uid] = task

    async def _one(self, worker: Worker, probe: Callable[[Endpoint], Awaitable[bool]]) -> None:
        asked_at = self._context.clock()
        try:
            there = await probe(worker.endpoint)
        finally:
            del self._asked[worker.uid]
        now = self._context.clock()
        if there:
            worker.alive_at = now
        else:
            not_there(self._context, self._connections(), worker, asked_at, now)

"""A record as people and programs read it. Pure; seconds are rounded to microseconds, offsets are from the request's arrival."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from fleet_router.explain.record import Record, Try
from fleet_router.explain.recorder import Refused
from fleet_router.policy.cost import missing_of
from fleet_router.policy.terms import Weighed, seconds_of
from fleet_router.workers import Worker

Shown = dict[str, Any]


def shown(record: Record, epoch_s: float) -> Shown:
    """`epoch_s`: what the router's clock plus it makes Unix time."""
    begun = record.came_at
    return _given({
        "request_id": record.request_id,
        "worker_request_id": record.leg_id,
        "at": round(begun + epoch_s, 6),
        "state": record.ended or "running",
        "status": record.status or (record.error.status if record.error is not None else None),
        "error": _error(record),
        "path": record.path.decode("latin-1"),
        "tenant": record.lane.account.name,
        "class": record.lane.slo_class.name,
        "adapter": record.adapter,
        "stream": record.stream,
        "prompt_bytes": record.prompt_bytes,
        "waited_s": _since(record.begun_at, begun),
        "first_byte_s": _since(record.first_at, begun),
        "last_byte_s": _since(record.last_at, begun) if record.first_at else None,
        "ended_s": _since(record.ended_at, begun),
        "writes": record.writes,
        "trace_id": record.trace.trace_id if record.trace is not None else None,
        "tries": [_try(one, begun) for one in record.tries],
    })  # fmt: skip


def refused(one: Refused, epoch_s: float) -> Shown:
    """One that nothing was decided for."""
    said = {"status": one.error.status, "code": one.error.code, "reason": one.error.reason}
    return _given({
        "request_id": one.request_id, "at": round(one.at + epoch_s, 6), "state": "refused", "status": one.error.status,
        "error": _given(said), "path": one.path.decode("latin-1"), "tenant": one.tenant, "tries": [],
    })  # fmt: skip


def header(record: Record) -> bytes:
    """The decision in a line of the answer's head; empty before there is one."""
    if not record.tries:
        return b""
    one = record.tries[-1]
    found = _try(one, record.came_at)
    names = ("reason", "prefill", "decode", "cost_s", "prompt_tokens", "missing_tokens", "compared")
    given = {name: found[name] for name in names if name in found}
    said = [f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in given.items()]
    return ("\r\nx-fleet-decision: " + "; ".join([*said, f"tries={len(record.tries)}"])).encode("latin-1", "replace")


def _error(record: Record) -> Shown | None:
    error = record.error
    return None if error is None else _given({"status": error.status, "code": error.code, "reason": error.reason})


def _try(one: Try, begun: float) -> Shown:
    said: Shown = {
        "at_s": _since(one.at, begun),
        "decided_s": round(one.decided_s, 6),
        "reason": one.reason,
        "prefill": _name(one.prefill),
        "decode": _name(one.decode),
        "hedge": _second(one, begun),
        "prefilled_s": _since(one.prefilled_at, begun),
        "failed_s": _since(one.wrong_at, begun),
        "why": one.why,
    }
    if one.sides is not None:
        said |= _cost(one, one.sides)
    return _given(said)


def _second(one: Try, begun: float) -> Shown | None:
    """The prefill worker that was asked, too, because the first one was late."""
    told = one.second
    if told is None:
        return None
    return _given({"prefill": _name(told.worker), "at_s": _since(told.at, begun), "outcome": told.outcome, "why": told.why})


def _cost(one: Try, sides: Sequence[Weighed]) -> Shown:
    """What the policy by cost knew; the others have no costs."""
    return {
        "cost_s": round(one.cost_s, 6), "prompt_tokens": round(one.prompt_tokens), "missing_tokens": round(one.missing_tokens),
        "moved_tokens": round(one.moved_tokens), "compared": one.compared,
        "pair_s": _pair_s(one, sides), "prewarmed_s": _prewarmed_s(one),
        "candidates": [row for side in sides for row in _side(side, one.by_cost)],
    }  # fmt: skip


def _pair_s(one: Try, sides: Sequence[Weighed]) -> float | None:
    """What the chosen pair costs above the least of all pairs; None without a transfer."""
    if one.prefill is None or one.decode is None:
        return None
    found = {
        worker.uid: cost_s
        for side in sides
        for worker, cost_s in zip(side.workers, seconds_of(side.costs), strict=True)
    }  # fmt: skip
    return round(one.cost_s - found[one.prefill.uid] - found[one.decode.uid], 6)


def _prewarmed_s(one: Try) -> float | None:
    """What the chosen pair's first transfer took, where it was made to meet before any request; None: it was not."""
    if not isinstance(one.prefill, Worker) or not isinstance(one.decode, Worker):
        return None
    seconds = one.prefill.warmed.get(one.decode.uid)
    return None if seconds is None else round(seconds, 6)


def _side(side: Weighed, by_cost: bool) -> list[Shown]:
    """The candidates of one side of one group, cheapest first. `by_cost`: prefilling on a decode worker was weighed too."""
    costs, local = seconds_of(side.costs), None if side.local is None else seconds_of(side.local)
    rows = [
        {
            "worker": _name(worker), "role": "prefill" if local is None else "decode", "tier": side.group[0],
            "missing_tokens": round(missing_of(side, i)), "cost_s": _seconds(costs[i]),
            **({} if local is None or not by_cost else {"local_s": _seconds(local[i])}),
        }
        for i, worker in enumerate(side.workers)
    ]  # fmt: skip
    return sorted(rows, key=lambda row: inf if row["cost_s"] is None else row["cost_s"])


def _seconds(cost_s: float) -> float | None:
    """None: its queue and prefill alone were more than what others cost, or its share of the work was used up."""
    return None if cost_s == inf else round(cost_s, 6)


def _name(worker: object) -> str | None:
    return worker.endpoint.name if isinstance(worker, Worker) else None


def _since(at: float, begun: float) -> float | None:
    return round(at - begun, 6) if at else None


def _given(said: Shown) -> Shown:
    """Without what is not known."""
    return {name: value for name, value in said.items() if value not in (None, "")}

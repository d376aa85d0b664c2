"""O4 and O6: an API server that shows old lists, refuses, is slow, lies, or is away. Stage one: the ledger shows the fault.
Stage two: nothing was done that the truth did not ask for, writes stay few, and the fleet is in order soon after."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from e2e.faultproxy.faults import Answer
from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest, path_of
from e2e.faultproxy.ledger import Request
from fleet_operator.cluster.interface import FLEET

pytestmark = FAMILY
IN_ORDER_S = 30.0
STALE_S = 4.0
WRITES_PER_S = 5.0
BURST = 10
RETRY_AFTER_S = 3


def image(lab: Lab, tag: str) -> None:
    lab.apply(fleet_manifest(lab.namespace, engine={"image": f"example.com/worker:{tag}"}))


def fleet_runs(lab: Lab) -> None:
    lab.start()
    image(lab, "a")
    lab.until("a running fleet", lambda: lab.serving(1, 2), 60)


@dataclass(frozen=True)
class Stale:
    """What the old lists show, and what happened since."""

    name: str
    before: Callable[[Lab], None]
    shown: Callable[[Lab], None]
    since: Callable[[Lab], None]
    decode: int
    same_pods: bool = True
    smoke: bool = False


def four(lab: Lab) -> None:
    lab.scale("decode", 4)
    lab.until("four decode workers", lambda: lab.serving(1, 4))


def made_anew(lab: Lab) -> None:
    lab.admin("DELETE", path_of(FLEET, lab.namespace, "f")).raise_for_status()
    lab.until_without_operator("the fleet's children are gone", lambda: not lab.objects(), 60)
    image(lab, "a")


def nothing(lab: Lab) -> None:
    """No step here."""


STALE = {
    row.name: row
    for row in (
        Stale("shows-a-wish-to-grow", nothing, lambda lab: lab.scale("decode", 4), lambda lab: lab.scale("decode", 2), 2),
        Stale("shows-a-wish-to-shrink", four, lambda lab: lab.scale("decode", 2), lambda lab: lab.scale("decode", 4), 4,
              smoke=True),
        Stale("shows-another-image", nothing, lambda lab: image(lab, "b"), lambda lab: image(lab, "a"), 2),
        Stale("shows-a-fleet-that-is-gone", nothing, nothing, made_anew, 2, same_pods=False),
    )
}  # fmt: skip


def play_stale(lab: Lab, row: Stale) -> None:
    fleet_runs(lab)
    row.before(lab)
    lab.kill()
    row.shown(lab)
    old = lab.lists()
    row.since(lab)
    pods, mark = lab.uids(), lab.proxy.ledger.mark()
    lab.proxy.old_lists = old
    lab.proxy.hold_events.clear()
    lab.start()
    lab.until("every old list", lambda: lab.proxy.ledger.faults()["old list"] >= len(old))  # a busy machine starts it slowly
    time.sleep(STALE_S)
    assert lab.uids() == pods, "pods were made or removed from an old picture"
    lab.proxy.heal()
    lab.until("the truth", lambda: lab.serving(1, row.decode), IN_ORDER_S)
    lab.at_rest()
    lab.honest()
    gone = [request for request in lab.proxy.ledger.writes(mark, carried_out=True) if request.method == "DELETE"]
    assert not gone, list(map(str, gone))
    if row.same_pods:
        assert lab.uids() == pods


@dataclass(frozen=True)
class Bad:
    """An API server that does not do what it should, for a while."""

    name: str
    for_s: float
    answer: Answer | None = None
    latency_s: float = 0.0
    dead: bool = False
    cause: str = ""
    """What the status must say meanwhile; empty where it cannot be written."""
    smoke: bool = False


def writes(request: Request) -> bool:
    return request.mutating


def making_pods(request: Request) -> bool:
    return request.method == "POST" and request.kind == "pods"


BAD = {
    row.name: row
    for row in (
        Bad("409-now-and-then", 20, Answer(409, 0.3, only=writes)),
        Bad("409-always", 20, Answer(409, only=lambda r: writes(r) and r.subresource != "status"), cause="answers 409"),
        Bad("429-with-retry-after", 15, Answer(429, retry_after_s=RETRY_AFTER_S)),
        Bad("500-everything", 60, Answer(500)),
        Bad("503-everything", 60, Answer(503, retry_after_s=1)),
        Bad("500-writes", 20, Answer(500, only=writes), smoke=True),
        Bad("500-pods", 20, Answer(500, only=making_pods), cause="answers 500"),
        Bad("403-pods", 20, Answer(403, only=making_pods), cause="answers 403"),
        Bad("429-pods", 15, Answer(429, retry_after_s=RETRY_AFTER_S, only=making_pods), cause="answers 429"),
        Bad("503-pods", 20, Answer(503, retry_after_s=1, only=making_pods), cause="answers 503"),
        Bad("500-though-carried-out", 20, Answer(500, 0.3, only=writes, carried_out=True)),
        Bad("slow", 30, latency_s=5.0),
        Bad("away", 40, dead=True),
    )
}  # fmt: skip


def play_bad(lab: Lab, row: Bad) -> str:
    fleet_runs(lab)
    time.sleep(0.5)
    mark, since = lab.proxy.ledger.mark(), time.monotonic()
    lab.proxy.answers = [row.answer] if row.answer is not None else []
    lab.proxy.latency_s, lab.proxy.dead = row.latency_s, row.dead
    if row.dead:
        lab.proxy.cut()
    lab.scale("decode", 3)
    image(lab, "b")
    if row.cause:
        lab.until("the status names the cause", lambda: names_it(lab, row.cause), row.for_s)
    while time.monotonic() < since + row.for_s:
        lab.operator.check()
        time.sleep(0.2)
    tried = lab.proxy.ledger.writes(mark)
    happened(lab, row, mark)
    few(row, tried)
    lab.proxy.heal()
    took_s = lab.until(f"{row.name}: in order", lambda: lab.serving(1, 3) and new_image(lab), IN_ORDER_S)
    assert len(lab.lives) == 1
    time.sleep(1)
    lab.at_rest()
    lab.honest()
    return f"{row.name}: {len(tried)} writes tried in {row.for_s:.0f} s, in order {took_s:.1f} s after"


def names_it(lab: Lab, cause: str) -> bool:
    found = lab.condition("Provisioned")
    return found["status"] == "False" and cause in found["message"]


def happened(lab: Lab, row: Bad, mark: int) -> None:
    met = [
        request
        for request in lab.proxy.ledger.requests[mark:]
        if (request.held_s == row.latency_s if row.latency_s else request.fault)
    ]
    assert met, "the fault met no request"


def few(row: Bad, tried: list[Request]) -> None:
    if row.answer is not None and row.answer.probability < 1:
        tried = [request for request in tried if request.fault]  # what succeeds is progress, and may go fast
    assert len(tried) <= WRITES_PER_S * row.for_s + BURST, list(map(str, tried))
    if row.answer is not None and row.answer.status == 429:
        tried = [request for request in tried if request.fault]  # who was not told to wait need not
        assert len(tried) <= 2 * (row.for_s / RETRY_AFTER_S + 1), [f"{r.at_s:.1f} {r}" for r in tried]


def new_image(lab: Lab) -> bool:
    roles = ("prefill", "decode")
    images = {
        p["spec"]["containers"][0]["image"] for p in lab.pods() if p["metadata"]["labels"]["inferencefleet.io/role"] in roles
    }
    return images == {"example.com/worker:b"}


PLAYS: dict[str, Callable[[Lab], str | None]] = {
    **{name: partial(play_stale, row=row) for name, row in STALE.items()},
    **{name: partial(play_bad, row=row) for name, row in BAD.items()},
}


def rows(table: Mapping[str, Stale | Bad]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.smoke] if row.smoke else []) for name, row in table.items()]


@pytest.mark.parametrize("row", rows(STALE))
def test_an_old_list_after_a_restart_moves_nothing(played: Played, row: str):
    played[row].result()


@pytest.mark.parametrize("row", rows(BAD))
def test_a_bad_api_costs_little_and_is_survived(played: Played, row: str):
    print(played[row].result())

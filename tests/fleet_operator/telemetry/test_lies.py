"""One metric of all workers, or of a router, says what cannot be: the reading is whole without it, no worker comes or goes for
it, and no pass ends. Every metric that anything here reads is one row."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from fleet_operator.cluster.interface import FLEET, POD
from fleet_operator.names import REVISION, ROLE
from fleet_operator.telemetry import aggregate as of
from fleet_operator.telemetry.kvwatch import KvWatch
from fleet_operator.telemetry.meter import COUNT_LIMIT, KvMeter, metered
from fleet_operator.telemetry.parse import MAX_LINES, parse_text
from fleet_planner.roles import ROLES
from fleet_planner.types import RevisionLoad, TierTelemetry
from tests.fleet_operator.world import NAMESPACE, World, manifest

WORKER = {
    of.RUNNING: 1.0, of.WAITING: 0.0, of.LEASES: 0.0, of.FAILED: 0.0, of.LATE: 0.0, of.BYTES: 900.0, of.TRANSFERS: 9.0,
    of.BLOCKS: 9.0, of.TRANSPORT + '{transport="tcp"}': 1.0, of.GBPS: 10.0, of.MEMLOCK: 1e9, of.STARTED: 30.0,
    of.ROLE_SAID + '{role="OWN"}': 0.0,
}  # fmt: skip
OF_REVISION = '{tier="t",revision="REVISION"}'
ROUTER = {
    of.SENT + '{role="prefill",tier="t"}': 6.0, of.SENT + '{role="decode",tier="t"}': 60.0, of.HELD: 0.0, of.ARRIVALS: 100.0,
    of.QUEUED + '{class="default"}': 0.0,
    of.PAIR + '{tier="t",prefill="nobody-0",decode="nobody-1"}': 1.0,
    of.MOVED + '{tier="t",prefill="nobody-2",decode="nobody-1"}': 1.0,
    of.HANDED + '{tier="t"}': 9.0, of.REQUESTS + OF_REVISION: 100.0, of.ERRORS + OF_REVISION: 0.0,
    **{f'{name}_bucket{{tier="t",revision="REVISION",le="{bound}"}}': 100.0
       for name, bounds in ((of.TTFT, ("1", "+Inf")), (of.ITL, ("0.02", "+Inf"))) for bound in bounds},
}  # fmt: skip
GROWING = (of.TRANSFERS, of.BLOCKS, of.BYTES, of.ARRIVALS, of.HANDED, of.REQUESTS, of.TTFT, of.ITL)
LIES = ["-1", "NaN", "+Inf", "-Inf", "1e308", "9.2e18", "5e18", "0", "", "garbage", "twice 1.7e308", "9e18", "0", "9e18", "0"]
"""Empty: the metric is missing; the last ones: a counter of nonsense that goes up and down."""
TIER = {"name": "t", "accelerator": {"type": "cpu"}, "prefill": {"maxReplicas": 6}, "decode": {"maxReplicas": 12}}
SLO = {"ttft": {"p99": "2s"}, "itl": {"p99": "50ms"}}


def exposition(metrics: dict[str, float], at: int, key: str = "", lie: str = "") -> str:
    """`at`: how far counters have come; `key`: the metric that lies."""
    lines = []
    for name, start in metrics.items():
        value = start + at if name.startswith(GROWING) else start
        if name != key:
            lines.append(f"{name} {value}")
        elif lie.startswith("twice "):
            bare, _, labels = name.partition("{")
            lines += [f"{name} {lie[6:]}", f'{bare}{{other="x",{labels or "}"} {lie[6:]}']
        elif lie:
            lines.append(f"{name} {lie}")
    return "\n".join(lines)


class Sources:
    """What the operator reads, reading after reading, as `scrape.py` puts it together."""

    def __init__(self) -> None:
        self.meter, self.watch, self.routers = KvMeter(), KvWatch(), list[of.Reading]()

    def read(self, pods: list[dict[str, Any]], now: float, key: str = "", lie: str = "") -> TierTelemetry:
        revision = pods[0]["metadata"]["labels"][REVISION] if pods else "none"
        worker, router = (exposition(one, len(self.routers), key, lie) for one in (WORKER, ROUTER))
        told = {role: of.Reading(parse_text(worker.replace("OWN", role)), now) for role in ROLES}
        roles = [(pod["metadata"]["labels"][ROLE], pod["metadata"]["name"]) for pod in pods]
        workers = [of.WorkerReading("t", role, told[role], name) for role, name in roles]
        self.routers.append(of.Reading(parse_text(router.replace("REVISION", revision)), now))
        latest, earlier = self.routers[-1], self.routers[max(0, len(self.routers) - 10)]
        self.watch = of.watch_tier("t", self.watch, workers, {"r": latest})
        found = of.tier_telemetry("t", workers, [latest], [earlier], now, self.watch)
        return replace(found, kv=metered(self.meter.read(of.decode_counts("t", workers), now), found.kv))


async def seconds(world: World, count: int, sources: Sources, key: str = "", lie: str = "") -> None:
    for _ in range(count):
        pods = [pod for pod in await world.store.list(POD, NAMESPACE) if pod["metadata"]["labels"].get(ROLE) in ROLES]
        world.load = {"t": sources.read(pods, world.now, key, lie)}
        await world.step()


async def uids(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}


@pytest.mark.parametrize("key", [*WORKER, *ROUTER])
def test_a_metric_that_lies_moves_no_worker_and_ends_no_pass(key: str):
    """An engine that said that it runs 9.2e18 requests made its tier as large as it may be, one whose KV counter was 1e308 ended
    every reading of its fleet, and one that went up and down counted past what a status can hold."""

    async def scenario() -> None:
        world, sources = World(), Sources()
        await world.user.apply(manifest(tiers=[TIER], slo=SLO))
        await seconds(world, 12, sources)
        before = await uids(world)
        assert await world.workers() == {"prefill": 2, "decode": 4}
        for lie in LIES:
            await seconds(world, 2, sources, key, lie)
            assert await uids(world) == before, lie
            assert [problem for state in world.operator._states.values() for problem in state.problems] == []
        await seconds(world, 12, sources)
        assert await uids(world) == before
        assert (await world.condition("TelemetryFresh"))["status"] == "True"
        kv = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][0]["kv"]
        assert all(0 <= kv[name] < COUNT_LIMIT for name in ("transfers", "blocks", "bytes", "failed"))

    asyncio.run(scenario())


def test_every_metric_that_is_read_is_a_row():
    assert {key.partition("{")[0] for key in (*WORKER, *ROUTER)} == of.METRICS


def test_an_engine_that_counts_up_and_down_fills_no_status():
    meter = KvMeter()
    for count in (2**62, 0) * 5:
        found = meter.read({"a": (count, count, count, count), "b": (2**62, 0, 0, 0)}, 1.0)
    assert found is not None
    assert (found.transfers, found.blocks, found.bytes, found.failed) == (COUNT_LIMIT - 1,) * 4


@pytest.mark.parametrize("lie", [-1.0, math.nan, math.inf, 1e300, 1e6])
def test_a_latency_that_cannot_be_is_none(lie: float):
    text = f'{of.TTFT}_bucket{{tier="t",le="{lie}"}} 9\n{of.TTFT}_bucket{{tier="t",le="+Inf"}} 9'
    found = of.tier_telemetry("t", [], [of.Reading(parse_text(text), 1.0)], [None], 1.0)
    assert found.prefill.ttft_p99_s in (None, 0.0)


def test_a_router_that_tells_of_thousands_of_revisions_holds_nobody_up():
    """So may the Prometheus that a fleet names, whoever created it. All that it said was read anew for each."""
    said = "\n".join(f'{of.REQUESTS}{{tier="t",revision="r{number}"}} 2' for number in range(MAX_LINES))
    reading = of.Reading(parse_text(said, of.METRICS), 1.0)
    before = time.process_time()
    found = of.tier_telemetry("t", [], [reading, None], [None, None], 2.0).revisions
    assert time.process_time() - before < 20
    assert len(found) == MAX_LINES
    assert found["r7"] == RevisionLoad(2, 0, 2, 0, None, None, partial=True, streams=0)

"""What clients got from each revision, as the canary's judge reads it: the same by a scrape and by Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from fleet_operator.telemetry.aggregate import Reading, tier_telemetry
from fleet_operator.telemetry.parse import parse_text
from fleet_operator.telemetry.prometheus import PrometheusTelemetry
from fleet_operator.telemetry.scrape import ScrapeTelemetry
from fleet_planner.types import RevisionLoad
from tests.fleet_operator.telemetry.answers import fleet, pod, reply, served

OLD, NEW = "aaaaaaaa", "bbbbbbbb"
Counts = dict[str, tuple[int, int, int]]
"""By revision: requests, errors, and requests that were slow (1 to 10 s); all others took up to a second."""
BEFORE: Counts = {OLD: (1_000, 10, 0)}
AFTER: Counts = {OLD: (1_100, 11, 0), NEW: (50, 5, 50)}
EXPECTED = {
    OLD: RevisionLoad(100, 1, 1_100, 11, pytest.approx(0.99), pytest.approx(0.99), streams=100),
    NEW: RevisionLoad(50, 5, 50, 5, pytest.approx(9.91), pytest.approx(9.91), streams=50),
}


def exposition(counts: Counts) -> str:
    rows = [
        'fleet_router_inflight{role="prefill",tier="t"} 0',
        'fleet_router_revision_requests_total{tier="other",revision="x"} 7',
    ]
    for revision, (requests, errors, slow) in counts.items():
        labels = f'tier="t",revision="{revision}"'
        rows.append(f"fleet_router_revision_requests_total{{{labels}}} {requests}")
        rows.append(f"fleet_router_revision_errors_total{{{labels}}} {errors}")
        for name in ("ttft", "itl"):
            for bound, count in (("1", requests - slow), ("10", requests), ("+Inf", requests)):
                rows.append(f'fleet_router_{name}_seconds_bucket{{{labels},le="{bound}"}} {count}')
    return "\n".join(rows) + "\n"


def scraped() -> dict[str, RevisionLoad]:
    texts = [exposition(BEFORE), exposition(AFTER)]

    async def go(url: str) -> Any:
        telemetry = ScrapeTelemetry()
        await telemetry.collect(fleet(), [], [url])
        found = await telemetry.collect(fleet(), [], [url])
        await telemetry.close()
        return found["t"].revisions

    with served(lambda handler: reply(handler, texts.pop(0))) as url:
        return asyncio.run(go(url))


def matrix() -> str:
    """Two scrapes of one router, as Prometheus has them."""
    rows: dict[str, Any] = {}
    for at, counts in ((950.0, BEFORE), (990.0, AFTER)):
        for sample in parse_text(exposition(counts)):
            metric = {"__name__": sample.name, "pod": "r", **sample.labels}
            row = rows.setdefault(json.dumps(metric, sort_keys=True), {"metric": metric, "values": []})
            row["values"].append([at, str(sample.value)])
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": list(rows.values())}})


def asked() -> dict[str, RevisionLoad]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        reply(handler, matrix())

    async def go(url: str) -> Any:
        telemetry = PrometheusTelemetry(lambda: 1_000.0)
        found = await telemetry.collect(fleet(url), url, [pod("r", "router", "127.87.0.3")])
        await telemetry.close()
        return found["t"].revisions

    with served(answer) as url:
        return asyncio.run(go(url))


@pytest.mark.parametrize("source", [scraped, asked])
def test_requests_errors_and_latency_of_each_revision_reach_the_judge(source: Callable[[], dict[str, RevisionLoad]]):
    assert source() == EXPECTED


def test_routers_add_up_and_the_slowest_speaks():
    old, new = (Reading(parse_text(exposition(counts)), 1_000.0) for counts in (BEFORE, AFTER))
    found = tier_telemetry("t", [], [new, new, None], [old, None, None], 1_000.0).revisions
    assert found[OLD] == RevisionLoad(1_200, 12, 2_200, 22, pytest.approx(0.99), pytest.approx(0.99), True, 1_200)
    assert (found[NEW].requests, found[NEW].errors) == (100, 10)


def test_a_router_that_started_again_counts_from_zero():
    old, new = (Reading(parse_text(exposition(counts)), 1_000.0) for counts in (AFTER, {OLD: (5, 1, 0)}))
    found = tier_telemetry("t", [], [new], [old], 1_000.0).revisions
    assert found.keys() == {OLD}
    assert (found[OLD].requests, found[OLD].errors, found[OLD].total_requests) == (5, 1, 5)

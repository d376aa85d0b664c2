"""KV counters over the lives of engines."""

from __future__ import annotations

import asyncio
import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.telemetry.meter import KvMeter
from fleet_operator.telemetry.prometheus import PrometheusTelemetry
from fleet_operator.telemetry.scrape import ScrapeTelemetry
from fleet_planner.fabric import disaggregating
from tests.fleet_operator.telemetry.answers import fleet, matrix, pod, reply, served


@pytest.mark.parametrize(
    ("readings", "transfers"),
    [
        ([{"a": 5, "b": 7}], 12),
        ([{"a": 5, "b": 7}, {"a": 2, "b": 8}], 15),
        ([{"a": 5, "b": 7}, {"a": None, "b": 8}, {"a": 6, "b": 8}], 14),
        ([{"a": 5, "b": 7}, {"b": 8}, {"b": 8, "c": 1}], 14),
        ([{"a": 5, "b": 7}, {"b": 8}, {"a": 6, "b": 8}], 14),
        ([{f"p{n}": 1} for n in range(3000)], 3000),
        ([{"a": 5}, {}, {"b": 0}], 5),
        ([{"a": 5}, {"a": None}, {"a": 1}], 6),
    ],
    ids=[
        "sum",
        "one-started-again",
        "unreadable-once",
        "one-is-gone",
        "one-was-away",
        "many-come-and-go",
        "all-gone",
        "started-again-unseen",
    ],
)
def test_what_moved_stays_counted(readings: list[dict[str, Any]], transfers: int):
    meter = KvMeter()
    found = None
    for reading in readings:
        found = meter.read({uid: None if n is None else (n, 2 * n, 3 * n, 0) for uid, n in reading.items()}, 9.0)
    assert found is not None
    assert (found.transfers, found.blocks, found.bytes, found.failed, found.measured_at) == (
        transfers, 2 * transfers, 3 * transfers, 0, 9.0,
    )  # fmt: skip


def test_nothing_read_is_not_zero():
    assert KvMeter().read({"a": None}, 1.0) is None
    assert KvMeter().read({}, 1.0) is None


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(0, 9))))
def test_it_never_goes_down(readings: list[dict[str, int | None]]):
    meter, before = KvMeter(), 0
    for reading in readings:
        found = meter.read({uid: None if n is None else (n, 0, 0, 0) for uid, n in reading.items()}, 0.0)
        after = found.transfers if found is not None else 0
        assert after >= before
        before = after


@pytest.mark.parametrize("source", ["scrape", "prometheus"])
def test_a_fleet_that_is_made_anew_has_moved_nothing(source: str):
    """Its workers have the names of those before; it said that KV moves, or that none does, before it had one request."""
    counts = [7]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if source == "scrape":
            reply(handler, f"vllm:nixl_xfer_time_seconds_count {counts[0]}\n")
            return
        told = json.loads(matrix("d"))
        labels = {**told["data"]["result"][0]["metric"], "__name__": "vllm:nixl_xfer_time_seconds_count"}
        told["data"]["result"].append({"metric": labels, "values": [[999, str(counts[0])]]})
        reply(handler, json.dumps(told))

    async def go(url: str) -> list[int]:
        found, port = [], int(url.rpartition(":")[2])
        ports = {"containers": [{"ports": [{"name": "agent", "containerPort": port}]}]}
        worker = {**pod("d", "decode", "127.0.0.1"), "spec": ports}
        telemetry = ScrapeTelemetry() if source == "scrape" else PrometheusTelemetry(lambda: 1_000.0)
        for uid, count in (("one", 7), ("one", 9), ("two", 1)):
            counts[0] = count
            known = fleet(url if source == "prometheus" else None)
            life = known.model_copy(update={"metadata": known.metadata.model_copy(update={"uid": uid})})
            where = [url, [worker]] if isinstance(telemetry, PrometheusTelemetry) else [[worker], []]
            kv = (await telemetry.collect(life, *where))["t"].kv  # type: ignore[arg-type]
            assert kv is not None
            found.append(kv.transfers)
        await telemetry.close()
        return found

    with served(answer) as url:
        assert asyncio.run(go(url)) == [7, 9, 1]


@pytest.mark.parametrize("source", ["scrape", "prometheus"])
def test_what_was_read_after_its_leases_end_reaches_the_status(source: str):
    """Incident: it was counted, and lost where the counters over restarts were put in: `KvReadLate`, some answers may be wrong,
    was never told."""
    late, names = [2], ("vllm:nixl_xfer_time_seconds_count", "vllm:nixl_num_notifications_after_expiry_total")

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if source == "scrape":
            reply(handler, f"{names[0]} 7\n{names[1]} {late[0]}\n")
            return
        told = json.loads(matrix("d"))
        known = told["data"]["result"][0]["metric"]
        for name, count in ((names[0], 7), (names[1], late[0])):
            for each in ("d", "p"):
                labels = {**known, "__name__": name, "pod": each}
                told["data"]["result"].append({"metric": labels, "values": [[999, str(count)]]})
        reply(handler, json.dumps(told))

    async def go(url: str) -> str:
        ports = {"containers": [{"ports": [{"name": "agent", "containerPort": int(url.rpartition(":")[2])}]}]}
        workers = [
            {**pod("d", "decode", "127.0.0.1"), "spec": ports},
            {**pod("p", "prefill", "localhost"), "spec": ports},
        ]
        telemetry = ScrapeTelemetry() if source == "scrape" else PrometheusTelemetry(lambda: 1_000.0)
        where = [url, workers] if isinstance(telemetry, PrometheusTelemetry) else [workers, []]
        known = fleet(url if source == "prometheus" else None)
        for late[0] in (2, 3):
            found = await telemetry.collect(known, *where)  # type: ignore[arg-type]
        await telemetry.close()
        return disaggregating(found)[1]

    with served(answer) as url:
        assert asyncio.run(go(url)) == "KvReadLate"

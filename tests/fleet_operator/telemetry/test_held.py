"""Routers at zero are heard at once: the operator's question against a real router in this loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from fleet_operator.telemetry.aggregate import Reading, tier_telemetry
from fleet_operator.telemetry.held import HeldRequests
from fleet_operator.telemetry.parse import parse_text
from fleet_planner.types import Demand
from fleet_router.follow.documents import Documents
from fleet_wire.endpoints import AtZero, Endpoints
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

SILENT = "http://127.0.0.1:1"


def rest(rig: Rig) -> None:
    rig.router.apply(Documents(CONFIG, Endpoints(fleet="f", namespace="n", at_zero=(AtZero(tier="t"),))))


def url(rig: Rig) -> str:
    return f"http://127.0.0.1:{rig.port}"


def test_a_held_request_is_heard_at_once_also_beside_a_router_that_is_gone():
    async def go(rig: Rig) -> None:
        rest(rig)
        ears = HeldRequests(now=lambda: 5.0, wait_s=20.0)
        hearing = asyncio.create_task(ears.listen([SILENT, url(rig)]))
        await until(lambda: len(rig.context.holding._listeners) == 1)
        reader, writer, _ = await rig.connect()
        begun = time.monotonic()
        writer.write(http(ask()))
        heard = await asyncio.wait_for(hearing, 5)
        assert time.monotonic() - begun < 2.0  # not the 20 s of the question
        assert heard is not None
        assert (heard.held, heard.arrivals, heard.measured_at) == (1, None, 5.0)
        again = await ears.listen([url(rig)])  # a level: whoever asks again is told again
        assert again is not None
        assert again.held == 1
        rig.apply(rig.prefill, rig.decode)
        assert (await answer_of(reader))[0] == 200
        await ears.close()

    run(go)


def test_silence_is_none_and_no_request_is_a_count_of_none():
    async def go(rig: Rig) -> None:
        rest(rig)
        ears = HeldRequests(wait_s=0.0)
        nothing = await ears.listen([url(rig)])
        assert nothing is not None
        assert nothing.held == 0
        assert await ears.listen([SILENT]) is None
        assert await ears.listen([]) is None
        await ears.close()

    run(go)


def test_an_answer_that_is_no_count_is_silence():
    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = bodies.pop()
        writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    bodies = ["", "three", "9" * 100_000, "-1"]

    async def go() -> None:
        server = await asyncio.start_server(strange, "127.0.0.1", 0)
        ears = HeldRequests(wait_s=0.0)
        for _ in list(bodies):
            assert await ears.listen([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]) is None
        await ears.close()
        server.close()

    asyncio.run(go())


def reading(text: str, at: float) -> Reading:
    return Reading(parse_text(text), at)


ONE = reading("fleet_router_held 2\nfleet_router_arrivals_total 7\n", 10.0)
TWO = reading("fleet_router_held 1\nfleet_router_arrivals_total 5\n", 9.0)
ASKED = reading(
    'fleet_router_held 0\nfleet_router_inflight{role="prefill",tier="t"} 2\nfleet_router_inflight{role="decode",tier="t"} 1\n',
    9.0,
)
REST = reading(
    'fleet_router_held 0\nfleet_router_inflight{role="prefill",tier="t"} 0\nfleet_router_inflight{role="prefill",tier="u"} 0\n',
    9.0,
)
OLD = reading("fleet_router_requests_total 1\n", 9.0)


@pytest.mark.parametrize(
    ("routers", "expected"),
    [
        ([], None),
        ([None, None], None),
        ([ONE], Demand(2, 7.0, 10.0)),
        ([ONE, TWO], Demand(3, 12.0, 9.0)),
        ([ONE, None], Demand(2, None, 10.0)),
        ([ONE, OLD], Demand(2, None, 9.0)),
        ([ASKED, REST], Demand(0, None, 9.0, 2.0)),
        ([REST], Demand(0, None, 9.0, 0.0)),
        ([REST, None], Demand(0, None, 9.0)),
        ([REST, ONE], Demand(2, None, 9.0)),
    ],
    ids=[
        "no router",
        "none readable",
        "one",
        "two",
        "one of two",
        "an older one",
        "prefill asked",
        "none asked",
        "a router away",
        "a router that knows no prefill worker",
    ],
)
def test_demand_of_a_fleets_routers(routers: list[Reading | None], expected: Demand | None):
    assert tier_telemetry("t", [], routers, [None] * len(routers), 11.0).demand == expected

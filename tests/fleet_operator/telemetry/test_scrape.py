"""The direct scrape on real sockets: what answers wrongly, slowly or not at all is missing, and nothing else is."""

from __future__ import annotations

import asyncio
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from fleet_operator.telemetry import scrape
from fleet_operator.telemetry.held import HeldRequests
from fleet_operator.telemetry.scrape import ScrapeTelemetry
from tests.fleet_operator.telemetry.answers import LOAD, PODS, Answer, dripping, fleet, pod, reply, served


def scraped(answer: Answer, pods: list[dict[str, Any]] = PODS) -> Any:
    async def go() -> Any:
        telemetry = ScrapeTelemetry()
        found = await telemetry.collect(fleet(), pods, [])
        await telemetry.close()
        return found["t"]

    with served(answer, "127.87.0.1", scrape.AGENT_PORT):
        return asyncio.run(go())


def test_a_worker_that_answers_is_known_and_one_that_does_not_is_not():
    found = scraped(lambda handler: reply(handler, LOAD + '\nfleet_agent_transport_info{transport="shm"} 1\n'))
    assert (found.prefill.inflight, found.decode.inflight, found.transport) == (4, None, "shm")


def test_workers_of_a_tier_that_left_the_spec_are_read_too():
    """A renamed tier: whether they run anything decides when they may go, and whether the fleet is idle."""
    labels = {"inferencefleet.io/role": "prefill", "inferencefleet.io/tier": "old"}
    old = {"metadata": {"name": "p", "labels": labels}, "status": {"podIP": "127.87.0.1", "phase": "Running"}}

    async def go() -> Any:
        telemetry = ScrapeTelemetry()
        found = await telemetry.collect(fleet(), [old], [])
        await telemetry.close()
        return found

    with served(lambda handler: reply(handler, LOAD), "127.87.0.1", scrape.AGENT_PORT):
        found = asyncio.run(go())
    assert (found["old"].busy, found["t"].busy) == ({"p": 4.0}, {})


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: reply(handler, LOAD, 500),
        lambda handler: reply(handler, LOAD, 302, location="http://127.0.0.1:1/"),
        lambda handler: reply(handler, "\x00" * 100),
        lambda handler: reply(handler, LOAD + "x" * (scrape.MAX_BYTES + 1)),
        lambda handler: handler.wfile.write(b"no http at all\r\n\r\n"),
        lambda handler: handler.connection.close(),
    ],
    ids=["500", "redirect", "zeros", "too-large", "no-http", "hangs-up"],
)
def test_a_wrong_answer_is_no_answer(answer: Answer):
    assert scraped(answer).prefill.inflight is None


def test_no_cookie_of_a_target_is_kept():
    """90 kB of them fit into each answer: one worker's image filled the memory of the operator of all fleets, and what pods that
    were long gone had set stayed, too."""
    seen = list[str | None]()

    def sets(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers.get("cookie"))
        path = handler.path.partition("?")[0]
        reply(handler, "1" if path == "/held" else LOAD, **{"set-cookie": "a=b; Max-Age=99999999"})

    async def go(url: str) -> None:
        telemetry, ears = ScrapeTelemetry(), HeldRequests(wait_s=0.0)
        for _ in range(2):
            assert (await telemetry.collect(fleet(), PODS, []))["t"].prefill.inflight == 4
            heard = await ears.listen([url])
            assert heard is not None
            assert heard.held == 1
        await telemetry.close()
        await ears.close()

    with served(sets, "127.87.0.1", scrape.AGENT_PORT) as url:
        asyncio.run(go(url))
    assert seen == [None] * 4


@pytest.mark.parametrize("head", [False, True], ids=["in-the-head", "in-the-body"])
def test_a_worker_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch, head: bool):
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.2)
    released = threading.Event()
    begun = time.monotonic()
    try:
        assert scraped(dripping(released, head)).prefill.inflight is None
    finally:
        released.set()
    assert time.monotonic() - begun < 3


def test_no_more_is_read_than_allowed():
    """A worker that never stops sending is left long before its time is over."""
    sent = 0

    def endless(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        handler.send_response(200)
        handler.end_headers()
        while sent < 100 * scrape.MAX_BYTES:
            sent += handler.wfile.write(b"#" * 65_536)

    assert scraped(endless).prefill.inflight is None
    assert sent < 10 * scrape.MAX_BYTES


@pytest.mark.parametrize("word", ["", "a b", "nvlink", "none\\n"])
def test_a_word_that_is_no_transport_costs_only_the_transport(word: str):
    found = scraped(lambda handler: reply(handler, LOAD + f'\nfleet_agent_transport_info{{transport="{word}"}} 1\n'))
    assert (found.prefill.inflight, found.transport) == (4, None)


@pytest.mark.parametrize(("text", "limit"), [("65536", 65_536), ("-1", None), ("NaN", None), ("1e300", None)])
def test_a_workers_memlock_limit_is_read_beside_its_transport(text: str, limit: int | None):
    words = f'{LOAD}\nfleet_agent_transport_info{{transport="tcp"}} 1\nfleet_agent_memlock_bytes {text}\n'
    (seen,) = scraped(lambda handler: reply(handler, words)).transports
    assert (seen.transport, seen.memlock_bytes) == ("tcp", limit)


def test_a_worker_on_the_hosts_network_is_asked_at_its_own_port():
    other = pod("p", "prefill", "127.87.0.2")
    other["spec"] = {"containers": [{"ports": [{"name": "agent", "containerPort": 20_001}]}]}

    async def go() -> Any:
        telemetry = ScrapeTelemetry()
        found = await telemetry.collect(fleet(), [other], [])
        await telemetry.close()
        return found["t"]

    with served(lambda handler: reply(handler, LOAD), "127.87.0.2", 20_001):
        assert asyncio.run(go()).prefill.inflight == 4


@pytest.mark.parametrize(
    "change",
    [{"deletionTimestamp": "2026-01-01T00:00:00Z"}, {"labels": {"inferencefleet.io/role": "router"}}],
    ids=["leaving", "router"],
)
def test_only_running_workers_are_asked(change: dict[str, Any]):
    other = pod("p", "prefill", "127.87.0.1")
    other["metadata"] |= change
    assert scraped(lambda handler: reply(handler, LOAD), [other]).prefill.inflight is None


# -- latency window -------------------------------------------------------------------------------------------------
class Router:
    """Answers what it counted so far: `fast` requests below a second and `slow` ones below ten."""

    def __init__(self) -> None:
        self.fast = self.slow = 0

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        rows = (("1", self.fast), ("10", self.fast + self.slow), ("+Inf", self.fast + self.slow))
        text = "".join(f'fleet_router_ttft_seconds_bucket{{tier="t",le="{bound}"}} {count}\n' for bound, count in rows)
        reply(handler, text + 'fleet_router_inflight{role="prefill",tier="t"} 0\n')


async def ttft(telemetry: ScrapeTelemetry, url: str, name: str = "f") -> float | None:
    return (await telemetry.collect(fleet(name=name), [], [url]))["t"].prefill.ttft_p99_s


def test_latency_is_of_the_window_and_never_of_the_routers_whole_life():
    router = Router()
    router.slow = 100

    async def go(url: str) -> list[float | None]:
        telemetry = ScrapeTelemetry()
        found = [await ttft(telemetry, url)]
        router.fast += 100
        found.append(await ttft(telemetry, url))
        await telemetry.close()
        return found

    with served(router.answer) as url:
        assert asyncio.run(go(url)) == [None, 0.99]


def test_fleets_keep_their_own_windows():
    router = Router()

    async def go(mine: str, others: str) -> float | None:
        telemetry = ScrapeTelemetry()
        await ttft(telemetry, mine)
        await ttft(telemetry, others, "other")
        router.fast += 100
        found = await ttft(telemetry, mine)
        await telemetry.close()
        return found

    with served(router.answer) as mine, served(Router().answer) as others:
        assert asyncio.run(go(mine, others)) == 0.99


def test_two_router_pods_of_one_address_are_one_router():
    """A node that began anew gives its pods other addresses, and for a while the API has those of before: reading it failed."""
    router = Router()

    async def go(url: str) -> list[float | None]:
        telemetry, found = ScrapeTelemetry(), list[float | None]()
        for fast in (0, 100):
            router.fast = fast
            found.append((await telemetry.collect(fleet(), [], [url, url]))["t"].prefill.ttft_p99_s)
        await telemetry.close()
        return found

    with served(router.answer) as url:
        assert asyncio.run(go(url)) == [None, 0.99]


def test_routers_and_fleets_that_are_gone_are_forgotten():
    clock = [1_000.0]

    async def go(url: str) -> list[int]:
        telemetry = ScrapeTelemetry(monotonic=lambda: clock[0])
        await ttft(telemetry, url)
        await telemetry.collect(fleet(name="other"), [], [url])
        found = [len(telemetry._history)]
        clock[0] += scrape.FORGET_S + 1
        await telemetry.collect(fleet(), [], [])
        found.append(len(telemetry._history))
        await telemetry.close()
        return found

    with served(Router().answer) as url:
        assert asyncio.run(go(url)) == [2, 0]


def test_a_clock_that_is_set_makes_nobody_forgotten_and_keeps_nobody_from_it():
    """Set back by an hour, nothing was swept for an hour; set forward, every other fleet's window and counters began anew."""
    wall, run = [1_000_000.0], [1_000.0]

    async def go(url: str) -> list[int]:
        telemetry, found = ScrapeTelemetry(lambda: wall[0], lambda: run[0]), []
        for name in ("gone", "other", "f"):
            await telemetry.collect(fleet(name=name), [], [url])
        for set_s, passed_s in ((3_600.0, scrape.SWEEP_S), (-7_200.0, scrape.FORGET_S - scrape.SWEEP_S)):
            wall[0], run[0] = wall[0] + set_s + passed_s, run[0] + passed_s
            for name in ("f", "other"):
                await telemetry.collect(fleet(name=name), [], [url])
            found.append(len(telemetry._history))
        await telemetry.close()
        return found

    with served(Router().answer) as url:
        assert asyncio.run(go(url)) == [3, 2]


def test_counters_do_not_go_down_while_no_router_can_be_read():
    """They were forgotten each minute with the routers' readings, as those of a fleet that is gone."""
    run, transfers = [1_000.0], [7]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        reply(handler, f"vllm:nixl_xfer_time_seconds_count {transfers[0]}\n")

    async def go(port: int) -> list[int]:
        telemetry, found = ScrapeTelemetry(monotonic=lambda: run[0]), []
        ports = {"containers": [{"ports": [{"name": "agent", "containerPort": port}]}]}
        worker = {**pod("d", "decode", "127.0.0.1"), "spec": ports}
        for count in (7, 2, 2):
            transfers[0] = count
            known = (await telemetry.collect(fleet(), [worker], []))["t"].kv
            assert known is not None
            found.append(known.transfers)
            run[0] += scrape.SWEEP_S
        await telemetry.close()
        return found

    with served(answer) as url:
        assert asyncio.run(go(int(url.rpartition(":")[2]))) == [7, 9, 9]

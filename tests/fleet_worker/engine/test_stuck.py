"""An engine whose step lasts: it never looks idle, and one that is stuck never looks healthy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fleet_worker.agent.engine_client import EngineClient, parse_load
from fleet_worker.agent.errors import ConfigError
from fleet_worker.agent.identity import read_identity
from fleet_worker.agent.life import Load, drain_done
from fleet_worker.engine import metrics as metrics_module
from fleet_worker.engine.assemble import build_core
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.server import EngineServer
from tests.fleet_worker.agent.test_command import GOOD_ENV
from tests.fleet_worker.engine.test_core import ScriptedConnector
from tests.fleet_worker.engine.test_server import ARCHITECTURE, CONFIG, LLAMA, TEXT, body, until

Scenario = Callable[[httpx.AsyncClient, EngineLoop, threading.Event], Awaitable[None]]


def held(scenario: Scenario) -> None:
    """An engine whose steps with work in them end when the event is set."""

    async def main() -> None:
        core, _ = build_core(CONFIG, LLAMA, ARCHITECTURE.eos_ids)
        go_on, step = threading.Event(), core.step

        def slow():
            if core.has_work():
                go_on.wait(30)
            return step()

        core.step = slow  # type: ignore[method-assign]
        loop = EngineLoop(core, lambda _: None, lambda _: None)
        loop.start()
        transport = httpx.ASGITransport(EngineServer(CONFIG, loop, TEXT, EngineMetrics("tiny"), step_timeout_s=60.0).app())
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=30) as client:
                await asyncio.wait_for(scenario(client, loop, go_on), 60)
        finally:
            go_on.set()
            await asyncio.to_thread(loop.stop)

    asyncio.run(main())


def is_drained(load: Load) -> bool:
    return drain_done(load, waited_s=60.0, idle_for_s=60.0, lease_s=1.0, has_lease_counter=True, is_prefill=False)


@pytest.mark.parametrize("collected_before", [True, False])
def test_a_worker_in_a_long_step_is_not_drained(monkeypatch: pytest.MonkeyPatch, collected_before: bool):
    """The gauges of before the request were told again, and the drain cut the request."""
    monkeypatch.setattr("fleet_worker.engine.server.METRICS_TIMEOUT_S", 0.05)

    async def scenario(client: httpx.AsyncClient, loop: EngineLoop, go_on: threading.Event) -> None:
        agent = EngineClient("http://engine")
        await agent._http.aclose()
        agent._http = client
        if collected_before:
            monkeypatch.setattr("fleet_worker.engine.server.METRICS_TIMEOUT_S", 20.0)
            assert is_drained(await agent.load())
            monkeypatch.setattr("fleet_worker.engine.server.METRICS_TIMEOUT_S", 0.05)
        asked = [asyncio.create_task(client.post("/v1/completions", json=body(stream=stream))) for stream in (True, False)]
        await until(lambda: bool(loop.core.sequences))
        load = await agent.load()
        assert (load.running or 0) + (load.waiting or 0) == 2
        assert not is_drained(load)
        go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
        monkeypatch.setattr("fleet_worker.engine.server.METRICS_TIMEOUT_S", 20.0)
        assert is_drained(await agent.load())

    held(scenario)


def held_of(load: Load) -> tuple[int | None, int | None, int | None]:
    return load.running, load.waiting, load.leases


def test_a_request_whose_body_still_comes_is_not_drained():
    """The engine has not heard of it; the drain's notice may be over when a slow client has sent the last byte."""

    async def scenario(client: httpx.AsyncClient, _: EngineLoop, go_on: threading.Event) -> None:
        go_on.set()
        more = asyncio.Event()
        begun = asyncio.Event()

        async def slowly():
            begun.set()
            yield b"{"
            await more.wait()

        asked = asyncio.create_task(client.post("/v1/completions", content=slowly()))
        await begun.wait()
        load = parse_load((await client.get("/metrics")).text)
        assert (held_of(load), is_drained(load)) == ((1, 0, 0), False)
        more.set()
        assert (await asked).status_code == 400
        assert held_of(parse_load((await client.get("/metrics")).text)) == (0, 0, 0)

    held(scenario)


@pytest.mark.parametrize(
    ("open_", "load"),
    [
        pytest.param("", Load(1, 2, 3), id="vllm-has-no-such-gauge"),
        pytest.param("fleet:requests_open 3\n", Load(1, 2, 3), id="all-in-the-engine"),
        pytest.param("fleet:requests_open 5\n", Load(3, 2, 3), id="two-on-their-way"),
        pytest.param("fleet:requests_open 0\n", Load(1, 2, 3), id="ended-since"),
    ],
)
def test_what_is_open_but_not_in_the_engine_runs(open_: str, load: Load):
    text = 'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 2.0\nfleet:kv_leases_open 3.0\n'
    assert parse_load(text + open_) == load
    assert parse_load(open_).running is None, "one number alone says nothing"


def test_a_stuck_engine_is_neither_healthy_nor_idle(monkeypatch: pytest.MonkeyPatch):
    """It answered 200 and running 0 for ever, which attracts requests."""
    monkeypatch.setattr("fleet_worker.engine.server.METRICS_TIMEOUT_S", 0.05)

    async def scenario(client: httpx.AsyncClient, loop: EngineLoop, go_on: threading.Event) -> None:
        asked = asyncio.create_task(client.post("/v1/completions", json=body()))
        await until(lambda: bool(loop.core.sequences) and loop._begun_at is not None)
        assert (await client.get("/health")).status_code == 200, "a long step is no stuck one"
        loop._begun_at -= 61.0  # type: ignore[operator]
        red = await client.get("/health")
        assert (red.status_code, "ENGINE_STEP_TIMEOUT_S allows 60 s" in red.text) == (503, True)
        load = parse_load((await client.get("/metrics")).text)
        assert (load.running or 0) + (load.waiting or 0) == 1
        go_on.set()
        assert (await asked).status_code == 200
        assert (await client.get("/health")).status_code == 200
        await until(lambda: loop.step_s() == 0)

    held(scenario)


def test_an_engine_whose_kv_transfers_are_stuck_is_not_healthy():
    """Its decode legs waited for ever, with every probe green."""

    async def scenario(client: httpx.AsyncClient, loop: EngineLoop, _: threading.Event) -> None:
        connector = loop.core.connector = ScriptedConnector(None)  # type: ignore[assignment]
        assert (await client.get("/health")).status_code == 200
        connector.turn_s = lambda: 61.0  # type: ignore[attr-defined, union-attr]
        red = await client.get("/health")
        assert (red.status_code, red.text) == (503, "a turn of the KV transfers lasts 61 s; ENGINE_STEP_TIMEOUT_S allows 60 s\n")

    held(scenario)


@pytest.mark.parametrize("given", ["fast", "0", "-1", "nan", "inf"])
def test_the_bound_of_a_step_is_a_number_of_seconds(given: str):
    assert read_identity({**GOOD_ENV, "ENGINE_STEP_TIMEOUT_S": "0.5"})
    with pytest.raises(ConfigError, match="ENGINE_STEP_TIMEOUT_S"):
        read_identity({**GOOD_ENV, "ENGINE_STEP_TIMEOUT_S": given})


def test_a_late_engine_and_its_server_may_tell_the_same_number_for_the_first_time(monkeypatch: pytest.MonkeyPatch):
    """Both made the gauge, the registry took one of them, and the other error ended the engine."""
    both, gauge = threading.Barrier(2), metrics_module.Gauge

    def made(*given: Any, **more: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return gauge(*given, **more)

    monkeypatch.setattr(metrics_module, "Gauge", made)
    told = EngineMetrics("tiny")
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(told.collect_outside, 1, 2) for _ in range(2)]:
            done.result()
    assert b"fleet:kv_leases_open" in told.exposition()

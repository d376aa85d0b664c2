"""Requests that wait while a fleet wakes from zero: order, bounds, clients that leave, the router's end, who hears of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.admission.tenants import Tenants
from fleet_router.config import HoldBounds, encode
from fleet_router.errors import RequestError
from fleet_router.follow.documents import Documents
from fleet_router.holding import LISTENERS_MOST, Holding
from fleet_router.process import Router, Settings
from fleet_wire import endpoints
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, AtZero, Endpoints
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

ZERO = (AtZero(tier="t"),)
FULL = (AtZero(tier="t", limited=True),)


# -- sans-IO ----------------------------------------------------------------------------------------------------------
class One:
    """A request that goes on when `free`."""

    def __init__(self, holding: Holding, name: int, size: int = 1, tier: str = "") -> None:
        self.holding, self.name, self.size, self.tier, self.ended = holding, name, size, tier, ""

    def wait(self, now: float = 0.0, bounds: HoldBounds = HoldBounds()) -> float:  # noqa: B008 - frozen
        return self.holding.hold(self, self.size, ("no worker", "no_worker"), now, bounds, tier=self.tier)

    def begin(self) -> None:
        self.ended = "begun"

    def cut(self, error: RequestError) -> None:
        self.ended = error.code


class Stubborn(One):
    """Finds no worker the first time that it is tried again."""

    def __init__(self, holding: Holding, name: int, size: int = 1) -> None:
        super().__init__(holding, name, size)
        self.tries = 0

    def begin(self) -> None:
        self.tries += 1
        if self.tries == 1:
            self.until = self.wait(50.0)
        else:
            super().begin()


class Ear:
    def __init__(self) -> None:
        self.heard: list[int] = []

    def hear(self, held: int) -> None:
        self.heard.append(held)


def test_they_go_on_in_the_order_in_which_they_came():
    holding, begun = Holding(ZERO), list[int]()
    ones = [One(holding, number) for number in range(5)]
    for one in ones:
        one.begin = lambda number=one.name: begun.append(number)  # type: ignore[method-assign]
        one.wait()
    holding.drop(ones[2], "left")
    holding.follow(ZERO, 3.0, served=False)
    assert begun == []
    holding.follow((), 3.0, served=True)
    assert begun == [0, 1, 3, 4]
    assert (len(holding), holding.size_bytes, dict(holding.outcomes)) == (0, 0, {"left": 1, "released": 4})
    assert holding.waited.total_s == 12.0


def test_what_nothing_wakes_any_more_is_tried_and_so_refused():
    holding = Holding(ZERO)
    one = One(holding, 1)
    one.wait()
    holding.follow((), 1.0, served=False)
    assert one.ended == "begun"
    assert holding.outcomes == {"refused": 1}
    with pytest.raises(RequestError, match="no worker") as refused:
        one.wait()
    assert refused.value.code == "no_worker"


def test_one_that_finds_no_worker_waits_on_with_its_old_deadline():
    holding = Holding(ZERO)
    one = Stubborn(holding, 1)
    until_ = one.wait(10.0, HoldBounds(time_s=300.0))
    holding.follow(ZERO, 50.0, served=True)
    assert (len(holding), one.until) == (1, until_)
    holding.follow((), 60.0, served=True)
    assert (len(holding), one.ended) == (0, "begun")


def test_one_whose_adapter_is_still_loaded_when_workers_serve_waits_on():
    holding = Holding(ZERO)
    one = Stubborn(holding, 1)
    one.wait()
    holding.follow((), 50.0, served=True)  # nothing is at zero any more
    assert len(holding) == 1
    with pytest.raises(RequestError):
        One(holding, 2).wait(50.0)  # who comes now is told at once
    holding.follow((), 51.0, served=True)
    assert (len(holding), one.ended, holding.outcomes) == (0, "begun", {"released": 1})


TWO = (AtZero(tier="a"), AtZero(tier="b", limited=True))


def test_who_only_one_tier_may_answer_waits_for_no_other():
    """Incident: a request of a cascade's last tier, which was gone, waited for hold.time because another tier was at zero."""
    holding = Holding(TWO)
    ones = {tier: One(holding, 1, tier=tier) for tier in ("", "a", "b")}
    for one in ones.values():
        one.wait()
    with pytest.raises(RequestError) as refused:
        One(holding, 2, tier="gone").wait()
    assert refused.value.code == "no_worker"
    holding.follow(TWO[:1], 1.0, served=False)  # b is gone, a still wakes
    assert {tier: one.ended for tier, one in ones.items()} == {"": "", "a": "", "b": "begun"}
    assert (len(holding), holding.size_bytes, holding.outcomes) == (2, 2, {"refused": 1})
    holding.follow((), 2.0, served=True)
    assert {one.ended for one in ones.values()} == {"begun"}


@pytest.mark.parametrize(("tier", "code"), [("a", "waking"), ("b", "no_capacity"), ("", "no_capacity")])
def test_the_cluster_is_full_for_the_tiers_that_it_has_no_room_for(tier: str, code: str):
    holding = Holding(TWO)
    one = One(holding, 1, tier=tier)
    one.wait()
    error = holding.expired(one)
    assert error is not None
    assert error.code == code


@pytest.mark.parametrize("bounds", [HoldBounds(requests=2), HoldBounds(bytes=20)], ids=["requests", "bytes"])
@pytest.mark.parametrize(("tiers", "code", "seconds"), [(ZERO, "hold_full", 10), (FULL, "no_capacity", 60)])
def test_above_a_bound_it_says_when_to_come_again(bounds: HoldBounds, tiers: Any, code: str, seconds: int):
    holding = Holding(tiers)
    for number in range(2):
        One(holding, number, 10).wait(0.0, bounds)
    with pytest.raises(RequestError) as refused:
        One(holding, 2, 10).wait(0.0, bounds)
    assert (refused.value.status, refused.value.code, refused.value.headers) == (503, code, f"retry-after: {seconds}\r\n")
    assert holding.outcomes == {"full": 1}


def test_nothing_waits_once_the_router_stops():
    holding, ear = Holding(ZERO), Ear()
    one = One(holding, 1)
    one.wait()
    holding.drop(one, "left")
    holding.listen(ear)
    one.wait()
    holding.stop()
    assert one.ended == "shutting_down"
    with pytest.raises(RequestError) as refused:
        one.wait()
    assert refused.value.code == "shutting_down"
    assert ear.heard == [1]


def test_listeners_hear_once_and_are_bounded():
    holding = Holding(ZERO)
    ears = [Ear() for _ in range(LISTENERS_MOST + 1)]
    for ear in ears:
        holding.listen(ear)
    assert [ear.heard for ear in ears[-2:]] == [[], [0]]
    holding.unlisten(ears[0])
    One(holding, 1).wait()
    One(holding, 2).wait()
    assert [ear.heard for ear in ears] == [[], *[[1]] * (LISTENERS_MOST - 1), [0]]
    late = Ear()
    holding.listen(late)
    assert late.heard == [2]


@given(st.lists(st.tuples(st.sampled_from(["hold", "drop", "expire", "follow"]), st.integers(0, 5)), max_size=40))
def test_its_bytes_are_those_of_what_waits(events: list[tuple[str, int]]):
    holding, bounds = Holding(ZERO), HoldBounds(requests=4, bytes=12)
    ones = [One(holding, number, number + 1) for number in range(6)]
    waiting = list[int]()
    for event, number in events:
        if event == "hold" and number not in waiting:
            try:
                ones[number].wait(0.0, bounds)
            except RequestError:
                assert len(waiting) == 4 or sum(n + 1 for n in waiting) + number + 1 > 12
            else:
                waiting.append(number)
        elif event in ("drop", "expire") and number in waiting:
            assert holding.drop(ones[number], "left") if event == "drop" else holding.expired(ones[number])
            waiting.remove(number)
        elif event == "follow" and number == 0:
            holding.follow(ZERO, 1.0, served=True)
            waiting.clear()
        assert (len(holding), holding.size_bytes) == (len(waiting), sum(n + 1 for n in waiting))


# -- a router on sockets --------------------------------------------------------------------------------------------------
def rest(rig: Rig, tiers: Any = ZERO, **hold: Any) -> None:
    """The fleet is at zero."""
    config = msgspec.structs.replace(CONFIG, hold=HoldBounds(**hold))
    rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", at_zero=tiers)))


def wake(rig: Rig) -> None:
    rig.apply(rig.prefill, rig.decode)


async def held(rig: Rig, count: int) -> None:
    await until(lambda: len(rig.context.holding) == count)


def metric(rig: Rig, name: str) -> float:
    text = rig.router.plain(b"/metrics")[2].decode()
    return float(next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")))


def test_requests_wait_for_workers_and_are_answered_in_order():
    async def go(rig: Rig) -> None:
        rest(rig)
        assert rig.router.plain(b"/ready")[0] == 200
        clients = []
        for number in range(20):
            reader, writer, _ = await rig.connect()
            writer.write(http(ask(prompt=f"{number}", stream=number % 2 == 1)))
            await held(rig, number + 1)
            clients.append(reader)
        assert metric(rig, "fleet_router_held") == metric(rig, "fleet_router_arrivals_total") == 20
        assert metric(rig, "fleet_router_held_bytes") > 0
        wake(rig)
        for number, reader in enumerate(clients):
            if number % 2:
                assert b"data: [DONE]" in await reader.readuntil(b"0\r\n\r\n")
            else:
                status, _, body = await answer_of(reader)
                assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")
        assert {body["prompt"] for body in rig.decode[0].seen} == {str(number) for number in range(20)}
        decided = [one.begun_at for one in sorted(rig.context.recorder.records(), key=lambda one: one.came_at)]
        assert (len(decided), decided) == (20, sorted(decided))  # on connections that a worker need not take in this order
        assert metric(rig, "fleet_router_held") == 0
        assert metric(rig, 'fleet_router_held_total{outcome="released"}') == 20

    run(go)


def test_the_time_that_it_waited_is_not_the_workers_time_to_first_token():
    async def go(rig: Rig) -> None:
        rest(rig)
        reader, writer, connection = await rig.connect()
        writer.write(http(ask(prompt="p")))
        await held(rig, 1)
        clock = rig.context.clock
        rig.context.clock = lambda: clock() + 250.0
        wake(rig)
        assert (await answer_of(reader))[0] == 200
        rig.context.clock = clock
        served = rig.context.metrics.of("t", "r")
        assert (served.whole.total_s < 5.0, sum(served.whole.fold())) == (True, 1)
        assert connection.flow is None

    run(go)


def test_a_request_whose_time_is_up_is_told_when_to_come_again():
    async def go(rig: Rig) -> None:
        for tiers, code, seconds in ((ZERO, "waking", "10"), (FULL, "no_capacity", "60")):
            rest(rig, tiers, time_s=100.0)
            reader, writer, _ = await rig.connect()
            writer.write(http(ask()))
            await held(rig, 1)
            rig.sweep(99.0)
            assert len(rig.context.holding) == 1
            rig.sweep(101.0)
            status, headers, body = await answer_of(reader)
            error = json.loads(body)["error"]
            assert (status, headers["retry-after"], error["code"], error["retryable"]) == (503, seconds, code, True)
            assert len(rig.context.holding) == 0
        assert metric(rig, 'fleet_router_held_total{outcome="expired"}') == 2

    run(go)


def test_above_the_bound_it_is_refused_and_the_others_wait_on():
    async def go(rig: Rig) -> None:
        rest(rig, requests=1)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="first")))
        await held(rig, 1)
        status, body = await rig.post(ask(prompt="second"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "hold_full")
        wake(rig)
        assert (await answer_of(reader))[0] == 200

    run(go)


def test_a_client_that_leaves_waits_no_longer():
    async def go(rig: Rig) -> None:
        rest(rig)
        _, writer, _ = await rig.connect()
        writer.write(http(ask()))
        await held(rig, 1)
        writer.close()
        await until(lambda: rig.sweep() is None and len(rig.context.holding) == 0)
        assert metric(rig, 'fleet_router_held_total{outcome="left"}') == 1
        wake(rig)
        await asyncio.sleep(0.02)
        assert rig.decode[0].seen == []

    run(go)


def test_a_second_request_of_a_connection_waits_behind_the_held_one():
    async def go(rig: Rig) -> None:
        rest(rig)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="one")) + http(ask(prompt="two")))
        await held(rig, 1)
        wake(rig)
        assert [(await answer_of(reader))[0] for _ in range(2)] == [200, 200]
        assert [body["prompt"] for body in rig.decode[0].seen] == ["one", "two"]

    run(go)


def test_who_may_not_ask_wakes_nothing():
    async def go(rig: Rig) -> None:
        rig.context.desk.tenants_needed = True
        rig.context.desk.know(Tenants(salt="s" * 32))
        rest(rig)
        status, _ = await rig.post(ask())
        assert (status, len(rig.context.holding), metric(rig, "fleet_router_arrivals_total")) == (401, 0, 0)

    run(go)


def test_without_a_tier_at_zero_nothing_waits():
    async def go(rig: Rig) -> None:
        rest(rig)
        rest(rig, ())  # where workers served, an empty document would be taken for a mistake
        status, body = await rig.post(ask())
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_worker")
        assert rig.router.plain(b"/ready")[0] == 503
        rest(rig)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask()))
        await held(rig, 1)
        rest(rig, ())
        status, _, raw = await answer_of(reader)
        assert (status, json.loads(raw)["error"]["code"]) == (503, "no_worker")

    run(go)


def test_a_router_that_stops_answers_what_it_holds():
    async def go(rig: Rig) -> None:
        rest(rig)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask()))
        await held(rig, 1)
        listener, asking, _ = await rig.connect()
        asking.write(b"GET /held?wait_s=30 HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await answer_of(listener))[2] == b"1\n"
        rig.context.draining = True
        rig.context.holding.stop()
        status, headers, raw = await answer_of(reader)
        assert (status, headers["connection"], json.loads(raw)["error"]["code"]) == (503, "close", "shutting_down")

    run(go)


def test_a_router_that_is_told_to_end_lets_nobody_wait(tmp_path: Path):
    """A whole process' life in this loop, up to the signal."""
    (tmp_path / ROUTER_CONFIG_KEY).write_text(encode(CONFIG))
    (tmp_path / ENDPOINTS_KEY).write_bytes(endpoints.encode(Endpoints(fleet="f", namespace="n", at_zero=ZERO)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def go() -> None:
        router = Router(Settings(f"dir:{tmp_path}", "127.0.0.1", port))
        life = asyncio.create_task(router.run())
        await until(lambda: bool(router._context.holding.at_zero))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http(ask()))
        await until(lambda: len(router._context.holding) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        status, headers, raw = await asyncio.wait_for(answer_of(reader), 5)
        assert (status, headers["connection"], json.loads(raw)["error"]["code"]) == (503, "close", "shutting_down")
        writer.close()
        assert await asyncio.wait_for(life, 5) == 0

    asyncio.run(go())


def test_a_failed_worker_does_not_end_a_request_while_others_wake():
    """All workers of one tier are gone while another wakes: the retry waits for that one instead of giving up."""

    async def go(rig: Rig) -> None:
        documents = Documents(CONFIG, rig_endpoints(rig))
        rig.router.apply(documents)

        async def dies(_: Any, writer: asyncio.StreamWriter) -> bool:
            rest(rig)
            writer.close()
            return True

        rig.decode[0].behave = dies
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="p")))
        await held(rig, 1)
        rig.decode[0].behave = None
        rig.apply(rig.prefill, rig.decode[1:])
        assert (await answer_of(reader))[0] == 200

    run(go, decode=2)


def rig_endpoints(rig: Rig) -> Endpoints:
    """The first decode worker alone, and a tier that wakes."""
    rig.apply(rig.prefill, rig.decode[:1])
    workers = tuple(worker.endpoint for worker in rig.context.table.workers.values())
    return Endpoints(fleet="f", namespace="n", workers=workers, at_zero=ZERO)


# -- who listens ------------------------------------------------------------------------------------------------------
LISTEN = b"GET /held?wait_s=%b HTTP/1.1\r\nhost: h\r\n\r\n"


def test_a_listener_hears_at_once_and_its_connection_goes_on():
    async def go(rig: Rig) -> None:
        rest(rig)
        listener, asking, connection = await rig.connect()
        asking.write(LISTEN % b"20")
        await until(lambda: connection.flow is not None)
        client, writer, _ = await rig.connect()
        writer.write(http(ask()))
        assert (await answer_of(listener))[2] == b"1\n"
        wake(rig)
        assert (await answer_of(client))[0] == 200
        asking.write(LISTEN % b"20")
        await until(lambda: connection.flow is not None)
        rig.sweep(21.0)
        assert (await answer_of(listener))[2] == b"0\n"
        asking.write(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await answer_of(listener))[2] == b"0\n"
        asking.write(LISTEN % b"20")
        await until(lambda: connection.flow is not None)
        asking.close()
        await until(lambda: rig.sweep() is None and not rig.context.holding._listeners)

    run(go)


@pytest.mark.parametrize("wait", [b"31", b"-1", b"soon", b"nan"])
def test_a_wait_out_of_bounds_is_refused(wait: bytes):
    async def go(rig: Rig) -> None:
        got = await rig.raw((LISTEN % wait).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert got.startswith(b"HTTP/1.1 400")
        assert b"wait_s must be" in got

    run(go)


def test_a_stopping_router_keeps_no_listener():
    async def go(rig: Rig) -> None:
        rest(rig)
        listener, asking, connection = await rig.connect()
        asking.write(LISTEN % b"20")
        await until(lambda: connection.flow is not None)
        rig.context.draining = True
        rig.context.holding.stop()
        _, headers, body = await answer_of(listener)
        assert (headers["connection"], body) == ("close", b"0\n")

    run(go)


def test_the_exposition_reads_as_prometheus_text():
    async def go(rig: Rig) -> None:
        text = rig.router.plain(b"/metrics")[2].decode()
        assert all(re.match(r"^(# TYPE \S+ \S+|[a-z0-9_:]+(\{[^{}]*\})? [-+.0-9a-zInf]+)$", line) for line in text.splitlines())

    run(go)

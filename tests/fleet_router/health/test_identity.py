"""Who answers at an address, and endpoints that name nobody."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from fleet_router.follow.emptied import AGAIN_S, KEPT_S
from fleet_router.follow.identity import Identity, follow_identity, uid_in
from fleet_router.upstream import Pool, Upstream
from fleet_wire.endpoints import Endpoint
from tests.fleet_router.rig import Rig, ask, run, until


@dataclass
class Suspected:
    endpoint: Endpoint
    unproven: bool = True


@pytest.mark.parametrize(
    ("answer", "uid"),
    [
        (b'HTTP/1.1 200 OK\r\n\r\n{"uid": "a", "phase": "Ready"}', "a"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"phase": "Ready"}', ""),
        (b"HTTP/1.1 404 Not Found\r\n\r\nnothing", ""),
        (b"", ""),
        (b'HTTP/1.1 200 OK\r\n\r\n{"uid": "\xff\xfe"}', ""),  # the task ended of it, and the router with the task
        (b'HTTP/1.1 200 OK\r\n\r\n{"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", ""),
    ],
    ids=["uid", "none", "404", "nothing", "no UTF-8", "deep"],
)
def test_what_an_agent_says(answer: bytes, uid: str):
    assert uid_in(answer) == uid


def test_r11_who_says_another_uid_is_a_stranger_and_who_says_nothing_is_asked_again():
    async def go() -> None:
        async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readuntil(b"\r\n\r\n")
            assert asked.startswith(b"GET /state ")
            writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"uid": "mine"}')
            writer.close()

        server = await asyncio.start_server(agent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        def suspected(uid: str, agent_port: int) -> Suspected:
            return Suspected(
                Endpoint(
                    name=uid, uid=uid, address="127.0.0.1", http_port=1, agent_port=agent_port, role="decode", tier="t",
                    revision="r", compat="c",
                )
            )  # fmt: skip

        mine, other, dumb = suspected("mine", port), suspected("theirs", port), suspected("dumb", 1)
        strangers: list[Endpoint] = []
        following = asyncio.create_task(
            follow_identity(lambda: [one for one in (mine, other, dumb) if one.unproven], strangers.append)
        )
        await until(lambda: not mine.unproven and bool(strangers))
        following.cancel()
        server.close()
        assert ({one.uid for one in strangers}, dumb.unproven) == ({"theirs"}, True)

    asyncio.run(go())


def test_r11_nothing_is_sent_on_a_new_connection_before_the_agent_was_asked():
    """A pod died and another one had its address between two looks: fifteen answers of other weights, HTTP 200."""

    async def go(rig: Rig) -> None:
        says, asked = "somebody else", 0

        async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            asked += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"uid": "%s"}' % says.encode())
            writer.close()

        server = await asyncio.start_server(agent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = msgspec.structs.replace(rig.context.table.by_role["decode"][0].endpoint, agent_port=port)
        pool = Pool(endpoint.address, endpoint.http_port, Upstream, Identity(endpoint).proven)

        async def taken() -> tuple[bool, str]:
            got: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
            pool.take(lambda connection, why: got.set_result((connection is not None, why)), fresh=True)
            return await got

        assert await asyncio.gather(*(taken() for _ in range(20))) == [(False, "another pod has its address")] * 20
        assert asked <= 3, "connections that come together share a question"
        says = endpoint.uid
        assert await taken() == (True, "")
        server.close()
        assert await taken() == (True, ""), "no agent answers"

    run(go)


def test_a_worker_that_dies_while_its_agent_is_asked_is_not_waited_for():
    """Else the request is written to nobody, and hears nothing until its deadline: one in 10,000 of the closed loop."""

    async def go() -> None:
        made: list[Upstream] = []

        def watched(pool: Pool) -> Upstream:
            made.append(Upstream(pool))
            return made[-1]

        async def proven() -> bool:
            while made[0].is_open():  # noqa: ASYNC110 - a connection has no event for whoever waits
                await asyncio.sleep(0)
            return True  # no agent answers

        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        pool = Pool("127.0.0.1", server.sockets[0].getsockname()[1], watched, proven)
        got: asyncio.Future[tuple[object, str]] = asyncio.get_running_loop().create_future()
        pool.take(lambda connection, why: got.set_result((connection, why)))
        assert await got == (None, "cannot connect: closed at once")
        server.close()

    asyncio.run(go())


def test_a_worker_that_nothing_comes_from_is_told_as_a_timeout(monkeypatch: pytest.MonkeyPatch):
    """A node that is gone answers no SYN; traces and logs said "cannot connect: " and not why."""

    async def go() -> tuple[object, str]:
        async def dark(*_: Any, **__: Any) -> None:
            raise TimeoutError

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", dark)
        got: asyncio.Future[tuple[object, str]] = asyncio.get_running_loop().create_future()
        Pool("127.0.0.1", 1, Upstream).take(lambda connection, why: got.set_result((connection, why)))
        return await got

    assert asyncio.run(go()) == (None, "cannot connect: timeout")


def test_r11_a_stranger_is_left_out_until_the_document_changes():
    async def go(rig: Rig) -> None:
        bad = rig.context.table.by_role["decode"][0]
        rig.router.stranger(bad.endpoint)
        for i in range(6):
            assert (await rig.post(ask(prompt=f"{i} short")))[0] == 200
        assert [worker.uid for worker in rig.context.table.by_role["decode"]] == [f"u{rig.decode[1].port}"]
        assert rig.decode[0].seen == []
        rig.apply([], rig.decode[1:])
        assert rig.context.table.strangers == {}

    run(go, prefill=0, decode=2)


async def later(rig: Rig, seconds: float) -> None:
    """The router's clock says so, and it has asked who serves."""
    now = rig.context.clock()
    rig.router._clock = lambda: now + seconds
    await rig.router.doubt()


def age_s(rig: Rig) -> float:
    return float(rig.router.plain(b"/metrics")[2].decode().split("\nfleet_router_endpoints_age_seconds ")[1].split("\n")[0])


def test_r10_endpoints_that_name_nobody_are_believed_when_nobody_serves():
    async def go(rig: Rig) -> None:
        await later(rig, 0.5)
        rig.router.same()
        assert age_s(rig) < 0.4, "nothing changed: it is as new as can be"
        rig.apply([], [])
        await later(rig, 1.0)
        rig.router.same()
        assert age_s(rig) >= 0.4, "what is there is not what is in force"
        assert (await rig.post(ask(prompt="short")))[0] == 200
        assert rig.context.metrics.follow_errors == 1
        await later(rig, KEPT_S + 1.0)
        assert (await rig.post(ask(prompt="short")))[0] == 503
        rig.apply([], rig.decode)
        assert (await rig.post(ask(prompt="short")))[0] == 200

    run(go, prefill=0, decode=1)


@pytest.mark.parametrize(
    ("says", "kept"),
    [
        (b'{"uid": "%b", "phase": "Serving"}', True),
        (b'{"uid": "%b", "phase": "Draining"}', False),
        (b'{"uid": "not %b", "phase": "Serving"}', False),
        (b"[%b]", False),
    ],
    ids=["it serves", "it goes", "another pod", "nonsense"],
)
def test_r10_endpoints_that_name_nobody_are_a_mistake_while_somebody_serves(says: bytes, kept: bool):
    """They were believed after a minute: nodes that the control plane had lost had all requests refused, and served."""

    async def go(rig: Rig) -> None:
        async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + says % worker.endpoint.uid.encode())
            writer.close()

        server = await asyncio.start_server(agent, "127.0.0.1", 0)
        worker = rig.context.table.by_role["decode"][0]
        worker.endpoint = msgspec.structs.replace(worker.endpoint, agent_port=server.sockets[0].getsockname()[1])
        rig.apply([], [])
        await later(rig, KEPT_S + 1.0)
        assert rig.context.table.workers == ({worker.uid: worker} if kept else {})
        server.close()
        await later(rig, KEPT_S + AGAIN_S - 1.0)
        assert bool(rig.context.table.workers) == kept, "asked again too soon"
        await later(rig, KEPT_S + 2 * AGAIN_S)
        assert rig.context.table.workers == {}

    run(go, prefill=0, decode=1)


def test_r10_a_stranger_is_no_news_of_endpoints_that_name_nobody():
    """The last good document was applied again, and with it the empty one forgotten."""

    async def go(rig: Rig) -> None:
        rig.apply([], [])
        rig.router.stranger(rig.context.table.by_role["decode"][0].endpoint)
        assert len(rig.context.table.by_role["decode"]) == 1
        await later(rig, KEPT_S + 1.0)
        assert rig.context.table.workers == {}

    run(go, prefill=0, decode=2)


def test_r11_a_stranger_does_not_make_the_endpoints_new():
    """Its place was left out by applying them again: their age began at 0, as if the API server had said something, and who is
    woken for old ones was not, just when addresses go to other pods."""

    async def go(rig: Rig) -> None:
        await later(rig, 600.0)
        rig.router.failed("nobody answers")
        rig.router.stranger(rig.context.table.by_role["decode"][0].endpoint)
        assert len(rig.context.table.by_role["decode"]) == 1
        assert age_s(rig) >= 599.0
        rig.apply([], rig.decode)
        assert age_s(rig) < 1.0

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("raw", [b'{"uid":"\xff"}', b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}", b"{", b"[]", b""])
def test_whoever_answers_nonsense_says_no_uid(raw: bytes):
    """Incident: text that is no UTF-8 ended the task that asks, and the router with it."""
    assert uid_in(b"HTTP/1.1 200 OK\r\n\r\n" + raw) == ""

"""What several processes say together while one of them does not answer."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable

import pytest
import uvloop

from fleet_router.config import HoldBounds
from fleet_router.errors import RequestError
from fleet_router.gathering import gathered, held_by_all
from fleet_router.holding import Holding
from fleet_router.listening import wait_of
from fleet_router.members import Answer, Member, ask_all, serve
from fleet_router.process import Router, Settings
from fleet_wire.endpoints import AtZero
from tests.fleet_router.rig import http, until
from tests.fleet_router.test_holding import One

FAMILY = secrets.token_hex(8)


async def metrics(_path: bytes) -> Answer:
    return 200, b"# TYPE x_total counter\nx_total 3\n# TYPE inference_pool_ready_pods gauge\ninference_pool_ready_pods 2\n"


@pytest.mark.parametrize(
    ("there", "status", "words"),
    [
        pytest.param(True, 200, b"x_total 6\n# TYPE inference_pool_ready_pods gauge\ninference_pool_ready_pods 2\n", id="both"),
        pytest.param(False, 503, b"does not answer", id="one has died"),
    ],
)
def test_counters_of_half_the_processes_are_no_counters(there: bool, status: int, words: bytes):
    """A process that died or was busy for a second: counters fell, for rates a restart, and its requests had ended."""

    async def go() -> None:
        mine, other = (Member.parse(f"{index}/2/{FAMILY}") for index in (0, 1))
        serving = asyncio.create_task(serve(other, metrics)) if there else None
        await asyncio.sleep(0)
        found = await gathered(mine, b"/metrics", metrics)
        assert (found[0], words in found[1]) == (status, True)
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(go())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("leaves", [True, False], ids=["nobody waits any more", "its time is over"])
def test_a_question_that_nobody_waits_for_is_hung_up(leaves: bool, loop: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    """Its connection was left open, for each scrape one at a process that hangs, and for each request that was held while the
    operator listened: to the next sweep of Python's at best."""
    monkeypatch.setattr("fleet_router.members.ASK_S", 0.05)
    family = secrets.token_hex(8)

    async def go() -> None:
        asked, hung_up = asyncio.Event(), asyncio.Event()

        async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            asked.set()
            await reader.read()
            hung_up.set()
            writer.close()

        mine, other = (Member.parse(f"{index}/2/{family}") for index in (0, 1))
        server = await asyncio.start_unix_server(hangs, other.name("ask").decode())
        question = asyncio.create_task(ask_all(mine, b"/held", 30.0 if leaves else 0.0))
        await asked.wait()
        if leaves:
            question.cancel()
        await asyncio.wait({question})
        assert question.cancelled() or question.result() == [None]
        await until(hung_up.is_set)
        server.close()

    loop(go())


@pytest.mark.parametrize(("here", "there"), [(0, 3), (2, 3), (2, 0)])
def test_what_one_of_many_processes_holds_is_told_at_once(here: int, there: int):
    """Of three processes one held a request: the operator heard of it when another had waited in vain, ten seconds later."""

    async def go() -> None:
        members = [Member.parse(f"{index}/3/{FAMILY}") for index in range(3)]
        holding = Holding(at_zero=(AtZero(tier="t"),))

        over = asyncio.Event()

        async def waits(url: bytes) -> Answer:
            if wait_of(url):
                await over.wait()
            return 200, b"0\n"

        async def holds(url: bytes) -> Answer:
            return (200, b"%d\n" % there) if there else await waits(url)

        serving = [asyncio.create_task(serve(one, answer)) for one, answer in zip(members[1:], (waits, holds), strict=True)]
        await asyncio.sleep(0)
        asked = asyncio.create_task(held_by_all(members[0], holding, b"/held?wait_s=20"))
        for number in range(here):
            holding.hold(One(holding, number), 1, ("", ""), 0.0, HoldBounds())
        assert await asyncio.wait_for(asked, 3.0) == (200, b"%d\n" % (here + there))
        over.set()
        await asyncio.sleep(0.01)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    asyncio.run(go())


@pytest.mark.parametrize("query", ["", "?limit=5", "?id=nobody"])
def test_decisions_of_all_processes_are_told_with_a_query_and_without(query: str):
    """Without one a sibling took the rights behind the path for a part of it, and answered as if it were asked for its health:
    whoever asked got 503."""

    async def go() -> None:
        members = [Member.parse(f"{index}/2/{FAMILY}") for index in (0, 1)]
        mine, other = (Router(Settings("dir:/none", "127.0.0.1", 0, member=member)) for member in members)
        serving = asyncio.create_task(serve(members[1], other.answer))
        async with await asyncio.get_running_loop().create_server(mine.connection, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(http(b"", "connection: close", path=f"/debug/decisions{query}", method="GET"))
            got = await reader.read(-1)
            writer.close()
        status, body = got.split(b" ", 2)[1], got.partition(b"\r\n\r\n")[2]
        assert (status, body == b'{"decisions":[]}') == ((b"404", False) if "id" in query else (b"200", True))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(go())


@pytest.mark.parametrize(("here", "there", "told"), [(5, 5, "a b a"), (1, 5, "a b b"), (0, 5, "b b b"), (2, 0, "a a")])
def test_as_many_decisions_are_told_as_were_asked_for_of_all_processes_together(here: int, there: int, told: str):
    """A router of four processes told four times as many, and behind them nothing of those that were asked last."""

    async def go() -> None:
        members = [Member.parse(f"{index}/2/{FAMILY}") for index in (0, 1)]
        routers = [Router(Settings("dir:/none", "127.0.0.1", 0, member=member)) for member in members]
        for router, name, count in zip(routers, "ab", (here, there), strict=True):
            for _ in range(count):
                router._recorder.refused(name, b"/v1/completions", "", RequestError(400, "no"))
        serving = asyncio.create_task(serve(members[1], routers[1].answer))
        await asyncio.sleep(0)
        status, body = await routers[0].gather(b"/debug/decisions?limit=3 all ")
        found = [row["request_id"] for row in json.loads(body)["decisions"]]
        assert (status, " ".join(found)) == (200, told)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(go())

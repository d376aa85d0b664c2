"""A bug of ours in what is done for one request is that request's end, and nobody else's."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from typing import Any

import pytest

from fleet_router.admission.bucket import Bucket
from fleet_router.config import HoldBounds
from fleet_router.desk import Desk
from fleet_router.errors import RequestError
from fleet_router.explain.journal import BUGS_PER_S, Journal
from fleet_router.faults import Faults
from fleet_router.holding import Holding
from fleet_router.knowledge import NOT_KNOWN
from fleet_router.metrics import COMPILED
from fleet_router.process import Router, Settings
from fleet_router.upstream import CollectingUpstream, Pool
from fleet_router.watching import watch
from fleet_wire.endpoints import AtZero
from tests.fleet_router.fake_worker import answer, stream
from tests.fleet_router.rig import Rig, answer_of, ask, http, run, until
from tests.fleet_router.test_framing import Heard, Wire


class Broken:
    """Stands before a flow: whatever the sweep calls of it fails."""

    def __init__(self, flow: Any, *, cut: bool) -> None:
        self._flow, self._cut = flow, cut
        self.deadline, self.started = 0.0, False

    def expire(self, _now: float) -> None:
        raise KeyError("a client's words")

    def cut(self, error: RequestError) -> None:
        if not self._cut:
            raise ValueError("a client's words")
        self._flow.cut(error)

    def cancel(self) -> None:
        self._flow.cancel()


@pytest.mark.parametrize("told", [True, False], ids=["is-told", "cannot-be-told"])
def test_a_failing_sweep_of_one_connection_ends_that_ones_request(told: bool):
    """Incident: one exception in the deadline of one request ended the process, and with it every stream of every client."""

    async def go(rig: Rig) -> None:
        over, said = asyncio.Event(), []

        async def slow(_: Any, writer: asyncio.StreamWriter) -> bool:
            await over.wait()
            await stream(writer, ["a"])
            return True

        rig.decode[0].behave = slow
        rig.context.desk.faults.tell = lambda *what: said.append(what)
        clients = [await rig.connect() for _ in range(2)]
        for _, writer, _ in clients:
            writer.write(http({"model": "m", "stream": True, "prompt": "short"}))
        await until(lambda: all(one.flow is not None for _, _, one in clients))
        bad, good = clients[0], clients[1]
        bad[2].flow = Broken(bad[2].flow, cut=told)  # type: ignore[assignment]
        rig.router.sweep(rig.context.clock())
        got = await bad[0].read(65536)
        assert (b" 500 " in got and b'"router_failed"' in got) is told
        assert not told or bad[2].flow is None
        over.set()
        assert b"[DONE]" in await good[0].readuntil(b"0\r\n\r\n")
        await until(rig.idle)
        assert rig.context.desk.gate.running == 0
        kinds = ["KeyError"] if told else ["KeyError", "ValueError"]
        assert [kind for _, kind, _ in said] == kinds
        assert [id_ for id_, _, _ in said] == [bad[2].request_id] * len(kinds)
        assert all(where[0].startswith("test_faults.py:") for _, _, where in said)
        text = rig.router.plain(b"/metrics")[2].decode()
        assert f"fleet_router_request_faults_total {len(kinds)}\n" in text

    run(go)


class Waits:
    """A request whose turn fails."""

    def __init__(self, *, fails: bool) -> None:
        self.fails, self.begun = fails, 0
        self.told: list[int] = []

    def begin(self) -> None:
        self.begun += 1
        if self.fails:
            raise KeyError("x")

    admitted = begin

    def cut(self, error: RequestError) -> None:
        self.told.append(error.status)


def test_a_request_whose_turn_in_the_queue_fails_is_told_and_the_next_one_has_its_own():
    desk = Desk(lambda: 0.0)
    bad, good = Waits(fails=True), Waits(fails=False)
    for flow in (bad, good):
        desk._admit(flow)
    assert (bad.told, good.told, good.begun, desk.faults.count) == ([500], [], 1, 1)


def test_held_requests_go_on_when_one_of_them_fails():
    holding = Holding(at_zero=(AtZero(tier="t"),))
    ones = [Waits(fails=True), Waits(fails=False)]
    for one in ones:
        holding._places[one] = holding._places.get(one) or _place()
    holding.follow([], 1.0, served=True)
    assert ([one.begun for one in ones], [one.told for one in ones]) == ([1, 1], [[500], []])
    assert (len(holding), holding.faults.count) == (0, 1)


def test_who_gives_way_and_cannot_be_told_takes_no_place_from_the_others():
    holding = Holding(at_zero=(AtZero(tier="t"),))
    first, second, third = Waits(fails=True), Waits(fails=False), Waits(fails=False)
    first.cut = {}.__getitem__  # type: ignore[method-assign, assignment]  # a KeyError
    bounds = HoldBounds(requests=2)
    for one, tenant in ((second, "big"), (first, "big"), (third, "small")):
        holding.hold(one, 1, ("none", "none"), 0.0, bounds, tenant)
    assert (set(holding._places), holding.faults.count) == ({second, third}, 2)


def _place() -> Any:
    from fleet_router.holding import _Place

    return _Place(1, 0.0, 9.0, "", 1.0)


def test_a_bug_in_the_loop_itself_is_nobodys_alone():
    """The process ends with it, and is started anew."""

    async def go(rig: Rig) -> None:
        rig.router._connections = None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            rig.router.sweep(0.0)
        rig.router._connections = rig.connections
        assert rig.context.desk.faults.count == 0

    run(go)


def test_who_logs_hears_kind_and_place_and_no_words():
    said: list[Any] = []
    faults = Faults()
    faults.tell = lambda *what: said.append(what)
    try:
        {}["a client's words"]
    except KeyError as error:
        faults.end(error, lambda _: None, "r1")
    ((request_id, kind, where),) = said
    assert (request_id, kind) == ("r1", "KeyError")
    assert "words" not in str(said)
    assert where[0].startswith("test_faults.py:")


def test_a_silent_worker_is_left_by_all_others_when_one_flow_fails(monkeypatch: pytest.MonkeyPatch):
    async def go(rig: Rig) -> None:
        over = asyncio.Event()

        async def hangs(_: Any, writer: asyncio.StreamWriter) -> bool:
            await over.wait()
            await stream(writer, ["a"])
            return True

        for worker in rig.decode:
            worker.behave = hangs
        clients = [await rig.connect() for _ in range(2)]
        for _, writer, _ in clients:
            writer.write(http({"model": "m", "stream": True, "prompt": "short"}))
        await until(lambda: all(one.flow is not None and one.flow.leg() is not None for _, _, one in clients))  # type: ignore[union-attr]
        seen: list[Any] = []

        def silent(flow: Any) -> None:
            seen.append(flow)
            if len(seen) == 1:
                raise KeyError("x")

        monkeypatch.setattr("fleet_router.flow.Flow.silent", silent)
        watch(rig.context, rig.connections, rig.context.clock() + 1000)
        assert (len(seen), rig.context.desk.faults.count) == (2, 1)
        monkeypatch.undo()
        over.set()

    run(go)


class Stumbling(Heard):
    """A leg with a bug in one of the things that it hears."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.faults: list[Exception] = []

        def fails(*_: Any) -> None:
            raise KeyError("ours")

        setattr(self, where, fails)

    def on_fault(self, error: Exception) -> None:
        self.faults.append(error)


@pytest.mark.parametrize("where", ["on_head", "on_body", "on_raw", "on_end"])
def test_a_bug_in_what_hears_an_answer_is_no_word_against_its_worker(where: str):
    """Incident: raised inside a callback of the parser it read as "the worker's answer is not HTTP", and out of the loop's hands
    as a connection that the worker had closed: the worker was put out."""
    leg, wire, pool = Stumbling(where), Wire(), Pool("127.0.0.1", 1)
    connection: Any = CollectingUpstream(pool)
    connection.connection_made(wire)
    connection.send(leg, b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    assert ([str(error) for error in leg.faults], leg.lost, wire.closed) == (["'ours'"], [], True)
    connection.connection_lost(None)
    assert leg.lost == []


@pytest.mark.parametrize("streamed", [False, True])
def test_a_bug_in_a_translation_is_counted_and_told_and_ejects_no_worker(streamed: bool, monkeypatch: pytest.MonkeyPatch):
    async def go(rig: Rig) -> None:
        def fails(*_: Any) -> bytes:
            raise KeyError("ours")

        async def tells(_: Any, writer: asyncio.StreamWriter) -> bool:
            if streamed:
                await stream(writer, ["a"])
            else:
                answer(writer, 200, {"choices": [{"message": {"content": "a"}}]})
            return True

        monkeypatch.setattr("fleet_router.dialect.translation.ChatTranslation.feed", fails)
        monkeypatch.setattr("fleet_router.dialect.translation.Translation.feed", fails)
        rig.decode[0].behave = tells
        turns = [{"role": "user", "content": "short"}]
        status, body = await rig.post({"model": "m", "max_tokens": 9, "stream": streamed, "messages": turns}, "/v1/messages")
        monkeypatch.undo()
        assert status in ((200, 500) if streamed else (500,))  # a stream's head may have gone out
        assert b"the router failed" in body
        (worker,) = rig.context.table.by_role["decode"]
        assert (rig.context.desk.faults.count, worker.breaker.until, len(rig.decode[0].seen)) == (1, 0.0, 1)
        assert rig.context.desk.gate.waiting == 0

    run(go)


def test_a_bug_in_how_a_request_is_read_ends_that_one_and_not_those_behind_it(monkeypatch: pytest.MonkeyPatch):
    async def go(rig: Rig) -> None:
        def fails(*_: Any) -> Any:
            raise KeyError("ours")

        monkeypatch.setattr("fleet_router.dialect.messages.Messages.take_body", fails)
        reader, writer, _ = await rig.connect()
        writer.write(http({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}, path="/v1/messages"))
        status, headers, _ = await answer_of(reader)
        assert (status, headers["connection"], rig.context.desk.faults.count) == (500, "close", 1)
        monkeypatch.undo()
        assert (await rig.post(ask(prompt="short")))[0] == 200

    run(go)


@pytest.mark.skipif(COMPILED, reason="compiled code takes real knowledge only: `make unit` runs this one")
def test_a_bug_behind_the_count_of_a_prompts_tokens_is_told(monkeypatch: pytest.MonkeyPatch):
    """They come from a thread: nobody heard of what failed then, and the client waited for its deadline."""

    async def go(rig: Rig) -> None:
        waits: list[Any] = []

        class Later:
            def count(self, _ask: Any, _chat: bool, then: Any, _salt: str) -> None:
                waits.append(then)

        def fails(*_: Any, **__: Any) -> None:
            raise KeyError("a client's words")

        rig.context.knowledge = Later()  # type: ignore[assignment]
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="short")))
        await until(lambda: len(waits) == 1)
        rig.context.knowledge = None
        monkeypatch.setattr(rig.context.table, "choose", fails)
        asyncio.get_running_loop().call_soon(waits[0], NOT_KNOWN)
        async with asyncio.timeout(3):
            status, _, body = await answer_of(reader)
        assert (status, b"router_failed" in body, rig.context.desk.faults.count) == (500, True, 1)

    run(go)


def test_what_nobody_guards_is_one_line_without_words(capsys: pytest.CaptureFixture[str]):
    """A dozen lines that are no JSON, and in them what a client wrote."""
    words = "a client's words\nand more"

    def fail(_body: str) -> None:
        raise KeyError(words)

    async def fail_later() -> None:
        raise ValueError(words)

    async def go() -> bytes:
        router = Router(Settings("dir:/none", "127.0.0.1", 0))
        running = asyncio.create_task(router.run())
        await until(lambda: router._context.metrics.follow_errors > 0)
        asyncio.get_running_loop().call_soon(fail, words)
        lost = asyncio.create_task(fail_later())
        await until(lost.done)
        del lost
        gc.collect()
        await until(lambda: router._desk.faults.count == 2)
        signal.raise_signal(signal.SIGTERM)
        assert await running == 0
        return router.plain(b"/metrics")[2]

    assert b"fleet_router_request_faults_total 2\n" in asyncio.run(go())
    said = capsys.readouterr().err
    lines = [line for line in map(json.loads, said.splitlines()) if line["event"] == "callback-failed"]
    assert [line["error"] for line in lines] == ["KeyError", "ValueError"]
    assert all(line["at"][0].startswith("test_faults.py:") for line in lines)
    assert "client" not in said


def test_a_bug_that_each_request_meets_does_not_fill_the_disk():
    lines: list[str] = []
    journal = Journal(lines.append)
    for _ in range(1000):
        journal.bug("request-failed", error="KeyError")
    assert BUGS_PER_S <= len(lines) < 2 * BUGS_PER_S
    told = len(lines)
    journal._bugs = Bucket(1, 1)  # a second later
    journal.bug("request-failed", error="KeyError")
    assert json.loads(lines[-1])["left_out"] == 1000 - told

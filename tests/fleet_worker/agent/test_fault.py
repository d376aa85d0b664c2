"""A fault of the agent's own: it is told, turns the worker unready, and what looks after the engine goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleet_worker.agent import agent as agent_module
from fleet_worker.agent import engine_client as client_module
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.command import EngineCommand
from fleet_worker.agent.engine_client import EngineClient, parse_load
from fleet_worker.agent.errors import ConfigError
from fleet_worker.agent.identity import Identity
from fleet_worker.agent.life import Load
from fleet_worker.agent.supervise import EngineProcess
from fleet_worker.config import STEP_TIMEOUT_ENV, EngineType, Parallel, Ports
from tests.fleet_worker.agent.test_command import config
from tests.fleet_worker.agent.test_role import FakeEngine, play, until


async def beside(work: Coroutine[Any, Any, None], check: Callable[[], bool]) -> None:
    task = asyncio.create_task(work)
    try:
        await until(check)
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_check_that_fails_in_an_unknown_way_turns_the_worker_unready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The task ended, nobody noticed, and /ready said for ever what it had said last."""
    monkeypatch.setattr(agent_module, "CHECK_EVERY_S", 0.0)

    async def scenario(agent: Agent, engine: FakeEngine, _: httpx.AsyncClient) -> None:
        faults = iter([ZeroDivisionError("a"), ZeroDivisionError("a"), KeyError("b")])
        checked = 0

        async def healthy() -> bool:
            nonlocal checked
            checked += 1
            if (fault := next(faults, None)) is not None:
                raise fault
            return True

        engine.healthy = healthy  # type: ignore[attr-defined]
        assert agent.ready()
        await beside(agent._check_for_ever(), lambda: not agent.ready())
        await beside(agent._check_for_ever(), lambda: checked > 3 and agent.ready())

    play(scenario, monkeypatch)
    said = capsys.readouterr().err.splitlines()
    assert said == ["AgentFault: checking the engine: ZeroDivisionError: a", "AgentFault: checking the engine: KeyError: 'b'"]


def test_the_keeper_of_adapters_begins_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(agent_module, "CHECK_EVERY_S", 0.0)

    async def scenario(agent: Agent, _: FakeEngine, __: httpx.AsyncClient) -> None:
        runs = 0

        async def run() -> None:
            nonlocal runs
            runs += 1
            if runs < 3:
                raise RuntimeError("odd")
            await asyncio.Event().wait()

        agent._adapters.run = run  # type: ignore[method-assign]
        agent._engine_answers.set()
        await beside(agent._keep_adapters(), lambda: runs == 3)

    play(scenario, monkeypatch)
    assert capsys.readouterr().err == "AgentFault: keeping adapters: RuntimeError: odd\n"


def test_a_look_that_fails_in_an_unknown_way_ends_no_drain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The drain's task ended by it, and SIGTERM cut every stream at once; the hook's caller got a 500."""

    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        engine.held, looks = Load(0, 0, 0), 0

        async def load() -> Load:
            nonlocal looks
            looks += 1
            if looks % 2:
                raise ZeroDivisionError("a")
            return Load(1, 0, 0) if looks < 10 else Load(0, 0, 0)

        engine.load = load  # type: ignore[method-assign]
        hook = asyncio.create_task(http.get("/drain"))
        await until(lambda: looks > 3)
        agent.ask_to_stop()
        await until(agent._stop.is_set)
        assert looks >= 10, "a stream was cut"
        assert (await hook).json()["drained"] is True

    play(scenario, monkeypatch)
    assert capsys.readouterr().err == "AgentFault: looking for what is left: ZeroDivisionError: a\n"


@pytest.mark.parametrize("value", ["e", "1e999", "--"])
def test_a_gauge_that_is_no_number_says_nothing(value: str):
    assert parse_load(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 1\n") == Load(None, 1, None)


@pytest.mark.parametrize(
    ("code", "how", "exit_code"),
    [
        (3, "exit code 3", 1),
        (2, "exit code 2", 2),
        (-9, "killed by SIGKILL", 1),
        (-40, "killed by signal 40", 1),  # a real-time signal has no name: asking for it ended the agent with a traceback
    ],
)
def test_however_an_engine_ends_the_cause_is_told(monkeypatch: pytest.MonkeyPatch, code: int, how: str, exit_code: int):
    async def scenario(agent: Agent, _: FakeEngine, __: httpx.AsyncClient) -> None:
        died = agent._death(EngineProcess(EngineCommand(("true",))), code)
        assert (str(died), died.exit_code) == (f"torch engine ended ({how})", exit_code)
        assert (agent.state()["phase"], agent.live()) == ("Failed", False)

    play(scenario, monkeypatch)


@pytest.mark.parametrize("what", ["not-executable", "a-folder", "kv_events", "kv_replay"])
def test_an_engine_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str):
    """It ended the agent with a traceback."""
    binary = tmp_path / "vllm"
    if what == "a-folder":
        binary.mkdir()
    else:
        binary.write_text("#!/bin/sh\n")
    monkeypatch.setenv("FLEET_VLLM_BIN", str(binary))

    async def scenario(agent: Agent, _: FakeEngine, __: httpx.AsyncClient) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports = {"kv_events": 0, "kv_replay": 0} | ({what: taken.getsockname()[1]} if what.startswith("kv_") else {})
            agent._config = msgspec.structs.replace(agent._config, ports=Ports(**ports))
            with pytest.raises(ConfigError, match=r"engine vllm cannot be started: .*(vllm|port|bind)"):
                await agent._start_engine(agent._place(tmp_path, ""))
        if agent._forwarder is not None:
            agent._forwarder.close()
        if agent._replays is not None:
            await agent._replays.close()

    play(scenario, monkeypatch, engine="vllm")


def test_requests_that_ended_are_counted_over_their_reasons():
    said = 'vllm:request_success_total{finished_reason="length"} 3.0\nvllm:request_success_total{finished_reason="abort"} 1.0\n'
    assert parse_load(said) == Load(None, None, None, 4)


@pytest.mark.parametrize(("said", "share"), [("0.0", 0.25), ("1e400", float("inf")), ("NaN", 0.25), ("-", None)])
def test_what_vllms_cache_holds_is_what_its_fullest_rank_says(said: str, share: float | None):
    told = f'vllm:kv_cache_usage_perc{{engine="0"}} 0.25\nvllm:kv_cache_usage_perc{{engine="1"}} {said}\n'
    assert parse_load(told).kv_share == share


@pytest.mark.parametrize(("engine_type", "env", "ready"), [("vllm", "0.01", False), ("vllm", "", True), ("torch", "0.01", True)])
def test_a_vllm_whose_requests_do_not_move_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine_type: str, env: str, ready: bool
):
    """Its /health is green as long as its processes live: a worker whose engine core hung stayed ready for ever."""
    monkeypatch.setattr(agent_module, "CHECK_EVERY_S", 0.02)
    monkeypatch.setenv(STEP_TIMEOUT_ENV, env)

    async def scenario(agent: Agent, engine: FakeEngine, _: httpx.AsyncClient) -> None:
        looks = 0

        async def healthy() -> bool:
            nonlocal looks
            looks += 1
            return True

        engine.healthy = healthy  # type: ignore[attr-defined]
        engine.held = Load(1, 0, None, moved=(5.0, 0.1), open=1)
        checking = asyncio.create_task(agent._check_for_ever())
        async with asyncio.timeout(10.0):
            while looks < 4:  # noqa: ASYNC110 - real seconds are what it counts
                await asyncio.sleep(0.01)
            assert agent.ready() is ready
            engine.held = Load(1, 0, None, moved=(6.0, 0.1), open=1)
            while not agent.ready():
                engine.held = Load(0, 0, None, moved=(6.0, 0.1))
                await asyncio.sleep(0.01)
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)

    play(scenario, monkeypatch, engine=engine_type)
    said = f"EngineStuck: requests run, and nothing of them moves; {STEP_TIMEOUT_ENV} allows {env} s\n"
    assert capsys.readouterr().err == ("" if ready else said)


@pytest.mark.parametrize(
    ("more", "moved"),
    [("vllm:generation_tokens_total 7.0\n", (7.0, 0.25)), ("", None), ("vllm:generation_tokens_total -\n", None)],
)
def test_what_moves_in_vllm_is_its_tokens_and_its_cache(more: str, moved: tuple[float, ...] | None):
    assert parse_load(f"{more}vllm:kv_cache_usage_perc 0.25\n").moved == moved
    assert parse_load(more).moved is None


@pytest.mark.parametrize(
    ("said", "found"),
    [('{"server_load": 3}', 3), ('{"server_load": "x"}', None), ("{}", None), ("[]", None), ("{", None), (None, None)],
)
@pytest.mark.parametrize(
    ("engine", "data", "asked"), [("vllm", 1, True), ("vllm", 2, False), ("torch", 1, False)], ids=["vllm", "ranks", "torch"]
)
def test_vllm_is_asked_for_its_open_requests(said: str | None, found: int | None, engine: EngineType, data: int, asked: bool):
    """Not one of several servers: what each says in turn would be requests that come and go."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text="vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n")
        assert (request.url.path, asked) == ("/load", True)
        return httpx.Response(404) if said is None else httpx.Response(200, text=said)

    async def scenario() -> None:
        agent = Agent(config(engine=engine, parallel=Parallel(data=data)), Identity("p", "u", "127.0.0.1"))
        agent._scratch.cleanup()
        client = agent._client
        await client._http.aclose()
        client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://engine")
        assert await client.load() == Load(0, 0, None, open=found if asked else None)
        await client.close()

    asyncio.run(scenario())


def test_a_request_that_opens_or_ends_is_no_idleness(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, engine: FakeEngine, _: httpx.AsyncClient) -> None:
        for opened, busy in ((0, True), (0, False), (1, True), (1, False), (None, False), (1, False), (0, True)):
            engine.held = Load(0, 0, None, open=opened)
            agent._busy_at = -1.0
            await agent._observe()
            assert (agent._busy_at > 0) is busy, opened

    play(scenario, monkeypatch, engine="vllm")


@pytest.mark.parametrize("how", ["drips", "floods"])
def test_an_engine_whose_answer_has_no_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, how: str):
    """httpx's timeout is for each piece: the check of a dripping engine came to no end, and /ready stayed as it was."""
    monkeypatch.setattr(client_module, "HEALTH_TIMEOUT_S", 0.1)
    writers: list[asyncio.StreamWriter] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            while not writer.is_closing():
                writer.write(b"x" * (1 if how == "drips" else 65_536))
                await writer.drain()
                await asyncio.sleep(0.01 if how == "drips" else 0)

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            async with asyncio.timeout(5):
                assert not await client.healthy()
                assert await client.metrics() is None
        finally:
            await client.close()
            server.close()
            for writer in writers:
                writer.transport.abort()
            await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    asyncio.run(main())


def test_a_check_asks_its_questions_at_once(monkeypatch: pytest.MonkeyPatch):
    """One after the other, each answer waited for the one before: on a busy machine a check took three times as long
    as an answer, and a dead engine was noticed so much later."""
    asked: set[str] = set()
    all_asked = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.add(request.url.path)
        if len(asked) == 3:
            all_asked.set()
        async with asyncio.timeout(2.0):
            await all_asked.wait()
        text = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
        return httpx.Response(200, json={"server_load": 4}) if request.url.path == "/load" else httpx.Response(200, text=text)

    async def scenario(agent: Agent, _: FakeEngine, __: httpx.AsyncClient) -> None:
        client = EngineClient("http://engine", counts_open=True)
        await client._http.aclose()
        client._http = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))
        agent._client = client
        assert await agent._checked()
        assert asked == {"/health", "/metrics", "/load"}
        assert (agent._load.running, agent._load.waiting, agent._load.open) == (2, 1, 4)
        await client.close()

    play(scenario, monkeypatch, engine="vllm")

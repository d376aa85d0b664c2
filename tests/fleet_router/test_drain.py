"""A router that is told to go: it waits for its streams as long as it may, and who is cut is told why."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import socket
from typing import Any

import msgspec
import pytest

from fleet_router.__main__ import arguments
from fleet_router.process import DRAIN_STEP_S
from fleet_router.upstream import Pool
from tests.fleet_router.fake_worker import stream
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

WAITS = msgspec.structs.replace(CONFIG, return_wait_s=10.0)

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "short"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("ends", [True, False], ids=["ends-in-time", "is-cut"])
def test_b14_streams_are_waited_for_and_those_that_are_cut_say_why(path: str, ends: bool):
    """Incident: every stream of more than 30 s was cut when a router was replaced, as if its worker had failed."""

    async def go(rig: Rig) -> None:
        going, over = asyncio.Event(), asyncio.Event()

        async def slow(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a"], end=False)
            going.set()
            await over.wait()
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return True

        rig.decode[0].behave = slow
        router, later_s, now = rig.router, 0.0, rig.router._clock()
        router._settings = dataclasses.replace(router._settings, drain_s=235.0)
        router._clock = lambda: now + later_s
        posted = asyncio.create_task(rig.post({"model": "m", "stream": True, **BODIES[path]}, path))
        await going.wait()
        await until(lambda: any(c.flow is not None and c.flow.started for c in rig.connections))
        rig.context.draining = True
        draining = asyncio.create_task(router._drain())
        await asyncio.sleep(0)  # it has begun
        later_s = 234.0
        await asyncio.sleep(3 * DRAIN_STEP_S)
        assert not posted.done()
        if ends:
            over.set()
        else:
            later_s = 236.0
        _, got = await posted
        await draining
        if path in ("/v1/completions", "/v1/chat/completions"):  # the other dialects have codes of their own
            assert (b'"code":"shutting_down"' in got) is not ends
        assert (b"the router is shutting down" in got) is not ends
        assert got.endswith(b"0\r\n\r\n")
        over.set()

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("argv", "env", "found"),
    [
        ([], None, 30.0),
        ([], "235", 235.0),
        (["--drain-timeout", "5"], "235", 5.0),
        ([], "soon", None),
        (["--drain-timeout=-1"], None, None),
    ],
)
def test_how_long_a_router_drains(argv: list[str], env: str | None, found: float | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLEET_DRAIN_TIMEOUT_S", raising=False)
    if env is not None:
        monkeypatch.setenv("FLEET_DRAIN_TIMEOUT_S", env)
    if found is None:
        with pytest.raises(SystemExit):
            arguments(["--follow", "dir:/x", *argv])
    else:
        assert arguments(["--follow", "dir:/x", *argv]).drain_timeout == found


@pytest.mark.parametrize(
    ("bind", "has_ipv6", "host"),
    [(None, True, "::"), (None, False, "0.0.0.0"), ("127.0.0.2", True, "127.0.0.2"), ("127.0.0.2", False, "127.0.0.2")],
)
def test_where_a_router_listens(bind: str | None, has_ipv6: bool, host: str, monkeypatch: pytest.MonkeyPatch):
    """In a cluster whose pods have IPv6 addresses no probe reached it, and no fleet became Ready. See test_families.py."""

    class Kernel(socket.socket):
        def __init__(self, family: int, kind: int) -> None:
            if family == socket.AF_INET6 and not has_ipv6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(socket.AF_INET, kind)

        def bind(self, _address: object) -> None:
            return

    monkeypatch.setattr("fleet_router.__main__.socket.socket", Kernel)
    monkeypatch.delenv("FLEET_BIND_HOST", raising=False)
    if bind is not None:
        monkeypatch.setenv("FLEET_BIND_HOST", bind)
    assert arguments(["--follow", "dir:/x"]).host == host


@pytest.mark.parametrize(("address", "said"), [("10.0.0.1", b"10.0.0.1:8000"), ("fd00::1", b"[fd00::1]:8000")])
def test_what_a_worker_is_called_in_its_requests(address: str, said: bytes):
    assert Pool(address, 8000).authority == said


@pytest.mark.parametrize("option", ["--port", "--admin-port", "--ext-proc-port", "--gossip-port"])
@pytest.mark.parametrize("given", ["65536", "99999", "-1", "http"])
def test_a_port_that_is_none_is_refused(option: str, given: str, capsys: pytest.CaptureFixture[str]):
    """--port 99999 listened on 34463, and said 99999."""
    with pytest.raises(SystemExit) as ended:
        arguments(["--follow", "dir:/x", f"{option}={given}"])
    assert ended.value.code == 2
    assert f"argument {option}: '{given}' is not a port, 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "found"), [("8080", 8080), ("0", 0), ("a", None)])
def test_the_port_of_the_environment(given: str, found: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLEET_PORT", given)
    if found is None:
        with pytest.raises(SystemExit):
            arguments(["--follow", "dir:/x"])
    else:
        assert arguments(["--follow", "dir:/x"]).port == found


def test_who_waits_for_a_worker_to_come_back_does_so_while_the_router_drains():
    """Incident: a router was replaced in the seconds in which the only decode worker was away, and refused what it held for it,
    with minutes of its drain left."""

    async def go(rig: Rig) -> None:
        rig.apply(rig.prefill, [], WAITS)  # its pod is not ready
        clients = [await rig.connect() for _ in range(2)]
        for number, (_, writer, _) in enumerate(clients):
            rig.context.draining = number == 1  # the second one came on a connection that stood
            if rig.context.draining:
                rig.context.holding.stop()
            writer.write(http(ask(prompt="short")))
            await until(lambda number=number: len(rig.context.holding) == number + 1)
        rig.apply(rig.prefill, rig.decode, WAITS)
        for reader, _, _ in clients:
            status, headers, _ = await answer_of(reader)
            assert (status, headers["connection"]) == (200, "close")

    run(go, config=WAITS)


def test_what_waits_when_the_drain_is_over_begins_nowhere(monkeypatch: pytest.MonkeyPatch):
    """Who was cut first gave its slot to one that waited, which was sent to a worker for nothing and cut then."""

    async def go(rig: Rig) -> None:
        going = asyncio.Event()

        async def slow(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a"], end=False)
            going.set()
            await asyncio.sleep(60)
            return True

        assert [status for status, _ in await asyncio.gather(*(rig.post(ask(prompt="short")) for _ in range(2)))] == [200, 200]
        rig.apply([], rig.decode, msgspec.structs.replace(CONFIG, worker_slots=1))
        rig.decode[0].seen.clear()
        rig.decode[0].behave = slow
        rig.router._settings = dataclasses.replace(rig.router._settings, drain_s=0.0)
        posted = [asyncio.create_task(rig.post(ask(prompt="short", stream=True)))]
        await going.wait()
        posted += [asyncio.create_task(rig.post(ask(prompt="short"))) for _ in range(3)]
        await until(lambda: rig.context.desk.gate.waiting == 3)
        rig.context.draining = True
        order = sorted(rig.connections, key=lambda one: one.flow is None or not one.flow.started)
        monkeypatch.setattr(rig.router, "_connections", dict.fromkeys(order))
        await rig.router._drain()
        found = await asyncio.gather(*posted)
        assert [status for status, _ in found] == [200, 503, 503, 503]
        assert all(b'"code":"shutting_down"' in body for _, body in found)
        assert len(rig.decode[0].seen) == 1

    run(go, prefill=0)

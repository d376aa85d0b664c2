"""Agents of one worker find each other, prove that they belong together, and notice when one is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet_worker.agent import gathering, group
from fleet_worker.agent.command import Place, vllm_command
from fleet_worker.agent.errors import ConfigError
from fleet_worker.agent.gathering import Join, Line, LineError, Whole, addresses_of, proof
from fleet_worker.agent.group import Leader, Membership
from fleet_worker.agent.identity import read_identity
from fleet_worker.config import (
    CONFIG_ENV,
    GROUP_UID_ENV,
    HOSTS_ENV,
    LEADER_ENV,
    MEMBER_ENV,
    POD_IP_ENV,
    POD_NAME_ENV,
    POD_UID_ENV,
    Parallel,
    WorkerConfig,
    encode,
)  # fmt: skip

HOST, NAME, UID = "127.0.0.1", "t-decode-aaaaaaaa-0-0.f-workers.ml", "uid-of-the-leader"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


async def until(holds: Callable[[], bool]) -> None:
    """The test as a whole has a bound."""
    while not holds():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


def quiet(_: str) -> None:
    """Nobody reads /state."""


class World:
    """A leader, and whoever wants to join."""

    def __init__(self, size: int) -> None:
        self.port = free_port()
        self.left: list[int] = []
        self.leader = Leader(UID, size, HOST, self.port, self.left.append)

    def member(self, place: int, uid: str = UID) -> Membership:
        return Membership(uid, place, NAME, self.port)


def play(size: int, scenario: Callable[[World], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.9.9.9 other.f-workers.ml\n{HOST} {NAME}\n")
    monkeypatch.setenv(HOSTS_ENV, str(hosts))

    async def whole() -> None:
        async with asyncio.timeout(20):
            world = World(size)
            await world.leader.open()
            try:
                await scenario(world)
            finally:
                await world.leader.close()

    asyncio.run(whole())


def test_a_group_is_whole_when_all_have_joined_and_not_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        first, second = world.member(1), world.member(2)
        leading = asyncio.create_task(world.leader.whole(quiet))
        joining = asyncio.create_task(first.whole(quiet))
        await until(lambda: world.leader.missing == [2])
        assert not leading.done()
        assert not joining.done()
        assert await second.whole(quiet) == HOST
        assert (await joining, await leading) == (HOST, HOST)
        await asyncio.gather(first.close(), second.close())

    play(3, scenario, monkeypatch, tmp_path)


def test_who_is_gone_after_that_takes_the_group_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        first, second = world.member(1), world.member(2)
        await asyncio.gather(first.whole(quiet), second.whole(quiet))
        await first.close()
        assert await world.leader.lost == "pod 1 of this worker is lost: the connection ended"
        await world.leader.close()
        assert "the leader of this worker is lost" in await second.lost
        await second.close()

    play(3, scenario, monkeypatch, tmp_path)


def test_who_goes_before_that_is_waited_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        async with dialled(world) as (reader, writer):
            await handshake(Line(reader, writer), 1, UID)
            await until(lambda: world.leader.missing == [2])
        await until(lambda: world.leader.missing == [1, 2])
        assert not world.leader.lost.done()

    play(3, scenario, monkeypatch, tmp_path)


@asynccontextmanager
async def dialled(world: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of somebody."""
    reader, writer = await asyncio.open_connection(HOST, world.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def handshake(line: Line, member: int, uid: str) -> gathering.Message:
    challenge = await line.hear()
    assert isinstance(challenge, gathering.Challenge)
    line.say(Join(member, "n", proof(uid, "join", challenge.nonce, "n", member)))
    return await line.hear()


@pytest.mark.parametrize(
    ("member", "uid", "reason"),
    [(1, "uid-of-an-earlier-life", "another life"), (0, UID, "no such place"), (7, UID, "no such place")],
)
def test_strangers_are_refused(member: int, uid: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        async with dialled(world) as (reader, writer):
            answer = await handshake(Line(reader, writer), member, uid)
            assert isinstance(answer, gathering.Refused)
            assert reason in answer.reason
            assert world.leader.missing == [1]

    play(2, scenario, monkeypatch, tmp_path)


def test_strangers_do_not_fill_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A line for each try of whoever reaches the port."""

    async def scenario(world: World) -> None:
        for _ in range(9):
            async with dialled(world) as (reader, writer):
                assert isinstance(await handshake(Line(reader, writer), 1, "another-uid"), gathering.Refused)

    play(2, scenario, monkeypatch, tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("GroupStranger: ")]
    assert [line.rpartition(", ")[2] for line in lines] == ["1 so far", "2 so far", "4 so far", "8 so far"]


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[" * 10_000, b'{"type":"join"}\n', b"\xff\xfe\n"])
def test_garbage_ends_its_own_connection_only(garbage: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        async with dialled(world) as (reader, writer):
            writer.write(garbage)
            left = await reader.read()
            assert left.count(b"\n") <= 2  # the challenge, and a refusal
        member = world.member(1)
        assert await member.whole(quiet) == HOST
        await member.close()

    play(2, scenario, monkeypatch, tmp_path)


def test_a_silent_peer_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        async with dialled(world) as (reader, writer):
            line = Line(reader, writer)
            assert isinstance(await handshake(line, 1, UID), gathering.Welcome)
            assert isinstance(await line.hear(), Whole)
            assert await world.leader.lost == "pod 1 of this worker is lost: silent for 0.05 s"

    monkeypatch.setattr(group.Line.hear, "__defaults__", (0.05,))
    play(2, scenario, monkeypatch, tmp_path)


def test_who_comes_when_the_group_is_whole_is_too_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        member = world.member(1)
        await member.whole(quiet)
        async with dialled(world) as (reader, writer):
            answer = await handshake(Line(reader, writer), 1, UID)
            assert answer == gathering.Refused("the group is whole")
        await member.close()

    play(2, scenario, monkeypatch, tmp_path)


def test_a_follower_that_is_told_to_go_waits_until_the_leader_has_drained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        member = world.member(1)
        await member.whole(quiet)
        member.leave()
        await until(lambda: bool(world.left))
        assert world.left == [1]
        assert not member.released.is_set()
        world.leader.release()
        await member.released.wait()
        assert not member.lost.done()
        await member.close()

    play(2, scenario, monkeypatch, tmp_path)


def test_a_leader_that_nobody_knows_yet_is_looked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        hosts = tmp_path / "hosts"
        known = hosts.read_text()
        hosts.write_text("")
        notes: list[str] = []
        member = world.member(1)
        joining = asyncio.create_task(member.whole(notes.append))
        await until(lambda: bool(notes))
        assert notes[0] == f"joining {NAME}: nobody knows its address yet"
        hosts.write_text(known)
        assert await joining == HOST
        await member.close()

    monkeypatch.setattr(group, "RETRY_S", (0.001, 0.001))
    play(2, scenario, monkeypatch, tmp_path)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_of_a_leader_with_addresses_of_both_families_the_one_where_it_listens_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Where the fleet's Service has both families, the resolver says the IPv6 address first, and leaders listen at their pod's
    first one: no worker over several nodes ever began."""

    async def scenario(world: World) -> None:
        monkeypatch.delenv(HOSTS_ENV)
        loop = asyncio.get_running_loop()
        known = loop.getaddrinfo

        async def look_up(host: str, *more: Any, **also: Any) -> Any:
            if host != NAME:
                return await known(host, *more, **also)
            return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
                    (socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOST, 0))]  # fmt: skip

        with monkeypatch.context() as patch:
            patch.setattr(loop, "getaddrinfo", look_up)
            member = world.member(1)
            assert await asyncio.wait_for(member.whole(quiet), 2.0) == HOST
        await member.close()

    monkeypatch.setattr(group, "RETRY_S", (0.01, 0.01))
    play(2, scenario, monkeypatch, tmp_path)


def test_without_a_hosts_file_the_resolver_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(HOSTS_ENV, raising=False)
    assert set(asyncio.run(addresses_of("localhost"))) & {"127.0.0.1", "::1"}
    assert asyncio.run(addresses_of("no.such.name.invalid")) == []


@pytest.mark.parametrize("name", ["a" * 64 + ".group", "a..b", "\udcff"])
def test_a_name_that_the_resolver_cannot_ask_for_is_one_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, name: str):
    """A part of more than 63 characters ended the follower with a traceback."""
    monkeypatch.delenv(HOSTS_ENV, raising=False)
    assert asyncio.run(addresses_of(name)) == []


@pytest.mark.parametrize("hosts", [b"\xff\n127.0.0.9 leader\n", b"127.0.0.9 leader"])
def test_a_hosts_file_is_read_whatever_else_is_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hosts: bytes):
    (tmp_path / "hosts").write_bytes(hosts)
    monkeypatch.setenv(HOSTS_ENV, str(tmp_path / "hosts"))
    assert asyncio.run(addresses_of("leader")) == ["127.0.0.9"]


def test_a_line_that_ends_in_the_middle_is_an_error():
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b'{"type":"beat"')
        reader.feed_eof()
        with pytest.raises(LineError, match="connection ended"):
            await Line(reader, None).hear()  # type: ignore[arg-type]

    asyncio.run(scenario())


# -- who a pod is, and what it starts ---------------------------------------------------------------------------------
def config(**changes: object) -> WorkerConfig:
    base = WorkerConfig(
        fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model="/m", served_name="tiny",
        engine="vllm", nodes=2, parallel=Parallel(tensor=4),
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def environment(**changes: str) -> dict[str, str]:
    own = {CONFIG_ENV: encode(config()), POD_NAME_ENV: "p", POD_UID_ENV: "mine", POD_IP_ENV: "10.0.0.1"}
    return {**own, MEMBER_ENV: "1", LEADER_ENV: NAME, GROUP_UID_ENV: UID, **changes}


def test_a_pod_knows_its_place():
    _, follower = read_identity(environment())
    assert (follower.member, follower.leader, follower.group_uid) == (1, NAME, UID)
    _, leader = read_identity(environment(**{MEMBER_ENV: "0", GROUP_UID_ENV: ""}))
    assert (leader.member, leader.group_uid) == (0, "mine")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({MEMBER_ENV: ""}, f"{MEMBER_ENV}: not set"),
        ({MEMBER_ENV: "2"}, "'2' is no place in a group of 2"),
        ({MEMBER_ENV: "-1"}, "is no place"),
        ({LEADER_ENV: ""}, f"{LEADER_ENV}: not set"),
        ({GROUP_UID_ENV: ""}, f"{GROUP_UID_ENV}: not set"),
    ],
)
def test_a_pod_without_a_place_says_what_is_missing(changes: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        read_identity(environment(**changes))


def test_vllm_is_told_its_node_and_only_the_leader_serves():
    for member in (0, 1):
        place = Place("/m", f"10.0.0.{member + 1}", "/vllm", "/s", has_gpu=True, member=member, master="10.0.0.1")
        command = vllm_command(config(), place)
        at = command.argv.index("--nnodes")
        expected = ("--nnodes", "2", "--node-rank", str(member), "--master-addr", "10.0.0.1", "--master-port", "29501")
        assert command.argv[at : at + 8] == expected
        assert ("--headless" in command.argv) == (member == 1)
        assert command.env["VLLM_HOST_IP"] == place.pod_ip
    alone = vllm_command(config(nodes=1), Place("/m", "10.0.0.1", "/vllm", "/s"))
    assert "--nnodes" not in alone.argv
    assert "VLLM_HOST_IP" not in alone.env


@pytest.mark.parametrize("said", [b'{"type":"challenge","nonce":"\xff"}\n', b"\xff\n", b"[" * 1_000 + b"\n", b"\n"])
def test_what_is_no_message_is_an_error_of_its_line(said: bytes):
    """Incident: bytes that are no UTF-8 were an error that nobody expected."""

    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(said)
        with pytest.raises(LineError, match="not understood"):
            await Line(reader, None).hear()  # type: ignore[arg-type]

    asyncio.run(scenario())

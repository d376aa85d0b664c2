"""Gossip's sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from fleet_router import process
from fleet_router.gossip import link as linking
from fleet_router.gossip.link import GossipError, GossipSettings, Link
from fleet_router.gossip.message import Message, parse_keys, seal
from fleet_router.gossip.share import Share
from fleet_router.process import Router, Settings
from fleet_wire.peerkey import GOSSIP, derived
from tests.fleet_router.rig import until


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".y"])
def test_a_peer_whose_name_is_none_ends_nothing(name: str, tmp_path: Path):
    """It ended the router: such a name is no error of DNS."""
    key = tmp_path / "key"
    key.write_text("k" * 32)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    async def go() -> None:
        settings = GossipSettings(key, "127.0.0.1", port, ((name, 1), ("127.0.0.1", 1)))
        link = Link(settings, Share(1, 0.0), asyncio.get_running_loop().time, lambda **_: None)
        running = asyncio.create_task(link.run())
        await until(lambda: bool(link.counts.sent) or running.done())
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(go())


def test_a_peer_whose_name_cannot_be_looked_up_for_a_while_is_spoken_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was dropped where another name was found: its routers' load counted no more, and quotas held for each by itself."""
    key, gone = tmp_path / "key", set[str]()
    key.write_text("k" * 32)
    monkeypatch.setattr(linking, "RESOLVE_S", 0.01)

    async def look_up(_: object, name: str, port: int, **__: object) -> list[object]:
        if name in gone:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (f"127.0.0.{len(name)}", port))]

    async def go() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
        settings = GossipSettings(key, "127.0.0.1", port, (("of-a", 9), ("of-bb", 9)))
        link = Link(settings, Share(1, 0.0), asyncio.get_running_loop().time, lambda **_: None)
        running = asyncio.create_task(link.run())
        both = [("127.0.0.4", 9), ("127.0.0.5", 9)]
        await until(lambda: [list(targets) for _, targets in link._sockets] == [both])
        gone.add("of-a")
        await asyncio.sleep(0.1)
        assert [list(targets) for _, targets in link._sockets] == [both]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # uvloop's look-up cannot be replaced
        runner.run(go())


def test_gossip_begins_once_its_port_is_free_also_beside_other_processes(tmp_path: Path):
    """It ended the router: the socket for its siblings, which had been opened before the port was found taken, was listened to
    again although it was closed."""
    key = tmp_path / "key"
    key.write_text("k" * 32)
    taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    taken.bind(("127.0.0.1", 0))
    settings = GossipSettings(key, "127.0.0.1", taken.getsockname()[1], unix=b"\0rb-%d" % taken.getsockname()[1])

    async def go() -> None:
        link = Link(settings, Share(1, 0.0), asyncio.get_running_loop().time, lambda **_: None)
        for _ in range(2):
            with pytest.raises(GossipError, match="AddressInUse"):
                await link.run()
        taken.close()
        running = asyncio.create_task(link.run())
        await asyncio.sleep(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sibling:
            sibling.sendto(b"x" * 20, settings.unix)
            await until(lambda: link.counts.received == 1 or running.done())
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(go())


def test_a_bug_in_gossip_ends_no_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing depends on gossip, and yet the process ended with its task."""
    key, said = tmp_path / "key", list[dict[str, object]]()
    key.write_text("k" * 32)
    monkeypatch.setattr(process, "GOSSIP_AGAIN_S", 0.0)

    async def go() -> None:
        router = Router(Settings("dir:/none", "127.0.0.1", 0, gossip=GossipSettings(key, unix=b"\0rb-bug-%d" % os.getpid())))
        monkeypatch.setattr(router._journal, "say", lambda event, **fields: said.append({"event": event, **fields}))
        monkeypatch.setattr(router._share, "speak", lambda *_: 1 / 0)
        assert router._link is not None
        running = asyncio.create_task(router._gossip(router._link))
        await until(lambda: len(said) > 1 or running.done())
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(go())
    assert said[0]["event"] == "gossip-failed"
    assert said[0]["problem"] == "ZeroDivisionError"
    assert str(said[0]["at"]).startswith("['test_link.py:")


def test_a_bug_in_gossip_keeps_no_router_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a group of tasks that fails while it is cancelled nothing but the failure is heard: gossip would have begun anew."""

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError from None

    async def go() -> None:
        router = Router(Settings("dir:/none", "127.0.0.1", 0, gossip=GossipSettings(tmp_path / "key")))
        assert router._link is not None
        monkeypatch.setattr(router._link, "run", fails_when_cancelled)
        running = asyncio.create_task(router._gossip(router._link))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running}, timeout=2)
        assert running.cancelled()

    asyncio.run(go())


USED = b"a" * 48


@pytest.mark.parametrize(
    ("raw", "taken"),
    [
        (b"b" * 48, True),
        (b"b" * 48 + b"\n", True),
        (b"b" * 64, True),
        (b"b" * 40, False),
        (b"b" * 40 + b"\n", True),
        (b"b" * 48 + b"\n" + b"c" * 40, False),
        (b"b" * 20, False),
        (b"", False),
        (b"\n", False),
        (b"b" * 70_000, False),
        (b"b" * 48 + b"\n" + b"c" * 65_000 + b"\n" + b"d" * 1_000, False),
        (None, False),
    ],
)
def test_half_of_a_key_is_never_taken(tmp_path: Path, raw: bytes | None, taken: bool):
    """40 bytes of one of 48 signed all that this router said, and nobody heard it; one that was gone was logged every 2 s."""
    file, said = tmp_path / "key", list[str]()
    file.write_bytes(USED)
    link = Link(GossipSettings(file), Share(1, 0.0), lambda: 0.0, lambda **fields: said.append(str(fields)))
    link._read_key()
    used = link._keys
    assert "fleet_router_gossip_key_outdated 0" in link.lines()
    file.unlink()
    if raw is not None:
        file.write_bytes(raw)
    for _ in range(3):
        link._read_key()
    assert (link._keys != used) is taken
    assert len(said) == (not taken)
    assert f"fleet_router_gossip_key_outdated {int(not taken)}" in link.lines()
    file.write_bytes(USED + b"\n")
    for _ in range(2):
        link._read_key()
    assert link._keys == used
    assert "fleet_router_gossip_key_outdated 0" in link.lines()


def test_a_key_that_is_being_written_is_waited_for(tmp_path: Path):
    """As long as the one in use, and yet half of the next: it was taken at once."""
    file = tmp_path / "key"
    file.write_bytes(USED)
    link = Link(GossipSettings(file), Share(1, 0.0), lambda: 0.0, lambda **_: None)
    link._read_key()
    used = link._keys
    for size in (48, 56, 64):
        file.write_bytes(b"b" * size)
        link._read_key()
        assert link._keys == used
    link._read_key()
    assert link._keys == parse_keys(b"b" * 64)


@pytest.mark.parametrize("ahead_s", [120.0, -120.0])
def test_of_a_router_that_is_refused_for_its_clock_the_log_says_by_how_much(tmp_path: Path, ahead_s: float):
    """Quotas held for each router by itself, and nothing said why: the alert spoke of keys."""
    key, said = tmp_path / "key", list[dict[str, object]]()
    key.write_text("k" * 32)
    link = Link(GossipSettings(key), Share(1, 0.0), time.monotonic, lambda **fields: said.append(fields))
    link._read_key()
    stamp_ms = int((time.time() + ahead_s) * 1000)
    for number in (1, 2):
        link.take(seal(Message(1, 2, number, stamp_ms, 0), parse_keys(b"k" * 32)[0]))
    assert link.counts.refused == {"clock": 2}
    assert said == [{"event": "gossip-refused", "reason": "clock", "ahead_s": pytest.approx(ahead_s, abs=5)}]


# -- the key that all pods of a fleet share ------------------------------------------------------------------------------
class Pods:
    """Routers on loopback addresses of their own, each with its file of the fleet's key."""

    def __init__(self, folder: Path, count: int, port: int, scopes: str = "same") -> None:
        own = 64 + os.getpid() % 64  # the suites of the plain and of the compiled router may run at once
        self.hosts = [f"127.{own}.{port % 200 + 1}.{n + 1}" for n in range(count)]
        self.files = [folder / f"{n}.key" for n in range(count)]
        scope = {"same": ["ns/f"] * count, "others": [f"ns/f{n}" for n in range(count)]}[scopes]
        clock = asyncio.get_running_loop().time
        self.links = [
            Link(
                GossipSettings(None, host, port, first_port=port, shared=file, scope=of),
                Share(n + 1, 0.0),
                clock,
                lambda **_: None,
            )
            for n, (host, file, of) in enumerate(zip(self.hosts, self.files, scope, strict=True))
        ]

    def tell(self) -> None:
        """The endpoints document names all."""
        for link in self.links:
            link.follow(tuple(self.hosts))

    def write(self, *keys: str) -> None:
        for file in self.files:
            file.write_text("".join(f"{key * 64}\n" for key in keys))

    def met(self) -> bool:
        return all(len(link._share.peers) == len(self.links) - 1 for link in self.links)

    def refused(self) -> int:
        """By signature; our own datagrams come back, which is nothing."""
        return sum(link.counts.refused["signature"] for link in self.links)


def with_pods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int, go: Callable[[Pods], Awaitable[None]], **more: str):
    monkeypatch.setattr(linking, "KEY_POLL_S", 0.05)
    monkeypatch.setattr(linking, "TICK_S", 0.01)
    monkeypatch.setattr(linking, "RESOLVE_S", 0.05)

    async def whole() -> None:
        pods = Pods(tmp_path, 2, port, **more)
        running = [asyncio.create_task(link.run()) for link in pods.links]
        try:
            await go(pods)
            assert not any(task.done() for task in running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(whole())


def test_routers_wait_for_the_fleets_key_and_for_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def go(pods: Pods) -> None:
        pods.tell()
        await asyncio.sleep(0.2)
        assert not any(link._sockets or link.counts.sent for link in pods.links), "no key, no word, no port"
        for link in pods.links:
            link.follow(())
        pods.write("k")
        await asyncio.sleep(0.2)
        assert not any(link._sockets or link.counts.sent for link in pods.links), "one router alone has nothing open"
        pods.tell()
        await until(pods.met)
        assert pods.refused() == 0
        assert all("fleet_router_gossip_key_outdated 0" in link.lines() for link in pods.links)

    with_pods(monkeypatch, tmp_path, 18_901, go)


def test_the_fleets_key_is_changed_while_routers_gossip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def taken(link: Link, keys: int) -> bool:
        return len(link._keys) == keys and not link.key_outdated

    def heard_more(links: list[tuple[Link, int]]) -> bool:
        return all(link.counts.received > before for link, before in links)

    async def go(pods: Pods) -> None:
        pods.write("k")
        pods.tell()
        await until(pods.met)
        for step in ("kn", "nk", "n"):
            for file, link in zip(pods.files, pods.links, strict=True):
                file.write_text("".join(f"{key * 64}\n" for key in step))
                await until(partial(taken, link, len(step)))
                await until(partial(heard_more, [(one, one.counts.received) for one in pods.links]))
        assert pods.refused() == 0
        assert pods.met()

    with_pods(monkeypatch, tmp_path, 18_902, go)


def test_two_fleets_with_one_key_do_not_hear_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def go(pods: Pods) -> None:
        pods.write("k")
        pods.tell()
        await until(lambda: all(link.counts.refused["signature"] > 0 for link in pods.links))
        assert not any(len(link._share.peers) for link in pods.links)

    with_pods(monkeypatch, tmp_path, 18_903, go, scopes="others")


def test_processes_of_a_pod_hear_each_other_before_the_fleets_key_is_there(tmp_path: Path):
    """By a key of their own; another pod, which has not that one, is told nothing until the fleet's is there."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.write_text("o" * 64)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix:
        link = Link(GossipSettings(own, shared=shared, scope="ns/f"), Share(1, 0.0), lambda: 0.0, lambda **_: None)
        link._udp = udp
        link._read_key()
        assert (link._signs(unix), link._signs(udp), link._keys) == (parse_keys(b"o" * 64)[0], None, parse_keys(b"o" * 64))
        shared.write_text("s" * 64)
        link._read_key()
        (fleets,) = derived([b"s" * 64], GOSSIP, "ns/f")
        assert (link._signs(unix), link._signs(udp)) == (parse_keys(b"o" * 64)[0], fleets)
        assert set(link._keys) == {*parse_keys(b"o" * 64), fleets}


def test_a_shared_key_file_that_cannot_be_looked_at_is_told_and_ends_nothing(tmp_path: Path):
    """Only whose folder is not there, or has no such file, is waited for without a word."""
    said = list[str]()
    own = tmp_path / "own"
    own.write_text("o" * 64)
    for name, words in (("k" * 300, ["File name too long"]), ("none", []), ("none/key", []), ("own/key", ["Not a directory"])):
        settings = GossipSettings(own, shared=tmp_path / name)
        link = Link(settings, Share(1, 0.0), lambda: 0.0, lambda **f: said.append(f["problem"]))
        link._read_key()
        assert (said, link._keys) == (words, parse_keys(b"o" * 64))
        said.clear()

"""Sockets of gossip: datagrams in and out, a few rounds each 100 ms, the peers' addresses by DNS or by list."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

from fleet_router.gossip.message import DATAGRAM_BYTES, REASONS, Refused, of_lines, seal, unseal
from fleet_router.gossip.share import Share
from fleet_router.port import EVERY
from fleet_wire.address import authority
from fleet_wire.keyfile import KeyFile
from fleet_wire.peerkey import GOSSIP, derived

INTERVAL_S = 0.02
"""Between two rounds; with more than four peers longer, so that a process sends at most some 200 datagrams a second."""
PER_PEER_S = 0.005
RESOLVE_S = 2.0
KEY_POLL_S = 2.0
TICK_S = 0.25
READ_MOST = 64
"""Datagrams in one turn of the loop: others want to be served as well."""
MOST_TARGETS = 256

Address = tuple[str, int] | bytes
"""Of UDP, or the name of an abstract Unix socket."""


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """What the command line says."""

    key: Path | None = None
    """File with a key for gossip alone; read again when it changes. The processes of one pod may have one of their own."""
    host: str = "0.0.0.0"
    port: int = 0
    peers: tuple[tuple[str, int], ...] = ()
    """(name or address, port); all addresses of a name are peers, our own does no harm."""
    first_port: int = 0
    """UDP port of the first process of every router that the endpoints document names."""
    processes: int = 1
    """Of each of these."""
    unix: bytes = b""
    """Abstract socket of this process."""
    siblings: tuple[bytes, ...] = ()
    """Abstract sockets of the other processes behind the same port."""
    shared: Path | None = None
    """File with the key that all pods of the fleet share (fleet_wire.peerkey), where they were given none for gossip alone. It
    may come later: until then no other pod is spoken to."""
    scope: str = ""
    """NAMESPACE/FLEET, which goes into what is made of that key."""


class GossipError(Exception):
    """Gossip cannot begin: the key or the address is wrong."""


@dataclass(slots=True)
class Counts:
    """Datagrams."""

    sent: int = 0
    received: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class Link:
    """Gossip of one process. `log` gets fields for one line."""

    def __init__(self, settings: GossipSettings, share: Share, clock: Callable[[], float], log: Callable[..., None]) -> None:
        self._settings, self._share, self._clock, self._log = settings, share, clock, log
        self._keys: tuple[bytes, ...] = ()
        """All are heard."""
        self._own_keys: tuple[bytes, ...] = ()
        self._shared_keys: tuple[bytes, ...] = ()
        self._own = None if settings.key is None else KeyFile(settings.key)
        self._shared = None if settings.shared is None else KeyFile(settings.shared)
        self._sockets: list[tuple[socket.socket, Sequence[Address]]] = []
        self._udp: socket.socket | None = None
        self._routers: tuple[str, ...] = ()
        self.counts = Counts()

    async def run(self) -> None:
        """Open, then speak until cancelled; GossipError when it cannot begin. One that has the fleet's key alone waits for it,
        and for another pod that it could speak to."""
        self._read_key()
        while self._own is None and not (self._keys and self._routers):
            await asyncio.sleep(KEY_POLL_S)
            self._read_key()
        if not self._keys:
            raise GossipError(f"no usable key in {self._settings.key}")
        loop = asyncio.get_running_loop()
        try:
            self._open()
            for opened, _ in self._sockets:
                loop.add_reader(opened, self._readable, opened)
            async with asyncio.TaskGroup() as tasks:
                for task in (self._speak(), self._tick(), self._resolve()):
                    tasks.create_task(task)
        finally:
            for opened, _ in self._sockets:
                loop.remove_reader(opened)
                opened.close()
            self._sockets, self._udp = [], None

    def follow(self, routers: tuple[str, ...]) -> None:
        """Addresses of routers that the endpoints document names, besides those of the command line."""
        self._routers = routers

    def _open(self) -> None:
        wanted = self._settings
        try:
            if wanted.unix:
                self._sockets.append((_bound(socket.AF_UNIX, wanted.unix), list(wanted.siblings)))
            if wanted.port:
                family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
                self._udp = _bound(family, (wanted.host, wanted.port))
                self._sockets.append((self._udp, []))
        except OSError as error:
            raise GossipError(
                f"AddressInUse: gossip cannot bind {authority(wanted.host, wanted.port)}: {error.strerror}"
            ) from error

    # -- in ---------------------------------------------------------------------------------------------------------
    def _readable(self, opened: socket.socket) -> None:
        for _ in range(READ_MOST):
            try:
                data = opened.recv(DATAGRAM_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                continue  # an ICMP error that belongs to something we sent
            self.take(data)

    def take(self, data: bytes) -> None:
        """One datagram, from anybody."""
        self.counts.received += 1
        try:
            self._share.hear(unseal(data, self._keys, int(time.time() * 1000)), self._clock())
        except Refused as refused:
            self.counts.refused[refused.reason] += 1
            if self.counts.refused[refused.reason] == 1:
                more = {"ahead_s": refused.ahead_s} if refused.reason == "clock" else {}
                self._log(event="gossip-refused", reason=refused.reason, **more)

    # -- out --------------------------------------------------------------------------------------------------------
    async def _speak(self) -> None:
        while True:
            targets = sum(len(found) for _, found in self._sockets)
            await asyncio.sleep(max(INTERVAL_S, PER_PEER_S * targets))
            for message in self._share.speak(self._clock(), int(time.time() * 1000)):
                for opened, found in self._sockets:
                    key = self._signs(opened)
                    if key is None or not found:
                        continue
                    data = seal(message, key)
                    for address in found:
                        with contextlib.suppress(OSError):  # nobody there, or a full buffer: it is said again
                            opened.sendto(data, address)
                            self.counts.sent += 1

    async def _tick(self) -> None:
        looked_at = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            self._share.tick(now)
            if now - looked_at >= KEY_POLL_S:
                looked_at = now
                self._read_key()

    async def _resolve(self) -> None:
        """Addresses of the peers; the last ones of a name stay in force when DNS fails."""
        udp, known = self._udp, dict[tuple[str, int], list[tuple[str, int]]]()
        while udp is not None:
            ports = range(self._settings.first_port, self._settings.first_port + self._settings.processes)
            wanted = (*self._settings.peers, *product(self._routers, ports))
            for name, port in wanted:
                # no name of a host: one that cannot be encoded is no OSError
                with contextlib.suppress(OSError, UnicodeError):
                    rows = await asyncio.get_running_loop().getaddrinfo(
                        name, port, family=udp.family, type=socket.SOCK_DGRAM, flags=socket.AI_V4MAPPED
                    )
                    known[name, port] = [(str(row[4][0]), int(row[4][1])) for row in rows]
            known = {one: known[one] for one in wanted if one in known}
            targets = list(dict.fromkeys(chain.from_iterable(known.values())))[:MOST_TARGETS]
            self._sockets = [(one, targets if one is udp else kept) for one, kept in self._sockets]
            await asyncio.sleep(RESOLVE_S)

    def _read_key(self) -> None:
        for file in (self._own, self._shared):
            if file is not None and (problem := file.look()) and (file is self._own or file.keys or _may_be_there(file.path)):
                self._log(event="gossip-key", problem=problem)
        self._own_keys = of_lines(self._own.keys) if self._own is not None else ()
        shared = self._shared.keys if self._shared is not None else ()
        self._shared_keys = derived(shared, GOSSIP, self._settings.scope)
        self._keys = self._own_keys + self._shared_keys

    def _signs(self, opened: socket.socket) -> bytes | None:
        """What is said on this socket: other pods are told by the key that all share where there is to be one, and by nothing
        until it has come; processes of this pod by their own. None: nothing is said."""
        if self._shared is not None and (opened is self._udp or not self._own_keys):
            return next(iter(self._shared_keys), None)
        return next(iter(self._own_keys), None)

    @property
    def key_outdated(self) -> bool:
        """What is on disk is not what is used."""
        return any(file.is_outdated for file in (self._own, self._shared) if file is not None)

    # -- what is known ----------------------------------------------------------------------------------------------
    def lines(self) -> list[str]:
        """Prometheus text."""
        counts = self.counts
        refused = [f'fleet_router_gossip_refused_total{{reason="{why}"}} {counts.refused[why]}' for why in REASONS]
        return [
            "# TYPE fleet_router_gossip_key_outdated gauge", f"fleet_router_gossip_key_outdated {int(self.key_outdated)}",
            "# TYPE fleet_router_gossip_peers gauge", f"fleet_router_gossip_peers {len(self._share.peers)}",
            "# TYPE fleet_router_gossip_sent_total counter", f"fleet_router_gossip_sent_total {counts.sent}",
            "# TYPE fleet_router_gossip_received_total counter", f"fleet_router_gossip_received_total {counts.received}",
            "# TYPE fleet_router_gossip_refused_total counter", *refused,
        ]  # fmt: skip


def _may_be_there(path: Path) -> bool:
    """There is such a file, or nobody can tell: `Path.exists` raises where a folder may not be looked into."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _bound(family: socket.AddressFamily, address: Address) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_DGRAM)
    try:
        opened.setblocking(False)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != EVERY))
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened

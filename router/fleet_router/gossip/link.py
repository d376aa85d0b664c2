"""Sockets of gossip: datagrams in and out, a few rounds each 100 ms, the peers' addresses by DNS or by list."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from fleet_router.gossip.message import DATAGRAM_BYTES, REASONS, Refused, longest_key_bytes, parse_keys, seal, unseal
from fleet_router.gossip.share import Share

INTERVAL_S = 0.02
"""Between two rounds; with more than four peers longer, so that a process sends at most some 200 datagrams a second."""
PER_PEER_S = 0.005
RESOLVE_S = 2.0
KEY_POLL_S = 2.0
TICK_S = 0.25
READ_MOST = 64
"""Datagrams in one turn of the loop: others want to be served as well."""
MOST_TARGETS = 256
KEY_FILE_BYTES = 65_536

Address = tuple[str, int] | bytes
"""Of UDP, or the name of an abstract Unix socket."""


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """What the command line says."""

    key: Path
    """File with the shared key; read again when it changes."""
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
        self._used_bytes = 0
        """Length of the longest of them."""
        self._stamp: object = None
        """Which version of the file they are of."""
        self._found: object = None
        """Which one was there at the last look."""
        self._problem = ""
        self._sockets: list[tuple[socket.socket, Sequence[Address]]] = []
        self._udp: socket.socket | None = None
        self._routers: tuple[str, ...] = ()
        self.counts = Counts()

    async def run(self) -> None:
        """Open, then speak until cancelled; GossipError when it cannot begin."""
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
            raise GossipError(f"AddressInUse: gossip cannot bind {wanted.host}:{wanted.port}: {error.strerror}") from error

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
                self._log(event="gossip-refused", reason=refused.reason)

    # -- out --------------------------------------------------------------------------------------------------------
    async def _speak(self) -> None:
        while True:
            targets = sum(len(found) for _, found in self._sockets)
            await asyncio.sleep(max(INTERVAL_S, PER_PEER_S * targets))
            for message in self._share.speak(self._clock(), int(time.time() * 1000)):
                data = seal(message, self._keys[0])
                for opened, found in self._sockets:
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
        """Addresses of the peers; the last ones stay in force when DNS fails."""
        udp = self._udp
        while udp is not None:
            found: dict[tuple[str, int], None] = {}
            failed = False
            ports = range(self._settings.first_port, self._settings.first_port + self._settings.processes)
            for name, port in (*self._settings.peers, *product(self._routers, ports)):
                try:
                    rows = await asyncio.get_running_loop().getaddrinfo(name, port, family=udp.family, type=socket.SOCK_DGRAM)
                except (OSError, UnicodeError):  # no name of a host: one that cannot be encoded is no OSError
                    failed = True
                    continue
                found.update({(str(row[4][0]), int(row[4][1])): None for row in rows})
            if found or not failed:
                targets = list(found)[:MOST_TARGETS]
                self._sockets = [(one, targets if one is udp else kept) for one, kept in self._sockets]
            await asyncio.sleep(RESOLVE_S)

    def _read_key(self) -> None:
        """The last good key stays in force, and a new one is taken when nobody has written for one look: half of a key would
        sign, too, and no other router would hear it."""
        try:
            with self._settings.key.open("rb") as opened:
                status = os.fstat(opened.fileno())
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                before, self._found = self._found, stamp
                if stamp == self._stamp or (self._keys and stamp != before):
                    return
                self._take_keys(opened.read(KEY_FILE_BYTES + 1))
        except (OSError, ValueError) as error:
            problem = str(error.strerror if isinstance(error, OSError) else error)
            self._found = self._found if isinstance(error, ValueError) else None
            if problem != self._problem:
                self._problem = problem
                self._log(event="gossip-key", problem=problem)
        else:
            self._stamp, self._problem = stamp, ""

    def _take_keys(self, raw: bytes) -> None:
        if len(raw) > KEY_FILE_BYTES:
            raise ValueError(f"it is longer than {KEY_FILE_BYTES} bytes")
        self._keys, self._used_bytes = parse_keys(raw, self._used_bytes), longest_key_bytes(raw)

    @property
    def key_outdated(self) -> bool:
        """What is on disk is not what is used."""
        return self._found != self._stamp

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


def _bound(family: socket.AddressFamily, address: Address) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_DGRAM)
    try:
        opened.setblocking(False)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened

"""Several router processes behind one port: what each asks its siblings, so that whoever answers a scrape answers for all.

Every member listens on an abstract Unix socket as well: a line with a path comes in, a status and a body go out. Pure merging of
the answers is in `summed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

ASK_S = 1.0
LINE_BYTES = 16_384
"""A path with its query, and for decisions who may read what."""
OWN_KEY = "/proc/self/fd/"
"""Where the file lies with a key that the processes of one pod alone share; a number follows."""
MEMBER = re.compile(r"^(\d{1,3})/(\d{1,3})/([0-9a-f]{16})$")

Answer = tuple[int, bytes]
Ask = Callable[[bytes], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Member:
    """One of `size` processes of a family."""

    index: int = 0
    size: int = 1
    family: str = ""

    @classmethod
    def parse(cls, text: str) -> Member:
        """INDEX/SIZE/FAMILY; ValueError."""
        found = MEMBER.match(text)
        if found is None or int(found[1]) >= int(found[2]):
            raise ValueError(f"{text!r} is not INDEX/SIZE/FAMILY")
        return cls(int(found[1]), int(found[2]), found[3])

    def name(self, what: str, index: int | None = None) -> bytes:
        """An abstract socket of this member, or of a sibling."""
        return f"\0fleet-router-{self.family}-{what}-{self.index if index is None else index}".encode()

    def siblings(self, what: str) -> tuple[bytes, ...]:
        """Those of the others."""
        return tuple(self.name(what, index) for index in range(self.size) if index != self.index)


async def serve(member: Member, answer: Ask) -> None:
    """Answer siblings until cancelled."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.setblocking(False)
    opened.bind(member.name("ask"))

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(ASK_S):
                path = (await reader.readline()).rstrip(b"\n")
            status, body = await answer(path)
            writer.write(b"%d\n" % status + body)
        writer.close()

    server = await asyncio.start_unix_server(one, sock=opened, limit=LINE_BYTES)
    async with server:
        await server.serve_forever()


async def ask_all(member: Member, path: bytes, wait_s: float = 0.0) -> list[Answer | None]:
    """Of each sibling; None: it did not answer in time."""
    return await asyncio.gather(*ask_each(member, path, wait_s))


def ask_each(member: Member, path: bytes, wait_s: float = 0.0) -> list[Coroutine[Any, Any, Answer | None]]:
    """The same, one by one."""
    return [_ask(name, path, wait_s) for name in member.siblings("ask")]


async def _ask(name: bytes, path: bytes, wait_s: float) -> Answer | None:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.setblocking(False)
        opened.connect(name)  # of a Unix socket: at once, or not at all
        async with asyncio.timeout(ASK_S + wait_s):
            reader, writer = await asyncio.open_unix_connection(sock=opened)
            try:
                writer.write(path + b"\n")
                raw = await reader.read(-1)
            finally:
                writer.close()  # also when nobody waits any more: the socket is its own
    except (OSError, TimeoutError):
        opened.close()
        return None
    status, _, body = raw.partition(b"\n")
    return (int(status), body) if status.isdigit() else None


MOST = frozenset({
    "fleet_router_endpoints_age_seconds", "fleet_router_endpoints", "fleet_router_authentication", "fleet_router_tenants",
    "fleet_router_slots", "fleet_router_gossip_peers", "process_start_time_seconds", "fleet_router_build_info",
    "inference_pool_ready_pods", "fleet_router_workers_out", "fleet_router_workers_strange", "fleet_router_pairs_out",
    "fleet_router_pair_failing", "fleet_router_pair_moved", "fleet_router_kv_streams", "fleet_router_kv_blocks",
    "fleet_router_certificate_expires_timestamp_seconds", "fleet_router_certificate_outdated", "fleet_router_gossip_key_outdated",
})  # fmt: skip
"""Metrics that every process has the same of: the largest stands for all. Others are added up."""


def summed(texts: Sequence[str]) -> str:
    """Prometheus text of all processes as if they were one."""
    families: dict[str, dict[str, float]] = {}
    for text in texts:
        series: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("#"):
                series = families.setdefault(line, {})
            elif line:
                name, _, value = line.rpartition(" ")
                number = float(value)
                most = name.partition("{")[0] in MOST
                series[name] = max(series.get(name, number), number) if most else series.get(name, 0.0) + number
    rows = [row for head, series in families.items() for row in (head, *(f"{n} {_text(v)}" for n, v in series.items()))]
    return "".join(f"{row}\n" for row in rows)


def _text(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)

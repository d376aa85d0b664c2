"""How the pods of a worker over several nodes come together: messages, proofs, names. One JSON object per line, bounded.

leader: challenge → follower: join (with a proof) → leader: welcome (with a proof) → when all are there: whole → beats both ways.

The key is the uid of the leader's pod: the operator gives it to the pods that it makes for this life of the group and to no
others, so that a pod of an earlier life, or of another worker, cannot join by a name that is used again. It is no secret to
whoever may read pods; who may reach the port at all is the NetworkPolicy's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
from pathlib import Path

import msgspec

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.config import HOSTS_ENV

MAX_LINE_BYTES = 4_096
BEAT_S = 1.0
SILENCE_S = 10.0
"""Nothing heard for so long: the other one is gone."""
HANDSHAKE_S = 5.0
CLOSE_S = 1.0
MAX_HOSTS_BYTES = 1024 * 1024


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    """Leader, first."""

    nonce: str


class Join(msgspec.Struct, frozen=True, tag="join", forbid_unknown_fields=True, omit_defaults=True):
    """Follower: it is member `member`, and knows the key."""

    member: int
    nonce: str
    proof: str
    version: str = ""
    """Commit of the model that it has; empty: it has none, or nobody knows."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Leader: it knows the key, too."""

    proof: str


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """Leader: not you, or not now."""

    reason: str


class Whole(msgspec.Struct, frozen=True, tag="whole", forbid_unknown_fields=True):
    """Leader: all are there; engines start now and meet at this address."""

    address: str


class Beat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """Still here; both ways."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving", forbid_unknown_fields=True):
    """Follower: it was told to go; the leader drains."""


class Released(msgspec.Struct, frozen=True, tag="released", forbid_unknown_fields=True):
    """Leader: nothing runs any more, everybody may go."""


Message = Challenge | Join | Welcome | Refused | Whole | Beat | Leaving | Released
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class LineError(Exception):
    """The other side is gone, silent, or says what nobody understands."""


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def hear(self, within_s: float = SILENCE_S) -> Message:
        """The next message; LineError."""
        try:
            async with asyncio.timeout(within_s):
                line = await self._reader.readuntil(b"\n")
            return _DECODER.decode(line)
        except TimeoutError as error:
            raise LineError(f"silent for {within_s:g} s") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LineError("the connection ended") from error
        except (asyncio.LimitOverrunError, *UNREADABLE) as error:
            raise LineError(f"not understood: {error}") from error

    def say(self, message: Message) -> None:
        """Queue a message; what cannot be sent is noticed by who listens. Nobody's queue grows: messages are few and small."""
        with contextlib.suppress(OSError):
            self._writer.write(msgspec.json.encode(message) + b"\n")

    def end(self) -> None:
        """Close; what was said before is still sent."""
        self._writer.close()

    async def ended(self) -> None:
        """Close, and wait until that is done; a peer that takes nothing is not waited for."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._writer.wait_closed()


async def beat(line: Line) -> None:
    """For ever."""
    while True:
        line.say(Beat())
        await asyncio.sleep(BEAT_S)


def new_nonce() -> str:
    """Never the same twice."""
    return secrets.token_hex(16)


def proof(key: str, who: str, challenge: str, nonce: str, member: int) -> str:
    """That `who` ("join" or "welcome") knows the key, for this connection alone."""
    text = f"{who}|{challenge}|{nonce}|{member}"
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def proven(found: str, expected: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(found.encode(), expected.encode())


async def addresses_of(name: str) -> list[str]:
    """IPs of a pod by its name, of both families where its Service has both; none while nobody knows it."""
    if (hosts := os.environ.get(HOSTS_ENV)) is not None:
        return [found] if (found := in_hosts(Path(hosts), name)) is not None else []
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # also of a name that cannot be asked for
        return []
    return [str(row[4][0]) for row in rows]


def in_hosts(path: Path, name: str) -> str | None:
    """The address beside `name` in a hosts file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(MAX_HOSTS_BYTES).splitlines()
    except OSError:
        return None
    return next((words[0] for line in lines if name in (words := line.split())[1:]), None)

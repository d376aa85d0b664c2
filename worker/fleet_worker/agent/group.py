"""The two ends of a group: the leader, at whom all pods of a worker join, and a follower's membership."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

from fleet_worker.agent.errors import GroupLostError
from fleet_worker.agent.gathering import (
    HANDSHAKE_S,
    MAX_LINE_BYTES,
    Beat,
    Challenge,
    Join,
    Leaving,
    Line,
    LineError,
    Refused,
    Released,
    Welcome,
    Whole,
    addresses_of,
    beat,
    new_nonce,
    proof,
    proven,
)  # fmt: skip

STRANGERS = 16
"""Connections beyond the group's own that may try to join at the same time."""
RETRY_S = (0.2, 2.0)
"""First and longest pause between two tries to join."""
TOO_LATE = "the group is whole"
OTHER_VERSION = "it has another commit of the model: its branch moved between us, both fetch again"


class Leader:
    """Listens for the others; `lost` is set with the reason once the group was whole and is not any more."""

    def __init__(
        self, uid: str, size: int, address: str, port: int, leaving: Callable[[int], None], version: str = ""
    ) -> None:  # fmt: skip
        """`leaving` is called with the place of a follower that was told to go. `version`: commit of the model that we have;
        engines of two commits would answer, with tokens of neither."""
        self._uid = uid
        self._size = size
        self._address = address
        self._port = port
        self._leaving = leaving
        self._lines: dict[int, Line] = {}
        self._meetings: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._whole = asyncio.Event()
        self._strangers = 0
        self._other = ""
        self._version = version
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Listen. OSError when the port is taken."""
        self._server = await asyncio.start_server(self._meet, self._address, self._port, limit=MAX_LINE_BYTES)

    @property
    def missing(self) -> list[int]:
        """Places of those who have not joined."""
        return [member for member in range(1, self._size) if member not in self._lines]

    async def whole(self, note: Callable[[str], None]) -> str:
        """Until all have joined; the address at which their engines meet. GroupLostError when one has another commit of
        the model."""
        while not self._whole.is_set():
            if self._other:
                raise GroupLostError(self._other)
            note(f"waiting for pods {', '.join(map(str, self.missing))} of this worker's {self._size}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._whole.wait(), 1.0)
        return self._address

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its last."""
        line = Line(reader, writer)
        member: int | None = None
        if (meeting := asyncio.current_task()) is None:
            return
        self._meetings.add(meeting)
        try:
            if len(self._meetings) > self._size + STRANGERS:
                return
            member = await self._admit(line)
            if member is not None:
                await self._stay(member, line)
        except LineError as error:
            if member is not None:
                self._left(member, line, str(error))
        finally:
            await line.ended()
            self._meetings.discard(meeting)

    def _say_stranger(self, place: int) -> None:
        """The 1st, 2nd, 4th, 8th...: whoever tries does not fill the disk."""
        self._strangers += 1
        if self._strangers & (self._strangers - 1) == 0:
            said = f"GroupStranger: somebody without the key asked for place {place}, {self._strangers} so far"
            print(said, file=sys.stderr, flush=True)

    async def _admit(self, line: Line) -> int | None:
        """The place of the one who joined, None when it was refused."""
        challenge = new_nonce()
        line.say(Challenge(challenge))
        asked = await line.hear(HANDSHAKE_S)
        if not isinstance(asked, Join) or not 0 < asked.member < self._size:
            line.say(Refused("no such place"))
            return None
        if not proven(asked.proof, proof(self._uid, "join", challenge, asked.nonce, asked.member)):
            self._say_stranger(asked.member)
            line.say(Refused("another life of the group"))
            return None
        if self._whole.is_set():
            line.say(Refused(TOO_LATE))
            return None
        if asked.version and self._version and asked.version != self._version:
            self._other = (
                f"pod {asked.member} of this worker has commit {asked.version[:40]} of the model, this one {self._version}"
            )
            line.say(Refused(OTHER_VERSION))
            return None
        if (before := self._lines.get(asked.member)) is not None:
            before.end()  # it came back before its end was noticed
        self._lines[asked.member] = line
        line.say(Welcome(proof(self._uid, "welcome", challenge, asked.nonce, asked.member)))
        if not self.missing:
            self._whole.set()
            for each in self._lines.values():
                each.say(Whole(self._address))
        return asked.member

    async def _stay(self, member: int, line: Line) -> None:
        beating = asyncio.create_task(beat(line))
        try:
            while True:
                if isinstance(await line.hear(), Leaving):
                    self._leaving(member)
        finally:
            beating.cancel()

    def _left(self, member: int, line: Line, why: str) -> None:
        if self._lines.get(member) is not line:
            return
        if not self._whole.is_set():
            del self._lines[member]
        elif not self.lost.done():
            self.lost.set_result(f"pod {member} of this worker is lost: {why}")

    def release(self) -> None:
        """Nothing runs any more: the others may go."""
        for line in self._lines.values():
            line.say(Released())

    async def close(self) -> None:
        """Everybody sees that the leader goes."""
        if self._server is not None:
            self._server.close()
        meetings = list(self._meetings)
        for meeting in meetings:
            meeting.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)


class Membership:
    """A follower's place in its group; `lost` is set with the reason once the group was whole and its leader is gone."""

    def __init__(self, uid: str, member: int, leader: str, port: int) -> None:
        self._uid = uid
        self._member = member
        self._leader = leader
        self._port = port
        self._line: Line | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.version = ""
        """As the leader's."""
        self.released = asyncio.Event()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def whole(self, note: Callable[[str], None]) -> str:
        """Join, again and again, until the group is whole; the address at which the engines meet. GroupLostError when the leader
        has another commit of the model."""
        pause_s = RETRY_S[0]
        while True:
            try:
                line = await self._join(note)
                return await self._wait_whole(line, note)
            except LineError as error:
                note(f"joining {self._leader}: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S[1])

    async def _join(self, note: Callable[[str], None]) -> Line:
        line = await self._connected(note)
        try:
            await self._shake_hands(line)
        except BaseException:
            await line.ended()
            raise
        return line

    async def _connected(self, note: Callable[[str], None]) -> Line:
        """To the first of its addresses where somebody listens: a leader does at its pod's first one alone."""
        problem = LineError("nobody knows its address yet")
        for address in await addresses_of(self._leader):
            note(f"joining {self._leader} at {address}")
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    return Line(*await asyncio.open_connection(address, self._port, limit=MAX_LINE_BYTES))
            except (OSError, TimeoutError) as error:
                problem = LineError(f"{type(error).__name__}: {error}")
        raise problem

    async def _shake_hands(self, line: Line) -> None:
        first = await line.hear(HANDSHAKE_S)
        if not isinstance(first, Challenge):
            raise LineError("it is no leader")
        nonce = new_nonce()
        known = proof(self._uid, "join", first.nonce, nonce, self._member)
        line.say(Join(self._member, nonce, known, self.version))
        answer = await line.hear(HANDSHAKE_S)
        if isinstance(answer, Refused):
            if answer.reason == OTHER_VERSION:
                raise GroupLostError(f"{self._leader}: {answer.reason}; here is {self.version}")
            raise LineError(f"refused: {answer.reason}")
        expected = proof(self._uid, "welcome", first.nonce, nonce, self._member)
        if not isinstance(answer, Welcome) or not proven(answer.proof, expected):
            raise LineError("it does not know the key")

    async def _wait_whole(self, line: Line, note: Callable[[str], None]) -> str:
        note("joined; waiting for the others")
        beating = asyncio.create_task(beat(line))
        try:
            while not isinstance(said := await line.hear(), Whole):
                if not isinstance(said, Beat):
                    raise LineError("it says what no leader says")
        except BaseException:
            beating.cancel()
            await line.ended()
            raise
        self._line = line
        self._tasks = [beating, asyncio.create_task(self._listen(line))]
        return said.address

    async def _listen(self, line: Line) -> None:
        try:
            while True:
                if isinstance(await line.hear(), Released):
                    self.released.set()
        except LineError as error:
            if not self.lost.done():
                self.lost.set_result(f"the leader of this worker is lost: {error}")
        finally:
            self.released.set()  # whoever waits for the leader waits in vain

    def leave(self) -> None:
        """Tell the leader that this pod was told to go."""
        if self._line is not None:
            self._line.say(Leaving())
        else:
            self.released.set()

    async def close(self) -> None:
        """Leave for good."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._line is not None:
            await self._line.ended()

"""Hot blocks on the side channel: a new worker asks for parts of another one's list, which the engine of that one answers.

The engine thread puts questions and answers here and collects them by polling; the transfer thread carries them. Who has not the
fleet's key (`trust.py`), and who is not compatible, is refused before the engine hears of it. The blocks themselves come by the
same pulls as every other KV.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec
import zmq

from fleet_wire.blocks import NAMES
from fleet_wire.sidechannel import PROTOCOL_VERSION, AskHot, Hottest, Refused, encode
from fleet_worker.transfer.base import KvPool, KvTransferError
from fleet_worker.transfer.owner import TransferSettings
from fleet_worker.transfer.peers import Answer, Peer, Peers
from fleet_worker.transfer.trust import REASONS, Trust

T = TypeVar("T")
MOST_ASKED: Final = 16
"""Questions that the engine has not answered yet."""
MAX_READER: Final = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of a new worker, and where its answer goes."""

    identity: bytes
    ask: AskHot


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of one of our own questions."""

    reader: str
    start: int
    answer: Hottest | Refused | KvTransferError


class HotChannel(Protocol):
    """What the engine needs; called from the engine thread only."""

    def ask_hot(self, host: str, port: int, weights: str, reader: str, start: int, most_blocks: int) -> None:
        """A part of that worker's list; `heard` has the answer, one per question."""
        ...

    def heard(self) -> list[Heard]:
        """Answers since the last call."""
        ...

    def asked(self) -> list[Asked]:
        """Questions of new workers since the last call."""
        ...

    def tell(self, asked: Asked, answer: Hottest | Refused) -> None:
        """Answer one."""
        ...

    def strangers(self) -> Mapping[str, int]:
        """Who was not believed, by `trust.REASONS`."""
        ...


@dataclass(frozen=True, slots=True)
class _Question:
    host: str
    port: int
    ask: AskHot


class HotLine:
    """Implements HotChannel. `wake` ends the transfer thread's wait."""

    def __init__(self, settings: TransferSettings, pool: KvPool, wake: Callable[[], None]) -> None:
        self.trust = Trust(settings.peer_key, settings.scope)
        self._host, self._port = settings.host, settings.port
        self._mine = (PROTOCOL_VERSION, settings.compat, pool.block_bytes, pool.block_tokens, NAMES)
        self.is_answered = False
        """An engine takes the questions of others from here."""
        self._wake = wake
        self._questions: deque[_Question] = deque()
        self._heard: deque[Heard] = deque()
        self._asked: deque[Asked] = deque()
        self._told: deque[tuple[Asked, Hottest | Refused]] = deque()

    # -- engine thread ----------------------------------------------------------------------------------------------
    def ask_hot(self, host: str, port: int, weights: str, reader: str, start: int, most_blocks: int) -> None:
        """As HotChannel has it."""
        version, compat, block_bytes, block_tokens, names = self._mine
        ask = AskHot(
            call=0, version=version, compat=compat, block_bytes=block_bytes, block_tokens=block_tokens, weights=weights,
            names=names, reader=reader, start=start, most_blocks=most_blocks,
        )  # fmt: skip
        self._questions.append(_Question(host, port, ask))
        self._wake()

    def heard(self) -> list[Heard]:
        """As HotChannel has it."""
        return _taken(self._heard)

    def asked(self) -> list[Asked]:
        """As HotChannel has it."""
        return _taken(self._asked)

    def tell(self, asked: Asked, answer: Hottest | Refused) -> None:
        """As HotChannel has it."""
        self._told.append((asked, answer))
        self._wake()

    def strangers(self) -> Mapping[str, int]:
        """As HotChannel has it."""
        return {why: self.trust.refused[why] for why in REASONS}

    # -- transfer thread --------------------------------------------------------------------------------------------
    def came(self, identity: bytes, ask: AskHot) -> Refused | None:
        """A question came in: the answer where the engine need not be asked, None where it will give one. A stranger is told
        nothing of this worker."""
        if why := self.trust.refusal(ask, self._host, self._port):
            return Refused(call=ask.call, reason="proof", message=self.trust.words(why, ask))
        theirs = (ask.version, ask.compat, ask.block_bytes, ask.block_tokens, ask.names)
        if theirs != self._mine:
            what = ("protocol version", "compatibility hash", "block bytes", "block tokens", "names of blocks")
            wrong = (f"{w}: here {m}, there {t}" for w, m, t in zip(what, self._mine, theirs, strict=True) if m != t)
            return Refused(call=ask.call, reason="incompatible", message=", ".join(wrong)[:500])
        if not self.is_answered:
            return Refused(call=ask.call, reason="off", message="this worker gives no hot prefixes")
        if ask.start < 0 or ask.most_blocks < 0 or not 0 < len(ask.reader) <= MAX_READER:
            return Refused(call=ask.call, reason="protocol", message="a question with bounds that mean nothing")
        if len(self._asked) >= MOST_ASKED:
            return Refused(call=ask.call, reason="busy", message="others ask, too")
        self._asked.append(Asked(identity, ask))
        return None

    def advance(self, server: zmq.Socket[bytes], peers: Peers, reach: Callable[[str, int, float], Peer]) -> None:
        """Send what the engine put here. Who does not take its answer has gone. The key is followed at every turn: a worker that
        nobody asks for days must know the next one by then."""
        self.trust.current()
        for asked, told in _taken(self._told):
            answer = self.trust.answering(told, asked.ask.nonce) if isinstance(told, Hottest) else told
            if answer is None:  # the key went meanwhile: its lease runs out
                continue
            try:
                server.send_multipart([asked.identity, encode(answer)], zmq.DONTWAIT)
            except zmq.ZMQError:
                continue
        for question in _taken(self._questions):
            self._send(question, peers, reach)

    def _send(self, question: _Question, peers: Peers, reach: Callable[[str, int, float], Peer]) -> None:
        now, ask = time.monotonic(), question.ask
        nonces = list[bytes]()

        def answered(answer: Answer | KvTransferError) -> None:
            if not isinstance(answer, Hottest | Refused | KvTransferError):
                answer = KvTransferError("peer", "it answered something else")
            elif isinstance(answer, Hottest) and not self.trust.believes(answer, nonces[-1]):
                answer = KvTransferError("proof", "who answers there has not the fleet's key")
            self._heard.append(Heard(ask.reader, ask.start, answer))

        def signed(call: int) -> AskHot:
            found = self.trust.asking(msgspec.structs.replace(ask, call=call), question.host, question.port)
            nonces.append(found.nonce if found is not None else b"")
            return found or ask

        if not self.trust.current():
            answered(KvTransferError("no_key", "this worker has no key that its fleet shares, and nobody answers one without"))
            return
        try:
            peer = reach(question.host, question.port, now)
        except KvTransferError as error:
            answered(error)
            return
        peers.call(peer, signed, now, answered)


def _taken(items: deque[T]) -> list[T]:
    found: list[T] = []
    while items:
        found.append(items.popleft())
    return found

"""KV events of all workers, read in one thread: SUB sockets, replays, broken connections. It decides nothing.

ZMQ has no place in the data path's loop: this thread decodes, and hands what it has to the loop in bounded parcels. It waits
until the loop has taken one; meanwhile ZMQ queues, and drops beyond QUEUE_BATCHES, which the receiver sees as a gap.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from fleet_wire.address import authority
from fleet_wire.events import END_OF_REPLAY, AllBlocksCleared, KVEventBatch, decode
from fleet_wire.unreadable import UNREADABLE

QUEUE_BATCHES = 10_000
PARCEL = 64
"""Batches that the loop applies at once, of a few blocks each: about a millisecond."""
BATCH_WORK = 16
"""As many blocks take as long as what a batch takes beside its blocks. A step of a long prompt has hundreds."""
PARCEL_WORK = PARCEL * BATCH_WORK
REPLAY_S = 5.0
SOCKETS_MOST = 8_192
KEPT_ALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 3}
"""We only listen: of a node that lost its power, and whose pods come back as they were, nothing else would ever tell us."""
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED


@dataclass(frozen=True, slots=True)
class Live:
    """A batch as it was published."""

    worker: str
    number: int
    batch: KVEventBatch


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection stands (again): nothing is known of what was published before."""

    worker: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection broke."""

    worker: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """A part of a replay, in order. `last` of the parts; `whole` False: it broke off."""

    worker: str
    asked_from: int
    batches: list[tuple[int, KVEventBatch]]
    last: bool
    whole: bool = True


@dataclass(frozen=True, slots=True)
class NoReplay:
    """A replay was asked for, and this worker gives none (vLLM's own default)."""

    worker: str


Message = Live | Connected | Lost | Replayed | NoReplay


@dataclass(slots=True)
class _Replay:
    worker: str
    asked_from: int
    deadline: float
    batches: list[tuple[int, KVEventBatch]] = field(default_factory=list)


@dataclass(slots=True)
class _Source:
    worker: str
    replay_at: str
    subscriber: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


class EventReader:
    """The thread. Its methods are called from the loop; `deliver` is called in the thread and returns when all was taken."""

    def __init__(self, deliver: Callable[[list[Message]], None]) -> None:
        self._deliver = deliver
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MOST)
        self._orders: deque[Callable[[], None]] = deque()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)  # the loop never waits for the thread: when this is full, it is awake anyway
        self._poller = zmq.Poller()
        self._sources: dict[str, _Source] = {}
        self._subscribers: dict[object, _Source] = {}
        self._monitors: dict[object, _Source] = {}
        self._replays: dict[object, _Replay] = {}
        self._out: list[Message] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    # -- orders -----------------------------------------------------------------------------------------------------
    def follow(self, worker: str, address: str, events_port: int, replay_port: int) -> None:
        """Read this worker's events until `forget`."""
        events, replays = (f"tcp://{authority(address, port)}" for port in (events_port, replay_port))
        self._order(lambda: self._open(worker, events, replays if replay_port else ""))

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._order(lambda: self._close(worker))

    def replay(self, worker: str, first: int) -> None:
        """Ask for everything from `first` on; `Replayed` follows. Of one that was asked for before, nothing more does."""
        self._order(lambda: self._ask(worker, first))

    def stop(self) -> None:
        """End the thread."""
        self._order(self._end)
        self._thread.join(timeout=5)

    def _order(self, what: Callable[[], None]) -> None:
        self._orders.append(what)
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # -- the thread -------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        while not self._stopped:
            for ready, _ in self._poller.poll(500):
                with contextlib.suppress(zmq.ZMQError):  # of one worker: the others are read on
                    self._look(ready)
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass
            while self._orders:
                with contextlib.suppress(zmq.ZMQError):  # an address that is none, no socket left: it is not believed
                    self._orders.popleft()()
            self._end_late_replays()
            out, self._out = self._out, []
            for parcel in parcels(out):
                self._deliver(parcel)
        for worker in list(self._sources):
            self._close(worker)
        for asked in list(self._replays):
            self._drop(asked)
        self._context.destroy(linger=0)
        self._wake.close()
        self._woken.close()

    def _end(self) -> None:
        self._stopped = True

    def _look(self, ready: object) -> None:
        if (source := self._subscribers.get(ready)) is not None:
            self._read(source)
        elif (source := self._monitors.get(ready)) is not None:
            with contextlib.suppress(zmq.Again):
                event = recv_monitor_message(source.monitor, zmq.DONTWAIT)["event"]
                self._out.append(Connected(source.worker) if event == zmq.EVENT_CONNECTED else Lost(source.worker))
                self._forget_replays(source.worker)
        elif (replay := self._replays.get(ready)) is not None:
            self._read_replay(ready, replay)

    def _open(self, worker: str, events_at: str, replay_at: str) -> None:
        self._close(worker)
        made = self._context.socket(zmq.SUB)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, QUEUE_BATCHES)
        made.setsockopt(zmq.IPV6, "[" in events_at)
        made.setsockopt(zmq.SUBSCRIBE, b"")
        for option, value in KEPT_ALIVE.items():
            made.setsockopt(option, value)
        source = _Source(worker, replay_at, made, made.get_monitor_socket(WATCHED))
        self._sources[worker] = self._subscribers[made] = self._monitors[source.monitor] = source
        self._poller.register(made, zmq.POLLIN)
        self._poller.register(source.monitor, zmq.POLLIN)
        made.connect(events_at)

    def _close(self, worker: str) -> None:
        source = self._sources.pop(worker, None)
        if source is None:
            return
        del self._subscribers[source.subscriber], self._monitors[source.monitor]
        self._poller.unregister(source.subscriber)
        self._poller.unregister(source.monitor)
        source.subscriber.disable_monitor()
        source.monitor.close(linger=0)
        source.subscriber.close()

    def _read(self, source: _Source) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(PARCEL):
                frames = source.subscriber.recv_multipart(zmq.DONTWAIT)
                if len(frames) == 3 and (found := _batch(frames[1], frames[2])) is not None:
                    self._out.append(Live(source.worker, *found))

    def _ask(self, worker: str, first: int) -> None:
        source = self._sources.get(worker)
        if source is None:
            return
        if not source.replay_at:
            self._out.append(NoReplay(worker))
            return
        self._forget_replays(worker)
        asked = self._context.socket(zmq.DEALER)
        asked.setsockopt(zmq.LINGER, 0)
        asked.setsockopt(zmq.IPV6, "[" in source.replay_at)
        try:
            asked.connect(source.replay_at)
        except zmq.ZMQError:
            asked.close()
            raise
        asked.send_multipart([b"", first.to_bytes(8, "big")])
        self._replays[asked] = _Replay(worker, first, time.monotonic() + REPLAY_S)
        self._poller.register(asked, zmq.POLLIN)

    def _read_replay(self, asked: object, replay: _Replay) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(PARCEL):
                frames = asked.recv_multipart(zmq.DONTWAIT)  # type: ignore[attr-defined]
                if len(frames) < 3:
                    continue
                if frames[-2] == END_OF_REPLAY:
                    self._hand_over(replay, last=True, whole=True)
                    self._drop(asked)
                    return
                if (found := _batch(frames[-2], frames[-1])) is not None:
                    replay.batches.append(found)
        replay.deadline = time.monotonic() + REPLAY_S
        if len(replay.batches) >= PARCEL:
            self._hand_over(replay, last=False, whole=True)

    def _hand_over(self, replay: _Replay, *, last: bool, whole: bool) -> None:
        batches, replay.batches = replay.batches, []
        *firsts, rest = list(_pieces(batches)) or [[]]
        self._out += [Replayed(replay.worker, replay.asked_from, piece, last=False) for piece in firsts]
        self._out.append(Replayed(replay.worker, replay.asked_from, rest, last, whole))

    def _end_late_replays(self) -> None:
        now = time.monotonic()
        for asked, replay in list(self._replays.items()):
            if now > replay.deadline:
                self._hand_over(replay, last=True, whole=False)
                self._drop(asked)

    def _forget_replays(self, worker: str) -> None:
        """They are of a life that may be over, or another one is asked for."""
        for asked, replay in list(self._replays.items()):
            if replay.worker == worker:
                self._drop(asked)

    def _drop(self, asked: object) -> None:
        del self._replays[asked]
        self._poller.unregister(asked)
        asked.close()  # type: ignore[attr-defined]


def parcels(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """In order; of each worker up to PARCEL batches were read, and there may be a hundred workers."""
    parcel, work = list[Message](), 0
    for message in messages:
        parcel.append(message)
        told = message.batches if isinstance(message, Replayed) else [(0, message.batch)] if isinstance(message, Live) else []
        work += BATCH_WORK if not told else sum(_work(batch) for _, batch in told)
        if work >= PARCEL_WORK:
            yield parcel
            parcel, work = [], 0
    if parcel:
        yield parcel


def _pieces(batches: Sequence[tuple[int, KVEventBatch]]) -> Iterator[list[tuple[int, KVEventBatch]]]:
    """In order, each about as much as a parcel."""
    piece, work = list[tuple[int, KVEventBatch]](), 0
    for told in batches:
        piece.append(told)
        work += _work(told[1])
        if work >= PARCEL_WORK:
            yield piece
            piece, work = [], 0
    if piece:
        yield piece


def _work(batch: KVEventBatch) -> int:
    """What it takes to apply it, in blocks."""
    return BATCH_WORK + sum(len(event.block_hashes) for event in batch.events if not isinstance(event, AllBlocksCleared))


def _batch(number: bytes, payload: bytes) -> tuple[int, KVEventBatch] | None:
    """None when it is no batch of ours: then its number is missing, and a replay is asked for."""
    if len(number) != 8:
        return None
    try:
        return int.from_bytes(number, "big"), decode(payload)
    except UNREADABLE:  # text that is no UTF-8, lists without an end
        return None

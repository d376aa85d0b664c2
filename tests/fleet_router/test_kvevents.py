"""The thread that reads KV events: what one worker sends must not end it, or all workers' knowledge stands still, believed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fleet_router.follow import kvevents
from fleet_router.follow.kvevents import PARCEL, Connected, EventReader, Live, Lost, Message, Replayed, _Replay, parcels
from fleet_router.kvindex.believed import Believed
from fleet_wire.events import END_OF_REPLAY, AllBlocksCleared, BlockStored, KVEventBatch, encode

TS = msgspec.msgpack.encode(1.0)


class Heard:
    """What was delivered."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._changed = threading.Condition()

    def __call__(self, messages: list[Message]) -> None:
        with self._changed:
            self.messages += messages
            self._changed.notify_all()

    def kind(self, wanted: type[Message], within_s: float = 5.0) -> bool:
        """One of these came."""
        with self._changed:
            return self._changed.wait_for(lambda: any(isinstance(m, wanted) for m in self.messages), within_s)

    def number(self, wanted: int, within_s: float = 5.0) -> bool:
        """This live batch came."""
        with self._changed:
            return self._changed.wait_for(
                lambda: any(isinstance(m, Live) and m.number == wanted for m in self.messages), within_s
            )


def published(heard: Heard, reader: EventReader, *payloads: bytes) -> Any:
    """A worker that sends these, numbered, until the last one is heard."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.PUB)
    port = made.bind_to_random_port("tcp://127.0.0.1")
    reader.follow("w", "127.0.0.1", port, 0)
    end = time.monotonic() + 5
    while not heard.number(0, 0) and time.monotonic() < end:
        made.send_multipart([b"", (0).to_bytes(8, "big"), encode(KVEventBatch(1.0, [AllBlocksCleared()]))])
        time.sleep(0.01)
    for number, payload in enumerate(payloads, 1):
        made.send_multipart([b"", number.to_bytes(8, "big"), payload])
    found = heard.number(len(payloads))
    context.destroy(linger=0)
    return found


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x92" + TS + b"\x91\x81\xa4type\xa2\xff\xfe", id="text that is no UTF-8"),
        pytest.param(b"\x94" + TS + b"\x90\xc0" + b"\x91" * 5_000 + b"\x01", id="lists in lists"),
        pytest.param(b"\xc1", id="nothing"), pytest.param(b"", id="empty"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_read_ends_no_thread(payload: bytes):
    heard = Heard()
    reader = EventReader(heard)
    try:
        assert published(heard, reader, payload, encode(KVEventBatch(2.0, [])))
    finally:
        reader.stop()


def test_an_address_that_is_none_ends_no_thread():
    heard = Heard()
    reader = EventReader(heard)
    try:
        reader.follow("bad", "no address", 5557, 5558)
        reader.replay("bad", 0)
        assert published(heard, reader, encode(KVEventBatch(2.0, [])))
        reader.forget("bad")
        assert reader._thread.is_alive()
    finally:
        reader.stop()


def test_orders_wait_for_no_thread_that_waits_for_the_loop():
    """A document in which 280 workers came, went or moved, while a parcel waited to be taken: what wakes the thread was full, the
    loop waited for the thread and the thread for the loop, and the router answered nobody any more."""
    delivered, taken = threading.Event(), threading.Event()

    def deliver(_: list[Message]) -> None:
        delivered.set()
        taken.wait(20)

    reader = EventReader(deliver)

    def document() -> None:
        for number in range(2_000):
            reader.forget(f"w{number}")

    ordering = threading.Thread(target=document, daemon=True)
    try:
        reader.follow("w", "127.0.0.1", 1, 0)
        reader.replay("w", 0)
        assert delivered.wait(5)
        ordering.start()
        ordering.join(5)
        assert not ordering.is_alive()
    finally:
        taken.set()
        reader.stop()


def test_a_replay_of_a_life_that_is_over_is_not_told(monkeypatch: pytest.MonkeyPatch):
    """Its end, five seconds later, was taken for that of the next life's, which had been asked for meanwhile."""
    monkeypatch.setattr(kvevents, "REPLAY_S", 0.5)
    heard = Heard()
    reader, context = EventReader(heard), zmq.Context[zmq.Socket[bytes]]()
    try:
        events, replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (events, replays)]
        reader.follow("w", "127.0.0.1", *ports)
        assert heard.kind(Connected)
        reader.replay("w", 0)
        assert replays.poll(5_000)  # asked, and nobody answers
        events.close(linger=0)
        assert heard.kind(Lost)
        assert not heard.kind(Replayed, within_s=1.5)
    finally:
        context.destroy(linger=0)
        reader.stop()


def test_the_loop_takes_few_batches_at_a_time_of_however_many_workers():
    """All that had come of all workers was applied in one turn of the loop: when a router began beside fifty, each stream stood
    for tens of milliseconds, again and again."""
    batch = KVEventBatch(1.0, [])
    told: list[Message] = [Connected("w")]
    told += [Live(f"w{number % 50}", number, batch) for number in range(50 * PARCEL)]
    told += [Replayed("w", 0, [(number, batch) for number in range(PARCEL)], last=False) for _ in range(5)]
    found = list(parcels(told))
    assert [message for parcel in found for message in parcel] == told
    sizes = [sum(len(one.batches) if isinstance(one, Replayed) else 1 for one in parcel) for parcel in found]
    assert max(sizes) <= 2 * PARCEL
    assert len(found) <= 50 + 5 + 1
    assert list(parcels([])) == []


def test_the_loop_takes_few_blocks_at_a_time():
    """A step of a long prompt tells of hundreds: 64 of them were applied in one turn, 60 ms in which no stream moved."""
    step = KVEventBatch(1.0, [BlockStored([bytes([1]) * 32] * 512, None, [], 16), AllBlocksCleared()])
    told = [(number, step) for number in range(200)]
    found = list(parcels([Live("w", number, batch) for number, batch in told]))
    assert sum(map(len, found)) == 200
    assert max(map(len, found)) == 2
    reader = EventReader(lambda _: None)
    reader.stop()
    reader._hand_over(_Replay("w", 7, 0.0, told), last=True, whole=False)
    parts = [one for parcel in parcels(reader._out) for one in parcel if isinstance(one, Replayed)]
    assert [row for one in parts for row in one.batches] == told
    assert max(len(one.batches) for one in parts) == 2
    assert [(one.last, one.whole) for one in parts] == [(False, True)] * (len(parts) - 1) + [(True, False)]
    assert {one.asked_from for one in parts} == {7}


def keeps_alive(port: int) -> bool:
    """A connection to this port has a timer for that, and no other one at this moment (proc(5))."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].endswith(f":{port:04X}") and row[5].startswith("02:") for row in rows)


def test_a_connection_whose_other_end_is_gone_without_a_word_is_found_out():
    """A node that lost its power and came back: nobody closed the connection, and the worker's next life was never heard."""
    heard = Heard()
    reader, context = EventReader(heard), zmq.Context[zmq.Socket[bytes]]()
    try:
        events = context.socket(zmq.PUB)
        port = events.bind_to_random_port("tcp://127.0.0.1")
        reader.follow("w", "127.0.0.1", port, 0)
        assert heard.kind(Connected)
        end = time.monotonic() + 3.0
        while not keeps_alive(port):
            assert time.monotonic() < end, "no timer"
            time.sleep(0.01)
    finally:
        context.destroy(linger=0)
        reader.stop()


def replaying(replays: zmq.Socket[bytes], published: int, stop: threading.Event) -> None:
    """As vLLM does it: all there is, as fast as it goes."""
    payload = encode(KVEventBatch(1.0, [BlockStored([1], None, list(range(2_000)), 2_000)]))
    while not stop.is_set():
        if replays.poll(50):
            who, _, first = replays.recv_multipart()
            for number in range(int.from_bytes(first, "big"), published):
                replays.send_multipart([who, b"", b"", number.to_bytes(8, "big"), payload])
            time.sleep(0.3)  # the end is not what is dropped here
            replays.send_multipart([who, b"", b"", END_OF_REPLAY, b""])


def test_all_of_a_replay_comes_whose_sender_drops_what_its_queue_does_not_hold():
    """vLLM's: its ROUTER drops what is beyond a thousand messages, in the middle of a replay."""
    believed, stop = Believed(1_000), threading.Event()
    believed.join("w", 64, "c")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events, replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    replays.setsockopt(zmq.SNDHWM, 100)
    ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (events, replays)]

    def deliver(messages: list[Message]) -> None:
        for one in messages:
            if isinstance(one, Connected):
                believed.connected(one.worker, 0.0)
            elif isinstance(one, Replayed):
                believed.replayed("w", one.asked_from, one.batches, 0.0, last=one.last, whole=one.whole)
                time.sleep(0.001)
        asks, believed.asks = believed.asks, []
        for worker, first in asks:
            asked.append(first)
            reader.replay(worker, first)

    asked: list[int] = []
    serving = threading.Thread(target=replaying, args=(replays, 4_000, stop))
    serving.start()
    reader = EventReader(deliver)
    try:
        reader.follow("w", "127.0.0.1", *ports)
        end = time.monotonic() + 30
        while believed.state("w") not in ("live", "partial") and time.monotonic() < end:
            time.sleep(0.02)
        assert believed.state("w") == "live"
        assert asked == sorted(set(asked))
    finally:
        reader.stop()
        stop.set()
        serving.join()
        context.destroy(linger=0)

"""Whatever happens while two prefill legs run, in whatever order: the client is told once, no KV is left behind or given back
twice, a leg is counted against its worker once at most, and budgets balance."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.follow.documents import Documents
from fleet_router.health.budget import FIRST
from fleet_router.health.budget import SHARE as RETRIES
from fleet_router.server import ClientConnection
from fleet_router.watching import watch
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.rig import CONFIG, Rig, ask, http, run, until
from tests.fleet_router.test_hedging import CUT, GARBAGE, HALF, HEDGED, MISSING, MORE, Stalls

SAVED = 5.0
BLAMED = {429, 500, GARBAGE, HALF, MISSING, MORE, CUT}
"""Answers that count against their worker."""
ANSWERS = [200, 200, 400, 404, *sorted(BLAMED)]
OTHERS = ["pause", "leaves", "deadline", "silent", "watched", "reload", "without_first", "without_second", "decode_breaks"]
ANSWER = st.tuples(st.sampled_from(["first", "second"]), st.sampled_from(ANSWERS))
DEEDS = st.lists(st.one_of(ANSWER, ANSWER, st.sampled_from(OTHERS)), min_size=1, max_size=5)
"""A leg that none of them answers is one that never answers, where `ENDS` is not `answers`."""
ENDS = ["answers", "leaves", "deadline"]


class Deeds:
    """What may happen to one request of which two legs run."""

    def __init__(self, rig: Rig, stalls: Stalls, connection: ClientConnection, client: tuple[Any, asyncio.StreamWriter]) -> None:
        self.rig, self.stalls, self.connection = rig, stalls, connection
        self.reader, self.writer = client
        self.left = False
        self.workers = list(rig.context.table.workers.values())
        self.sides = [worker.home for worker in self.workers if worker.home is not None]

    async def does(self, deed: str | tuple[str, int]) -> None:
        if isinstance(deed, str):
            await getattr(self, deed)()
        elif not (told := self.stalls.told[deed[0] == "second"]).done():
            told.set_result(deed[1])

    async def pause(self) -> None:
        await asyncio.sleep(0.03)

    async def leaves(self) -> None:
        if self.left:
            return
        self.left = True
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def deadline(self) -> None:
        self.rig.sweep(later_s=3600.0)

    async def silent(self) -> None:
        flow: Any = self.connection.flow
        if flow is not None:
            flow.silent()

    async def watched(self) -> None:
        watch(self.rig.context, self.rig.connections, self.rig.context.clock() + HEDGED.silent_s + 1)

    async def reload(self) -> None:
        self.say(CONFIG, "")

    async def without_first(self) -> None:
        self.say(HEDGED, f"u{self.stalls.asked[0].port}")

    async def without_second(self) -> None:
        self.say(HEDGED, f"u{self.stalls.asked[1].port}")

    def say(self, config: Any, gone: str) -> None:
        found = tuple(
            msgspec.structs.replace(worker.endpoint, revision=worker.uid)
            for worker in self.rig.context.table.workers.values() if worker.uid != gone
        )  # fmt: skip
        self.rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=found)))

    async def decode_breaks(self) -> None:
        async def breaks(*_: object) -> bool:
            self.rig.decode[0].behave = None
            raise ConnectionError

        self.rig.decode[0].behave = breaks

    async def end(self, how: str) -> None:
        """Whoever is still asked answers; or its client leaves, or its time is over."""

        def is_over() -> bool:
            for told in self.stalls.told:
                if how == "answers" and not told.done():
                    told.set_result(200)
            if how == "deadline":
                self.rig.sweep(later_s=3600.0)
            return self.connection.flow is None and not any(worker.inflight for worker in self.workers)

        if how == "leaves":
            await self.leaves()
        await until(is_over)
        releases = self.rig.context.releases._by_pool.values()
        await until(lambda: all(one.outcome for found in releases for one in found))

    async def heard(self) -> bytes:
        """What the client has; it asks no more, so that the router closes when it has told all."""
        if self.left:
            return b""
        async with asyncio.timeout(3.0):
            return bytes(await self.reader.read())


def hedges_paid(one: Deeds) -> float:
    """What the second leg cost."""
    assert HEDGED.hedge is not None
    return SAVED + HEDGED.hedge.share - one.rig.context.hedges.saved


def is_balanced(one: Deeds) -> None:
    """What was there before is there again, and what was taken from the budget of retries ran."""
    rig, events = one.rig, one.rig.context.metrics.hedges
    assert [(worker.inflight, worker.pending) for worker in one.workers] == [(0, 0)] * len(one.workers)
    assert [side.inflight for side in one.sides] == [0] * len(one.sides)
    assert rig.context.desk.gate.running == 0
    assert events["started"] == events["won"] + events["lost"] + events["failed"] + events["cut"] == 1
    paid = FIRST + RETRIES - rig.context.budget.saved
    assert -1e-9 <= paid <= rig.context.metrics.retries + 1e-9
    assert rig.context.desk.faults.count == 0


def legs_of(one: Deeds) -> Counter[str]:
    """Prefill legs by worker, as the record has them: of one that was given up at once its worker may have read nothing."""
    (record,) = one.rig.context.recorder.records()
    first = [one.prefill.uid for one in record.tries if one.prefill is not None]
    return Counter([*first, *(one.second.worker.uid for one in record.tries if one.second is not None)])


def no_kv_is_left(one: Deeds) -> None:
    """Each leg's KV was read, or given back, and nothing was given back more often than it was asked for."""
    read = Counter(body["kv_transfer_params"]["lease_id"] for body in one.rig.decode[0].seen if "kv_transfer_params" in body)
    legs = legs_of(one)
    for i, fake in enumerate(one.rig.prefill):
        assert len(fake.released) <= legs[f"u{fake.port}"], fake.released
        assert len(fake.released) + read[f"lease-{i}"] >= one.stalls.leased.count(fake)
        assert read[f"lease-{i}"] <= one.stalls.leased.count(fake)


def nothing_counts_twice(one: Deeds, deeds: list[Any]) -> None:
    """Errors of a worker: at most one per leg of it; none where nothing of it can have failed."""
    late, legs = {"deadline", "silent", "watched"} & {deed for deed in deeds if isinstance(deed, str)}, legs_of(one)
    for fake in one.rig.prefill:
        answers = [told for worker, told in zip(one.stalls.asked, one.stalls.told, strict=True) if worker is fake and told.done()]
        failed, counted = (
            sum(told.result() in BLAMED for told in answers),
            one.rig.context.metrics.of("t", f"u{fake.port}").errors,
        )
        assert counted <= (legs[f"u{fake.port}"] if late else failed), (counted, failed)


def is_told_once(answer: bytes, left: bool) -> None:
    """One answer, or one error that says which."""
    if left:
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    status = int(head.split(b" ")[1])
    if status >= 500:
        assert json.loads(body)["error"]["code"]
    elif status == 200:
        assert body.count(b"hello") + body.count(b'"a"') == 1


@settings(max_examples=60, deadline=None)
@given(DEEDS, st.booleans(), st.integers(2, 3), st.sampled_from(ENDS))
def test_nothing_is_left_behind(deeds: list[str | tuple[str, int]], stream: bool, prefill: int, ends: str):
    async def go(rig: Rig) -> None:
        stalls = Stalls(rig)
        rig.context.hedges.saved = SAVED
        reader, writer, connection = await rig.connect()
        one = Deeds(rig, stalls, connection, (reader, writer))
        one.say(HEDGED, "")
        writer.write(http(ask(stream=stream), "connection: close"))
        await until(lambda: len(stalls.asked) == 2)
        for deed in deeds:
            await one.does(deed)
        await one.end(ends)
        is_told_once(await one.heard(), one.left)
        is_balanced(one)
        assert hedges_paid(one) == 1.0, "the second leg was sent, and paid for once"
        no_kv_is_left(one)
        nothing_counts_twice(one, [*deeds, ends])

    run(go, prefill=prefill, config=HEDGED)

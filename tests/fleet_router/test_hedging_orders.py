"""Whatever happens while two prefill legs run, in whatever order: nothing is counted for ever, and no KV is left behind."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.follow.documents import Documents
from fleet_router.server import ClientConnection
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.rig import CONFIG, Rig, ask, http, run, until
from tests.fleet_router.test_hedging import CUT, GARBAGE, HEDGED, Stalls

ANSWERS = [200, 200, 400, 404, 429, 500, GARBAGE, CUT]
OTHERS = ["pause", "leaves", "deadline", "silent", "reload", "without_first", "without_second", "decode_breaks"]
ANSWER = st.tuples(st.sampled_from(["first", "second"]), st.sampled_from(ANSWERS))
DEEDS = st.lists(st.one_of(ANSWER, st.sampled_from(OTHERS)), min_size=1, max_size=5)


class Deeds:
    """What may happen to one request of which two legs run."""

    def __init__(self, rig: Rig, stalls: Stalls, connection: ClientConnection, writer: asyncio.StreamWriter) -> None:
        self.rig, self.stalls, self.connection, self.writer = rig, stalls, connection, writer
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
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def deadline(self) -> None:
        self.rig.sweep(later_s=3600.0)

    async def silent(self) -> None:
        flow: Any = self.connection.flow
        if flow is not None:
            flow.silent()

    async def reload(self) -> None:
        self.say(CONFIG, "")

    async def without_first(self) -> None:
        self.say(HEDGED, f"u{self.stalls.asked[0].port}")

    async def without_second(self) -> None:
        self.say(HEDGED, f"u{self.stalls.asked[1].port}")

    def say(self, config: Any, gone: str) -> None:
        found = tuple(worker.endpoint for worker in self.rig.context.table.workers.values() if worker.uid != gone)
        self.rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=found)))

    async def decode_breaks(self) -> None:
        async def breaks(*_: object) -> bool:
            self.rig.decode[0].behave = None
            raise ConnectionError

        self.rig.decode[0].behave = breaks

    async def end(self) -> None:
        """Whoever is still asked answers."""

        def is_over() -> bool:
            for told in self.stalls.told:
                if not told.done():
                    told.set_result(200)
            return self.connection.flow is None and not any(worker.inflight for worker in self.workers)

        await until(is_over)
        releases = self.rig.context.releases._by_pool.values()
        await until(lambda: all(one.outcome for found in releases for one in found))


@settings(max_examples=40, deadline=None)
@given(DEEDS, st.booleans(), st.integers(2, 3))
def test_nothing_is_left_behind(deeds: list[str | tuple[str, int]], stream: bool, prefill: int):
    async def go(rig: Rig) -> None:
        stalls = Stalls(rig)
        _, writer, connection = await rig.connect()
        writer.write(http(ask(stream=stream)))
        await until(lambda: len(stalls.asked) == 2)
        one = Deeds(rig, stalls, connection, writer)
        for deed in deeds:
            await one.does(deed)
        await one.end()
        assert [(worker.inflight, worker.pending) for worker in one.workers] == [(0, 0)] * len(one.workers)
        assert [side.inflight for side in one.sides] == [0] * len(one.sides)
        events = rig.context.metrics.hedges
        assert events["started"] == events["won"] + events["lost"] + events["failed"] + events["cut"] == 1
        given_back = [(fake.port, name) for fake in rig.prefill for name in fake.released]
        assert len(set(given_back)) == len(given_back), "twice"
        read = sum("kv_transfer_params" in body for body in rig.decode[0].seen)
        assert len(given_back) + read >= len(stalls.leased)

    run(go, prefill=prefill, config=HEDGED)

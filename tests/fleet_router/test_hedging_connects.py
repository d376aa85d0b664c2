"""The same while the second leg waits for its connection, which comes late, or is refused, or for which there is no room."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fleet_router.rig import Rig, ask, http, run, until
from tests.fleet_router.test_hedging import HEDGED, Stalls
from tests.fleet_router.test_hedging_orders import (
    ANSWER,
    ENDS,
    OTHERS,
    SAVED,
    Deeds,
    hedges_paid,
    is_balanced,
    is_told_once,
    legs_of,
    no_kv_is_left,
    nothing_counts_twice,
)

CONNECTS = {"connects": 0, "refused": errno.ECONNREFUSED, "no_room": errno.EMFILE}
SOME = [one for one in OTHERS if one != "without_second"]
DEEDS = st.lists(st.one_of(ANSWER, st.sampled_from([*CONNECTS, "closes_idle"]), st.sampled_from(SOME)), min_size=1, max_size=6)


class Late(Deeds):
    """The second leg's connection is made, or not, when it is told."""

    def hold(self) -> None:
        loop = asyncio.get_running_loop()
        really, ports = loop.create_connection, {worker.port for worker in self.stalls.rig.prefill}
        self.told: asyncio.Future[int] = loop.create_future()
        self.others: list[int] = []
        first: list[int] = []

        async def create(make: Any, host: str, port: int) -> Any:
            if port in ports and not first:
                first.append(port)
            elif port in ports and port != first[0] and not self.others:
                self.others.append(port)
                if error := await self.told:
                    raise OSError(error, "no")
            return await really(make, host, port)

        loop.create_connection = create  # type: ignore[method-assign, assignment]

    async def does(self, deed: str | tuple[str, int]) -> None:
        if isinstance(deed, str) and deed in CONNECTS:
            if not self.told.done():
                self.told.set_result(CONNECTS[deed])
        elif deed == "closes_idle":
            for worker in self.workers:
                for connection in list(worker.pool._idle):
                    connection.abort()
        elif isinstance(deed, str) or len(self.stalls.told) > (deed[0] == "second"):
            await super().does(deed)
        await asyncio.sleep(0)


def is_paid_if_sent(one: Late) -> None:
    """By the second leg's worker, unless that had other legs of this request, too."""
    second = f"u{one.others[0]}"
    read = sum(f"u{worker.port}" == second for worker in one.stalls.asked)
    assert hedges_paid(one) in (0.0, 1.0)
    if legs_of(one)[second] == 1 and (read or (one.told.done() and one.told.result())):
        assert hedges_paid(one) == read


@settings(max_examples=60, deadline=None)
@given(DEEDS, st.booleans(), st.integers(2, 3), st.sampled_from(ENDS))
def test_nothing_is_left_behind_of_a_second_that_connects(
    deeds: list[str | tuple[str, int]], stream: bool, prefill: int, ends: str
):  # fmt: skip
    async def go(rig: Rig) -> None:
        stalls = Stalls(rig)
        rig.context.hedges.saved = SAVED
        reader, writer, connection = await rig.connect()
        one = Late(rig, stalls, connection, (reader, writer))
        one.say(HEDGED, "")
        one.hold()
        writer.write(http(ask(stream=stream), "connection: close"))
        await until(lambda: len(stalls.asked) == 1)
        await until(lambda: rig.context.metrics.hedges["started"] == 1)
        for deed in [*deeds, "connects"]:
            await one.does(deed)
        await one.end(ends)
        is_told_once(await one.heard(), one.left)
        await asyncio.sleep(0.02)
        is_balanced(one)
        is_paid_if_sent(one)
        no_kv_is_left(one)
        nothing_counts_twice(one, [*deeds, ends, *(["deadline"] if one.told.result() else [])])

    run(go, prefill=prefill, config=HEDGED)

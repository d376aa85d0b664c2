"""Whatever becomes of the legs of one request, in whatever order: hedges, retries, streams that are carried on, deadlines, a
client that leaves. No leg is left open, and no KV is left behind or given back twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet_router.config import HedgeBounds
from fleet_router.ending import unframed
from fleet_router.health.resume import said_of
from fleet_router.watching import watch
from tests.fleet_router.fake_worker import REFERENCE, FakeWorker, answer
from tests.fleet_router.health.test_resume import GREEDY, generator, tokens, word
from tests.fleet_router.rig import CONFIG, Rig, http, run, until
from tests.fleet_router.test_hedging import GARBAGE, HALF, RAW

Behaviour = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]
PROMPT = list(range(100, 300))
HEDGE = HedgeBounds(after=1.0, least_s=0.01, share=0.5)
PREFILLS = ["kv", "kv", "slow", "slow", "stalls", "fails", "garbage", "half", "breaks"]
DECODES = ["all", "dies", "dies", "dies at once", "fails", "no kv", "stalls", "stalls later"]
ENDS = ["reads", "reads", "leaves", "deadline"]


class Legs:
    """Workers that do what is next of a list for each leg they get, and what they gave and were told."""

    def __init__(self, rig: Rig, prefills: list[str], decodes: list[str]) -> None:
        self.rig, self.prefills, self.decodes = rig, list(prefills), list(decodes)
        self.leases: list[tuple[FakeWorker, str]] = []
        """Given out, by whom."""
        self.read: set[str] = set()
        """By decode workers that began to answer."""
        for worker in rig.prefill:
            worker.behave = self.prefill(worker)
        for worker in rig.decode:
            worker.behave = self.decode(worker)
        rig.context.hedges.saved, rig.context.hedges.saved_tokens = 10.0, 1e6

    async def left(self, worker: FakeWorker, writer: asyncio.StreamWriter) -> bool:
        """It says nothing more, until nobody waits for it."""
        await until(lambda: worker.is_left(writer), deadline_s=10.0)
        return True

    def prefill(self, worker: FakeWorker) -> Behaviour:
        async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            how = self.prefills.pop(0) if self.prefills else "kv"
            if how == "stalls":
                return await self.left(worker, writer)
            if how == "slow":
                await asyncio.sleep(0.03)
            if how in ("kv", "slow"):
                lease = f"lease-{len(self.leases)}"
                self.leases.append((worker, lease))
                answer(writer, 200, {"choices": [], "kv_transfer_params": {**REFERENCE, "lease_id": lease}})
            elif how == "fails":
                answer(writer, 500, {})
            elif how == "breaks":
                writer.transport.abort()
            else:
                writer.write(RAW[GARBAGE if how == "garbage" else HALF])
                if how == "half":
                    await writer.drain()
                    writer.close()
            return True

        return behave

    def decode(self, worker: FakeWorker) -> Behaviour:
        async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if not body.get("max_tokens"):
                return await generator()(body, writer)
            how = self.decodes.pop(0) if self.decodes else "all"
            if how == "stalls":
                return await self.left(worker, writer)
            if how == "fails":
                answer(writer, 500, {})
            elif how == "no kv":
                answer(writer, 500, {"error": {"type": "KvTransferError", "message": "no"}})
            elif how == "dies at once":
                writer.transport.abort()
            elif how == "stalls later":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                return await self.left(worker, writer)
            else:
                self.read.add(body.get("kv_transfer_params", {}).get("lease_id", ""))
                return await generator(dies_after=12 if how == "dies" else None)(body, writer)
            return True

        return behave

    def is_over(self) -> bool:
        """Nothing runs."""
        return all(one.flow is None for one in self.rig.connections) and self.rig.idle()

    async def end(self, how: str) -> None:
        """All legs come to an end; what stalls does by its deadline."""
        for turn in range(200):
            if self.is_over():
                break
            await asyncio.sleep(0.01)
            if how == "deadline" or turn > 20:
                watch(self.rig.context, self.rig.connections, self.rig.context.clock() + CONFIG.silent_s + 1)
                self.rig.sweep(later_s=CONFIG.first_token_deadline_s + 1)
        await until(self.is_over)
        releases = self.rig.context.releases
        await until(lambda: all(one.outcome for found in releases._by_pool.values() for one in found))

    def no_kv_is_left(self) -> None:
        """All that was given out was read, or given back; by its id once."""
        for worker, lease in self.leases:
            assert worker.released.count(lease) <= 1, lease
            named = [name for name in worker.released if not name.startswith("lease-")]
            assert lease in self.read or lease in worker.released or named, (lease, worker.released)
        for worker in self.rig.prefill:
            given_back = [name for name in worker.released if name.startswith("lease-")]
            assert {(id(worker), one) for one in given_back} <= {(id(by), one) for by, one in self.leases}
            assert len({*worker.released}) == len(worker.released), "once each, whatever it is called"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(PREFILLS), max_size=5), st.lists(st.sampled_from(DECODES), max_size=5), st.sampled_from(ENDS),
    st.floats(0.0, 0.08), st.sampled_from(["replay", "prefill"]), st.integers(1, 3), st.booleans(),
)  # fmt: skip
@example([], ["dies", "stalls later"], "reads", 0.0, "replay", 1, False)  # the KV of the rest stayed
def test_no_leg_is_left_open_and_no_kv_behind(
    prefills: list[str], decodes: list[str], ends: str, after_s: float, resume: Any, workers: int, hedged: bool
):
    config = msgspec.structs.replace(CONFIG, hedge=HEDGE if hedged else None, resume=resume, min_uncached_tokens=0)

    async def go(rig: Rig) -> None:
        legs = Legs(rig, prefills, decodes)
        reader, writer, connection = await rig.connect()
        writer.write(http({**GREEDY, "prompt": PROMPT}, "connection: close"))
        await until(lambda: connection.flow is not None or bool(rig.context.metrics.requests))
        if ends == "leaves":
            await asyncio.sleep(after_s)
            writer.transport.abort()
        await legs.end(ends)
        got = b"" if ends == "leaves" else await reader.read()
        assert got.count(b"HTTP/1.1 ") == (ends != "leaves")
        if b"[DONE]" in got:
            said = said_of(unframed(got.partition(b"\r\n\r\n")[2]))
            assert said is not None
            assert said.text == "".join(map(word, tokens(PROMPT, 40)))
        legs.no_kv_is_left()
        assert [worker.pending for worker in rig.context.table.workers.values()] == [0] * (workers + 3)
        assert rig.context.desk.gate.running == 0
        assert rig.context.desk.faults.count == 0

    run(go, prefill=workers, decode=3, config=config)

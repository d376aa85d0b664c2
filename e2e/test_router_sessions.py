"""Sessions keep their workers, and a worker that joins gets less at first: a real router process, workers without an engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import httpx
import msgspec

from e2e.emulated.asking import Ask
from e2e.emulated.fleet import CONFIG, Emulated, Worker, until
from e2e.test_router_faults_workers import asks

HEADER = "x-session"
SLOW_START_S = 12.0
EARLY_S = 3.0
CLIENTS = 24


def finished(workers: list[Worker]) -> list[int]:
    return [int(worker.stats()["finished"]) for worker in workers]


async def send(client: httpx.AsyncClient, fleet: Emulated, one: Ask, session: str = "") -> str:
    """The decode worker that the router chose."""
    headers = {"x-fleet-explain": "1", "content-type": "application/json", **({HEADER: session} if session else {})}
    answer = await client.post(f"http://{fleet.address}/v1/completions", content=one.body(), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-fleet-decision"].partition('decode="')[2].partition('"')[0]


def test_a_session_stays_with_its_worker_over_a_new_router_and_a_new_worker(tmp_path: Path):
    """Its prompts have no beginning in common, so that nothing but the header holds it there."""
    config = msgspec.structs.replace(CONFIG, session_header=HEADER)
    sessions = [f"user-{i}" for i in range(24)]

    async def turn(fleet: Emulated, first: int) -> dict[str, str]:
        """Each session twice; its one worker."""
        found: dict[str, set[str]] = {name: set() for name in sessions}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            for i, name in enumerate(sessions * 2):
                (one,) = asks(1, first=first + i)
                found[name].add(await send(client, fleet, one, name))
        assert all(len(workers) == 1 for workers in found.values()), found
        return {name: workers.pop() for name, workers in found.items()}

    with Emulated(tmp_path, 195, 0, 4, config=config) as fleet:
        fleet.publish(fleet.decode[:3])
        until("three are followed", lambda: fleet.metric("endpoints") == 3, 10)
        before = asyncio.run(turn(fleet, 0))
        assert len(set(before.values())) == 3, "sessions are spread"
        fleet.kill_router()
        fleet.start_router()
        assert asyncio.run(turn(fleet, 1_000)) == before, "another router agrees"
        fleet.publish(fleet.decode)
        until("all are followed", lambda: fleet.metric("endpoints") == 4, 10)
        after = asyncio.run(turn(fleet, 2_000))
        moved = {name for name in sessions if after[name] != before[name]}
        print(f"{len(moved)} of {len(sessions)} sessions went to the new worker: {Counter(after.values())}")
        assert {after[name] for name in moved} <= {fleet.decode[3].endpoint().name}, "none goes from one old worker to another"
        assert len(moved) <= len(sessions) // 2


def test_a_worker_that_joins_gets_less_in_its_first_seconds(tmp_path: Path):
    """Two that serve, then a third, under a load that is always the same; its share of it before and after its slow start."""
    config = msgspec.structs.replace(CONFIG, slow_start_s=SLOW_START_S)
    shares: list[float] = []

    async def load(fleet: Emulated, stop: asyncio.Event, first: int) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            while not stop.is_set():
                (one,) = asks(1, first=first)
                first += 1
                await send(client, fleet, one)

    async def share(fleet: Emulated, seconds: float) -> float:
        before = await asyncio.to_thread(finished, fleet.decode)
        await asyncio.sleep(seconds)
        more = [now - then for now, then in zip(await asyncio.to_thread(finished, fleet.decode), before, strict=True)]
        print(more)
        return more[2] / sum(more)

    async def go(fleet: Emulated) -> None:
        stop = asyncio.Event()
        loads = [asyncio.create_task(load(fleet, stop, 10_000 * i)) for i in range(CLIENTS)]
        await asyncio.sleep(1.0)
        begun = time.monotonic()
        fleet.publish(fleet.decode)
        shares.append(await share(fleet, EARLY_S))
        await asyncio.sleep(max(0.0, begun + SLOW_START_S + 1.0 - time.monotonic()))
        shares.append(await share(fleet, 2 * EARLY_S))
        stop.set()
        await asyncio.gather(*loads)

    with Emulated(tmp_path, 196, 0, 3, config=config) as fleet:
        for worker in fleet.decode:
            worker.fault(tick_s=0.01)
        fleet.publish(fleet.decode[:2])
        asyncio.run(go(fleet))
        print(json.dumps(shares))
        early, late = shares
        assert 0 < early < 0.2
        assert late > max(0.2, 1.5 * early)  # a third of them is its part
        fleet.quiet()

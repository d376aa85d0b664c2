"""Is disaggregation real? What a real router and real worker processes count, read by the operator's telemetry as in a cluster,
up to the condition `Disaggregating`. Requests are answered 200 with right tokens all the time: only what the workers count tells
whether their KV moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.emulated.asking import Ledger, closed_loop
from e2e.emulated.fleet import PORT, Emulated, Worker
from e2e.test_router_faults_workers import asks
from fleet_api.parse import parse_fleet
from fleet_operator.telemetry.scrape import ScrapeTelemetry
from fleet_planner.fabric import NOT_MOVING_ANSWERS, disaggregating
from fleet_planner.types import Verdict

pytestmark = pytest.mark.timeout(300)
LONG = 120
"""Tokens of a prompt that is prefilled by another worker."""


def pod(worker: Worker) -> dict[str, Any]:
    """What the operator knows of it."""
    labels = {"inferencefleet.io/role": worker.role, "inferencefleet.io/tier": "t"}
    agent = {"name": "agent", "containerPort": PORT + 1}
    return {
        "metadata": {"name": f"{worker.role}-{worker.number}", "labels": labels},
        "spec": {"containers": [{"name": "worker", "ports": [agent]}]},
        "status": {"podIP": worker.host, "phase": "Running"},
    }


class Watched:
    """One fleet, requests one after the other, and a reading after each."""

    def __init__(self, fleet: Emulated) -> None:
        self._fleet = fleet
        tier = {"name": "t", "accelerator": {"type": "cpu"}}
        self._spec = parse_fleet(
            {
                "apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet",
                "metadata": {"name": "emulated", "namespace": "default"},
                "spec": {"model": {"source": "file:///m"}, "tiers": [tier]},
            }
        )  # fmt: skip
        self._telemetry = ScrapeTelemetry()
        self._sent = 0
        self.ledger = Ledger()

    async def read(self) -> Verdict:
        """The condition, from what everybody counts now."""
        pods = [pod(worker) for worker in self._fleet.workers]
        return disaggregating(await self._telemetry.collect(self._spec, pods, [f"http://{self._fleet.address}"]))

    async def told(self, reason: str, most_s: float = 90.0) -> Verdict:
        """The condition once it has this reason, while requests come; a pair that is out is tried again after 5 s, then 10 s."""
        begun = time.monotonic()
        while (found := await self.read())[1] != reason:
            assert time.monotonic() - begun < most_s, found
            await self.ask(5)
        return found

    async def ask(self, count: int = 1) -> None:
        """Prompts that nobody has seen, so that they are prefilled somewhere."""
        await closed_loop(self._fleet.address, asks(count, first=self._sent, size=LONG), 1, self.ledger)
        self._sent += count

    async def handed(self) -> int:
        """Answers whose prompt another worker prefilled, as the router counts them."""
        return int(await asyncio.to_thread(self._fleet.metric, "handed_over_total"))

    async def close(self) -> None:
        await self._telemetry.close()


async def played(fleet: Emulated, scenario: Callable[[Emulated, Watched], Awaitable[None]]) -> None:
    watched = Watched(fleet)
    try:
        await scenario(fleet, watched)
    finally:
        await watched.close()


async def scenario(fleet: Emulated, watched: Watched) -> None:
    assert (await watched.read())[:2] == ("Unknown", "NoTransferYet")
    await watched.ask(3 * NOT_MOVING_ANSWERS)
    assert await watched.handed() >= 2 * NOT_MOVING_ANSWERS, "the router prefilled too little elsewhere"
    assert (await watched.read())[:2] == ("True", "KvMoved")
    moved = fleet.decode[0].stats()["pulled"]
    fleet.decode[0].fault(deaf=True)
    before, told = await watched.handed(), ("", "", "")
    while told[1] != "KvNotMoving":
        await watched.ask()
        told = await watched.read()
        assert await watched.handed() - before <= NOT_MOVING_ANSWERS, told
        assert watched.ledger.all < 20 * NOT_MOVING_ANSWERS, "the router hands nothing over any more"
    assert await watched.handed() - before == NOT_MOVING_ANSWERS
    assert told[0] == "False"
    assert f"{NOT_MOVING_ANSWERS} prompts" in told[2]
    assert fleet.decode[0].stats()["pulled"] == moved, "the fault did not happen"
    fleet.decode[0].fault()
    await watched.ask(3)
    assert (await watched.read())[:2] == ("True", "KvMoved")
    assert watched.ledger.right == watched.ledger.all, watched.ledger.ends
    print(f"{watched.ledger.all} answers, all right; told after {NOT_MOVING_ANSWERS} whose KV did not move")


def test_answers_without_kv_are_told_within_n_and_no_sooner(tmp_path: Path):
    with Emulated(tmp_path, 122, 1, 1) as fleet:
        asyncio.run(played(fleet, scenario))
        assert fleet.prefill[0].stats()["pinned"] == NOT_MOVING_ANSWERS, "KV that nobody read is there until its lease is over"


async def one_pair(fleet: Emulated, watched: Watched) -> None:
    """Nothing else fails, and nobody's answer is wrong."""
    giver, taker = fleet.prefill[0], fleet.decode[0]
    await watched.ask(3 * NOT_MOVING_ANSWERS)
    assert (await watched.read())[:2] == ("True", "KvMoved")
    giver.fault(cut=[taker.uid])
    told = await watched.told("PairFailing")
    named = f"from {giver.role}-{giver.number} to {taker.role}-{taker.number};"
    assert (told[0], named in told[2]) == ("False", True), told
    assert giver.stats()["cut_reads"], "the fault did not happen"
    giver.fault()
    assert (await watched.told("KvMoved"))[0] == "True"
    assert watched.ledger.right == watched.ledger.all, watched.ledger.ends


def test_a_pair_between_which_no_kv_moves_is_named_until_it_does_again(tmp_path: Path):
    with Emulated(tmp_path, 123, 2, 1) as fleet:
        asyncio.run(played(fleet, one_pair))

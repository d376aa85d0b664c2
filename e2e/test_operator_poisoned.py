"""A prefill worker from which no KV gets to anybody, while it answers and is ready: the operator finds out which side it is and
replaces that worker, no request fails meanwhile, what serves stays inside the ratio, and a second one waits for its hour.

The operator's own code on the in-memory store and on what it scrapes, a real router process on the operator's documents, and
worker processes without an engine whose KV moves over TCP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from e2e.emulated.asking import Ledger, closed_loop
from e2e.emulated.fleet import Emulated, Worker
from e2e.test_router_faults_workers import asks
from fleet_api.conditions import rfc3339
from fleet_operator.cluster.interface import CONFIG_MAP, DEPLOYMENT, POD
from fleet_operator.names import ROLE
from fleet_operator.telemetry.scrape import AGENT_PORT, ScrapeTelemetry
from fleet_planner.roles import ROLES
from fleet_planner.types import TierTelemetry
from fleet_wire.endpoints import ENDPOINTS_KEY
from tests.fleet_operator.world import NAMESPACE, World, manifest

pytestmark = pytest.mark.timeout(300)
TIER = {
    "name": "t", "accelerator": {"type": "cpu"}, "ratio": {"prefill": 1, "decode": 1, "min": "3:4", "max": "4:3"},
    "prefill": {"replicas": 3, "minReplicas": 3}, "decode": {"replicas": 3, "minReplicas": 3},
}  # fmt: skip
SPEC = {
    "model": {"source": "file:///m", "servedName": "tiny"},
    "tiers": [TIER],
    "scaling": {"mode": "manual"},
    "telemetry": {"interval": "1s"},
    "routing": {"slowStart": "0s"},
    "healing": {"restartPoisoned": {"after": "3s"}},
}
CLIENTS = 12
LOOK_S = 0.2
LONG = 120
"""Tokens of a prompt that is prefilled by another worker."""


class Playground(World):
    """Its pods are processes, its clock is the wall's, and it is scraped."""

    def __init__(self, fleet: Emulated, net: int) -> None:
        super().__init__()
        self.now = time.time()
        self.fleet, self.net = fleet, net
        self.processes: dict[str, Worker] = {}
        """By uid."""
        self.documents: list[dict[str, Any]] = []
        """All that the routers were told of workers."""
        self.scraped = ScrapeTelemetry()
        self._numbers = count()

    async def collect(self, fleet: Any, pods: Any, routers: Any) -> dict[str, TierTelemetry]:
        return await self.scraped.collect(fleet, pods, [f"http://{self.fleet.address}"])

    async def kubelet(self) -> None:
        """Workers are started, ready when they answer, and end when nothing runs on them any more."""
        for pod in await self.store.list(POD, NAMESPACE):
            meta = pod["metadata"]
            if meta["labels"].get(ROLE) not in ROLES:
                continue
            if meta["uid"] not in self.processes:
                worker = Worker(meta["labels"][ROLE], next(self._numbers), self.net, self.fleet.folder, AGENT_PORT)
                self.processes[meta["uid"]] = worker.start(meta["uid"])
                await self.user.bind(NAMESPACE, meta["name"], "node")
            elif "deletionTimestamp" in meta:
                await self._drained(meta)
            elif not (pod.get("status") or {}).get("podIP"):
                await self._ready(meta)
        for deployment in await self.store.list(DEPLOYMENT, NAMESPACE):
            await self.user.patch_status(DEPLOYMENT, NAMESPACE, deployment["metadata"]["name"], {"readyReplicas": 1})

    async def _ready(self, meta: dict[str, Any]) -> None:
        worker = self.processes[meta["uid"]]
        with suppress(OSError):
            await asyncio.to_thread(worker.stats)
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": rfc3339(time.time())}
            status = {"phase": "Running", "podIP": worker.host, "conditions": [ready]}
            await self.user.patch_status(POD, NAMESPACE, meta["name"], status)

    async def _drained(self, meta: dict[str, Any]) -> None:
        """As its agent does: streams and leases first."""
        stats = await asyncio.to_thread(self.processes[meta["uid"]].stats)
        if not stats["running"] and not stats["pinned"]:
            self.processes[meta["uid"]].stop()
            await self.user.delete(POD, NAMESPACE, meta["name"], grace_s=0)

    async def go_on(self) -> None:
        """What the operator does, as time passes."""
        while True:
            self.now = time.time()
            await self.step()
            await self._publish()
            await asyncio.sleep(LOOK_S)

    async def _publish(self) -> None:
        for one in await self.store.list(CONFIG_MAP, NAMESPACE):
            told = json.loads(one["data"][ENDPOINTS_KEY])
            if not self.documents or self.documents[-1] != told:
                self.documents.append(told)
                for key, text in one["data"].items():
                    self.fleet.write(key, text.encode())

    def of(self, role: str) -> list[str]:
        """Uids of those that serve."""
        workers = self.documents[-1]["workers"] if self.documents else []
        return sorted(one["uid"] for one in workers if (one["role"], one["state"]) == (role, "serving"))

    async def until(self, what: str, *reasons: str, most_s: float = 90.0) -> None:
        """Until Disaggregating has one of these reasons."""
        end = time.monotonic() + most_s
        while (found := await self.condition("Disaggregating")).get("reason") not in reasons:
            assert time.monotonic() < end, (what, found, await self.events())
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def playing(folder: Path, net: int) -> AsyncIterator[Playground]:
    fleet = Emulated(folder, net, 0, 0)
    fleet.documents.mkdir()
    here = Playground(fleet, net)
    await here.user.apply(manifest(**SPEC))
    going = asyncio.create_task(here.go_on())
    try:
        end = time.monotonic() + 60
        while not (len(here.of("prefill")) == len(here.of("decode")) == 3):
            assert not going.done() or await going
            assert time.monotonic() < end, here.documents[-1:]
            await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(fleet.start_router)
        yield here
    finally:
        going.cancel()
        with suppress(asyncio.CancelledError):
            await going
        fleet.stop_router()
        for worker in here.processes.values():
            worker.stop()
        await here.scraped.close()


async def load(here: Playground, ledger: Ledger, stop: asyncio.Event) -> None:
    """Prompts that nobody has seen, so that they are prefilled somewhere."""
    sent = 0
    while not stop.is_set():
        await closed_loop(here.fleet.address, asks(CLIENTS * 2, first=sent, size=LONG, max_tokens=8), CLIENTS, ledger)
        sent += CLIENTS * 2
        await asyncio.sleep(0.1)


async def scenario(here: Playground) -> None:
    ledger, stop = Ledger(), asyncio.Event()
    asking = asyncio.create_task(load(here, ledger, stop))
    await here.until("KV moves", "KvMoved")
    first, second, _ = here.of("prefill")
    here.processes[first].fault(cut=here.of("decode"))
    begun = time.monotonic()
    await here.until("it is found", "WorkerPoisoned")
    found_s = time.monotonic() - begun
    await here.until("it is replaced", "KvMoved")
    replaced_s = time.monotonic() - begun
    assert first not in here.of("prefill")
    assert len(here.of("prefill")) == 3
    here.processes[second].fault(cut=here.of("decode"))
    await here.until("the budget is spent", "HealingBudgetSpent")
    await asyncio.sleep(15)
    assert second in here.of("prefill"), "a second one in the same hour"
    assert (await here.condition("Disaggregating"))["reason"] == "HealingBudgetSpent"
    stop.set()
    await asking
    assert ledger.right == ledger.all > 100, (ledger.ends, ledger.odd)
    replaced = [event for event in await here.events() if " PoisonedReplaced " in event]
    assert len(replaced) == 1
    counts = [
        [sum((w["role"], w["state"]) == (role, "serving") for w in told["workers"]) for role in ROLES] for told in here.documents
    ]
    at_rest = [pair for pair in counts if all(pair)]
    assert all(3 * d <= 4 * p and 3 * p <= 4 * d for p, d in at_rest), counts
    print(f"found {found_s:.0f} s and replaced {replaced_s:.0f} s after it broke; {ledger.all} answers, all right: {replaced[0]}")


def test_a_poisoned_worker_is_replaced_and_a_second_one_waits(tmp_path: Path):
    async def whole() -> None:
        async with playing(tmp_path, 124) as here:
            await scenario(here)

    asyncio.run(whole())

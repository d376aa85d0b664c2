"""The transport, told by real workers: proven shared memory, RDMA that is not there, and what `required` makes of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_up import free_port
from fleet_api.v1alpha1 import FleetStatus
from fleet_cli.up.bundled import bundled_manifest, tiny_model
from fleet_cli.up.local import LocalFleet
from fleet_operator.names import ROLE
from fleet_worker.transfer.transport import has_rdma_device

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore::ResourceWarning")]
WITHIN_S = 150
RDMA = {"transport": "rdma", "resource": "rdma/hca"}
no_rdma = pytest.mark.skipif(has_rdma_device(), reason="this machine has an RDMA device")


class Fleet:
    """A running fleet and what it says."""

    def __init__(self, local: LocalFleet) -> None:
        self.local = local

    async def condition(self, kind: str) -> tuple[str, str, str]:
        _, status = await self.local.observe()
        found = FleetStatus.model_validate(status).condition(kind)
        return (found.status, found.reason, found.message) if found is not None else ("", "", "")

    async def until(self, kind: str, status: str) -> tuple[str, str, str]:
        deadline, found = time.monotonic() + WITHIN_S, ("", "", "")
        while time.monotonic() < deadline:
            self.local.raise_if_dead()
            found = await self.condition(kind)
            if found[0] == status:
                return found
            await asyncio.sleep(0.2)
        raise AssertionError(f"{kind} is {found}, not {status}")

    async def ask(self, times: int) -> None:
        async with httpx.AsyncClient(base_url=self.local.router_url, timeout=60, trust_env=False) as client:
            for turn in range(times):
                body = {"model": "tiny", "prompt": f"{turn} tells a story of many words and no end " * 8, "max_tokens": 4}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

    async def told(self, metric: str) -> list[float]:
        """Samples of all workers."""
        pods, _ = await self.local.observe()
        workers = [pod["status"]["podIP"] for pod in pods if pod["metadata"]["labels"][ROLE] in ("prefill", "decode")]
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            texts = [(await client.get(f"http://{address}:8000/metrics")).text for address in workers]
        lines = [line for text in texts for line in text.splitlines()]
        return [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == metric]


def played(tmp_path: Path, transfer: dict[str, Any], scenario: Any) -> None:
    manifest = bundled_manifest(tiny_model())
    manifest["spec"]["tiers"][0]["kvTransfer"] = transfer

    async def whole() -> None:
        async with LocalFleet(manifest=manifest, state_dir=tmp_path / "state", port=free_port(), claims={}) as local:
            await scenario(Fleet(local))

    asyncio.run(whole())


def test_shared_memory_is_proven_by_probe_and_by_engine(tmp_path: Path):
    async def scenario(fleet: Fleet) -> None:
        await fleet.until("Available", "True")
        status, reason, message = await fleet.until("TransportVerified", "True")
        assert (status, reason) == ("True", "Verified")
        assert "3 workers use shm, " in message
        await fleet.ask(4)
        assert (await fleet.until("Disaggregating", "True"))[1] == "KvMoved"
        assert "use shm" in (await fleet.until("TransportVerified", "True"))[2]
        assert await fleet.told("fleet:kv_handoff_guarded") == [1.0] * 3, "a fleet of this machine has its key, too"
        assert sum(await fleet.told("fleet:kv_handoff_strangers_total")) == 0

    played(tmp_path, {"transport": "shm", "required": True}, scenario)


@no_rdma
def test_rdma_that_is_not_there_is_told_while_the_fleet_serves(tmp_path: Path):
    async def scenario(fleet: Fleet) -> None:
        await fleet.until("Available", "True")
        status, reason, message = await fleet.until("TransportVerified", "False")
        assert (status, reason) == ("False", "TcpFallback")
        assert "asks for rdma, but 3 of 3 workers use tcp" in message
        await fleet.ask(3)
        assert (await fleet.condition("TransportVerified"))[1] == "TcpFallback"

    played(tmp_path, RDMA, scenario)


@no_rdma
def test_required_rdma_that_is_not_there_keeps_workers_from_serving(tmp_path: Path):
    async def scenario(fleet: Fleet) -> None:
        status, reason, message = await fleet.until("TransportVerified", "False")
        assert (status, reason) == ("False", "Mismatch")
        assert message.endswith("they do not serve, because it is required; their log says why")
        assert (await fleet.condition("Available"))[0] == "False"
        pods, _ = await fleet.local.observe()
        workers = [pod for pod in pods if pod["metadata"]["labels"][ROLE] in ("prefill", "decode")]
        ready = [c["status"] for pod in workers for c in (pod.get("status") or {}).get("conditions", []) if c["type"] == "Ready"]
        assert len(workers) == 3
        assert "True" not in ready

    played(tmp_path, {**RDMA, "required": True}, scenario)

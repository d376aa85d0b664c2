"""Pods that are deleted while the API server fails, or deleted again with less grace; and restarts with less grace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleet_operator.cluster.interface import POD, Kind, UnavailableError
from tests.fleet_operator.runtime.test_kubelet import Local, is_ready, marked, python, run

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('up', 'w'); time.sleep(600)"
UP = {"exec": {"command": ["test", "-e", "up"]}, "periodSeconds": 0.1}
HOOK = {"preStop": {"sleep": {"seconds": 100}}}


@pytest.mark.parametrize("lifecycle", [{}, HOOK], ids=["ignores-sigterm", "in-its-hook"])
@pytest.mark.parametrize("grace_s", [1, 0])
def test_a_second_deletion_shortens_the_grace(tmp_path: Path, lifecycle: dict[str, Any], grace_s: int):
    """kubectl delete --force after a deletion with a long grace: the process ran on, without a pod."""

    async def scenario() -> None:
        async with Local(tmp_path).running() as local:
            worker = python(STUBBORN, readinessProbe=UP, lifecycle=lifecycle)
            await local.apply("stubborn", worker, terminationGracePeriodSeconds=100)
            await local.until("stubborn", is_ready)
            await local.cluster.delete(POD, "default", "stubborn")
            await local.until("stubborn", lambda pod: "deletionTimestamp" in pod["metadata"])
            await local.cluster.delete(POD, "default", "stubborn", grace_s=grace_s)
            await local.gone("stubborn")
            async with asyncio.timeout(10):
                while marked(tmp_path) or local.kubelet._runners:  # noqa: ASYNC110 - processes tell nobody
                    await asyncio.sleep(0.02)

    run(scenario)


def test_a_last_status_that_cannot_be_written_does_not_keep_the_pod(tmp_path: Path):
    """It was Terminating until the runtime was started anew."""

    async def scenario() -> None:
        async with Local(tmp_path).running() as local:

            async def unavailable(kind: Kind, *_: Any, **__: Any) -> Any:
                raise UnavailableError("not now")

            local.cluster.patch_status = unavailable  # type: ignore[method-assign]
            await local.apply("one", python("import time; time.sleep(600)"))
            async with asyncio.timeout(10):
                while not marked(tmp_path):  # noqa: ASYNC110 - processes tell nobody
                    await asyncio.sleep(0.02)
            await local.cluster.delete(POD, "default", "one", grace_s=2)
            await local.gone("one")

    run(scenario)


@pytest.mark.parametrize("probe", ["livenessProbe", "startupProbe"])
def test_a_probe_may_have_a_grace_of_its_own(tmp_path, probe):
    """A stopped process takes no SIGTERM: it was waited for as long as a healthy pod may drain."""

    async def scenario():
        async with Local(tmp_path).running() as local:
            never = {"exec": {"command": ["false"]}, "periodSeconds": 0.05, "failureThreshold": 1, "timeoutSeconds": 15}
            deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            probes = {probe: {**never, "terminationGracePeriodSeconds": 0.05}}
            await local.apply("deaf", python(deaf, **probes), terminationGracePeriodSeconds=600)
            pod = await local.until("deaf", lambda p: p.get("status", {}).get("containerStatuses", [{}])[0].get("restartCount"))
            ended = pod["status"]["containerStatuses"][0]["lastState"]["terminated"]
            assert f"{probe.removesuffix('Probe')} probe failed" in ended["message"]
            await local.cluster.delete(POD, "default", "deaf", grace_s=0)
            await local.gone("deaf")

    run(scenario)

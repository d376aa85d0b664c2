"""What workers leave in this machine's /dev/shm."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fleet_operator.cluster.interface import POD
from tests.fleet_operator.runtime.test_kubelet import Local, python


@pytest.mark.parametrize("first", [True, False], ids=["its-pod-goes-first", "they-go-together"])
def test_what_a_killed_worker_shared_goes_with_its_pod_or_with_its_runtime(tmp_path, first):
    async def scenario():
        os.mkfifo(tmp_path / "told")
        holds = f"import time; held = make(); open({str(tmp_path / 'told')!r}, 'w').write(str(held.folder)); time.sleep(600)"
        async with (local := Local(tmp_path)).running():
            await local.apply("holds", python(f"from fleet_worker.segments import make; {holds}"))
            folder = Path(await asyncio.to_thread((tmp_path / "told").read_text))
            if first:
                runners = list(local.kubelet._tasks.values())
                await local.cluster.delete(POD, "default", "holds", grace_s=0)
                await asyncio.wait(runners)
            return folder, first and await asyncio.to_thread(folder.exists)

    folder, was_there = asyncio.run(scenario())
    assert (was_there, folder.exists()) == (False, False)

"""What a container's first process leaves behind when it is killed: real processes, shaped as vLLM's."""

import asyncio
import contextlib
import os
import select
import signal
import sys

import pytest

from fleet_operator.runtime.logs import ContainerLog
from fleet_operator.runtime.process import start

CORE = "import time; time.sleep(600)"
# the API server leads a session of its own; the core below it wrote its title over its environment
SERVER = f"""
import subprocess, sys, time
core = subprocess.Popen(["env", "-i", sys.executable, "-c", {CORE!r}])
open(sys.argv[1], "w").write(str(core.pid))
time.sleep(600)
"""
AGENT = f"""
import os, subprocess, sys, time
from fleet_worker.agent.supervise import _die_with
subprocess.Popen([sys.executable, "-c", {SERVER!r}, sys.argv[1]], start_new_session=True, preexec_fn=_die_with(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("killer", ["runtime", "somebody-else"])
def test_an_engine_core_without_its_mark_ends_with_its_container(tmp_path, killer):
    async def scenario():
        told = tmp_path / "core"
        os.mkfifo(told)
        log = ContainerLog(tmp_path / "log", 1024)
        argv = [sys.executable, "-c", AGENT, str(told)]
        process = start(argv, os.environ, tmp_path, log, message_bytes=100, mark="m", pids=tmp_path / "pids")
        core = os.pidfd_open(int(await asyncio.to_thread(told.read_text)))
        try:
            if killer == "runtime":
                process.kill()
            else:
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            ended, _, _ = await asyncio.to_thread(select.select, [core], [], [], 10)
            assert ended, "the core outlives its container"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(core, signal.SIGKILL)
            os.close(core)
            process.close()

    asyncio.run(scenario())

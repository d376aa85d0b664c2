"""What a container's first process leaves behind when it is killed: real processes, shaped as vLLM's."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

from fleet_operator.runtime.leftovers import kill_leftovers
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
from fleet_worker.agent.supervise import die_with
subprocess.Popen([sys.executable, "-c", {SERVER!r}, sys.argv[1]], start_new_session=True, preexec_fn=die_with(os.getpid()))
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


# a runtime whose process is its own, as that of `fleet up`: what it waits for is bounded by the test
RUNTIME = """
import asyncio, os, signal, subprocess, sys
from pathlib import Path
from fleet_operator.runtime import leftovers
from fleet_operator.runtime.logs import ContainerLog
from fleet_operator.runtime.process import start

folder, agent_code = Path(sys.argv[1]), sys.argv[2]

def children():
    of_all = (Path("/proc/self/task") / thread / "children" for thread in os.listdir("/proc/self/task"))
    return {int(pid) for file in of_all for pid in file.read_text().split()}

def begin(name, argv):
    log = ContainerLog(folder / name, 1024)
    return start(argv, os.environ, folder, log, message_bytes=100, mark=name, pids=folder / "pids", alone=True)

async def main():
    stays, told = begin("stays", ["/bin/sleep", "600"]), folder / "told"
    os.mkfifo(told)
    agent = begin("agent", [sys.executable, "-c", agent_code, str(told)])
    await asyncio.to_thread(told.read_text)
    os.kill(agent.pid, signal.SIGKILL)
    await agent.wait()
    assert len(children()) == 3, children()
    while children() != {stays.pid}:
        await asyncio.sleep(0.01)
    helper = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    assert (leftovers.kill_orphans(), helper.poll()) == (0, None), "it may be somebody's who looks after it"
    assert leftovers.kill_orphans(folder / "pids") == 1
    assert children() == {stays.pid}
    agent.close()
    stays.close()

try:
    asyncio.run(asyncio.wait_for(main(), 30))
finally:
    for pid in children():
        os.kill(pid, signal.SIGKILL)
"""
LEADERS = f"""
import os, subprocess, sys, time
for environment in (dict(os.environ), {{}}):  # an engine, and its guard, which carries no mark
    subprocess.Popen([sys.executable, "-c", {CORE!r}], start_new_session=True, env=environment)
open(sys.argv[1], "w").write("ready")
time.sleep(600)
"""


def test_leaders_of_sessions_below_a_killed_agent_are_ended_and_reaped_where_all_children_are_containers(tmp_path):
    argv = [sys.executable, "-c", RUNTIME, str(tmp_path), LEADERS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_no_record_in_a_folder_that_the_user_chose_is_the_users(tmp_path):
    """`fleet up --state tmp` in a Rails application, whose server keeps its own tmp/pids: the files went, a folder ended it."""
    pids = tmp_path / "pids"
    (pids / "7").mkdir(parents=True)
    (pids / "workers").mkdir()
    (pids / "server.pid").write_text("4711\n")
    (pids / "4711").write_bytes(b"\xff")
    (pids / "4712").write_text("1")  # a record of ours; the process is another one by now, if there is one
    assert kill_leftovers(tmp_path) == 0
    assert sorted(path.name for path in pids.iterdir()) == ["4711", "7", "server.pid", "workers"]

"""The process ends when it is told to, or has to."""

from __future__ import annotations

import subprocess
import sys

HANGS = """
import asyncio, contextlib, socket, sys, threading, time
from fleet_operator import __main__ as command, process
from fleet_operator.leader.elector import LeadershipLostError
from fleet_operator.telemetry.prometheus import PrometheusTelemetry

asked = threading.Event()

def hangs(*_, **__):
    asked.set()
    time.sleep(60)

async def run(_):
    asking, telemetry = None, PrometheusTelemetry()
    try:
        socket.getaddrinfo = hangs
        asking = asyncio.ensure_future(telemetry._ask("http://prometheus.monitoring:9090", "up", 0.0))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        raise LeadershipLostError("it could not be renewed in time")
    finally:
        asking.cancel()
        await telemetry.close()

process.run = run
sys.argv = ["fleet-operator", "--health-port", "0"]
sys.exit(command.main())
"""


def test_a_look_up_that_hangs_keeps_no_process_that_lost_its_lease():
    """While DNS was away it lost its lease, and was there for a minute more: the interpreter waits for a pool's threads, and the
    next container only began when the resolver had given up."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (3, "LeadershipLost: it could not be renewed in time\n")

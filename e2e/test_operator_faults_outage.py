"""O7: the API server is killed under a fleet that serves. Stage one: nobody answers at its port all the time. Stage two: no
request failed, no process was started anew, and the operator goes on where it stood. FLEET_O7_S is how long, 45 s if not set."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.fleet import Fleet, manifest, router_processes, worker_processes
from e2e.kube.controlplane import ControlPlane
from e2e.traffic import Ledger, read_trace, send
from fleet_cli.up.bundled import tiny_model

OUTAGE_S = float(os.environ.get("FLEET_O7_S", "45"))
SCHEDULER_S = 60.0
"""After an outage kube-scheduler's own watches wait up to 30 s and, by chance, as long again (client-go's reflector)."""
pytestmark = pytest.mark.timeout(400 + OUTAGE_S)


@contextmanager
def small_load(url: str) -> Iterator[Ledger]:
    """One user who never stops asking."""
    ledger, stop, requests = Ledger(), threading.Event(), read_trace()[:24]

    def ask() -> None:
        while not stop.is_set():
            asyncio.run(send(url, requests, 1, ledger))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield ledger
    finally:
        stop.set()
        thread.join(120)


def kill_api_server(plane: ControlPlane) -> None:
    service = next(service for service in plane.services if service.name == "kube-apiserver")
    plane.services.remove(service)
    os.kill(service.pid, signal.SIGKILL)
    service.stop()


def start_api_server(plane: ControlPlane) -> None:
    plane._run("kube-apiserver", *plane._apiserver_flags())
    plane.services.insert(1, plane.services.pop())  # it must be stopped after all that need it
    plane.wait("readyz of kube-apiserver", plane._is_ready)


def test_the_fleet_serves_while_the_api_server_is_dead(fleet: Fleet, control_plane: ControlPlane):
    fleet.apply(manifest(fleet.namespace, tiny_model()))
    fleet.wait_serving(1, 2)
    pods = {pod["metadata"]["uid"] for role in ("prefill", "decode", "router") for pod in fleet.pods(role)}
    processes = (set(worker_processes(fleet.namespace)), set(router_processes(fleet.namespace)))
    with small_load(fleet.router()) as ledger:
        deadline = time.monotonic() + 60
        while ledger.rounds == 0 and time.monotonic() < deadline:
            time.sleep(0.2)
        before = ledger.rounds
        kill_api_server(control_plane)
        end = time.monotonic() + OUTAGE_S
        while time.monotonic() < end:
            assert not control_plane._is_ready()
            fleet.operator.check()
            time.sleep(1)
        during = ledger.rounds - before
        start_api_server(control_plane)
        fleet.wait("the operator writes again", lambda: fleet.condition("Ready")["status"] == "True", 60)
        pool = next(p for p in fleet.objects("workerpools") if p["spec"]["role"] == "decode")
        fleet.kubectl("scale", "wpool", pool["metadata"]["name"], "--replicas=3")
        fleet.wait("3 decode workers", lambda: fleet.serving() == (1, 3), 90 + SCHEDULER_S)
        time.sleep(5)
    assert during > 0, "no request was answered during the outage"
    assert not ledger.errors, list(ledger.errors.items())[:3]
    assert len(ledger.tokens) == 24
    assert pods <= {pod["metadata"]["uid"] for role in ("prefill", "decode", "router") for pod in fleet.pods(role)}
    assert processes[0] <= set(worker_processes(fleet.namespace))
    assert processes[1] <= set(router_processes(fleet.namespace))
    fleet.delete_and_leave_nothing()

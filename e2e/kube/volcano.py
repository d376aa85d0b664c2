"""A real Volcano beside a control plane: scheduler and controllers, under their own rights. Its webhooks, optional, are off.

with ControlPlane() as plane, volcano(plane): ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from e2e.kube.controlplane import ControlPlane
from e2e.kube.manager import Manager, answers
from e2e.kube.service import Service, free_ports

VOLCANO = Manager("volcano")
LEFT_OUT = ("Deployment", "Job", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
FIRST = ("Namespace", "CustomResourceDefinition")
QUEUE = "/apis/scheduling.volcano.sh/v1beta1/queues/default"


@contextmanager
def volcano(plane: ControlPlane) -> Iterator[Service]:
    """Places pods whose schedulerName is volcano while the block runs; TimeoutError."""
    assets = VOLCANO.assets()
    wish = [one for one in yaml.safe_load_all((assets / "volcano.yaml").read_text()) if one and one["kind"] not in LEFT_OUT]
    for some in ([o for o in wish if o["kind"] in FIRST], [o for o in wish if o["kind"] not in FIRST]):
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(some))
    established = ("wait", "--for=condition=Established", "--timeout=5s", "crd", "--all")
    plane.wait("its CRDs", lambda: plane.kubectl(*established, check=False).returncode == 0)
    config = plane.dir / "volcano-scheduler.conf"
    config.write_text(_configuration(wish))
    scheduler, controllers = free_ports(2)
    services = [
        _start(plane, "scheduler", scheduler, f"--scheduler-conf={config}", f"--cache-dump-dir={plane.dir}"),
        _start(plane, "controller-manager", controllers),
    ]
    plane.services.extend(services)
    try:
        for service, port in zip(services, (scheduler, controllers), strict=True):
            plane.wait(f"{service.name} ready", lambda port=port: answers(f"http://127.0.0.1:{port}/healthz"))
        plane.wait("its default queue", lambda: plane.exists(QUEUE))
        yield services[0]
    finally:
        for service in services:
            plane.services.remove(service)
            service.stop()


def _configuration(objects: list[dict[str, Any]]) -> str:
    """The scheduler's, as installed."""
    found = (one for one in objects if one["kind"] == "ConfigMap" and one["metadata"]["name"] == "volcano-scheduler-configmap")
    return str(next(found)["data"]["volcano-scheduler.conf"])


def _start(plane: ControlPlane, program: str, port: int, *flags: str) -> Service:
    account = {"scheduler": "volcano-scheduler", "controller-manager": "volcano-controllers"}[program]
    kubeconfig = plane.service_account_kubeconfig(VOLCANO.system, account)
    common = (f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--enable-healthz", f"--healthz-address=127.0.0.1:{port}")
    argv = [str(VOLCANO.assets() / program), *common, "--logtostderr", "-v=3", *flags]
    environment = {**os.environ, "DEBUG_SOCKET_DIR": str(plane.dir)}
    return Service(f"volcano-{program}", argv, plane.dir / f"volcano-{program}.log", environment)

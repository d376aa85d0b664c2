"""A real kube-scheduler of scheduler-plugins beside a control plane, as a second scheduler, and its PodGroup controller.

    with ControlPlane() as plane, sched_plugins(plane): ...

Rights and configuration are those of its own chart with one plugin on, coscheduling; the CRDs are those of its module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.helm.chart import helm
from e2e.kube.controlplane import ControlPlane
from e2e.kube.manager import Manager, answers
from e2e.kube.service import Service, free_ports

PLUGINS = Manager("sched-plugins")
SCHEDULER = "scheduler-plugins-scheduler"
CONTROLLER = "scheduler-plugins-controller"
VALUES = {
    "plugins": {"enabled": ["Coscheduling"]},
    "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}],
}


@contextmanager
def sched_plugins(plane: ControlPlane) -> Iterator[Service]:
    """Places pods that name it while the block runs; TimeoutError."""
    assets = PLUGINS.assets()
    plane.kubectl("apply", "--server-side", "-f", str(assets / "crds"))
    established = ("wait", "--for=condition=Established", "--timeout=5s", "crd", "--all")
    plane.wait("its CRDs", lambda: plane.kubectl(*established, check=False).returncode == 0)
    config = yaml.safe_load(_install(plane, assets))
    config["clientConnection"] = {"kubeconfig": str(plane.service_account_kubeconfig(PLUGINS.system, SCHEDULER))}
    file = plane.dir / "sched-plugins.yaml"
    file.write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    account = plane.service_account_kubeconfig(PLUGINS.system, CONTROLLER)
    flags = ["--metricsAddr=0", f"--probeAddr=127.0.0.1:{port}"]
    services = [
        Service(SCHEDULER, [str(assets / "scheduler"), f"--config={file}", "--secure-port=0"], plane.dir / "sched-plugins.log"),
        Service(CONTROLLER, [str(assets / "controller"), *flags], plane.dir / "pod-groups.log", _with(account)),
    ]
    plane.services.extend(services)
    try:
        plane.wait(f"{CONTROLLER} ready", lambda: answers(f"http://127.0.0.1:{port}/readyz"))
        yield services[0]
    finally:
        for service in services:
            plane.services.remove(service)
            service.stop()


def _install(plane: ControlPlane, assets: Path) -> str:
    """Everything of the chart but the pods; the scheduler's configuration."""
    where = ("--namespace", PLUGINS.system, "--values", "-")
    rendered = helm("template", "plugins", str(assets / "chart"), *where, stdin=yaml.safe_dump(VALUES))
    objects: list[dict[str, Any]] = [one for one in yaml.safe_load_all(rendered) if one and one["kind"] != "Deployment"]
    plane.kubectl("create", "namespace", PLUGINS.system)
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))
    return next(str(text) for one in objects if one["kind"] == "ConfigMap" for text in one["data"].values())


def _with(kubeconfig: Path) -> dict[str, str]:
    return {**os.environ, "KUBECONFIG": str(kubeconfig)}

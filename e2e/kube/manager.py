"""Somebody else's controller beside a control plane: its manager as a process, everything else as its own manifests have it.

CRDs, roles, webhooks and configuration are those of the module's `config/default`, made by `kubectl kustomize`; the manager has
the rights of its service account and makes its own certificates. Because it is no pod, the Service of its webhooks is an
ExternalName for this machine, and its Secret is copied to files by us.
"""

from __future__ import annotations

import base64
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.kube.controlplane import ROOT, ControlPlane
from e2e.kube.service import Service, free_ports

CONFIG = "controller_manager_config.yaml"
LEFT_OUT = ("APIService", "Deployment")
FIRST = ("Namespace", "CustomResourceDefinition")
START_S = 180


class MissingError(RuntimeError):
    """The controller is not on this machine, and not to be had; the message is what its get-script said."""


@dataclass(frozen=True)
class Manager:
    """A controller of somebody else, as kubebuilder makes them."""

    name: str
    """Of its program, its get-script and its log; the prefix of its objects."""
    flags: tuple[str, ...] = ()

    @property
    def system(self) -> str:
        """Its namespace."""
        return f"{self.name}-system"

    def assets(self) -> Path:
        """The folder with its program and its manifests; builds them once per machine (minutes). MissingError."""
        done = subprocess.run([ROOT / f"e2e/kube/get-{self.name}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingError(f"{self.name} was not run: {done.stderr.strip()}")
        return Path(done.stdout.strip().splitlines()[-1])


@contextmanager
def running(plane: ControlPlane, manager: Manager) -> Iterator[Service]:
    """Installed, and its manager runs while the block does; TimeoutError."""
    assets = manager.assets()
    port, health = free_ports(2)
    objects = list(yaml.safe_load_all(plane.kubectl("kustomize", str(assets / "config/default")).stdout))
    wish = [_placed_here(one, f"{manager.name}-webhook-service", port) for one in objects if one["kind"] not in LEFT_OUT]
    for some in ([o for o in wish if o["kind"] in FIRST], [o for o in wish if o["kind"] not in FIRST]):
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(some))
    config = next(one["data"][CONFIG] for one in wish if one["kind"] == "ConfigMap" and CONFIG in one["data"])
    (plane.dir / f"{manager.name}.yaml").write_text(_configured(config, _certificates(plane, manager), port, health))
    service = _start(plane, manager, assets)
    plane.services.append(service)
    try:
        plane.wait(f"the certificate of {manager.name}", lambda: _mounted(plane, manager), START_S)
        plane.wait(f"{manager.name} ready", lambda: answers(f"http://127.0.0.1:{health}/readyz"), START_S)
        yield service
    finally:
        plane.services.remove(service)
        service.stop()


def _placed_here(one: dict[str, Any], webhooks: str, port: int) -> dict[str, Any]:
    """The same object for a manager that listens on a port of this machine."""
    if one["kind"] == "Service" and one["metadata"]["name"] == webhooks:
        return {**one, "spec": {"type": "ExternalName", "externalName": "localhost"}}
    for hook in one.get("webhooks", []):
        hook["clientConfig"]["service"]["port"] = port
    conversion = one.get("spec", {}).get("conversion", {}) if one["kind"] == "CustomResourceDefinition" else {}
    if conversion.get("strategy") == "Webhook":
        conversion["webhook"]["clientConfig"]["service"]["port"] = port
    return one


def _configured(text: str, certificates: Path, port: int, health: int) -> str:
    """The default configuration, with our ports and without an election."""
    config = yaml.safe_load(text)
    config["health"] = {**config.get("health", {}), "healthProbeBindAddress": f"127.0.0.1:{health}"}
    config["metrics"] = {**config.get("metrics", {}), "bindAddress": "0"}
    config["webhook"] = {"host": "127.0.0.1", "port": port, "certDir": str(certificates)}
    config["leaderElection"] = {**config.get("leaderElection", {}), "leaderElect": False}
    return yaml.safe_dump(config)


def _certificates(plane: ControlPlane, manager: Manager) -> Path:
    return plane.dir / f"{manager.name}-certs"


def _start(plane: ControlPlane, manager: Manager, assets: Path) -> Service:
    kubeconfig = plane.service_account_kubeconfig(manager.system, f"{manager.name}-controller-manager")
    argv = [str(assets / manager.name), f"--config={plane.dir / manager.name}.yaml", "--zap-log-level=3", *manager.flags]
    return Service(manager.name, argv, plane.dir / f"{manager.name}.log", {**os.environ, "KUBECONFIG": str(kubeconfig)})


def _mounted(plane: ControlPlane, manager: Manager) -> bool:
    """What the kubelet does for a pod: the Secret that the manager fills becomes files."""
    secret = f"/api/v1/namespaces/{manager.system}/secrets/{manager.name}-webhook-server-cert"
    data = plane.get(secret).get("data") or {}
    if not {"tls.crt", "tls.key"} <= set(data):
        return False
    folder = _certificates(plane, manager)
    folder.mkdir(exist_ok=True)
    for name in sorted(data):
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(base64.b64decode(data[name]))
    return True


def answers(url: str) -> bool:
    """Whether it says 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

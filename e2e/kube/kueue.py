"""A real Kueue beside a control plane: its manager as a process, everything else as its own install manifests have it.

    with ControlPlane() as plane, kueue(plane): ...

CRDs with conversion, roles, webhooks and configuration are those of `config/default`, made by `kubectl kustomize`; the manager
has the rights of its service account and makes its own certificates. Three things differ, because it is no pod: the Service of
its webhooks is an ExternalName for this machine, its Secret is copied to files by us, and the visibility API (an aggregated API
server) is off.
"""

from __future__ import annotations

import base64
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.kube.controlplane import ROOT, ControlPlane
from e2e.kube.service import Service, free_ports

SYSTEM = "kueue-system"
ACCOUNT = "kueue-controller-manager"
WEBHOOKS = "kueue-webhook-service"
CERTIFICATE = "kueue-webhook-server-cert"
CONFIG = "controller_manager_config.yaml"
LEFT_OUT = ("APIService", "Deployment")
FIRST = ("Namespace", "CustomResourceDefinition")
START_S = 180


class KueueMissingError(RuntimeError):
    """No Kueue on this machine, and none to be had; the message is what get-kueue said."""


def kueue_assets() -> Path:
    """The folder with Kueue's manager and its manifests; builds them once per machine (minutes). KueueMissingError."""
    done = subprocess.run([ROOT / "e2e/kube/get-kueue"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KueueMissingError(f"Kueue was not run: {done.stderr.strip()}")
    return Path(done.stdout.strip().splitlines()[-1])


@contextmanager
def kueue(plane: ControlPlane) -> Iterator[Service]:
    """Admits pods while the block runs; TimeoutError."""
    assets = kueue_assets()
    port, health = free_ports(2)
    objects = list(yaml.safe_load_all(plane.kubectl("kustomize", str(assets / "config/default")).stdout))
    wish = [_placed_here(one, port) for one in objects if one["kind"] not in LEFT_OUT]
    for some in ([o for o in wish if o["kind"] in FIRST], [o for o in wish if o["kind"] not in FIRST]):
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(some))
    config = next(one["data"][CONFIG] for one in wish if one["kind"] == "ConfigMap" and CONFIG in one["data"])
    service = _start(plane, assets, _configured(config, plane.dir / "kueue-certs", port, health))
    plane.services.append(service)
    try:
        plane.wait("Kueue's certificate", lambda: _mounted(plane), START_S)
        plane.wait("Kueue ready", lambda: _answers(f"http://127.0.0.1:{health}/readyz"), START_S)
        yield service
    finally:
        plane.services.remove(service)
        service.stop()


def _placed_here(one: dict[str, Any], port: int) -> dict[str, Any]:
    """The same object for a manager that listens on a port of this machine."""
    if one["kind"] == "Service" and one["metadata"]["name"] == WEBHOOKS:
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
    config["health"]["healthProbeBindAddress"] = f"127.0.0.1:{health}"
    config["metrics"]["bindAddress"] = "0"
    config["webhook"] = {"host": "127.0.0.1", "port": port, "certDir": str(certificates)}
    config["leaderElection"]["leaderElect"] = False
    return yaml.safe_dump(config)


def _start(plane: ControlPlane, assets: Path, config: str) -> Service:
    (plane.dir / "kueue.yaml").write_text(config)
    kubeconfig = plane.service_account_kubeconfig(SYSTEM, ACCOUNT)
    argv = [str(assets / "kueue"), f"--config={plane.dir / 'kueue.yaml'}", "--zap-log-level=3"]
    env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    return Service("kueue", [*argv, "--feature-gates=VisibilityOnDemand=false"], plane.dir / "kueue.log", env)


def _mounted(plane: ControlPlane) -> bool:
    """What the kubelet does for a pod: the Secret that the manager fills becomes files."""
    data = plane.get(f"/api/v1/namespaces/{SYSTEM}/secrets/{CERTIFICATE}").get("data") or {}
    if not {"tls.crt", "tls.key"} <= set(data):
        return False
    folder = plane.dir / "kueue-certs"
    folder.mkdir(exist_ok=True)
    for name in sorted(data):
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(base64.b64decode(data[name]))
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

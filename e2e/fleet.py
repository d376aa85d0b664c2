"""A fleet on the control plane, as a user sees it through kubectl, and what tests ask of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from e2e.kube.controlplane import ControlPlane
from e2e.kube.service import Service

READY_S = 90.0


def manifest(namespace: str, model: Path) -> dict[str, Any]:
    return {
        "apiVersion": "inferencefleet.io/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "loop", "namespace": namespace},
        "spec": {
            "model": {"source": f"file://{model}", "servedName": "tiny"},
            "engine": {"maxModelLen": 1024},
            "tiers": [
                {
                    "name": "gpu",
                    "accelerator": {"type": "h100-sxm"},
                    "ratio": {"prefill": 1, "decode": 2, "min": "1:3", "max": "1:1"},
                    "prefill": {"maxReplicas": 2},
                    "decode": {"maxReplicas": 4},
                }
            ],
            "scaling": {"targetInflight": {"prefill": 4, "decode": 4}, "scaleDownWindow": "10m"},
            "telemetry": {"interval": "1s"},
        },
    }


class Fleet:
    """A fleet on the control plane, as a user sees it."""

    def __init__(self, plane: ControlPlane, namespace: str, operator: Service) -> None:
        self.plane = plane
        self.operator = operator
        self.namespace = namespace

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.plane.kubectl("-n", self.namespace, *args, stdin=stdin).stdout

    def apply(self, wish: dict[str, Any]) -> None:
        """As a user does it."""
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(wish))

    def wait_serving(self, prefill: int, decode: int, timeout_s: float = READY_S) -> None:
        """Ready, and so many workers that take requests."""
        self.wait("Ready", lambda: self.condition("Ready")["status"] == "True", timeout_s)
        self.wait(f"{prefill} prefill and {decode} decode workers", lambda: self.serving() == (prefill, decode), timeout_s)

    def delete_and_leave_nothing(self) -> None:
        """No object and no process may be left."""
        self.kubectl("delete", "ifleet", "loop", "--timeout=60s")
        kinds = "pods,workerpools,deployments,services,configmaps,poddisruptionbudgets,roles,rolebindings,networkpolicies"
        self.wait("nothing left", lambda: not self.objects(kinds, "-l", "inferencefleet.io/fleet=loop"), 60)
        self.wait("no process left", lambda: not worker_processes(self.namespace), 20)

    def objects(self, kind: str, *selector: str) -> list[dict[str, Any]]:
        return json.loads(self.kubectl("get", kind, "-o", "json", *selector))["items"]

    def pods(self, role: str) -> list[dict[str, Any]]:
        return self.objects("pods", "-l", f"inferencefleet.io/role={role}")

    def status(self) -> dict[str, Any]:
        return json.loads(self.kubectl("get", "ifleet", "loop", "-o", "json")).get("status") or {}

    def condition(self, kind: str) -> dict[str, Any]:
        found = [c for c in self.status().get("conditions") or [] if c["type"] == kind]
        return found[0] if found else {"status": "Unknown", "message": "no status yet"}

    def desired(self) -> tuple[int, int]:
        """Sizes that the operator wants: (prefill, decode)."""
        tier = self.status()["tiers"][0]
        return tier["prefill"]["desired"], tier["decode"]["desired"]

    def serving(self) -> tuple[int, int]:
        tiers = self.status().get("tiers") or [{}]
        return tiers[0].get("prefill", {}).get("serving", 0), tiers[0].get("decode", {}).get("serving", 0)

    def wait(self, what: str, check: Callable[[], bool], timeout_s: float = READY_S) -> None:
        end = time.monotonic() + timeout_s
        while not check():
            self.operator.check()
            if time.monotonic() > end:
                pods = self.kubectl("get", "pods", "-o", "wide")
                state = f"status {json.dumps(self.status())[:3000]}\n{pods}\noperator: {self.operator.tail()}"
                raise AssertionError(f"{what}: not within {timeout_s} s; {state}")
            time.sleep(0.3)

    def router(self) -> str:
        ready = [p for p in self.pods("router") if p["status"].get("podIP") and "deletionTimestamp" not in p["metadata"]]
        return f"http://{ready[0]['status']['podIP']}:8080"


def tokens(url: str, prompt: str, count: int = 16) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def worker_processes(namespace: str) -> dict[int, str]:
    """Agents and engines of a namespace's fleets: pid → pod name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if f'"namespace":"{namespace}"'.encode() in environment:
            named = [pair for pair in environment.split(b"\0") if pair.startswith(b"FLEET_POD_NAME=")]
            found[int(entry.name)] = named[0].partition(b"=")[2].decode() if named else ""
    return found


def router_processes(namespace: str) -> list[int]:
    """Routers that follow a document of the namespace."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"\0kube:{namespace}/".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def rss_mb(pid: int) -> float:
    """Resident memory now."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024

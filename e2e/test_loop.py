"""The whole loop on a real control plane: apply, serve, prove, scale, heal, delete."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from e2e.kube.controlplane import ControlPlane
from e2e.kube.service import Service
from fleet_worker.tinymodel import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The operator counts two replicas and the router reads the longest prefix again. " * 10
READY_S = 90.0

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(400)]


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

    def objects(self, kind: str, *selector: str) -> list[dict[str, Any]]:
        return json.loads(self.kubectl("get", kind, "-o", "json", *selector))["items"]

    def pods(self, role: str) -> list[dict[str, Any]]:
        return self.objects("pods", "-l", f"inferencefleet.io/role={role}")

    def status(self) -> dict[str, Any]:
        return json.loads(self.kubectl("get", "ifleet", "loop", "-o", "json")).get("status") or {}

    def condition(self, kind: str) -> dict[str, Any]:
        found = [c for c in self.status().get("conditions") or [] if c["type"] == kind]
        return found[0] if found else {"status": "Unknown", "message": "no status yet"}

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


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane) -> Iterator[Service]:
    """The operator under the rights of charts/rbac/operator.yaml and no others."""
    control_plane.kubectl("create", "namespace", "inferencefleet-system")
    control_plane.kubectl("apply", "-f", str(ROOT / "charts/rbac/operator.yaml"))
    kubeconfig = control_plane.service_account_kubeconfig("inferencefleet-system", "inferencefleet-operator")
    argv = [sys.executable, "-m", "fleet_operator", "--kubeconfig", str(kubeconfig), "--drain-timeout", "10"]
    service = Service("operator", argv, control_plane.dir / "operator.log", dict(os.environ))
    yield service
    service.stop()


@pytest.fixture
def fleet(control_plane: ControlPlane, gpu_nodes: Path, operator: Service, namespace: str) -> Fleet:
    return Fleet(control_plane, namespace, operator)


def tokens(url: str, prompt: str, count: int = 16) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_the_whole_loop(fleet: Fleet, operator: Service, gpu_nodes: Path):
    model = make_tiny_model(Path(os.environ.get("INFERENCEFLEET_CACHE", Path.home() / ".cache/inferencefleet")) / "tiny-llama")
    wish = manifest(fleet.namespace, model)
    fleet.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(wish))
    fleet.wait("Ready", lambda: fleet.condition("Ready")["status"] == "True")
    fleet.wait("1 prefill and 2 decode workers", lambda: fleet.serving() == (1, 2))

    # tokens through the router with the official client equal those of one engine asked directly, and KV really moved
    client = OpenAI(base_url=f"{fleet.router()}/v1", api_key="none")
    engine = f"http://{fleet.pods('prefill')[0]['status']['podIP']}:8000"
    for i in range(8):
        prompt = f"{i} {PROMPT}"
        streamed = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=16, temperature=0, stream=True, extra_body={"return_token_ids": True}
        )
        got = [token for chunk in streamed for token in chunk.choices[0].token_ids]
        assert got == tokens(engine, prompt)
    fleet.wait("proof that KV moved", lambda: fleet.condition("Disaggregating")["status"] == "True", 20)
    fleet.wait("a counter of 8 transfers", lambda: fleet.status()["tiers"][0]["kv"]["transfers"] >= 8, 20)

    scaling_keeps_the_ratio(fleet)
    children_are_put_back(fleet)
    assert_rests(fleet, operator)

    assert operator.rss_mb() <= 150

    fleet.kubectl("delete", "ifleet", "loop", "--timeout=60s")
    kinds = "pods,workerpools,deployments,services,configmaps,poddisruptionbudgets,roles,rolebindings"
    fleet.wait("nothing left", lambda: not fleet.objects(kinds, "-l", "inferencefleet.io/fleet=loop"), 60)
    fleet.wait("no process left", lambda: not worker_processes(fleet.namespace), 20)


def scaling_keeps_the_ratio(fleet: Fleet) -> None:
    """kubectl scale moves one role; the other follows when the ratio needs it."""
    pool = next(p for p in fleet.objects("workerpools") if p["spec"]["role"] == "decode")
    fleet.kubectl("scale", "wpool", pool["metadata"]["name"], "--replicas=4")
    fleet.wait("2 prefill and 4 decode workers", lambda: fleet.serving() == (2, 4))
    assert fleet.condition("WithinRatio")["status"] == "True"


def children_are_put_back(fleet: Fleet) -> None:
    """A deleted pod comes back; an edited child is what it was."""
    victim = fleet.pods("decode")[0]["metadata"]
    fleet.kubectl("delete", "pod", victim["name"], "--wait=false")
    fleet.wait("a pod in its place", lambda: victim["uid"] not in {p["metadata"]["uid"] for p in fleet.pods("decode")}, 60)
    fleet.kubectl("patch", "service", "loop-router", "--type=merge", "-p", '{"spec":{"ports":[{"name":"http","port":9999}]}}')
    fleet.kubectl("delete", "configmap", "loop-router")
    fleet.wait("the Service as it was", lambda: ports(fleet) == [8080], 30)
    fleet.wait(
        "the ConfigMap again", lambda: any(c["metadata"]["name"] == "loop-router" for c in fleet.objects("configmaps")), 30
    )
    fleet.wait("4 decode workers again", lambda: fleet.serving() == (2, 4))


def ports(fleet: Fleet) -> list[int]:
    mine = [s for s in fleet.objects("services") if s["metadata"]["name"] == "loop-router"]
    return [port["port"] for service in mine for port in service["spec"]["ports"]]  # absent while it is made anew


def assert_rests(fleet: Fleet, operator: Service) -> None:
    """At rest nothing is written: no object's resourceVersion moves."""
    kinds = "inferencefleets,workerpools,deployments,services,configmaps,poddisruptionbudgets,roles,rolebindings,serviceaccounts"

    def versions() -> dict[str, str]:
        return {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in fleet.objects(kinds)}

    time.sleep(3)
    before = versions()
    time.sleep(6)
    assert versions() == before, operator.tail()


def worker_processes(namespace: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f'"namespace":"{namespace}"'.encode() in environment:
                found.append(int(entry.name))
    return found


def test_a_killed_engine_is_restarted_and_nothing_else_stops(fleet: Fleet):
    model = Path(os.environ.get("INFERENCEFLEET_CACHE", Path.home() / ".cache/inferencefleet")) / "tiny-llama"
    fleet.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(manifest(fleet.namespace, model)))
    fleet.wait("Ready", lambda: fleet.condition("Ready")["status"] == "True")
    fleet.wait("2 decode workers", lambda: fleet.serving() == (1, 2))
    victim = fleet.pods("decode")[0]["status"]["podIP"]
    os.kill(httpx.get(f"http://{victim}:9000/state").json()["engine_pid"], signal.SIGKILL)
    answers = [tokens(fleet.router(), f"{i} {PROMPT}") for i in range(6)]
    assert all(len(answer) == 16 for answer in answers)
    fleet.wait("2 decode workers again", lambda: fleet.serving() == (1, 2))
    restarted = [p for p in fleet.pods("decode") if p["status"]["containerStatuses"][0]["restartCount"] == 1]
    assert len(restarted) == 1
    fleet.kubectl("delete", "ifleet", "loop", "--timeout=60s")


def test_a_model_that_does_not_exist_is_named_in_the_status(fleet: Fleet):
    wish = manifest(fleet.namespace, Path("/no/such/model"))
    fleet.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(wish))
    fleet.wait("the cause in the condition", lambda: "does not exist" in fleet.condition("Available").get("message", ""), 60)
    assert fleet.condition("Ready")["status"] == "False"
    fleet.kubectl("delete", "ifleet", "loop", "--timeout=60s")

"""The whole loop on a real control plane: apply, serve, prove, scale, heal, delete."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from e2e.fleet import Fleet, manifest, router_processes, rss_mb, tokens, worker_processes
from e2e.kube.service import Service
from e2e.shared_memory import ownerless
from fleet_cli.up.bundled import tiny_model

PROMPT = "The operator counts two replicas and the router reads the longest prefix again. " * 10

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(400)]


def test_the_whole_loop(fleet: Fleet, operator: Service, gpu_nodes: Path):
    shared_memory = ownerless()
    fleet.apply(manifest(fleet.namespace, tiny_model()))
    fleet.wait_serving(1, 2)

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
    fleet.wait("a counter of 8 transfers", lambda: fleet.status()["tiers"][0]["kv"]["transfers"] >= 8, 45)  # written every 30 s

    # nobody asked for a transport: what the engines' own UCX says is told
    fleet.wait("the transport", lambda: fleet.condition("TransportVerified")["status"] == "True", 20)
    assert "workers use shm" in fleet.condition("TransportVerified")["message"]

    scaling_keeps_the_ratio(fleet)
    children_are_put_back(fleet)
    assert_rests(fleet, operator)
    events_tell(fleet)

    assert operator.rss_mb() <= 150
    memory_is_bounded(fleet)

    fleet.delete_and_leave_nothing()
    assert ownerless() <= shared_memory


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
        objects = fleet.objects(kinds) + told(fleet)
        return {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in objects}

    time.sleep(3)
    before = versions()
    time.sleep(6)
    assert versions() == before, operator.tail()


def memory_is_bounded(fleet: Fleet) -> None:
    """A worker is its agent and its engine."""
    pods: dict[str, float] = {}
    for pid, pod in worker_processes(fleet.namespace).items():
        pods[pod] = pods.get(pod, 0.0) + rss_mb(pid)
    assert len(pods) == 6
    assert max(pods.values()) <= 1_200, pods
    routers = [rss_mb(pid) for pid in router_processes(fleet.namespace)]
    assert routers
    assert max(routers) <= 80, routers


def told(fleet: Fleet) -> list[dict[str, Any]]:
    events = fleet.objects("events.events.k8s.io")
    return [event for event in events if event.get("reportingController") == "inferencefleet.io/operator"]


def events_tell(fleet: Fleet) -> None:
    """`kubectl describe` shows what happened and why."""
    text = fleet.kubectl("describe", "ifleet", "loop").partition("Events:")[2]
    for words in ("Resized", "scaled by a user", "WorkersCreated", "PutBack", "Service loop-router", "ConfigMap loop-router"):
        assert words in text, text


def test_a_killed_engine_is_restarted_and_nothing_else_stops(fleet: Fleet):
    fleet.apply(manifest(fleet.namespace, tiny_model()))
    fleet.wait_serving(1, 2)
    victim = fleet.pods("decode")[0]["status"]["podIP"]
    os.kill(httpx.get(f"http://{victim}:9000/state").json()["engine_pid"], signal.SIGKILL)
    answers = [tokens(fleet.router(), f"{i} {PROMPT}") for i in range(6)]
    assert all(len(answer) == 16 for answer in answers)
    fleet.wait("2 decode workers again", lambda: fleet.serving() == (1, 2))
    restarted = [p for p in fleet.pods("decode") if p["status"]["containerStatuses"][0]["restartCount"] == 1]
    assert len(restarted) == 1
    fleet.kubectl("delete", "ifleet", "loop", "--timeout=60s")


def test_a_model_that_does_not_exist_is_named_in_the_status(fleet: Fleet):
    fleet.apply(manifest(fleet.namespace, Path("/no/such/model")))
    fleet.wait("the cause in the condition", lambda: "does not exist" in fleet.condition("Available").get("message", ""), 60)
    assert fleet.condition("Ready")["status"] == "False"
    fleet.kubectl("delete", "ifleet", "loop", "--timeout=60s")

"""Workers over two nodes on a real control plane: whole or nothing, recreated together, backed out of together, no deadlock."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import yaml

from e2e.fleet import Fleet, manifest, tokens, worker_processes
from e2e.kube.controlplane import ControlPlane
from e2e.kube.service import Service
from fleet_cli.up.bundled import tiny_model

pytestmark = pytest.mark.timeout(590)
PROMPT = "Both halves of a worker wait for each other before the first token leaves. " * 10
GROUP = "inferencefleet.io/group"
TAINT = "gang=second:NoSchedule"


def two_nodes(namespace: str, *, wait: str, decode: int = 2) -> dict[str, Any]:
    """One device per pod, two pods per worker."""
    wish = manifest(namespace, tiny_model())
    tier = wish["spec"]["tiers"][0]
    tier |= {"accelerator": {"type": "h100-sxm", "count": 2}, "parallelism": {"nodes": 2}}
    tier |= {"ratio": {"prefill": 1, "decode": 2, "min": "1:4", "max": "1:1"}}
    tier |= {"prefill": {"maxReplicas": 1}, "decode": {"minReplicas": decode, "maxReplicas": 4}}
    wish["spec"]["scaling"]["capacityWait"] = wait
    return wish


def blocker(gpus: int) -> dict[str, Any]:
    """A pod of somebody else that holds devices."""
    container = {"name": "c", "image": "x", "command": ["sleep", "1000"], "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    spec: dict[str, Any] = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"blocker-{gpus}"}, "spec": spec}


def groups(fleet: Fleet, role: str) -> dict[str, list[dict[str, Any]]]:
    """Pods by worker."""
    found: dict[str, list[dict[str, Any]]] = {}
    for pod in fleet.pods(role):
        found.setdefault(pod["metadata"]["labels"][GROUP], []).append(pod)
    return found


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def served(fleet: Fleet) -> list[dict[str, Any]]:
    """What the routers are told."""
    found = json.loads(fleet.kubectl("get", "configmap", "loop-router", "-o", "json"))
    return json.loads(found["data"]["endpoints.json"])["workers"]


@contextmanager
def asking(fleet: Fleet, expected: dict[str, list[int]]) -> Iterator[list[str]]:
    """Two clients that ask without a pause; what went wrong."""
    wrong: list[str] = []
    stop = threading.Event()
    url = fleet.router()

    def client(prompt: str) -> None:
        while not stop.is_set():
            try:
                found = tokens(url, prompt)
            except (AssertionError, httpx.HTTPError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
                continue
            if found != expected[prompt]:
                wrong.append(f"{found} is not {expected[prompt]}")

    clients = [threading.Thread(target=client, args=(prompt,)) for prompt in expected]
    for each in clients:
        each.start()
    try:
        yield wrong
    finally:
        stop.set()
        for each in clients:
            each.join()


def test_a_worker_over_two_nodes_is_whole_or_nothing(fleet: Fleet):
    fleet.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(blocker(3)))
    fleet.wait("the blocker", lambda: fleet.objects("pods")[0]["status"].get("phase") == "Running", 30)
    fleet.apply(two_nodes(fleet.namespace, wait="2m"))
    fleet.wait("five pods with a node", lambda: len(placed(fleet)) == 5, 60)
    fleet.wait("the leaders wait", lambda: waiting_leaders(fleet) >= 1, 60)
    partial = [pods for role in ("prefill", "decode") for pods in groups(fleet, role).values() if not all(map(has_node, pods))]
    assert len(partial) == 1
    assert not any(is_ready(pod) for pod in partial[0])
    assert partial[0][0]["metadata"]["labels"][GROUP] not in {worker["name"] for worker in served(fleet)}

    fleet.kubectl("delete", "pod", "blocker-3", "--now")
    fleet.wait_serving(1, 2)
    every = [pod for role in ("prefill", "decode") for pods in groups(fleet, role).values() for pod in pods]
    assert len(every) == 6
    assert all(map(is_ready, every))
    leaders = {pod["metadata"]["name"] for pod in every if pod["metadata"]["labels"]["inferencefleet.io/member"] == "0"}
    assert {worker["name"] for worker in served(fleet)} == leaders
    pool = next(p for p in fleet.objects("workerpools") if p["spec"]["role"] == "decode")
    fleet.wait("workers in the pool's status", lambda: pool_counts(fleet, pool["metadata"]["name"]) == (2, 2), 20)

    a_lost_pod_takes_its_worker_along(fleet)
    a_killed_agent_restarts_its_worker(fleet, "1")
    a_killed_agent_restarts_its_worker(fleet, "0")
    what_does_not_fit_is_given_back(fleet, pool["metadata"]["name"])
    fleet.delete_and_leave_nothing()


def has_node(pod: dict[str, Any]) -> bool:
    return bool(pod["spec"].get("nodeName"))


def placed(fleet: Fleet) -> list[dict[str, Any]]:
    return [pod for role in ("prefill", "decode") for pod in fleet.pods(role) if has_node(pod)]


def waiting_leaders(fleet: Fleet) -> int:
    """Agents that say that they wait for the rest of their worker."""
    found = 0
    for pod in placed(fleet):
        try:
            state = httpx.get(f"http://{pod['status']['podIP']}:9000/state", timeout=5).json()
        except (httpx.HTTPError, KeyError):
            continue
        found += state["phase"] == "Preparing" and "waiting for pods 1 of this worker's 2" in state["detail"]
    return found


def pool_counts(fleet: Fleet, name: str) -> tuple[int, int]:
    status = json.loads(fleet.kubectl("get", "wpool", name, "-o", "json")).get("status") or {}
    return status.get("replicas", 0), status.get("readyReplicas", 0)


def a_lost_pod_takes_its_worker_along(fleet: Fleet) -> None:
    """A follower is gone without a goodbye: its leader drains and goes with it, the other worker serves on, nobody notices."""
    expected = {prompt: tokens(fleet.router(), prompt) for prompt in (f"0 {PROMPT}", f"1 {PROMPT}")}
    name, pods = sorted(groups(fleet, "decode").items())[0]
    before = {pod["metadata"]["uid"] for pod in pods}
    follower = next(pod for pod in pods if pod["metadata"]["labels"]["inferencefleet.io/member"] == "1")
    with asking(fleet, expected) as wrong:
        fleet.kubectl("delete", "pod", follower["metadata"]["name"], "--force", "--grace-period=0")
        fleet.wait("all of its pods replaced", lambda: before.isdisjoint(uids(fleet, "decode")), 90)
        fleet.wait_serving(1, 2)
        time.sleep(1)
    assert wrong == [], name


def uids(fleet: Fleet, role: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in fleet.pods(role)}


def a_killed_agent_restarts_its_worker(fleet: Fleet, member: str) -> None:
    """A container that dies takes the containers of its worker down; the pods stay where they are and come together again. What
    a leader was streaming ends with it; no client ever sees a wrong token."""
    expected = {prompt: tokens(fleet.router(), prompt) for prompt in (f"2 {PROMPT}", f"3 {PROMPT}")}
    pods = next(iter(groups(fleet, "decode").values()))
    victim = next(pod for pod in pods if pod["metadata"]["labels"]["inferencefleet.io/member"] == member)
    before = {pod["metadata"]["uid"] for pod in pods}
    counts = restarts(fleet, before)
    with asking(fleet, expected) as wrong:
        for pid in [pid for pid, pod in worker_processes(fleet.namespace).items() if pod == victim["metadata"]["name"]]:
            os.kill(pid, signal.SIGKILL)
        fleet.wait("both containers restarted", lambda: restarts(fleet, before) == [count + 1 for count in counts], 60)
        fleet.wait_serving(1, 2)
        time.sleep(1)
    assert [one for one in wrong if member == "1" or " is not " in one] == []
    assert before <= uids(fleet, "decode")


def restarts(fleet: Fleet, of: set[str]) -> list[int]:
    pods = [pod for pod in fleet.pods("decode") if pod["metadata"]["uid"] in of]
    return [status["restartCount"] for pod in pods for status in pod["status"].get("containerStatuses") or []]


def what_does_not_fit_is_given_back(fleet: Fleet, pool: str) -> None:
    """One device is free for a worker that needs two: it is given back, said, and nobody else loses anything."""
    wish = two_nodes(fleet.namespace, wait="4s")
    fleet.apply(wish)
    fleet.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(blocker(1)))
    fleet.wait(
        "the blocker", lambda: any(p["metadata"]["name"] == "blocker-1" and has_node(p) for p in fleet.objects("pods")), 30
    )
    before = uids(fleet, "decode") | uids(fleet, "prefill")
    fleet.kubectl("scale", "wpool", pool, "--replicas=3")
    fleet.wait("a third worker with one node", lambda: len(placed(fleet)) == 7, 30)
    fleet.wait("it is backed out of", lambda: fleet.condition("CapacityLimited").get("reason") == "BackedOut", 60)
    message = fleet.condition("CapacityLimited")["message"]
    assert "1 of its 2" in message, message
    assert "nvidia.com/gpu" in message, message
    fleet.wait("its pods are gone", lambda: (uids(fleet, "decode") | uids(fleet, "prefill")) == before, 60)
    assert fleet.serving() == (1, 2)
    assert fleet.condition("WithinRatio")["status"] == "True"
    fleet.kubectl("delete", "pod", "blocker-1", "--now")


def test_two_workers_that_hold_half_of_the_nodes_each_do_not_wait_for_ever(
    control_plane: ControlPlane, gpu_nodes: object, operator: Service, namespace: str
):
    other = f"{namespace}-b"
    control_plane.kubectl("create", "namespace", other)
    account = f"/api/v1/namespaces/{other}/serviceaccounts/default"
    control_plane.wait("its service account", lambda: control_plane.exists(account))
    one, two = Fleet(control_plane, namespace, operator), Fleet(control_plane, other, operator)
    try:
        hold_half_each(one, two)
        both = (one, two)
        one.wait("one of the two serves", lambda: any(f.serving() == (1, 1) for f in both), 150)
        loser = next(f for f in both if f.serving() != (1, 1))
        loser.wait("the other says what is missing", lambda: loser.condition("CapacityLimited")["status"] == "True", 60)
        assert "nvidia.com/gpu" in loser.condition("CapacityLimited")["message"]
    finally:
        for fleet in (one, two):
            fleet.kubectl("delete", "ifleet", "--all", "--timeout=60s")
        control_plane.kubectl("taint", "node", "gpu-b", "gang-", check=False)
        control_plane.kubectl("delete", "namespace", other, "--wait=false")


def hold_half_each(one: Fleet, two: Fleet) -> None:
    """Each fleet's decode worker needs both nodes and gets one: the second node lets only the second fleet in, for a moment."""
    one.kubectl("taint", "node", "gpu-b", TAINT)
    one.apply(whole_cluster(one.namespace))
    one.wait("a half for the one", lambda: held(one) == 1, 30)
    wish = whole_cluster(two.namespace)
    wish["spec"]["tiers"][0]["decode"]["podTemplate"] = {"tolerations": [{"key": "gang", "operator": "Exists"}]}
    two.apply(wish)
    two.wait("a half for the other", lambda: held(two) == 1, 30)
    one.kubectl("taint", "node", "gpu-b", "gang-")
    assert (held(one), held(two)) == (1, 1)


def whole_cluster(namespace: str) -> dict[str, Any]:
    """A prefill worker without a device, and a decode worker that needs all devices of both nodes."""
    wish = two_nodes(namespace, wait="15s")
    gang = {"accelerator": {"type": "h100-sxm", "count": 8}, "parallelism": {"nodes": 2}, "maxReplicas": 1}
    tier = {"name": "gpu", "accelerator": {"type": "cpu"}, "ratio": {"decode": 1}, "prefill": {"maxReplicas": 1}, "decode": gang}
    wish["spec"]["tiers"] = [tier]
    return wish


def held(fleet: Fleet) -> int:
    return sum(has_node(pod) for pod in fleet.pods("decode"))

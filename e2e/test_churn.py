"""Every pod replaced, by rollout, by draining one node after the other, by scaling and by hand, routers by another template, too,
under load: no request fails, every token is right, and what serves is inside the ratio in every document that the routers ever
got."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from e2e.faultproxy.lab import Admin, path_of
from e2e.fleet import Fleet
from e2e.kube.nodes import NODES
from e2e.test_operator_faults_scale import crowded
from e2e.test_traffic import single_process_answers, wish
from e2e.traffic import Ledger, Request, read_trace, send
from fleet_operator.cluster.interface import POOL
from fleet_wire.endpoints import ENDPOINTS_KEY

CLIENTS = 4
LOW, HIGH = 1 / 3, 1.0
ROUTERS_FIRST_S = 1.0
"""From a worker's deletion, or from the smaller size, to the document in which it takes no more requests, on a machine of one's
own."""
ROUTERS = "labelSelector=inferencefleet.io/role%3Drouter"

pytestmark = [pytest.mark.timeout(800)]


@dataclass
class Recorder:
    """Every endpoints document, as a watch shows them."""

    counts: list[tuple[float, int, int]] = field(default_factory=list)
    serving: list[tuple[float, set[str]]] = field(default_factory=list)
    """When, and the names of those that take requests."""

    def see(self, document: dict[str, Any]) -> None:
        workers = json.loads(document["data"][ENDPOINTS_KEY])["workers"]
        self.serving.append((time.time(), {worker["name"] for worker in workers if worker["state"] == "serving"}))
        serving = [worker["role"] for worker in workers if worker["state"] == "serving"]
        self.counts.append((time.time(), serving.count("prefill"), serving.count("decode")))

    def left(self, name: str, since: float) -> float | None:
        """Seconds from then, when it served, until routers were told that it takes no more; None when they never were."""
        assert name in [names for at, names in self.serving if at < since][-1], f"{name} did not serve"
        return next((at - since for at, names in self.serving if at >= since and name not in names), None)

    def outside(self) -> list[tuple[float, int, int]]:
        """Documents that break the ratio."""
        return [one for one in self.counts if not (one[2] and LOW <= one[1] / one[2] <= HIGH)]


@contextmanager
def recording(fleet: Fleet) -> Iterator[Recorder]:
    """From the present document to the last one in the block."""
    recorder, decoder = Recorder(), json.JSONDecoder()
    argv = [*fleet.plane.kubectl_argv(), "-n", fleet.namespace, "get", "configmap", "loop-router", "-o", "json", "--watch"]
    watching = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        text = ""
        for line in watching.stdout or ():
            text += line
            if line == "}\n":  # kubectl indents everything but the end of an object
                recorder.see(decoder.decode(text))
                text = ""

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield recorder
    finally:
        watching.terminate()
        thread.join()
        watching.wait()
        if watching.stdout is not None:
            watching.stdout.close()


@contextmanager
def load(fleet: Fleet, requests: list[Request], *, apart: bool = False) -> Iterator[Ledger]:
    """The same requests again and again while the block runs, each to a router that does not leave: what a Service does. A router
    goes on for 5 s after it began to leave, so that a client that has just looked never meets a closed port. `apart`: no two
    users send the same."""
    ledger, stop = Ledger(), threading.Event()

    def user(number: int) -> None:
        part = cycle(requests[number::CLIENTS] if apart else requests)
        while not stop.is_set():
            routers = [
                pod for pod in fleet.plane.get(f"/api/v1/namespaces/{fleet.namespace}/pods?{ROUTERS}")["items"] if ready(pod)
            ]
            url = f"http://{routers[number % len(routers)]['status']['podIP']}:8080"
            before = set(ledger.errors)
            asyncio.run(send(url, [next(part)], 1, ledger))
            for number_lost in set(ledger.errors) - before:
                print(f"{time.strftime('%X')} request {number_lost} to {url}: {ledger.errors[number_lost]}", flush=True)

    users = [threading.Thread(target=user, args=(number,)) for number in range(CLIENTS)]
    for thread in users:
        thread.start()
    try:
        yield ledger
    finally:
        stop.set()
        for thread in users:
            thread.join()


def say(phase: str) -> None:
    """For whoever reads what failed when."""
    print(f"{time.strftime('%X')} {phase}", flush=True)


def ready(pod: dict[str, Any]) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or []}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def delete(fleet: Fleet, pod: str) -> float:
    """By hand, without kubectl's own time; when it was asked for."""
    admin, begun = Admin(fleet.plane), time.time()
    try:
        admin("DELETE", f"/api/v1/namespaces/{fleet.namespace}/pods/{pod}").raise_for_status()
    finally:
        admin.close()
    return begun


def scale(fleet: Fleet, pool: str, replicas: int) -> float:
    """`kubectl scale`, without kubectl's own time; when it was asked for."""
    admin, begun = Admin(fleet.plane), time.time()
    try:
        admin.merge(path_of(POOL, fleet.namespace, pool), {"spec": {"replicas": replicas}})
    finally:
        admin.close()
    return begun


def workers(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["uid"]: pod for role in ("prefill", "decode") for pod in fleet.pods(role)}


def said_by_routers(nodes: Path) -> str:
    """The end of every router's log, for whoever must find out why a request failed."""
    logs = sorted(nodes.glob("*/logs/*router*/*.log"))
    return "\n".join(f"{path.relative_to(nodes)}: {path.read_text()[-2000:]}" for path in logs)


def everybody(fleet: Fleet) -> set[str]:
    """Workers and routers."""
    return {*workers(fleet), *(pod["metadata"]["uid"] for pod in fleet.pods("router"))}


def drain(fleet: Fleet, node: str) -> None:
    """As an administrator does it, and the node is given back."""
    say(f"drain of node {node}")
    try:
        fleet.plane.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s", timeout_s=130)
        left = [p for p in [*workers(fleet).values(), *fleet.pods("router")] if p["spec"].get("nodeName") == node]
        assert left == []
        fleet.wait("serving on the other node", lambda: fleet.serving() == (1, 2), 60)
        fleet.wait("two routers again", lambda: sum(map(ready, fleet.pods("router"))) == 2, 60)
    finally:
        fleet.plane.kubectl("uncordon", node)


def settled(fleet: Fleet, gone: set[str], size: tuple[int, int]) -> bool:
    """Nothing of `gone` is left, and so many serve."""
    return gone.isdisjoint(workers(fleet)) and fleet.serving() == size and fleet.condition("RollingOut")["reason"] == "Complete"


def renewed_routers(fleet: Fleet, made: dict[str, Any]) -> None:
    """What another version's routers go through when they are asked for: another template, one by one. No worker notices."""
    say("routers renewed")
    old, kept = {pod["metadata"]["uid"] for pod in fleet.pods("router")}, set(workers(fleet))
    made["spec"]["routing"]["endpointPicker"] = {}
    fleet.apply(made)
    fleet.wait("no router of before", lambda: old.isdisjoint(pod["metadata"]["uid"] for pod in fleet.pods("router")), 90)
    fleet.wait("two routers again", lambda: sum(map(ready, fleet.pods("router"))) == 2, 60)
    assert set(workers(fleet)) == kept


def pool_of(fleet: Fleet, role: str) -> str:
    return next(
        p["metadata"]["name"] for p in fleet.objects("workerpools") if p["spec"]["role"] == role and p["spec"]["replicas"]
    )


def replaced_by_scaling(fleet: Fleet) -> dict[tuple[str, str], float]:
    """Every worker is replaced by scaling alone: the tier grows to twice its size, and the old ones are the cheapest when it
    shrinks. In between a prefill worker is deleted by hand. Who left, how, and since when."""
    say("scaling")
    old, names = (
        set(workers(fleet)),
        {role: [pod["metadata"]["name"] for pod in fleet.pods(role)] for role in ("prefill", "decode")},
    )
    fleet.kubectl("annotate", "pods", *names["prefill"], *names["decode"], "controller.kubernetes.io/pod-deletion-cost=-1")
    decode, prefill = pool_of(fleet, "decode"), pool_of(fleet, "prefill")
    fleet.kubectl("scale", "workerpool", decode, "--replicas=4")
    fleet.wait("the other role followed", lambda: fleet.serving() == (2, 4), 60)
    begun = scale(fleet, decode, 2)
    left = {("scaled down", name): begun for name in names["decode"]}
    fleet.wait("shrunk", lambda: fleet.serving() == (2, 2), 60)
    victim = next(pod["metadata"] for pod in fleet.pods("prefill") if pod["metadata"]["name"] not in names["prefill"])
    left["a prefill worker deleted by hand", victim["name"]] = delete(
        fleet, victim["name"]
    )  # no decode worker is to spare for a flip
    fleet.wait("put back", lambda: settled(fleet, {victim["uid"]}, (2, 2)), 60)
    begun = scale(fleet, prefill, 1)
    left |= {("scaled down", name): begun for name in names["prefill"]}
    fleet.wait("every worker replaced by scaling", lambda: settled(fleet, old, (1, 2)), 60)
    return left


def test_full_churn_under_load_loses_nothing(fleet: Fleet, gpu_nodes: Path, tmp_path: Path):
    requests = read_trace()[:60]
    expected = single_process_answers(requests, tmp_path)
    made: dict[str, Any] = wish(fleet.namespace)
    made["spec"] |= {"routing": {"replicas": 2}, "scaling": {"mode": "manual"}, "rollout": {"drainTimeout": "30s"}}
    fleet.apply(made)
    fleet.wait_serving(1, 2)
    fleet.wait("two routers", lambda: sum(map(ready, fleet.pods("router"))) == 2)

    slow = crowded()  # by others: our own load has not begun
    with recording(fleet) as recorder, load(fleet, requests) as ledger:
        say("rollout")
        first = set(workers(fleet))
        made["spec"]["engine"]["maxBatch"] = 24
        fleet.apply(made)
        fleet.wait("every pod replaced by the rollout", lambda: settled(fleet, first, (1, 2)), 120)

        before = everybody(fleet)
        for node in NODES:
            drain(fleet, node)
        assert before.isdisjoint(everybody(fleet)), "drains replaced every pod, routers included"

        renewed_routers(fleet, made)
        left = replaced_by_scaling(fleet)

        say("a pod deleted by hand")
        victim = next(pod["metadata"] for pod in fleet.pods("decode") if ready(pod))  # the others still drain from shrinking
        left["a decode worker deleted by hand", victim["name"]] = delete(fleet, victim["name"])
        fleet.wait("put back", lambda: settled(fleet, {victim["uid"]}, fleet.desired()), 60)
        fleet.wait("each request at least once", lambda: len(ledger.tokens) == len(requests))  # a crowded machine is slow

    left_s = {" ".join(who): recorder.left(who[1], since) for who, since in left.items()}
    counts = {
        "requests": len(ledger.tokens),
        "rounds": ledger.rounds,
        "documents": len(recorder.counts),
        "left_s": left_s,
        "slow": slow,
    }
    print(json.dumps(counts))
    for who, seconds in left_s.items():
        assert seconds is not None, who
        assert seconds <= ROUTERS_FIRST_S * slow, f"routers were told late: {who}"
    assert ledger.errors == {}, said_by_routers(gpu_nodes)
    restarts = [container["restartCount"] for pod in fleet.pods("router") for container in pod["status"]["containerStatuses"]]
    assert set(restarts) == {0}, said_by_routers(gpu_nodes)
    assert ledger.tokens == {number: expected.tokens[number] for number in ledger.tokens}
    assert len(ledger.tokens) == len(requests)
    assert len(recorder.counts) >= 8
    assert recorder.outside() == []
    fleet.delete_and_leave_nothing()

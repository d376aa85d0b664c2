"""`healing.restartPoisoned` with every part real: kube-apiserver and etcd, the operator process under its own rights, a router
that finds the failing pairs and tells them by its metrics, torch workers of which one has no lease that holds, while it answers
and is ready (`changed/`). Under load whose every token is compared with one engine's.

One fleet's life: a first worker is poisoned, and the operator is killed at the very write of its decision; a second one in the
same hour is held; then the budget is raised, and the operator is killed right after that decision was stored.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from e2e.faultproxy.faults import Crash
from e2e.faultproxy.fixtures import ROOT, SYSTEM
from e2e.faultproxy.lab import Admin, Lab, path_of
from e2e.faultproxy.ledger import Request as Asked
from e2e.faultproxy.nursery import Nursery, OperatorProcess
from e2e.faultproxy.proxy import FaultProxy
from e2e.fleet import manifest as small_fleet
from e2e.kube.controlplane import ControlPlane
from e2e.kube.nodes import NODES
from e2e.kube.service import Service
from e2e.test_traffic import single_process_answers
from e2e.traffic import FIRST_PLAIN_TOKEN, VOCABULARY, Ledger, Request, send
from fleet_api.quantities import Ratio
from fleet_cli.up.bundled import cache_folder, tiny_model
from fleet_operator.cluster.interface import EVENT, FLEET
from fleet_planner.ratio import within

pytestmark = pytest.mark.timeout(580)
ROLES = ("prefill", "decode")
CLIENTS = 12
"""With fewer one decode worker does it all, and a poisoned prefill worker is only ever tried with that one."""
PROMPTS = 400
PROMPT, ANSWER = 96, 24
"""Tokens. No two prompts have a beginning in common, and no worker's cache holds the third of them that comes to it: a prefill
worker computes each, each time."""
CACHE = "32Mi"
"""512 blocks of the tiny model: 64 such prompts with their answers."""
POISON = Path(__file__).parent / "changed"
HELD_S = 20.0
FOUND_S = 120.0
"""A router tries a pair that it put out again after 5 s, then 10 s, and tells it from the second time on."""


@dataclass
class AtDecision(Crash):
    """Kill the operator at the write of a status that says so many replaced workers, as long as it said fewer before."""

    replaced: int = 1

    def due(self, request: Asked) -> bool:
        if self.hit is None and request.mutating and len(replaced_in(request.body)) >= self.replaced and is_status(request):
            self.hit = request
        return self.hit is request


def is_status(request: Asked) -> bool:
    return (request.kind, request.subresource) == (FLEET.plural, "status")


def replaced_in(document: Any) -> list[dict[str, Any]]:
    """What a fleet's status says was decided."""
    tiers = ((document or {}).get("status") or {}).get("tiers") or []
    return [one for tier in tiers for one in (tier.get("healing") or {}).get("replaced") or []]


class Clinic(Lab):
    """Its pods are processes, and its operator drains as long as the fleet says."""

    poison: Path
    """A folder; what a pod finds in /tmp is its own."""

    def start(self) -> OperatorProcess:
        log = self.plane.dir / f"operator-{self.namespace}-{len(self.lives)}.log"
        kubeconfig = self.proxy.kubeconfig(self.credentials)
        argv = ["--kubeconfig", str(kubeconfig), "--namespace", self.namespace, "--drain-timeout", "20", "--health-port", "0"]
        self.lives.append(self.nursery.start(argv, log))
        return self.lives[-1]

    def fell(self, uid: str) -> None:
        """From now on this worker hands nothing over."""
        (self.poison / uid).touch()

    def refused(self, uid: str) -> int:
        """Questions that it refused."""
        return len((self.poison / uid).read_text().splitlines())

    def ready_uids(self, role: str) -> list[str]:
        """Of workers that are ready and stay, in order of names."""
        pods = [pod for pod in self.pods(role) if is_ready(pod)]
        return [pod["metadata"]["uid"] for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))]

    def says(self) -> str:
        """Reason of Disaggregating."""
        return str(self.condition("Disaggregating").get("reason"))

    def decided(self) -> list[str]:
        """Uids, by the status that the API has."""
        return [one["uid"] for one in replaced_in(self.get(FLEET, "f"))]

    def events(self, reason: str) -> list[str]:
        """Notes, by the API."""
        items = self.admin("GET", path_of(EVENT, self.namespace)).raise_for_status().json()["items"]
        return [one["note"] for one in items if one["reason"] == reason]

    def deleted(self, since: int = 0) -> list[str]:
        """Names of worker pods that the operator asked to delete, in order."""
        asked = [one for one in self.proxy.ledger.writes(since) if (one.method, one.kind) == ("DELETE", "pods")]
        return [one.name for one in asked if "router" not in one.name]


def is_ready(pod: dict[str, Any]) -> bool:
    told = {one["type"]: one["status"] for one in pod["status"].get("conditions") or []}
    return told.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


@contextmanager
def clinic(folder: Path) -> Iterator[Clinic]:
    """A control plane of its own, two nodes whose kubelets run processes, a proxy before the operator."""
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane())
        plane.install_crds()
        plane.kubectl("create", "namespace", SYSTEM)
        plane.kubectl("apply", "-f", str(ROOT / "charts/rbac/operator.yaml"))
        argv = [sys.executable, "-m", "e2e.kube.nodes", str(plane.kubeconfig), str(folder / "nodes")]
        nodes = Service("nodes", argv, plane.dir / "nodes.log", dict(os.environ))
        plane.services.append(nodes)
        admin = Admin(plane)
        stack.callback(admin.close)
        plane.wait("two nodes", lambda: len([node for node in NODES if schedulable(admin, node)]) == len(NODES))
        namespace = "clinic"
        plane.kubectl("create", "namespace", namespace)
        plane.wait("its account", lambda: plane.exists(f"/api/v1/namespaces/{namespace}/serviceaccounts/default"))
        nursery = stack.enter_context(Nursery())
        proxy = stack.enter_context(FaultProxy(plane, 1))
        account = plane.service_account_kubeconfig(SYSTEM, "inferencefleet-operator")
        made = Clinic(plane, admin, nursery, proxy, namespace, account)
        made.poison = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="poison-", dir=cache_folder())))
        try:
            yield made
        finally:
            for life in made.lives:
                life.kill()


def schedulable(admin: Admin, node: str) -> bool:
    answer = admin("GET", f"/api/v1/nodes/{node}")
    return answer.status_code == 200 and not answer.json()["spec"].get("taints") and "Ready" in answer.text


def wish(here: Clinic, per_hour: int = 1) -> dict[str, Any]:
    paths = [str(POISON), *(str(Path(one).resolve()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one)]
    env = {"PYTHONPATH": os.pathsep.join(paths), "POISON_DIR": str(here.poison)}
    template = {"env": [{"name": name, "value": value} for name, value in env.items()]}
    made = small_fleet(here.namespace, tiny_model())
    made["metadata"]["name"] = "f"
    role = {"replicas": 3, "minReplicas": 3, "maxReplicas": 4, "podTemplate": template}
    made["spec"] |= {
        "tiers": [{
            "name": "t", "accelerator": {"type": "cpu"}, "prefill": role, "decode": role,
            "ratio": {"prefill": 1, "decode": 1, "min": "3:4", "max": "4:3"},
        }],
        "engine": {"maxModelLen": 1024, "cacheSize": CACHE},
        "scaling": {"mode": "manual"},
        "rollout": {"drainTimeout": "20s"},
        "routing": {"slowStart": "0s", "remotePrefill": {"minUncachedTokens": 16}},
        "healing": {"restartPoisoned": {"after": "3s", "perHour": per_hour}},
    }  # fmt: skip
    return made


@dataclass
class Load:
    """The same prompts again and again, and what became of each."""

    asked: list[Request]
    ledger: Ledger = field(default_factory=Ledger)
    sent: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def requests(self) -> Iterator[Request]:
        for one in cycle(self.asked):
            if self.stop.is_set():
                return
            self.sent += 1
            yield one

    def run(self, url: str) -> None:
        asyncio.run(send(url, self.requests(), CLIENTS, self.ledger))


def prompts() -> list[Request]:
    dice = random.Random(7)
    found = [tuple(dice.choices(range(FIRST_PLAIN_TOKEN, VOCABULARY), k=PROMPT)) for _ in range(PROMPTS)]
    return [Request(number, prompt, ANSWER) for number, prompt in enumerate(found)]


@contextmanager
def loaded(here: Clinic, asked: list[Request]) -> Iterator[Load]:
    (router,) = [pod for pod in here.pods("router") if is_ready(pod)]
    load = Load(asked)
    thread = threading.Thread(target=load.run, args=(f"http://{router['status']['podIP']}:8080",))
    thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        thread.join()


@contextmanager
def watched_ratio(here: Clinic) -> Iterator[list[tuple[int, int]]]:
    """What serves, by every status that a look shows."""
    seen, stop = list[tuple[int, int]](), threading.Event()

    def look() -> None:
        while not stop.wait(0.2):
            tier = (here.status().get("tiers") or [{}])[0]
            counts = tier.get("prefill", {}).get("serving", 0), tier.get("decode", {}).get("serving", 0)
            if not seen or seen[-1] != counts:
                seen.append(counts)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def killed_at(here: Clinic, when: Any, replaced: int) -> AtDecision:
    crash = AtDecision(0, when, here.kill, replaced=replaced)
    here.proxy.crash = crash
    return crash


def wait(here: Clinic, what: str, check: Callable[[], bool], most_s: float) -> float:
    """Also while the operator is dead."""
    begun = time.monotonic()
    while not check():
        assert time.monotonic() - begun < most_s, f"{what}: not within {most_s} s, but {here.condition('Disaggregating')}"
        time.sleep(0.1)
    return time.monotonic() - begun


def first_is_killed_at_the_write(here: Clinic) -> str:
    """The decision is not stored, so nothing is done of it; the next life decides it anew, and only then deletes."""
    before, first = here.uids(), here.ready_uids("prefill")[0]
    crash = killed_at(here, "before", 1)
    here.fell(first)
    found_s = wait(here, "the decision", lambda: crash.hit is not None and here.operator.poll() is not None, FOUND_S)
    assert here.refused(first) > 2, "stage one: it refused"
    time.sleep(3)
    assert (here.decided(), here.deleted(), here.uids()) == ([], [], before)
    here.proxy.heal()
    mark = here.proxy.ledger.mark()
    here.start()
    replaced_s = here.until("it is gone", lambda: first not in here.uids(), 120)
    here.until("three and three serve", lambda: here.serving(3, 3), 60)
    assert here.decided() == [first]
    assert len(here.deleted(mark)) == 1
    requests = here.proxy.ledger.requests
    told = next(one for one in requests if is_status(one) and one.status == 200 and replaced_in(one.body))
    gone = next(one for one in requests if (one.method, one.kind) == ("DELETE", "pods"))
    assert told.number < gone.number, "the decision is stored before anything is deleted"
    (note,) = here.events("PoisonedReplaced")
    assert "no KV gets from it to" in note
    assert before - here.uids() == {first}
    here.until("KV moves", lambda: here.says() == "KvMoved", 60)
    print(f"the decision after {found_s:.0f} s, gone {replaced_s:.0f} s after the operator was back: {note}")
    return first


def second_is_held(here: Clinic) -> str:
    before, second, mark = here.uids(), here.ready_uids("prefill")[0], here.proxy.ledger.mark()
    here.fell(second)
    held_s = here.until("the budget is spent", lambda: here.says() == "HealingBudgetSpent", FOUND_S)
    time.sleep(HELD_S)
    assert here.says() == "HealingBudgetSpent"
    assert (here.deleted(mark), here.uids(), len(here.decided())) == ([], before, 1)
    assert len(here.events("HealingBudgetSpent")) == 1
    print(f"held {held_s:.0f} s after it broke: {here.condition('Disaggregating')['message']}")
    return second


def decision_outlives_the_operator(here: Clinic, first: str, second: str) -> None:
    """A larger budget lets it be decided. Killed right after that was stored: exactly this is carried out, and nothing else."""
    before, mark = here.uids(), here.proxy.ledger.mark()
    crash = killed_at(here, "after", 2)
    here.apply(wish(here, per_hour=2))
    wait(here, "the decision", lambda: crash.hit is not None and here.operator.poll() is not None, 60)
    assert here.decided() == [first, second]
    assert (here.deleted(mark), here.uids()) == ([], before)
    time.sleep(3)
    assert (here.decided(), here.uids()) == ([first, second], before), "nobody is there to do it"
    here.proxy.heal()
    here.start()
    here.until("it is gone", lambda: second not in here.uids(), 120)
    here.until("three and three serve", lambda: here.serving(3, 3), 60)
    assert len(here.deleted(mark)) == 1
    assert before - here.uids() == {second}
    assert here.decided() == [first, second]
    assert len(here.events("PoisonedReplaced")) == 2, "the operator that decided it could tell nobody"
    replaced = [note for reason in ("WorkersReplaced", "WorkersDeleted") for note in here.events(reason)]
    assert [note for note in replaced if here.deleted(mark)[0] in note and "no KV gets from it" in note], replaced


def test_a_poisoned_worker_is_replaced_whatever_becomes_of_the_operator(tmp_path: Path) -> None:
    low, high, asked = Ratio(3, 4), Ratio(4, 3), prompts()
    expected = single_process_answers(asked, tmp_path)
    with clinic(tmp_path) as here:
        here.start()
        here.apply(wish(here))
        here.until("three and three serve", lambda: here.serving(3, 3), 180)
        with loaded(here, asked) as load, watched_ratio(here) as served:
            here.until("KV moves", lambda: here.says() == "KvMoved", 60)
            first = first_is_killed_at_the_write(here)
            second = second_is_held(here)
            decision_outlives_the_operator(here, first, second)
            here.until("KV moves", lambda: here.says() == "KvMoved", 60)
            time.sleep(5)
        forbidden = [str(one) for one in here.proxy.ledger.requests if one.status == 403]
        assert not forbidden, "the chart's Role is enough"
        assert all(within(*pair, low, high) for pair in served), served
        here.at_rest()
        log = "".join(life.log.read_text() for life in here.lives)
        assert "Traceback" not in log, log[-3_000:]
    assert load.ledger.errors == {}
    assert load.ledger.tokens == expected.tokens
    print(f"{load.sent} answers, every token right; served {served}")
    assert load.sent > 2 * PROMPTS

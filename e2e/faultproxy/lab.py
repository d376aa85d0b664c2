"""A fleet under a faulty API: one namespace, one proxy, an operator that can die and come back, and the questions a test asks."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from e2e.faultproxy.nursery import Nursery, OperatorProcess
from e2e.faultproxy.proxy import FaultProxy
from e2e.faultproxy.state import NUDGE, Objects
from e2e.kube.controlplane import ControlPlane
from fleet_operator.cluster.interface import FLEET, POD, POOL, Kind
from fleet_operator.reconciler import CHILDREN

KINDS = (FLEET, *CHILDREN)
FLEET_LABEL = "inferencefleet.io/fleet"
CONVERGED_S = 30.0
MERGE = "application/merge-patch+json"
BUSY_MOST = 10
"""Attempts of the administrator."""


class Admin:
    """The administrator's requests, past the proxy, on kept connections."""

    def __init__(self, plane: ControlPlane) -> None:
        config = yaml.safe_load(plane.kubeconfig.read_text())
        token = config["users"][0]["user"]["token"]
        trust = ssl.create_default_context(cafile=str(plane.ca_file))
        self._client = httpx.Client(base_url=plane.url, headers={"Authorization": f"Bearer {token}"}, verify=trust, timeout=30)

    def close(self) -> None:
        self._client.close()

    def __call__(self, method: str, path: str, body: Any = None, kind: str = "application/json", **params: str) -> httpx.Response:
        """An API server that has too much to do is asked again when it says so, as kubectl does."""
        content = json.dumps(body) if body is not None else None
        for left in range(BUSY_MOST - 1, -1, -1):
            try:
                answer = self._client.request(method, path, content=content, headers={"Content-Type": kind}, params=params)
            except httpx.ReadError:  # rows share the pool: one thread takes for idle, and closes, what another has begun to read
                if method != "GET" or not left:
                    raise
                continue
            if answer.status_code != 429:
                break
            time.sleep(float(answer.headers.get("Retry-After", "1")))
        return answer

    def get(self, path: str) -> Any:
        """Parsed; HTTPStatusError."""
        return self("GET", path).raise_for_status().json()

    def watch(self, path: str, version: str, quiet_s: float, **params: str) -> Iterator[dict[str, Any]]:
        """Events after `version`, until none came for so long."""
        params, patience = {**params, "watch": "1", "resourceVersion": version}, httpx.Timeout(30, read=quiet_s)
        with suppress(httpx.ReadTimeout), self._client.stream("GET", path, params=params, timeout=patience) as answer:
            yield from map(json.loads, answer.iter_lines())

    def merge(self, path: str, patch: Any) -> Any:
        """A merge patch that must succeed."""
        return self("PATCH", path, patch, MERGE).raise_for_status().json()


def path_of(kind: Kind, namespace: str, name: str = "") -> str:
    """The API path of a collection or an object."""
    root = "/apis" if "/" in kind.api_version else "/api"
    where = f"{root}/{kind.api_version}/namespaces/{namespace}/{kind.plural}"
    return f"{where}/{name}" if name else where


def fleet_manifest(namespace: str, name: str = "f", **spec: Any) -> dict[str, Any]:
    """A small fleet on CPUs: one prefill and two decode workers."""
    return {
        "apiVersion": FLEET.api_version,
        "kind": FLEET.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"source": "file:///m"}, "tiers": [{"name": "t", "accelerator": {"type": "cpu"}}],
            "telemetry": {"interval": "1s"}, **spec,
        },
    }  # fmt: skip


@dataclass
class Lab:
    """One namespace whose operator speaks through one proxy."""

    plane: ControlPlane
    admin: Admin
    nursery: Nursery
    proxy: FaultProxy
    namespace: str
    credentials: Path
    """Kubeconfig of the operator's service account, past the proxy."""
    lives: list[OperatorProcess] = field(default_factory=list)
    selection: tuple[str, ...] = ()
    """Flags that say which namespaces are its operator's; none: the lab's own, by name."""

    def start(self) -> OperatorProcess:
        """A new life of the operator."""
        log = self.plane.dir / f"operator-{self.namespace}-{len(self.lives)}.log"
        kubeconfig = self.proxy.kubeconfig(self.credentials)
        where = self.selection or ("--namespace", self.namespace)
        argv = ["--kubeconfig", str(kubeconfig), *where, "--drain-timeout", "1", "--health-port", "0"]
        self.lives.append(self.nursery.start(argv, log))
        return self.lives[-1]

    @property
    def operator(self) -> OperatorProcess:
        """The present life."""
        return self.lives[-1]

    def kill(self) -> None:
        """SIGKILL the present life."""
        self.operator.kill()

    # -- objects ----------------------------------------------------------------------------------------------------
    def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """As a user does it."""
        path = path_of(FLEET, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        answer = self.admin("PATCH", path, manifest, "application/apply-patch+yaml", fieldManager="user", force="true")
        assert answer.status_code < 300, answer.text
        applied: dict[str, Any] = answer.json()
        return applied

    def objects(self, fleet: str = "f") -> Objects:
        """The fleet and everything with its label."""
        found: Objects = {}
        for kind in KINDS:
            params = {} if kind == FLEET else {"labelSelector": f"{FLEET_LABEL}={fleet}"}
            listed = self.admin("GET", path_of(kind, self.namespace), **params).raise_for_status().json()["items"]
            for item in listed:
                if kind != FLEET or item["metadata"]["name"] == fleet:
                    found[kind.kind, item["metadata"]["name"]] = {**item, "apiVersion": kind.api_version, "kind": kind.kind}
        return found

    def lists(self) -> dict[str, bytes]:
        """What LIST answers now, by plural: for `FaultProxy.old_lists`."""
        found = {}
        for kind in KINDS:
            params = {} if kind == FLEET else {"labelSelector": "app.kubernetes.io/managed-by=inferencefleet"}
            found[kind.plural] = self.admin("GET", path_of(kind, self.namespace), **params).raise_for_status().content
        return found

    def uids(self) -> set[str]:
        """Of the fleet's worker pods, those on their way out included."""
        roles = ("prefill", "decode")
        return {p["metadata"]["uid"] for p in self.pods() if p["metadata"]["labels"]["inferencefleet.io/role"] in roles}

    def revisions(self) -> set[str]:
        """Of the fleet's worker pods."""
        found = {pod["metadata"]["labels"].get("inferencefleet.io/revision") for pod in self.pods()}
        return {revision for revision in found if revision}

    def scale(self, role: str, replicas: int) -> None:
        """kubectl scale of a role's pool; the newest one when there are several."""
        pools = [o for (kind, _), o in self.objects().items() if kind == "WorkerPool" and o["spec"]["role"] == role]
        newest = max(pools, key=lambda pool: pool["metadata"]["creationTimestamp"])
        self.admin.merge(path_of(POOL, self.namespace, newest["metadata"]["name"]), {"spec": {"replicas": replicas}})

    def serving(self, prefill: int, decode: int) -> bool:
        """So many serve, the status says it, and no pod more is there."""
        tier = (self.status().get("tiers") or [{}])[0]
        counts = tuple(tier.get(role, {}).get("serving") for role in ("prefill", "decode"))
        return counts == (prefill, decode) and len(self.uids()) == prefill + decode and self.ready()

    def get(self, kind: Kind, name: str) -> dict[str, Any] | None:
        """The object; None when there is none."""
        answer = self.admin("GET", path_of(kind, self.namespace, name))
        if answer.status_code == 404:
            return None
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def pods(self, role: str = "", fleet: str = "f") -> list[dict[str, Any]]:
        """Pods of the fleet, of one role."""
        selector = f"{FLEET_LABEL}={fleet}" + (f",inferencefleet.io/role={role}" if role else "")
        items: list[dict[str, Any]] = (
            self.admin("GET", path_of(POD, self.namespace), labelSelector=selector).raise_for_status().json()["items"]
        )
        return items

    def status(self, fleet: str = "f") -> dict[str, Any]:
        """The fleet's status; empty when it has none."""
        return (self.get(FLEET, fleet) or {}).get("status") or {}

    def condition(self, kind: str, fleet: str = "f") -> dict[str, Any]:
        """One condition; its status is Absent when it was never written."""
        found = [c for c in self.status(fleet).get("conditions") or [] if c["type"] == kind]
        return found[0] if found else {"status": "Absent", "reason": "", "message": ""}

    # -- waiting and judging ------------------------------------------------------------------------------------------
    def until(self, what: str, check: Callable[[], bool], timeout_s: float = CONVERGED_S) -> float:
        """Poll; seconds that it took. AssertionError with what is known when it takes too long or the operator ended."""
        start = time.monotonic()
        while not check():
            if self.lives:
                self.operator.check()
            if time.monotonic() - start > timeout_s:
                log = self.operator.tail() if self.lives else ""
                told = json.dumps(self.status().get("conditions"), indent=1)
                raise AssertionError(
                    f"{what}: not within {timeout_s} s (seed {self.proxy.seed})\n{told}\n{self.proxy.ledger.tail()}\n{log}"
                )
            time.sleep(0.05)
        return time.monotonic() - start

    def until_without_operator(self, what: str, check: Callable[[], bool], timeout_s: float) -> None:
        """Poll while the operator is down."""
        end = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < end, f"{what}: not within {timeout_s} s"
            time.sleep(0.1)

    def ready(self, fleet: str = "f") -> bool:
        """Serving, and the status is of the present spec."""
        found = self.get(FLEET, fleet)
        status = (found or {}).get("status") or {}
        if found is None or status.get("observedGeneration") != found["metadata"]["generation"]:
            return False
        return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))

    def at_rest(self, for_s: float = 1.3, within_s: float = 10.0) -> None:
        """The fixed point: a pass happens (a note on the fleet makes one), and for so long nothing is written."""
        end = time.monotonic() + within_s
        while True:
            mark = self.proxy.ledger.mark()
            self.admin("PATCH", path_of(FLEET, self.namespace, "f"), {"metadata": {"annotations": {NUDGE: str(mark)}}}, MERGE)
            time.sleep(for_s)
            self.operator.check()
            if not (written := self.proxy.ledger.writes(mark)):
                return
            assert time.monotonic() < end, f"still writing: {list(map(str, written))}\n{self.operator.tail()}"

    def honest(self, fleet: str = "f") -> None:
        """The status equals an independent recount of the pods."""
        assert not (wrong := dishonesty(self.objects(fleet), fleet)), wrong


def dishonesty(objects: Objects, fleet: str) -> list[str]:
    """What a fleet's status says that its pods do not show; empty when it is honest."""
    found = objects["InferenceFleet", fleet]
    status, wrong = found.get("status") or {}, []
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        wrong.append(f"observedGeneration {status.get('observedGeneration')} is not {found['metadata']['generation']}")
    for tier in status.get("tiers", []):
        for role in ("prefill", "decode"):
            serving = sum(_serves(o, tier["name"], role) for (kind, _), o in objects.items() if kind == "Pod")
            if tier[role]["serving"] != serving:
                wrong.append(f"{tier['name']}/{role}: serving {tier[role]['serving']}, counted {serving}")
        counted = f"{tier['prefill']['serving']}:{tier['decode']['serving']}"
        told = {c["type"]: c["status"] for c in status.get("conditions", [])}
        at_zero = (tier.get("zero") or {}).get("state") == "AtZero"
        able = at_zero or all(tier[role]["serving"] > 0 for role in ("prefill", "decode"))
        if told.get("Ready") == "True" and not able:
            wrong.append(f"Ready with {counted}")
    return wrong


def _serves(pod: dict[str, Any], tier: str, role: str) -> bool:
    labels = pod["metadata"].get("labels") or {}
    if (labels.get("inferencefleet.io/tier"), labels.get("inferencefleet.io/role")) != (tier, role):
        return False
    conditions = {c["type"]: c["status"] for c in (pod.get("status") or {}).get("conditions") or []}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


@contextmanager
def lab(plane: ControlPlane, admin: Admin, nursery: Nursery, namespace: str, credentials: Path, seed: int) -> Iterator[Lab]:
    """A lab whose operator ends with it."""
    with FaultProxy(plane, seed) as proxy:
        made = Lab(plane, admin, nursery, proxy, namespace, credentials)
        try:
            yield made
        finally:
            for life in made.lives:
                life.kill()


def running(lab: Lab, **spec: Any) -> None:
    """A fleet `f` that serves with one prefill and two decode workers."""
    lab.start()
    lab.apply(fleet_manifest(lab.namespace, **spec))
    lab.until("a running fleet", lambda: lab.serving(1, 2), 60)


def removed(lab: Lab) -> None:
    """No fleet `f` any more, and nothing of it; the operator may be down."""
    answer = lab.admin("DELETE", path_of(FLEET, lab.namespace, "f"))
    assert answer.status_code in (200, 202, 404), answer.text
    lab.until_without_operator("the fleet is gone", lambda: not lab.objects(), 60)

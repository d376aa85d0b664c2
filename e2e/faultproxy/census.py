"""Every state that a fleet's worker pods went through, from the API server's own watch: none is missed between two looks."""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType
from typing import Any

from e2e.faultproxy.lab import FLEET_LABEL, Lab, path_of
from fleet_operator.cluster.interface import POD

QUIET_S = 0.5
ROLES = ("prefill", "decode")
ROLE_LABEL = "inferencefleet.io/role"


class Census:
    """Counts while the block runs: `most` workers at once, those on their way out included; `least` ready ones by role."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._params = {"labelSelector": f"{FLEET_LABEL}=f,{ROLE_LABEL} in ({','.join(ROLES)})"}
        self._path = path_of(POD, lab.namespace)
        found = lab.admin("GET", self._path, **self._params).raise_for_status().json()
        self._pods = {pod["metadata"]["uid"]: pod for pod in found["items"]}
        self._version = found["metadata"]["resourceVersion"]
        self.states = 0
        self.most = len(self._pods)
        self.least = self._ready()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Census:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _follow(self) -> None:
        while not self._stop.is_set():
            for event in self._lab.admin.watch(self._path, self._version, QUIET_S, **self._params):
                self._one(event["type"], event["object"])

    def _one(self, kind: str, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        self._version = meta["resourceVersion"]
        if kind == "DELETED":
            self._pods.pop(meta["uid"], None)
        else:
            self._pods[meta["uid"]] = pod
        ready = self._ready()
        self.states += 1
        self.most = max(self.most, len(self._pods))
        self.least = {role: min(self.least[role], ready[role]) for role in ROLES}

    def _ready(self) -> dict[str, int]:
        found = Counter(pod["metadata"]["labels"][ROLE_LABEL] for pod in self._pods.values() if _serves(pod))
        return {role: found[role] for role in ROLES}


def _serves(pod: dict[str, Any]) -> bool:
    conditions = {c["type"]: c["status"] for c in (pod.get("status") or {}).get("conditions") or []}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]

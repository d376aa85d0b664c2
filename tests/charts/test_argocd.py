"""charts/argocd/health.lua in a real Lua 5.1, the language of Argo CD's health scripts."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lupa import lua51

from fleet_planner import status

SCRIPT = (Path(__file__).resolve().parents[2] / "charts/argocd/health.lua").read_text()


def health(obj: dict[str, Any]) -> tuple[str, str]:
    """(status, message); Argo CD binds the object as `obj`, and gives the script no libraries that reach outside."""
    lua = lua51.LuaRuntime(unpack_returned_tuples=True)
    lua.execute("io, os, require, dofile, loadfile, package = nil")
    lua.globals().obj = lua.table_from(obj, recursive=True)
    answer = lua.execute(SCRIPT)
    return answer["status"], answer["message"]


def fleet(conditions: dict[str, tuple[str, str, str]], *, generation: int = 3, observed: int = 3) -> dict[str, Any]:
    listed = [{"type": kind, "status": s, "reason": r, "message": m} for kind, (s, r, m) in conditions.items()]
    status = {"observedGeneration": observed, "conditions": listed}
    return {"kind": "InferenceFleet", "metadata": {"name": "f", "generation": generation}, "spec": {}, "status": status}


def pool(wanted: int, **status: int) -> dict[str, Any]:
    return {"kind": "WorkerPool", "metadata": {"name": "p", "generation": 1}, "spec": {"replicas": wanted}, "status": status}


READY = {"Ready": ("True", "AllGood", "the fleet serves")}
NOT_AVAILABLE = {"Ready": ("False", "WorkersStarting", "0 prefill")}
WAITING = ("Progressing", "waiting for the operator to look at this generation")


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        ({"kind": "InferenceFleet", "metadata": {"generation": 1}, "spec": {}}, ("Progressing", "waiting for the operator")),
        ({"kind": "WorkerPool", "metadata": {"generation": 1}, "spec": {}}, ("Progressing", "waiting for the operator")),
        (fleet({}), WAITING),
        (fleet(READY, observed=2), WAITING),
        (fleet(READY), ("Healthy", "the fleet serves")),
        (fleet(READY | {"RollingOut": ("True", "Surging", "1 of 3 groups")}), ("Progressing", "1 of 3 groups")),
        (fleet(READY | {"RollingOut": ("False", "Complete", "")}), ("Healthy", "the fleet serves")),
        (fleet(READY | {"RollingOut": ("True", "Paused", "paused at 1 of 3")}), ("Suspended", "paused at 1 of 3")),
        (fleet(READY | {"CapacityLimited": ("True", "Unschedulable", "no GPU")}), ("Healthy", "the fleet serves")),
        (fleet(NOT_AVAILABLE | {"CapacityLimited": ("True", "Unschedulable", "no GPU")}), ("Degraded", "no GPU")),
        # whoever waits in a queue is in order, and the operator tells it as Normal: Kueue lets it in when it is its turn
        (fleet(NOT_AVAILABLE | {"CapacityLimited": ("True", "Queued", "2 wait in q")}), ("Progressing", "2 wait in q")),
        (fleet({"Ready": ("False", "NotAccepted", "bad")}), ("Degraded", "bad")),
        (fleet({"Ready": ("False", "NotProvisioned", "quota")}), ("Degraded", "quota")),
        (fleet(NOT_AVAILABLE | {"Available": ("False", "WorkersFailing", "OOM")}), ("Degraded", "OOM")),
        (fleet(NOT_AVAILABLE | {"Available": ("False", "WorkersStarting", "")}), ("Progressing", "0 prefill")),
        (fleet(READY | {"RollingOut": ("False", "Stuck", "no node")}), ("Degraded", "Stuck: no node")),
        (
            fleet(READY | {"RollingOut": ("False", "ProgressDeadlineExceeded", "tier t: late")}),
            ("Degraded", "ProgressDeadlineExceeded: tier t: late"),
        ),
        (fleet(READY | {"RollingOut": ("False", "RolledBack", "errors")}), ("Degraded", "RolledBack: errors")),
        (fleet(NOT_AVAILABLE | {"RollingOut": ("False", "RolledBack", "errors")}), ("Degraded", "RolledBack: errors")),
        (fleet(READY | {"Accepted": ("False", "Invalid", "spec.x: bad")}), ("Degraded", "Invalid: spec.x: bad")),
        (fleet({"Accepted": ("False", "Invalid", "spec.x: bad")}), ("Degraded", "Invalid: spec.x: bad")),
        (fleet({"Accepted": ("False", "Invalid", "spec.x: bad")}, observed=2), WAITING),
        (fleet(READY | {"Accepted": ("True", "Valid", "")}), ("Healthy", "the fleet serves")),
        (pool(2, replicas=2, readyReplicas=2), ("Healthy", "2 of 2 workers are ready")),
        (pool(2, replicas=3, readyReplicas=3), ("Progressing", "3 of 2 workers are ready")),
        (pool(2, replicas=2, readyReplicas=1), ("Progressing", "1 of 2 workers are ready")),
        (pool(0, replicas=0), ("Healthy", "0 of 0 workers are ready")),
    ],
)
def test_health(obj, expected):
    assert health(obj) == expected


def _without(obj: Any) -> Iterator[Any]:
    """The object without each of its parts in turn, at every depth."""
    for key in list(obj) if isinstance(obj, dict) else range(len(obj)) if isinstance(obj, list) else ():
        for inner in _without(obj[key]):
            found = copy.copy(obj)
            found[key] = inner
            yield found
        rest = copy.copy(obj)
        del rest[key]
        yield rest


def test_whatever_a_status_lacks_it_is_judged():
    """A condition without a reason or a message (somebody edited it) was an error of the script, and the health Unknown."""
    words = {
        "Accepted": ("False", "Invalid", "m"),
        "Ready": ("False", "WorkersStarting", "m"),
        "RollingOut": ("False", "Stuck", "m"),
    }
    whole = [fleet({kind: told}) for kind, told in words.items()] + [fleet(READY | {"RollingOut": words["RollingOut"]})]
    for obj in (odd for one in [*whole, pool(2, replicas=2, readyReplicas=2)] for odd in _without(one) if "metadata" in odd):
        status, message = health(obj)
        assert status in ("Healthy", "Progressing", "Degraded", "Suspended"), obj
        assert isinstance(message, str), obj


@pytest.mark.parametrize("kind", ["InferenceFleet", "WorkerPool"])
def test_what_leaves_is_progressing(kind):
    leaving = fleet(READY) | {"kind": kind}
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert health(leaving) == ("Progressing", "draining and leaving")


def test_every_reason_of_a_rollout_is_judged():
    """b12: Stuck, ProgressDeadlineExceeded and RolledBack were Healthy. A new reason has to be decided here."""
    source = inspect.getsource(status._rolling)
    reasons = set(re.findall(r'"(?:True|False|Unknown)", "(\w+)"', source))
    expected = {
        "Stuck": "Degraded",
        "ProgressDeadlineExceeded": "Degraded",
        "RolledBack": "Degraded",
        "Paused": "Suspended",
        "Progressing": "Progressing",
        "Complete": "Healthy",
    }
    assert reasons == expected.keys()
    of = {"Paused": "True", "Progressing": "True"}
    found = {reason: health(fleet(READY | {"RollingOut": (of.get(reason, "False"), reason, "m")}))[0] for reason in reasons}
    assert found == expected


def test_every_reason_of_a_fleet_that_does_not_serve_is_judged():
    """WorkersLate, whose deadline is over, was Progressing for ever. A new reason has to be decided here."""
    source = inspect.getsource(status._available) + inspect.getsource(status._unserved)
    reasons = set(re.findall(r'"(Workers\w+|Router\w+|No[A-Z]\w+)"', source)) | {status.STARTING, status.WAKING}
    given_up = {"WorkersFailing", "WorkersLate"}
    coming = {"WorkersStarting", "Waking", "WorkersLost", "WorkersSilent", "WorkersPending", "RouterStarting", "NoRouter"}
    assert reasons == given_up | coming
    for reason in reasons:
        said = ("False", reason, "why")
        expected = "Degraded" if reason in given_up else "Progressing"
        assert health(fleet({"Ready": said, "Available": said})) == (expected, "why"), reason

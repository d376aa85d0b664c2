"""What pods say of themselves, in the forms that a kubelet of Kubernetes 1.36 writes."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_operator.names import FLIP
from fleet_operator.observe import observe_pods, observe_router, timestamp
from fleet_operator.pod_words import last_words
from fleet_operator.recorder import render_event
from fleet_planner.causes import router_words, unready
from fleet_planner.events import Event
from fleet_planner.types import RouterPod

PULL = 'Back-off pulling image "w:9": ErrImagePull: failed to resolve reference "w:9": not found'
BACK_OFF = "back-off 5m0s restarting failed container=worker pod=f-t-decode-a-0_ml(u)"
KILLED = "exit code 137 (SIGKILL)"
NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}


def waiting(reason: str, message: str = "", last: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": "worker", "state": {"waiting": {"reason": reason, "message": message}}, "lastState": last or {}}


def ended(code: int = 137, **words: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, **words}}


@pytest.mark.parametrize(
    ("container", "message", "blocked"),
    [
        (waiting("ImagePullBackOff", PULL), PULL, True),
        (waiting("ErrImagePull", "failed to resolve reference"), "failed to resolve reference", True),
        (waiting("CreateContainerConfigError", 'secret "hf-token" not found'), 'secret "hf-token" not found', True),
        (waiting("InvalidImageName"), "InvalidImageName", True),
        (waiting("ContainerCreating"), "", False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(reason="OOMKilled")), "OOMKilled", False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(reason="OOMKilled", message="shard 3\n")), "OOMKilled: shard 3", False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(2, reason="Error", message="BadModel: none")), "BadModel: none", False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(1, reason="Error")), "Error", False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(3)), "exit code 3", False),
        # killed or crashed in native code: its last line of the log, of something that went well, was told as the cause
        (waiting("CrashLoopBackOff", BACK_OFF, ended(reason="Error", message="GET /x 200")), f"{KILLED}: GET /x 200", False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(139, reason="Error")), "exit code 139 (SIGSEGV)", False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(message="GET /x 200")), f"{KILLED}: GET /x 200", False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended()), KILLED, False),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(255, reason="Error", message="no")), "no", False),
    ],
)  # fmt: skip
def test_a_worker_that_is_not_ready(container: dict[str, Any], message: str, blocked: bool):
    """The last words of a container that the kernel killed hid that it was killed: the log's end stood there."""
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}
    pod = {
        "metadata": {"name": "f-t-decode-a-0", "uid": "u", "labels": labels},
        "spec": {"nodeName": "gpu-a"},
        "status": {"phase": "Pending", "containerStatuses": [container]},
    }
    (seen,) = observe_pods([pod])
    assert (seen.message, seen.blocked) == (message, blocked)


BEGINS = {"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}, "lastState": {}, "restartCount": 0}


@pytest.mark.parametrize(
    ("first", "message", "blocked", "restarts"),
    [
        ({"state": {"waiting": {"reason": "ImagePullBackOff", "message": PULL}}}, f"mesh: {PULL}", True, 0),
        (
            {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": BACK_OFF}}, "lastState": ended(1, message="no CA")},
            "mesh: no CA",
            False,
            3,
        ),
        ({"state": {"running": {}}}, "", False, 0),
        ({"state": ended(0, reason="Completed"), "ready": True, "lastState": ended(1, message="no CA")}, "", False, 0),
    ],
    ids=["no-image", "ends-again-and-again", "runs", "done"],
)
def test_a_container_that_others_put_before_ours_is_named(first: dict[str, Any], message: str, blocked: bool, restarts: int):
    """A mesh or an injector adds it. While it failed the worker was only late, and the status said to look at the log of the
    worker, which had not begun."""
    told = {"name": "mesh", "ready": False, "restartCount": 3 if restarts or first.get("ready") else 0, **first}
    status = {"phase": "Pending", "containerStatuses": [BEGINS], "initContainerStatuses": [told]}
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}
    pod = {"metadata": {"name": "f-t-decode-a-0", "uid": "u", "labels": labels}, "spec": {"nodeName": "gpu-a"}, "status": status}
    (seen,) = observe_pods([pod])
    assert (seen.message, seen.blocked, seen.restarts, seen.crashes) == (message, blocked, restarts, 0)
    (router,) = observe_router({"spec": {}}, [pod]).pods
    assert (router.message, router.restarts) == (message, restarts)


CAUSE = "EngineDied: " + "x" * 288


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (f"{'y' * 300}\n{CAUSE}\n", CAUSE),
        (f"{'y' * 300}\n{CAUSE}\nend", f"{CAUSE}\nend"),
        (f"of a line\n{CAUSE}{'z' * 200}", f"{CAUSE}{'z' * 200}"),
        (f"of a line\n{CAUSE}{'z' * 300}", f"{CAUSE[-200:]}{'z' * 300}"),
        ("a\nb", "a\nb"),
    ],
    ids=["half-a-line", "two-lines", "just-fits", "one-long-line", "all-of-it"],
)
def test_the_end_of_a_log_begins_with_a_whole_line(log: str, said: str):
    """A status began in the middle of whatever was said before the cause."""
    assert last_words({"exitCode": 1, "message": log}) == said


RUNS = {"name": "worker", "restartCount": 0, "state": {"running": {"startedAt": "2026-01-01T00:00:10Z"}}}
FELL = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T04:00:00Z"}


PROXY_FELL = {"name": "istio-proxy", "restartCount": 5, "state": {"running": {}}, "lastState": ended()}
"""In a kubelet's list of a pod's containers, which goes by names, it stands before ours."""


@pytest.mark.parametrize(
    ("own", "proxy", "message", "blocked", "restarts"),
    [
        (waiting("ImagePullBackOff", PULL), {"ready": True}, PULL, True, 0),
        (waiting("CrashLoopBackOff", BACK_OFF, ended(2, message="BadModel: none")), {"ready": False}, "BadModel: none", False, 5),
        ({"name": "worker", "state": {"running": {}}}, {"ready": True}, "", False, 0),
        ({"name": "worker", "state": {"running": {}}}, {"ready": False}, f"istio-proxy: {KILLED}", False, 5),
    ],
    ids=["it-has-no-image", "it-crashes", "it-begins", "the-proxy-fails"],
)
def test_a_container_that_others_put_beside_ours_is_named_and_hides_nothing(
    own: dict[str, Any], proxy: dict[str, Any], message: str, blocked: bool, restarts: int
):
    """The last end of a mesh's proxy, days ago, was told as why a worker was not ready: its image that is not to be had was not,
    and the proxy's restarts made it WorkersFailing."""
    status = {"phase": "Running", "containerStatuses": [{**PROXY_FELL, **proxy}, own]}
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}
    pod = {"metadata": {"name": "f-t-decode-a-0", "uid": "u", "labels": labels}, "spec": {"nodeName": "gpu-a"}, "status": status}
    (seen,) = observe_pods([pod])
    assert (seen.message, seen.blocked, seen.restarts, seen.crashes) == (message, blocked, restarts, "CrashLoop" in str(own))


def test_a_routers_proxy_that_ends_again_and_again_is_named():
    """It was told as the router's own end."""
    status = {"containerStatuses": [{**PROXY_FELL, "ready": True}, {"name": "router", "ready": True, "state": {"running": {}}}]}
    (seen,) = observe_router({"spec": {}}, [{"metadata": {"name": "f-router-x"}, "status": status}]).pods
    assert (seen.message, seen.restarts) == (f"istio-proxy: {KILLED}", 5)


UNREADY = "containers with unready status: [istio-proxy]"
GATE = 'the status of pod readiness gate "target-health" is not "True", but False'


@pytest.mark.parametrize("words", [UNREADY, GATE])
def test_what_keeps_a_pod_from_being_ready_whose_own_container_is(words: str):
    """Of a worker that answers the status said that it does not, and to look at its log (WorkersSilent), while a mesh's proxy
    beside it was not ready, or a gate that a load balancer put on its pod was shut."""
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}
    meta = {"name": "f-t-decode-a-0", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    own = [{**RUNS, "name": name, "ready": True} for name in ("worker", "router")]
    conditions = [{**FELL, "message": words}]
    pods = [
        {"metadata": meta, "spec": {"nodeName": "n"}, "status": {"containerStatuses": [one], "conditions": conditions}}
        for one in own
    ]
    (worker,), router = observe_pods(pods[:1]), observe_router({"spec": {}}, pods[1:])
    assert (worker.silent, worker.message) == (False, "")
    now = timestamp("2026-01-01T04:02:00Z") or 0.0
    told = f"answers, and its pod is not ready since 2026-01-01T04:00:00Z on node n: {words}"
    assert unready([worker], now) == f"f-t-decode-a-0: {told}"
    assert unready([worker], now - 70) == "", "mostly it is over soon"
    assert router_words(router) == f": f-t-decode-a-0 answers, and its pod is not ready: {words}"


@pytest.mark.parametrize(
    ("status", "notes", "silent"),
    [
        pytest.param({"containerStatuses": [RUNS], "conditions": [FELL]}, {}, True, id="it-was-ready"),
        pytest.param(
            {"containerStatuses": [RUNS], "conditions": [{**FELL, "lastTransitionTime": "2026-01-01T00:00:10Z"}]}, {}, False,
            id="it-never-was",
        ),
        pytest.param({"containerStatuses": [RUNS], "conditions": [{**FELL, "status": "True"}]}, {}, False, id="ready"),
        pytest.param({"containerStatuses": [{**RUNS, "ready": True}], "conditions": [FELL]}, {}, True, id="its-node-is-lost"),
        pytest.param({"containerStatuses": [waiting("ContainerCreating")], "conditions": [FELL]}, {}, False, id="not-running"),
        pytest.param({"containerStatuses": [RUNS, waiting("x")], "conditions": [FELL]}, {}, False, id="one-of-two-runs"),
        pytest.param({"conditions": [FELL]}, {}, False, id="no-container"),
        pytest.param({"containerStatuses": [RUNS]}, {}, False, id="no-condition"),
        pytest.param({"containerStatuses": [RUNS], "conditions": [FELL]}, {FLIP: "decode"}, False, id="it-changes-its-role"),
    ],
)  # fmt: skip
def test_a_worker_that_was_ready_and_runs_on_is_silent(status: dict[str, Any], notes: dict[str, str], silent: bool):
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}
    meta = {"name": "f-t-decode-a-0", "uid": "u", "labels": labels, "annotations": notes}
    (seen,) = observe_pods([{"metadata": meta, "spec": {}, "status": status}])
    assert seen.silent is silent


@pytest.mark.parametrize(
    ("told_at", "since_s"),
    [
        pytest.param("2026-01-01T09:00:05Z", 5.0, id="the-node-is-right"),
        pytest.param("2026-01-01T00:00:05Z", 0.0, id="nine-hours-behind"),
        pytest.param("2026-01-01T18:00:05Z", 9 * 3600 + 5.0, id="nine-hours-ahead-is-for-the-planner"),
        pytest.param("soon", None, id="no-time"),
    ],
)
def test_nothing_happened_to_a_pod_before_it_was_made(told_at: str, since_s: float | None):
    """On a node whose clock was nine hours behind every new worker was WorkersLate at once."""
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}
    meta = {"name": "f-t-decode-a-0", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T09:00:00Z"}
    for ready in ("True", "False"):
        conditions = [
            {"type": "Ready", "status": ready, "lastTransitionTime": told_at},
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": told_at},
        ]
        (seen,) = observe_pods([{"metadata": meta, "spec": {}, "status": {"conditions": conditions}}])
        made_at, expected = seen.created_at, None if since_s is None else seen.created_at + since_s
        assert seen.scheduled_at == expected
        assert seen.ready_since == (expected if ready == "True" else None)
        assert seen.unready_since == (None if ready == "True" else made_at if expected is None else expected)


@pytest.mark.parametrize(
    ("reason", "unschedulable", "gated"),
    [("Unschedulable", True, False), ("SchedulerError", True, False), ("SchedulingGated", False, True), ("Odd", False, False)],
)
def test_a_pod_that_a_scheduler_gave_no_node(reason: str, unschedulable: bool, gated: bool):
    """SchedulerError: it cannot read what the pod asks for. CapacityLimited said "every pod found a node"."""
    meta = {"name": "f-t-decode-a-0", "uid": "u", "labels": {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}}
    status = {"phase": "Pending", "conditions": [{**NO_NODE, "reason": reason}]}
    (seen,) = observe_pods([{"metadata": meta, "spec": {}, "status": status}])
    assert (seen.unschedulable, seen.gated, seen.message) == (unschedulable, gated, "0/2 nodes are available")


def router(*conditions: dict[str, Any], deleted: bool = False) -> dict[str, Any]:
    meta = {"name": "f-router-x"} | ({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {})
    return {"metadata": meta, "status": {"conditions": list(conditions)}}


OOM = {"name": "router", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
EVICTED: list[dict[str, Any]] = [
    {"metadata": {"name": "f-router-a"}, "status": {"phase": "Failed"}},
    {"metadata": {"name": "f-router-b"}, "status": {"phase": "Failed", "containerStatuses": [OOM]}},
]
"""They stay for long."""


@pytest.mark.parametrize(
    ("replica_failure", "pods", "message", "silent"),
    [
        ("", [router(NO_NODE)], "f-router-x: 0/2 nodes are available", ""),
        ('pods "f-router-x" is forbidden: exceeded quota: none', [], 'pods "f-router-x" is forbidden: exceeded quota: none', ""),
        ("", [router({"type": "PodScheduled", "status": "True"})], "", "f-router-x"),
        ("", [router(NO_NODE, deleted=True)], "", ""),
        ("", [*EVICTED, router(NO_NODE)], "f-router-x: 0/2 nodes are available", ""),
    ],
    ids=["no-node", "quota", "hangs", "leaves", "others-were-evicted"],
)
def test_a_router_that_is_not_there(replica_failure: str, pods: list[dict[str, Any]], message: str, silent: str):
    """`no router pod is ready`, and not a word why: no node for it, or a quota that refuses its pod."""
    failure = [{"type": "ReplicaFailure", "status": "True", "message": replica_failure}] if replica_failure else []
    seen = observe_router({"spec": {"replicas": 1}, "status": {"conditions": failure}}, pods)
    assert seen is not None
    assert (seen.ready, seen.message, seen.silent) == (0, message, silent)


def test_kubectl_describe_shows_events_in_the_order_in_which_they_happened():
    """kubectl sorts by lastTimestamp, which events.k8s.io/v1 refuses, so what the API lists stands as it comes: by name."""
    raw = {"apiVersion": "v", "kind": "InferenceFleet", "metadata": {"name": "f", "namespace": "ml", "uid": "u"}}
    times = [1_700_000_000.0 + 0.25 * n for n in range(40)]
    named = [render_event(raw, Event("Normal", f"R{n % 7}", "", "a"), at, "i")["metadata"]["name"] for n, at in enumerate(times)]
    assert named == sorted(named)
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    ("meta", "gone_by"),
    [
        pytest.param({}, None, id="it stays"),
        pytest.param(
            {"deletionTimestamp": "1970-01-01T00:10:30Z", "deletionGracePeriodSeconds": 30}, 630.0, id="as the API says"
        ),
        pytest.param({"deletionTimestamp": "1970-01-01T00:10:00Z"}, 645.0, id="we asked, and have not seen it yet"),
        pytest.param({"deletionTimestamp": "soon", "deletionGracePeriodSeconds": 30}, None, id="no time"),
    ],
)
def test_when_the_grace_of_a_worker_that_goes_is_over(meta: dict[str, Any], gone_by: float | None):
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}
    pod = {
        "metadata": {"name": "f-t-decode-a-0", "uid": "u", "labels": labels, **meta},
        "spec": {"nodeName": "gpu-a", "terminationGracePeriodSeconds": 45},
    }
    (seen,) = observe_pods([pod])
    assert seen.gone_by == gone_by


MADE_AT, ENDED_AT = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
AGAIN = {
    "name": "router",
    "state": {"running": {"startedAt": "2026-01-01T00:01:10Z"}},
    "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": ENDED_AT}},
    "restartCount": 4,
}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            {"phase": "Running", "containerStatuses": [AGAIN], "conditions": [{"type": "Ready", "status": "True"}]},
            {"ready": True, "message": "OOMKilled", "restarts": 4, "ended_at": timestamp(ENDED_AT)},
        ),
        ({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}, {}),
        ({"phase": "Pending", "containerStatuses": [waiting("ContainerCreating")]}, {"pending": True}),
        ({"phase": "Pending", "conditions": [NO_NODE]}, {"pending": True, "message": "0/2 nodes are available"}),
        ({}, {"pending": True}),
        (
            {"phase": "Running", "containerStatuses": [{**AGAIN, "lastState": {"terminated": {"finishedAt": "soon"}}}]},
            {"restarts": 4},
        ),
    ],
)
def test_routers_are_seen_one_by_one(status: dict[str, Any], expected: dict[str, Any]):
    """Only whether any of them was ready was known."""
    pods = [{"metadata": {"name": "f-router-x", "creationTimestamp": MADE_AT}, "status": status}, *EVICTED]
    failure = [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]
    seen = observe_router({"spec": {"replicas": 2}, "status": {"conditions": failure}}, pods)
    assert seen is not None
    assert seen.pods == (RouterPod("f-router-x", created_at=timestamp(MADE_AT) or 0.0, **expected),)
    assert seen.refused == "exceeded quota"

"""What the status says at night: which pod, since when, why; and no alarm about what only begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.v1alpha1.status import Condition, FleetStatus
from fleet_planner.causes import ROUTER_TAKES_S, SILENT_S, UNSEEN_S
from fleet_planner.events import Pass, events_of
from fleet_planner.reconcile import reconcile
from fleet_planner.types import Observed, ObservedPod, Problem, RouterPod, RouterView
from tests.fleet_planner.test_gang import gang
from tests.fleet_planner.test_reconcile import NOW, carry_out, fleet, start

HALF_AN_HOUR_S = 1_800.0
NOBODY = "tier t: 0 prefill and 0 decode workers are serving"


def condition(kind: str, observed: Observed, now: float = NOW) -> tuple[str, str, str]:
    found = next(c for c in reconcile(fleet(), observed, now).status.conditions if c.type == kind)
    return found.status, found.reason, found.message


@pytest.fixture
def serving() -> Observed:
    observed = carry_out(reconcile(fleet(), start(), NOW), start())
    return replace(observed, pods=tuple(replace(pod, created_at=NOW, ready_since=NOW) for pod in observed.pods))


def unready(observed: Observed, **change: Any) -> Observed:
    """No worker is ready any more, each for the same reason."""
    lost = {"ready": False, "ready_since": None, "unready_since": NOW, "node": "gpu-a"} | change
    return replace(observed, pods=tuple(replace(pod, **lost) for pod in observed.pods))


def names(observed: Observed) -> list[str]:
    return [pod.name for pod in observed.pods]


@pytest.mark.parametrize("words", ['Back-off pulling image "w:9": ErrImagePull', 'secret "hf-token" not found'])
def test_workers_that_cannot_be_started_fail_and_do_not_start(serving: Observed, words: str):
    """3 am: an image that nobody can pull, a Secret that is missing: WorkersStarting for ever, without a Warning."""
    status, reason, message = condition("Available", unready(serving, message=words, blocked=True))
    assert (status, reason) == ("False", "WorkersFailing")
    assert message.count(words) == 1, "each cause once, with the pods that have it"
    assert ", ".join(names(serving)) in message


def test_a_worker_that_hangs_is_named_with_node_and_time(serving: Observed):
    """0 prefill and 0 decode workers are serving: that was all, for half an hour."""
    hung = unready(serving)
    assert condition("Available", hung, NOW + SILENT_S - 1)[2].endswith("are serving"), "a beginning has no words, and no writes"
    status, reason, message = condition("Available", hung, NOW + SILENT_S)
    assert (status, reason) == ("False", "WorkersStarting")
    assert message.endswith("not ready since 1970-01-01T00:16:40Z on node gpu-a: look at its log")
    assert condition("Available", hung, NOW + 2 * SILENT_S)[2] == message, "it moves no more: at rest nothing is written"


def test_a_worker_that_hangs_for_as_long_as_a_rollout_may_is_late(serving: Observed):
    assert condition("Available", unready(serving), NOW + HALF_AN_HOUR_S)[1] == "WorkersStarting"
    assert condition("Available", unready(serving), NOW + HALF_AN_HOUR_S + 1)[1] == "WorkersLate"
    waiting = unready(serving, node=None, unschedulable=True)
    assert condition("Available", waiting, NOW + HALF_AN_HOUR_S + 1)[1] == "WorkersPending", "not late: there is no room"


def halves(follower: dict[str, Any], leader: dict[str, Any] | None = None) -> Observed:
    """One worker of each role, over two nodes. The leaders are ready unless said otherwise."""
    lost = {"ready": False, "ready_since": None, "unready_since": NOW}
    pods = [*gang("f-t-prefill-aaaaaaaa-0", "prefill"), *gang("f-t-decode-aaaaaaaa-0")]
    changed = [replace(pod, created_at=NOW, **(lost | follower if pod.member else leader or {})) for pod in pods]
    return replace(start(nodes=(2, 2)), pods=tuple(changed), router=RouterView(1, 1))


def test_half_of_a_worker_that_has_a_node_is_not_late_while_the_rest_finds_none():
    """It said that no lack of nodes is why, was a Warning, and Argo CD called the fleet Degraded."""
    begun = {"ready": False, "ready_since": None, "unready_since": NOW, "node": "gpu-a"}
    waiting = halves({"node": None, "unschedulable": True, "message": "0/4 nodes"}, begun)
    assert condition("Available", waiting, NOW + HALF_AN_HOUR_S + 1)[1] == "WorkersPending"
    placed = halves({"node": "gpu-b"}, begun)
    assert condition("Available", placed, NOW + HALF_AN_HOUR_S + 1)[1] == "WorkersLate"


def test_a_leader_that_is_ready_does_not_hide_its_silent_follower():
    """Nothing serves: the worker is not there, though its leader answers."""
    told = condition("Available", halves({"node": "gpu-b", "silent": True}), NOW + 1)
    assert told[1] == "WorkersSilent"
    assert "was ready, and does not answer since 1970-01-01T00:16:40Z on node gpu-b" in told[2]


def test_pods_that_no_scheduler_looks_at_are_named_with_what_to_look_at(serving: Observed):
    """3 am: a podTemplate.schedulerName of a scheduler that did not run. CapacityLimited said "every pod found a node", Available
    WorkersStarting for ever, without a Warning: look at the log of a pod that has none."""
    lost = unready(serving, node=None, phase="Pending")
    named = ", ".join(names(serving))
    look = "look at podTemplate.schedulerName, and at that scheduler's log"
    assert condition("CapacityLimited", lost, NOW + UNSEEN_S - 1)[1] == "Sufficient"
    told = condition("CapacityLimited", lost, NOW + UNSEEN_S)
    assert told == ("True", "NoScheduler", f"3 pods got no node, and no scheduler says why: {named}: {look}")
    said = f"{named}: no node since 1970-01-01T00:16:40Z, and no scheduler says why: {look}"
    assert condition("Available", lost, NOW + SILENT_S)[1:] == ("WorkersStarting", f"{NOBODY}: {said}")
    assert condition("Available", lost, NOW + HALF_AN_HOUR_S + 1)[1:] == ("WorkersLate", f"{NOBODY}: {said}")
    for change in ({"gated": True}, {"message": "words"}, {"terminating": True}, {"phase": "Failed"}, {"unschedulable": True}):
        other = unready(serving, **{"node": None, "phase": "Pending"} | change)
        assert condition("CapacityLimited", other, NOW + UNSEEN_S)[1] != "NoScheduler"
    gated = unready(serving, node=None, phase="Pending", gated=True)
    assert condition("Available", gated, NOW + HALF_AN_HOUR_S + 1)[1] == "WorkersStarting", "a queue has them"


@pytest.mark.parametrize(
    ("role", "silent", "reason"),
    [("prefill", True, "WorkersSilent"), ("decode", True, "WorkersSilent"), ("prefill", False, "WorkersStarting")],
)
def test_a_worker_that_served_and_does_not_answer_is_not_called_starting(serving: Observed, role: str, silent: bool, reason: str):
    """A prefill worker that hung (SIGSTOP) after hours made WorkersStarting of its fleet, and nothing named it for a minute."""
    lost = {"ready": False, "ready_since": None, "unready_since": NOW, "node": "gpu-a", "silent": silent}
    pods = tuple(replace(pod, **lost) if pod.role == role else pod for pod in serving.pods)
    status, said, message = condition("Available", replace(serving, pods=pods), NOW + 1)
    assert (status, said) == ("False", reason)
    assert message.endswith("was ready, and does not answer since 1970-01-01T00:16:40Z on node gpu-a: look at its log") is silent
    crashed = tuple(replace(pod, restarts=1) if not pod.ready else pod for pod in pods)
    assert condition("Available", replace(serving, pods=crashed), NOW + 1)[1] == "WorkersFailing"


def test_one_role_alone_is_not_a_fleet_that_serves(serving: Observed):
    """Decode workers compute prompts themselves for as long as no prefill worker is there: what was asked for is not."""
    lost = {"ready": False, "ready_since": None, "unready_since": NOW}
    pods = [replace(pod, serving=True, **(lost if pod.role == "prefill" else {})) for pod in serving.pods]
    told = condition("Available", replace(serving, pods=tuple(pods)), NOW + 1)
    assert told == ("False", "WorkersStarting", "tier t: 0 prefill and 2 decode workers are serving")


def test_a_silent_worker_of_a_role_that_serves_says_nothing_of_the_one_that_starts(serving: Observed):
    first = next(pod for pod in serving.pods if pod.role == "decode")
    lost = {"ready": False, "ready_since": None, "unready_since": NOW}
    pods = [replace(pod, **lost) if pod.role == "prefill" else pod for pod in serving.pods]
    pods = [replace(pod, silent=True, **lost) if pod is first else pod for pod in pods]
    assert condition("Available", replace(serving, pods=tuple(pods)), NOW + 1)[1] == "WorkersStarting"


def test_workers_that_end_again_and_again_say_how_often(serving: Observed):
    message = condition("Available", unready(serving, message="OOMKilled", restarts=7))[2]
    assert message.endswith(": OOMKilled (7 restarts)")


def test_causes_are_few(serving: Observed):
    pods = [replace(serving.pods[0], name=f"p{n}", ready=False, message=f"words {n}") for n in range(5)]
    message = condition("Available", replace(serving, pods=tuple(pods)))[2]
    assert message.endswith("p2: words 2; and 2 other causes")


def test_pods_without_a_node_are_named(serving: Observed):
    pods = unready(serving, node=None, unschedulable=True, message="0/2 nodes are available").pods
    told = condition("CapacityLimited", replace(serving, pods=pods))[2]
    assert told == f"3 pods cannot be scheduled: {', '.join(names(serving))}: 0/2 nodes are available"
    told = condition("CapacityLimited", replace(serving, pods=pods[:1]))[2]
    assert told == f"1 pod cannot be scheduled: {names(serving)[0]}: 0/2 nodes are available"


@pytest.mark.parametrize(
    ("router", "after_s", "expected"),
    [
        (RouterView(1, 0), 0.0, "RouterStarting"),
        (
            RouterView(1, 0),
            -30.0,
            "RouterStarting",
        ),  # the node's clock is ahead: a worker is ready from half a minute from now on
        (RouterView(1, 0), ROUTER_TAKES_S, "NoRouter"),
        (RouterView(1, 0, "f-router-x: 0/2 nodes are available"), 0.0, "NoRouter"),
        (RouterView(1, 1), ROUTER_TAKES_S, "Serving"),
        (None, ROUTER_TAKES_S, "NoRouter"),
    ],
)
def test_a_router_that_only_begins_is_no_alarm(serving: Observed, router: RouterView | None, after_s: float, expected: str):
    """A router is ready when it knows of a worker, a moment after the first one serves: every new fleet had a Warning."""
    assert condition("Available", replace(serving, router=router), NOW + after_s)[1] == expected
    if router is not None and router.message:
        assert router.message in condition("Available", replace(serving, router=router), NOW + after_s)[2]


def test_a_router_that_says_nothing_is_named(serving: Observed):
    told = condition("Available", replace(serving, router=RouterView(1, 0, silent="f-router-x")), NOW + ROUTER_TAKES_S)[2]
    assert told == "no router pod is ready: f-router-x runs and does not become ready: look at its log"


WELL = RouterPod("f-router-a", created_at=NOW, ready=True)
OOM = RouterPod("f-router-b", created_at=NOW, message="OOMKilled", restarts=1)
ENDS_AGAIN = replace(OOM, ready=True, restarts=3, ended_at=NOW)
WITHOUT_SECRET = RouterPod("f-router-b", created_at=NOW, pending=True)
HOUR_S, DAY_S = 3_600.0, 86_400.0


@pytest.mark.parametrize(
    ("router", "after_s", "told"),
    [
        (RouterView(2, 2, pods=(WELL, replace(WELL, name="f-router-b"))), 0.0, ""),
        (RouterView(2, 1, pods=(WELL, RouterPod("f-router-b", created_at=NOW))), DAY_S, ""),  # it says nothing: it begins
        (RouterView(2, 1, pods=(WELL, OOM)), 0.0, "f-router-b: OOMKilled"),
        (RouterView(2, 2, pods=(WELL, replace(OOM, ready=True, ended_at=NOW))), 0.0, ""),  # once, and it is well again
        (RouterView(2, 2, pods=(WELL, ENDS_AGAIN)), HOUR_S - 1, "f-router-b: OOMKilled (3 restarts)"),
        (RouterView(2, 2, pods=(WELL, ENDS_AGAIN)), HOUR_S, ""),
        (RouterView(2, 2, pods=(WELL, replace(ENDS_AGAIN, created_at=NOW - 2 * DAY_S))), 1.0, ""),  # not three times a day
        (RouterView(2, 2, pods=(WELL, replace(ENDS_AGAIN, message=""))), 1.0, "f-router-b: ends again and again (3 restarts)"),
        (RouterView(1, 1, pods=(replace(ENDS_AGAIN, name="f-router-a"),)), 1.0, "f-router-a: OOMKilled (3 restarts)"),
        (RouterView(2, 2, pods=(WELL, WITHOUT_SECRET)), HALF_AN_HOUR_S, ""),
        (
            RouterView(2, 2, pods=(WELL, WITHOUT_SECRET)),
            HALF_AN_HOUR_S + 1,
            "f-router-b: not started since 1970-01-01T00:16:40Z: look at its events",
        ),
        (RouterView(2, 1, pods=(WELL,), refused='"f-router-b" is forbidden: exceeded quota'), 0.0, "exceeded quota"),
    ],
)
def test_one_router_of_several_that_fails_is_told(serving: Observed, router: RouterView, after_s: float, told: str):
    """Of two routers one ended again and again (OOM), or had no image, node or Secret: AllGood, without event and alert, while
    half of the connections broke, or until the other one went, too."""
    observed, now = replace(serving, router=router), NOW + after_s
    status, reason, message = condition("Available", observed, now)
    assert (status, reason) == ("True", "RoutersFailing" if told else "Serving")
    assert message.startswith("http://f-router answers")
    assert message.endswith(told)
    if told:
        assert condition("Ready", observed, now) == (status, reason, message), "the column REASON of kubectl get ifleet"
    ill = reconcile(fleet(), observed, now).status
    events = events_of(reconcile(fleet(), replace(serving, router=RouterView(2, 2, pods=(WELL,))), now).status, ill, Pass())
    assert [(e.type, e.reason) for e in events] == ([("Warning", "RoutersFailing")] if told else [])


def test_the_reason_of_ready_is_the_cause(serving: Observed):
    """kubectl get ifleet has it in a column; NotAvailable said nothing."""
    assert condition("Ready", unready(serving, message="m", blocked=True))[1] == "WorkersFailing"
    assert condition("Ready", replace(serving, router=RouterView(1, 0)), NOW + ROUTER_TAKES_S)[1] == "NoRouter"


def test_one_thing_that_breaks_is_one_event(serving: Observed):
    """NoRouter and NotAvailable came with the same words."""
    well = reconcile(fleet(), serving, NOW).status
    ill = reconcile(fleet(), replace(serving, router=RouterView(1, 0, "gone")), NOW).status
    assert [(e.type, e.reason) for e in events_of(well, ill, Pass())] == [("Warning", "NoRouter")]


def test_a_fleet_that_begins_warns_of_nothing():
    def available(reason: str) -> FleetStatus:
        return FleetStatus(conditions=(Condition(type="Available", status="False", reason=reason, message="m"),))

    assert events_of(available("WorkersStarting"), available("RouterStarting"), Pass()) == ()
    assert [e.type for e in events_of(available("RouterStarting"), available("NoRouter"), Pass())] == ["Warning"]


def test_a_quota_that_refuses_is_not_a_right_that_is_missing():
    refused = Problem("Forbidden", 'Pod f-t-decode-a-0: pods "f" is forbidden: exceeded quota: small, used: pods=2')
    assert [e.reason for e in events_of(FleetStatus(), FleetStatus(), Pass(problems=[refused]))] == ["QuotaExceeded"]


def test_who_is_on_its_way_out_explains_nothing(serving: Observed):
    pods = list[ObservedPod](unready(serving, message="ended", blocked=True, terminating=True).pods)
    assert condition("Available", replace(serving, pods=tuple(pods)))[1] == "WorkersStarting"

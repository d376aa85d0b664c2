"""Tables for pod phase, conditions and container statuses."""

import dataclasses

import pytest

from fleet_operator.runtime.status import ContainerView, PodView, pod_phase, pod_status

RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
CREATING = {"waiting": {"reason": "ContainerCreating"}}
CRASHED = {"waiting": {"reason": "CrashLoopBackOff"}}


def ended(code):
    return {"terminated": {"exitCode": code}}


def view(state, **more):
    defaults = {"last_state": {}, "restarts": 0, "ready": False, "started": False, "ended": "terminated" in state}
    return ContainerView(name=more.pop("name", "main"), image="i", state=state, **(defaults | more))


def pod(*containers, init=()):
    return PodView("127.9.9.9", "127.0.0.1", "2026-01-01T00:00:00Z", init, containers)


@pytest.mark.parametrize(
    ("shown", "phase"),
    [
        (pod(view(CREATING)), "Pending"),
        (pod(view(RUNNING), view(CREATING)), "Pending"),
        (pod(view(RUNNING)), "Running"),
        (pod(view(CRASHED, last_state=ended(1))), "Running"),
        (pod(view(ended(0))), "Succeeded"),
        (pod(view(ended(0)), view(ended(3))), "Failed"),
        (pod(view(ended(0)), view(RUNNING)), "Running"),
        (pod(view(CREATING), init=[view(ended(1))]), "Failed"),
        (pod(view(CREATING), init=[view(RUNNING)]), "Pending"),
    ],
)
def test_phase(shown, phase):
    assert pod_phase(shown) == phase


def conditions(status):
    return {condition["type"]: condition for condition in status["conditions"]}


def test_a_ready_pod_in_the_kubelets_shape():
    status = pod_status(pod(view(RUNNING, ready=True, started=True, container_id="process://7")), {}, "T1")
    assert status["podIP"] == "127.9.9.9"
    assert status["podIPs"] == [{"ip": "127.9.9.9"}]
    assert {name: c["status"] for name, c in conditions(status).items()} == {
        "PodScheduled": "True",
        "PodReadyToStartContainers": "True",
        "Initialized": "True",
        "ContainersReady": "True",
        "Ready": "True",
    }
    [container] = status["containerStatuses"]
    assert container == {
        "name": "main",
        "image": "i",
        "imageID": "",
        "state": RUNNING,
        "lastState": {},
        "ready": True,
        "started": True,
        "restartCount": 0,
        "containerID": "process://7",
    }


def test_unready_containers_are_named():
    status = pod_status(pod(view(RUNNING, ready=True), view(RUNNING, name="slow")), {}, "T1")
    ready = conditions(status)["Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "ContainersNotReady")
    assert ready["message"] == "containers with unready status: [slow]"


def test_what_is_wrong_with_a_pod_is_told_and_taken_back():
    wrong = pod_status(dataclasses.replace(pod(view(RUNNING)), message="no room"), {}, "T1")
    assert wrong["message"] == "no room"
    mended = pod_status(pod(view(RUNNING)), wrong, "T2")
    assert mended["message"] is None
    assert "message" not in pod_status(pod(view(RUNNING)), mended, "T3")


def test_transition_times_move_only_with_the_status():
    before = pod_status(pod(view(RUNNING)), {}, "T1")
    same = pod_status(pod(view(RUNNING)), before, "T2")
    assert same == before
    after = pod_status(pod(view(RUNNING, ready=True)), before, "T3")
    times = {name: condition["lastTransitionTime"] for name, condition in conditions(after).items()}
    assert times == {
        "PodScheduled": "T1",
        "PodReadyToStartContainers": "T1",
        "Initialized": "T1",
        "ContainersReady": "T3",
        "Ready": "T3",
    }


def test_a_finished_pod_is_not_ready_but_complete():
    ready = conditions(pod_status(pod(view(ended(0))), {}, "T1"))["Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "PodCompleted")

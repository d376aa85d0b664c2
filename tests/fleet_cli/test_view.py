"""What is shown of pods and status."""

from __future__ import annotations

import io
import json
import shlex

import pytest

from fleet_api.v1alpha1 import FleetStatus, KvStatus
from fleet_cli.errors import InputError, RunError
from fleet_cli.up.screen import LiveScreen, PlainScreen, open_screen
from fleet_cli.up.view import adapter_lines, curl_line, fatal, kv_line, kv_total, role_lines, size, snapshot, trouble_lines

BEGUN, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def pod(
    name="p-0",
    *,
    role="decode",
    ready=False,
    container=None,
    deleted=False,
    phase="Running",
    conditions=(),
    since="",
    message=None,
):
    metadata = {"name": name, "labels": {"inferencefleet.io/role": role}}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    told = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": since}
    status = {"phase": phase, "conditions": [told, *conditions]}
    if container is not None:
        status["containerStatuses"] = [container]
    if message is not None:
        status["message"] = message
    return {"metadata": metadata, "status": status}


def status_of(serving, kv=None, ready="False"):
    return {
        "tiers": [
            {
                "name": "local",
                "prefill": {"desired": 1, "ready": serving, "serving": serving},
                "decode": {"desired": 2, "ready": serving, "serving": serving},
                **({"kv": kv} if kv else {}),
            }
        ],
        "conditions": [{"type": "Ready", "status": ready, "reason": "AllGood"}],
    }


def died(code, message="", restarts=0, key="lastState"):
    return {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, key: {"terminated": {"exitCode": code, "message": message}},
            "restartCount": restarts}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "state"),
    [
        (pod(phase="Pending"), "pending"),
        (pod(container={"state": {"running": {}}, "started": False}), "starting"),
        (pod(container={"state": {"running": {}}, "started": True}), "warming"),
        (pod(container={"state": {"running": {"startedAt": BEGUN}}, "started": True}, since=BEGUN), "warming"),
        # a worker that hung (SIGSTOP) was said to be warming, for as long as it hung
        (pod(container={"state": {"running": {"startedAt": BEGUN}}, "started": True}, since=LATER), "not answering"),
        (pod(ready=True, container={"state": {"running": {}}}), "ready"),
        (pod(ready=True, deleted=True), "draining"),
        # a full disk: the router never heard of its workers, and nothing said why
        (pod(message="its files are not written"), "running: its files are not written"),
        (pod(ready=True, message="its files are not written"), "ready: its files are not written"),
        (pod(container=died(1)), "restarting"),
        (
            pod(phase="Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": "no gpu"}]),
            "unschedulable: no gpu",
        ),
        (
            pod(phase="Pending", container={"state": {"waiting": {"reason": "ContainerCreating", "message": "/s: disk full"}}}),
            "pending: /s: disk full",
        ),
        ({"metadata": {"name": "fresh"}}, "pending"),
    ],
)
def test_state_of_a_pod(raw, state):
    assert snapshot([raw], {}).pods[0].state == state


@pytest.mark.parametrize(
    ("container", "kind", "text"),
    [
        (died(2, "loading\nBadModel: /m is not a folder\n"), InputError, "p-0: BadModel: /m is not a folder"),
        (died(2, ""), InputError, "p-0: exit code 2"),
        (died(2, "BadModel: x", key="state"), InputError, "p-0: BadModel: x"),
        (died(1, "EngineDied: signal 9", restarts=3), RunError, "p-0 keeps failing: EngineDied: signal 9"),
        (died(137, "listening on 8000", restarts=3), RunError, "p-0 keeps failing: exit code 137 (SIGKILL): listening on 8000"),
        (died(1, "EngineDied", restarts=2), None, ""),
        (died(0), None, ""),
        (
            {"state": {"waiting": {"reason": "CreateContainerError", "message": 'exec: "vllm": not found'}}},
            RunError,
            'p-0 cannot start: exec: "vllm": not found',
        ),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, None, ""),
        ({"state": {"running": {}}}, None, ""),
    ],
)
def test_fatal_tells_input_from_failure(container, kind, text):
    error = fatal([pod(container=container)])
    assert (type(error) if error else None) is kind
    assert str(error or "") == text


def test_lines():
    status = FleetStatus.model_validate(status_of(1, {"transfers": 3, "blocks": 42, "bytes": 5_300_000, "transport": "shm"}))
    assert role_lines(status) == [
        "local/prefill: 1 serving, 1 ready, 1 desired",
        "local/decode: 1 serving, 1 ready, 2 desired",
    ]
    assert kv_line(kv_total(status)) == "KV moved: 3 transfers, 42 blocks, 5.3 MB over shm (engine counters)"
    assert kv_line(KvStatus()).startswith("KV moved: nothing yet")
    assert "2 failed" in kv_line(KvStatus(transfers=1, failed=2))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000_000, "2.5 GB"), (3 * 10**15, "3000.0 TB")]
)
def test_size(count, text):
    assert size(count) == text


def test_the_curl_line_is_a_shell_command_with_valid_json():
    words = shlex.split(curl_line("http://127.0.0.1:8080", "tiny", tokens=16))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8080/v1/completions"]
    assert json.loads(words[-1])["max_tokens"] == 16


@pytest.mark.parametrize(
    ("serving", "ready", "complete"), [(1, "True", False), (2, "True", True), (2, "False", False), (0, "False", False)]
)
def test_complete_means_ready_with_every_worker(serving, ready, complete):
    assert snapshot([], status_of(serving, ready=ready)).complete is complete


def test_plain_output_says_each_change_once_and_has_no_control_codes():
    out, clock = io.StringIO(), iter(range(100))
    screen = open_screen(out, lambda: float(next(clock)))
    assert isinstance(screen, PlainScreen)
    with screen:
        screen.say("two\nlines")
        screen.block("paste me")
        for _ in range(2):
            screen.show(snapshot([pod(phase="Pending")], {}))
        for _ in range(2):
            screen.show(snapshot([pod(ready=True)], status_of(1, ready="True")))
        screen.show(snapshot([], status_of(0)))
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert [line.partition("] ")[2] or line for line in lines] == [
        "two",
        "lines",
        "",
        "paste me",
        "",
        "pod p-0: pending",
        "pod p-0: ready",
        "local/prefill: 1 serving, 1 ready, 1 desired; local/decode: 1 serving, 1 ready, 2 desired; "
        "KV moved: nothing yet (no request needed a remote prefill)",
        "pod p-0: gone",
    ]


BROKEN = {"name": "b", "desired": 3, "reason": "BadAdapter", "message": "p-0 and 1 more: adapter_model.safetensors: no header"}


def with_adapters(*adapters):
    return {**status_of(2, ready="True"), "adapters": list(adapters)}


def test_an_adapter_is_shown_when_all_workers_have_it_and_when_one_cannot():
    status = with_adapters({"name": "a", "desired": 3, "loaded": 3}, {"name": "c", "desired": 3, "loaded": 2}, BROKEN)
    assert adapter_lines(FleetStatus.model_validate(status)) == {
        "a": "on 3 of 3 workers",
        "b": "on 0 of 3 workers; BadAdapter: p-0 and 1 more: adapter_model.safetensors: no header",
    }
    assert adapter_lines(FleetStatus.model_validate(with_adapters({"name": "a"}))) == {}


def test_a_broken_adapter_is_said_once_and_again_when_it_is_mended():
    out = io.StringIO()
    with PlainScreen(out, lambda: 0.0) as screen:
        for row in (BROKEN, BROKEN, {**BROKEN, "reason": ""}, {"name": "b", "desired": 3, "loaded": 3}):
            screen.show(snapshot([], with_adapters(row)))
        screen.show(snapshot([], with_adapters(BROKEN), stopping=True))
    told = [line.partition("] ")[2] for line in out.getvalue().splitlines() if "adapter" in line]
    assert told == [
        "adapter b: on 0 of 3 workers; BadAdapter: p-0 and 1 more: adapter_model.safetensors: no header",
        "adapter b: on 3 of 3 workers",
    ]


@pytest.mark.parametrize("stopping", [False, True])
def test_the_panel_shows_adapters(stopping):
    out = io.StringIO()
    screen = LiveScreen(out, lambda: 0.0)
    screen.show(snapshot([], with_adapters(BROKEN), stopping=stopping))
    screen._console.print(screen._panel())
    assert ("adapter b: on 0 of 3 workers; BadAdapter" in out.getvalue()) is not stopping


MISMATCH = {"type": "TransportVerified", "status": "False", "reason": "Mismatch", "message": "tier local asks for rdma"}
STARTING = {"type": "Available", "status": "False", "reason": "WorkersStarting", "message": "0 prefill"}
UNROUTED = {"type": "Available", "status": "False", "reason": "NoRouter", "message": "no router"}


def with_conditions(*conditions):
    return {**status_of(0), "conditions": list(conditions)}


def test_what_no_pod_shows_is_said_once_and_again_when_it_comes_back():
    """A fleet that asked for RDMA on a laptop said "starting" for ever; its status had the cause."""
    more = {**MISMATCH, "message": "tier local asks for rdma, 2 workers"}
    out = io.StringIO()
    with PlainScreen(out, lambda: 0.0) as screen:
        for rows in ((STARTING,), (STARTING, MISMATCH), (UNROUTED, more), (), (more,)):
            screen.show(snapshot([], with_conditions(*rows)))
        screen.show(snapshot([], with_conditions(), stopping=True))
        screen.show(snapshot([], with_conditions(MISMATCH), stopping=True))
    told = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert told == ["Mismatch: tier local asks for rdma", "Mismatch: tier local asks for rdma, 2 workers"]


@pytest.mark.parametrize("stopping", [False, True])
def test_the_panel_shows_what_is_to_be_mended(stopping):
    out = io.StringIO()
    screen = LiveScreen(out, lambda: 0.0)
    screen.show(snapshot([], with_conditions(STARTING, MISMATCH), stopping=stopping))
    screen._console.print(screen._panel())
    assert ("Mismatch: tier local asks for rdma" in out.getvalue()) is not stopping
    assert "WorkersStarting" not in out.getvalue()


def test_the_panel_cuts_no_cause_at_the_edge_of_the_terminal(monkeypatch):
    """Lines that stay are not wrapped, so that they can be copied; of the panel's the end was lost with that."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", "40"), ("LINES", "20")):
        monkeypatch.setenv(name, value)
    out, why = io.StringIO(), "worker prefill-0 has no device mlx5_0, which kvTransfer.netDevices names"
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    screen = LiveScreen(out, lambda: 0.0)
    screen.show(snapshot([], with_conditions({**MISMATCH, "message": why})))
    with screen:
        pass
    assert f"Mismatch: {why}" in " ".join(out.getvalue().split())


def test_what_is_to_be_pasted_into_a_shell_is_on_a_terminal_as_it_is():
    """In a terminal the model `acme:on:cpu` of the line to paste was one that nobody serves: rich knows `:on:` as a picture."""
    line = curl_line("http://127.0.0.1:8080", "acme:on:cpu", tokens=9)
    LiveScreen(out := io.StringIO(), lambda: 0.0).block(line)
    assert line in out.getvalue()


@pytest.mark.parametrize(("term", "kind"), [("dumb", PlainScreen), ("xterm", LiveScreen)])
def test_a_terminal_that_draws_no_panel_gets_lines(monkeypatch, term, kind):
    """With TERM=dumb nothing was said of any pod, ready or not."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", term)
    assert type(open_screen(out, lambda: 0.0)) is kind


def test_what_two_conditions_say_is_told_once():
    """A fleet whose workers fail said so twice, in the same words."""
    why = {"status": "False", "reason": "WorkersFailing", "message": "w-0: no such file"}
    told = [{"type": "Available", **why}, {"type": "Ready", **why}, {"type": "RollingOut", **why, "message": "another thing"}]
    found = trouble_lines(snapshot([], {"conditions": told}).status)
    assert list(found.values()) == ["WorkersFailing: w-0: no such file", "WorkersFailing: another thing"]

"""Deleting a fleet needs no finalizer: what clients are reading is read to its end, and then nothing is left, with and without an
operator. Streams that take longer than a drain get their time from spec.deletion: the operator takes its finalizer off, or the
user when there is none any more."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import pytest

from e2e.fleet import Fleet, manifest, router_processes, worker_processes
from e2e.kube.service import Service
from fleet_cli.up.bundled import tiny_model

pytestmark = pytest.mark.timeout(600)
TOKENS = 400
"""A few seconds: inside the drain time that the operator of these tests allows (10 s)."""


@dataclass
class Stream:
    """One request that runs while its fleet is deleted."""

    url: str
    most_tokens: int = TOKENS
    started: threading.Event = field(default_factory=threading.Event)
    tokens: int = 0
    ended: str = ""
    thread: threading.Thread | None = None

    def begin(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = {"model": "tiny", "prompt": "The router reads. " * 40, "max_tokens": self.most_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=90) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        self.ended = "done"
                        return
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        self.ended = line
                        return
                    self.tokens += len(chunk["choices"][0]["token_ids"])
                    self.started.set()
        except httpx.HTTPError as error:
            self.ended = repr(error)


@pytest.mark.parametrize("how", ["operator present", "operator absent", "namespace"])
def test_what_is_being_read_is_read_to_its_end_and_nothing_is_left(fleet: Fleet, operator: Service, how: str):
    wish = manifest(fleet.namespace, tiny_model())
    wish["spec"]["engine"]["maxModelLen"] = 2048
    fleet.apply(wish)
    fleet.wait_serving(1, 2)
    assert "finalizers" not in json.loads(fleet.kubectl("get", "ifleet", "loop", "-o", "json"))["metadata"]
    streams = [Stream(fleet.router()) for _ in range(4)]
    for stream in streams:
        stream.begin()
    for stream in streams:
        assert stream.started.wait(30), stream.ended
    if how == "operator absent":
        os.kill(operator.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        what = ("namespace", fleet.namespace) if how == "namespace" else ("ifleet", "loop")
        fleet.kubectl("delete", *what, "--wait=false")
        running = sum(stream.ended == "" for stream in streams)
        for stream in streams:
            assert stream.thread is not None
            stream.thread.join(60)
        assert [(stream.ended, stream.tokens) for stream in streams] == [("done", TOKENS)] * len(streams)
        assert running > 0, "every stream had ended before the fleet was deleted: the test shows nothing"
        wait(lambda: not worker_processes(fleet.namespace) and not router_processes(fleet.namespace), 60, "a process is left")
        wait(lambda: left(fleet) == [], 60, "an object is left")
        assert time.monotonic() - begun < 60
    finally:
        os.kill(operator.pid, signal.SIGCONT)


LONG_TOKENS = 1_200
"""Several times the drain time of the fleets below."""
RELEASE = (
    '[{"op": "test", "path": "/metadata/finalizers/0", "value": "inferencefleet.io/drain"}, '
    '{"op": "remove", "path": "/metadata/finalizers/0"}]'
)
"""As operator/README.md says it."""


def long_streams(fleet: Fleet, wait: str | None = "5m") -> list[Stream]:
    """A fleet whose drain is over long before these streams are."""
    wish = manifest(fleet.namespace, tiny_model())
    wish["spec"]["engine"]["maxModelLen"] = 2048
    wish["spec"]["rollout"] = {"drainTimeout": "1s"}
    if wait is not None:
        wish["spec"]["deletion"] = {"wait": wait}
    fleet.apply(wish)
    fleet.wait_serving(1, 2)
    streams = [Stream(fleet.router(), LONG_TOKENS) for _ in range(4)]
    for stream in streams:
        stream.begin()
    for stream in streams:
        assert stream.started.wait(30), stream.ended
    return streams


def while_they_run(streams: list[Stream], check: Callable[[], bool], what: str) -> None:
    """It comes before any of these streams ends, however slow the machine is: they are its clock."""
    while not check():
        assert all(stream.ended == "" for stream in streams), what
        time.sleep(0.2)


def all_over(streams: list[Stream]) -> list[tuple[str, int]]:
    """How each ended, once all have; one that stands still for a minute has not."""
    for stream in streams:
        assert stream.thread is not None
        before = -1
        while stream.thread.is_alive() and stream.tokens > before:
            before = stream.tokens
            stream.thread.join(60)
    return [(stream.ended, stream.tokens) for stream in streams]


def nothing_is_left(fleet: Fleet) -> None:
    wait(lambda: not worker_processes(fleet.namespace) and not router_processes(fleet.namespace), 60, "a process is left")
    wait(lambda: left(fleet) == [], 60, "an object is left")


def finalizers(fleet: Fleet) -> list[str]:
    return json.loads(fleet.kubectl("get", "ifleet", "loop", "-o", "json"))["metadata"].get("finalizers") or []


def told(fleet: Fleet, reason: str) -> list[str]:
    events = json.loads(fleet.kubectl("get", "events.events.k8s.io", "-o", "json"))["items"]
    return [event["type"] for event in events if event["reason"] == reason and event["regarding"]["name"] == "loop"]


def test_with_a_wait_streams_that_are_longer_than_a_drain_are_read_to_their_end(fleet: Fleet):
    streams = long_streams(fleet)
    assert finalizers(fleet) == ["inferencefleet.io/drain"]
    fleet.kubectl("delete", "ifleet", "loop", "--wait=false")
    begun, written = time.monotonic(), [stream.tokens for stream in streams]
    while_they_run(streams, lambda: fleet.condition("Ready").get("reason") == "Deleting", "nobody says that it is deleted")
    answers = list[httpx.Response]()

    def refused() -> bool:
        body = {"model": "tiny", "prompt": "new", "max_tokens": 1}
        answers.append(httpx.post(f"{streams[0].url}/v1/completions", json=body, timeout=90))
        return answers[-1].status_code != 200

    while_they_run(streams, refused, "new requests are let in")
    print(answers[-1].text, f"after {time.monotonic() - begun:.1f} s, tokens", written, [stream.tokens for stream in streams])
    assert answers[-1].status_code == 503, answers[-1].text
    assert all(stream.ended == "" for stream in streams), "every stream had ended: the test shows nothing"
    assert all_over(streams) == [("done", LONG_TOKENS)] * len(streams)
    assert time.monotonic() - begun > 2, "they ended inside the drain time: the test shows nothing"
    nothing_is_left(fleet)
    assert (told(fleet, "Deleting"), told(fleet, "DeletionLate")) == (["Normal"], [])


def test_when_the_wait_is_over_it_goes_and_says_what_it_cut(fleet: Fleet):
    streams = long_streams(fleet, "2s")
    fleet.kubectl("delete", "ifleet", "loop", "--wait=false")
    nothing_is_left(fleet)
    assert "done" not in [ended for ended, _ in all_over(streams)]
    assert told(fleet, "DeletionLate") == ["Warning"]


@pytest.mark.parametrize("how", ["as the README says", "as kubectl tells"])
def test_without_an_operator_the_user_releases_it(fleet: Fleet, operator: Service, how: str, monkeypatch: pytest.MonkeyPatch):
    streams = long_streams(fleet)
    os.kill(operator.pid, signal.SIGSTOP)
    try:
        fleet.kubectl("delete", "ifleet", "loop", "--wait=false")
        assert all_over(streams) == [("done", LONG_TOKENS)] * len(streams)  # nobody told anybody to end
        assert finalizers(fleet) == ["inferencefleet.io/drain"]
        assert len(fleet.pods("decode")) == 2
        begun = time.monotonic()
        if how == "as the README says":
            fleet.kubectl("patch", "ifleet", "loop", "--type", "json", "-p", RELEASE)
        else:
            assert "finalizer inferencefleet.io/drain" in fleet.kubectl("describe", "ifleet", "loop")
            explained = " ".join(fleet.kubectl("explain", "ifleet.spec.deletion.wait").split())
            assert "kubectl edit does: take inferencefleet.io/drain out of metadata.finalizers" in explained
            monkeypatch.setenv("KUBE_EDITOR", "sed -i /^..-.inferencefleet.io.drain$/d")
            fleet.kubectl("edit", "ifleet", "loop")
        nothing_is_left(fleet)
        assert time.monotonic() - begun < 60
    finally:
        os.kill(operator.pid, signal.SIGCONT)


def test_an_operator_that_comes_back_goes_on(fleet: Fleet, operator: Service):
    streams = long_streams(fleet)
    os.kill(operator.pid, signal.SIGSTOP)
    try:
        fleet.kubectl("delete", "ifleet", "loop", "--wait=false")
    finally:
        os.kill(operator.pid, signal.SIGCONT)
    assert all_over(streams) == [("done", LONG_TOKENS)] * len(streams)
    nothing_is_left(fleet)


def test_a_namespace_is_not_held_by_it(fleet: Fleet):
    """Its pods are the namespace controller's to delete: streams have their drain time, and no more."""
    streams = long_streams(fleet)
    begun = time.monotonic()
    fleet.kubectl("delete", "namespace", fleet.namespace, "--wait=false")
    nothing_is_left(fleet)
    wait(lambda: not namespaces(fleet), 60, "the namespace is there")
    assert time.monotonic() - begun < 60
    all_over(streams)


def namespaces(fleet: Fleet) -> str:
    return fleet.plane.kubectl("get", "namespace", fleet.namespace, "-o", "name", "--ignore-not-found").stdout.strip()


def left(fleet: Fleet) -> list[str]:
    """Objects of the fleet, and the fleet itself."""
    kinds = "ifleet,wpool,pods,deployments,services,configmaps,pdb,roles,rolebindings,controllerrevisions,serviceaccounts"
    done = fleet.plane.kubectl(
        "-n", fleet.namespace, "get", kinds, "-l", "inferencefleet.io/fleet=loop", "-o", "name", check=False
    )
    found = done.stdout.split()
    gone = fleet.plane.kubectl("-n", fleet.namespace, "get", "ifleet", "-o", "name", check=False).stdout.split()
    return found + gone


def wait(check: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.2)

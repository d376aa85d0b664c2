"""Deleting a fleet needs no finalizer: what clients are reading is read to its end, and then nothing is left, with and without an
operator."""

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

pytestmark = pytest.mark.timeout(300)
TOKENS = 400
"""A few seconds: inside the drain time that the operator of these tests allows (10 s)."""


@dataclass
class Stream:
    """One request that runs while its fleet is deleted."""

    url: str
    started: threading.Event = field(default_factory=threading.Event)
    tokens: int = 0
    ended: str = ""
    thread: threading.Thread | None = None

    def begin(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = {"model": "tiny", "prompt": "The router reads. " * 40, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "stream": True, "return_token_ids": True}  # fmt: skip
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

"""Ways to a fleet's router pods in a cluster: `kubectl port-forward`, with the user's own rights and no port open to others."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from fleet_cli.errors import InputError, RunError
from fleet_operator.names import FLEET, ROLE, ROUTER_ROLE

ROUTER_PORT = 8080
ADMIN = "admin"
"""Port of a router that speaks TLS at the other one."""
FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
KUBECTL_S = 30
FORWARD_S = 15.0
"""Seconds in which a way to a pod is open."""
MAX_SAID = 65_536
MAX_LINE = 500


@contextmanager
def router_urls(fleet: str, where: Sequence[str], problems: list[str]) -> Iterator[list[str]]:
    """URLs of every running router pod while the block runs; why there is none of a pod goes to `problems`. `where`: options for
    kubectl (-n, --context, --kubeconfig)."""
    pods = _pods(fleet, where)
    if not pods:
        raise InputError(f"no router of a fleet {fleet} runs there")
    with ExitStack() as stack:
        urls: list[str] = []
        for pod, port in pods:
            try:
                urls.append(stack.enter_context(_forwarded(pod, port, where)))
            except RunError as error:
                problems.append(str(error))
        yield urls


def _pods(fleet: str, where: Sequence[str]) -> list[tuple[str, int]]:
    argv = ["kubectl", *where, "get", "pods", "-l", f"{FLEET}={fleet},{ROLE}={ROUTER_ROLE}", "-o", "json"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=KUBECTL_S, check=False)
    except FileNotFoundError as error:
        raise InputError("kubectl is not installed; give --url instead") from error
    except OSError as error:
        raise InputError(f"kubectl cannot be run: {error.strerror}; give --url instead") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"kubectl did not answer within {KUBECTL_S} s") from error
    if done.returncode:
        raise RunError(f"kubectl: {_last(done.stderr) or f'it ended with {done.returncode} and said nothing'}")
    try:
        items = json.loads(done.stdout)["items"]
        return [(item["metadata"]["name"], _port(item)) for item in items if item.get("status", {}).get("phase") == "Running"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"kubectl get pods sent no list of pods: {_last(done.stdout) or 'nothing'}") from error


def _last(said: str) -> str:
    """The last line: above it kubectl tells how often it tried."""
    return (said.strip().splitlines() or [""])[-1][:MAX_LINE]


def _port(pod: dict[str, Any]) -> int:
    ports = [port for one in pod["spec"]["containers"] for port in one.get("ports", [])]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == ADMIN), ROUTER_PORT)


@contextmanager
def _forwarded(pod: str, port: int, where: Sequence[str]) -> Iterator[str]:
    argv = ["kubectl", *where, "port-forward", f"pod/{pod}", f":{port}", "--address", "127.0.0.1"]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        said = _said(running)
        found = FORWARDING.search(said)
        if found is None:
            raise RunError(f"kubectl port-forward pod/{pod}: {_last(said) or f'it said nothing within {FORWARD_S:g} s'}")
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        running.terminate()
        try:
            running.wait(KUBECTL_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        if running.stdout is not None:
            running.stdout.close()


def _said(running: subprocess.Popen[bytes]) -> str:
    """What it says until it forwards, ends, or the time is up."""
    said, end = b"", time.monotonic() + FORWARD_S
    while running.stdout is not None and len(said) < MAX_SAID and FORWARDING.search(said.decode(errors="replace")) is None:
        if not select.select([running.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            break
        part = os.read(running.stdout.fileno(), 4_096)
        if not part:
            break
        said += part
    return said.decode(errors="replace")

"""Ways to a fleet's router pods in a cluster: `kubectl port-forward`, with the user's own rights and no port open to others."""

from __future__ import annotations

import json
import re
import subprocess
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


@contextmanager
def router_urls(fleet: str, where: Sequence[str]) -> Iterator[list[str]]:
    """URLs of every running router pod while the block runs. `where`: options for kubectl (-n, --context, --kubeconfig)."""
    pods = _pods(fleet, where)
    if not pods:
        raise InputError(f"no router of a fleet {fleet} runs there")
    with ExitStack() as stack:
        yield [stack.enter_context(_forwarded(pod, port, where)) for pod, port in pods]


def _pods(fleet: str, where: Sequence[str]) -> list[tuple[str, int]]:
    argv = ["kubectl", *where, "get", "pods", "-l", f"{FLEET}={fleet},{ROLE}={ROUTER_ROLE}", "-o", "json"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=KUBECTL_S, check=False)
    except FileNotFoundError as error:
        raise InputError("kubectl is not installed; give --url instead") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"kubectl did not answer within {KUBECTL_S} s") from error
    if done.returncode:
        raise RunError(f"kubectl: {done.stderr.strip()[-500:]}")
    items = json.loads(done.stdout)["items"]
    return [(item["metadata"]["name"], _port(item)) for item in items if item.get("status", {}).get("phase") == "Running"]


def _port(pod: dict[str, Any]) -> int:
    ports = [port for one in pod["spec"]["containers"] for port in one.get("ports", [])]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == ADMIN), ROUTER_PORT)


@contextmanager
def _forwarded(pod: str, port: int, where: Sequence[str]) -> Iterator[str]:
    argv = ["kubectl", *where, "port-forward", f"pod/{pod}", f":{port}", "--address", "127.0.0.1"]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)
    try:
        line = running.stdout.readline() if running.stdout is not None else ""
        found = FORWARDING.search(line)
        if found is None:
            raise RunError(f"kubectl port-forward pod/{pod}: {line.strip()[-500:] or 'it said nothing'}")
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        running.terminate()
        running.wait(KUBECTL_S)
        if running.stdout is not None:
            running.stdout.close()

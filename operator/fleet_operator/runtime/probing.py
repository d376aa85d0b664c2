"""Probe and hook actions: one HTTP GET, TCP connect, command or sleep, bounded in time and size. True means success."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

Exec = Callable[[list[str], float], Awaitable[int]]
"""Run a command in the container's environment for at most so many seconds; its exit code."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the actions of one container go."""

    host: str
    named_ports: Mapping[str, int]
    run: Exec
    body_bytes: int

    def port(self, port: int | str) -> int:
        """A number, or the number of a named container port; KeyError."""
        return self.named_ports[port] if isinstance(port, str) and not port.isdigit() else int(port)


def named_ports(container: Mapping[str, Any]) -> dict[str, int]:
    """Port names of a container."""
    return {port["name"]: int(port["containerPort"]) for port in container.get("ports") or [] if "name" in port}


async def act(action: Mapping[str, Any], target: Target, timeout_s: float) -> tuple[bool, str]:
    """Whether `action` (httpGet, tcpSocket, exec, or a hook's sleep) succeeded in time, and the reason when it did not."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _act(action, target, timeout_s)
    except TimeoutError:
        return False, f"no answer within {timeout_s:g}s"
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, KeyError) as error:
        return False, f"{type(error).__name__}: {error}"


async def _act(action: Mapping[str, Any], target: Target, timeout_s: float) -> tuple[bool, str]:
    if "httpGet" in action:
        get = action["httpGet"]
        host, port, path = get.get("host") or target.host, target.port(get["port"]), get.get("path") or "/"
        status = await http_get(host, port, path, target.body_bytes)
        return 200 <= status < 400, f"GET {path} on port {port} answered {status}"
    if "tcpSocket" in action:
        port = target.port(action["tcpSocket"]["port"])
        _, writer = await asyncio.open_connection(target.host, port)
        await _closed(writer)
        return True, ""
    if "exec" in action:
        code = await target.run(action["exec"]["command"], timeout_s)
        return code == 0, f"command exited with {code}"
    if "sleep" in action:  # hooks only: an API server takes no such probe
        await asyncio.sleep(action["sleep"]["seconds"])
        return True, ""
    return False, f"unknown action {', '.join(action) or '(none)'}"


async def http_get(host: str, port: int, path: str, body_bytes: int) -> int:
    """The status code of a GET; reads at most `body_bytes` of the answer, so that the server may finish writing it."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: kube-probe/inferencefleet\r\n"
        writer.write(f"{request}Accept: */*\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        status_line = (await reader.readuntil(b"\n")).split()
        remaining = body_bytes
        while remaining > 0 and (data := await reader.read(remaining)):
            remaining -= len(data)
        return int(status_line[1])
    finally:
        await _closed(writer)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()

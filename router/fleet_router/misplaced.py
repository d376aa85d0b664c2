"""Requests that are refused for the port or the method that they came by."""

from __future__ import annotations

from fleet_router.errors import RequestError
from fleet_router.paths import ADMIN


def check_port(path: bytes, *, admin: bool) -> None:
    """RequestError 404 for what the port for probes and scrapes (`admin`) does not serve."""
    if admin and path not in ADMIN:
        raise RequestError(404, "this port is for probes and scrapes: requests go to the other one")


def need(method: bytes, *allowed: bytes) -> None:
    """RequestError 405 for another method."""
    if method not in allowed:
        names = b", ".join(allowed).decode()
        raise RequestError(405, f"{allowed[0].decode()} is needed here", headers=f"allow: {names}\r\n")

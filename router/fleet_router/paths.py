"""What is served where."""

from __future__ import annotations

from typing import Final

from fleet_router.dialect.routes import ALONE, TRANSLATED
from fleet_router.errors import RequestError
from fleet_router.explain.route import PATH as DECISIONS
from fleet_router.listening import PATH as HELD

COMPLETIONS: Final = b"/v1/completions"
CHAT: Final = b"/v1/chat/completions"
GENERATE: Final = {COMPLETIONS: False, CHAT: True}
MODELS: Final = b"/v1/models"
ONE_MODEL: Final = b"/v1/models/"
PLAIN: Final = {MODELS, b"/health", b"/ready", b"/metrics"}
WATCHED: Final = {b"/metrics", HELD}
"""What names tenants, and what wakes when they come."""
OF_ALL: Final = {b"/ready", b"/metrics"}
"""Where several processes share the port, the answer is theirs together."""
ADMIN: Final = {*PLAIN, HELD, DECISIONS} - {MODELS}
KINDS: Final = {b"/metrics": b"text/plain; version=0.0.4", DECISIONS: b"application/json"}
KNOWN: Final = {*GENERATE, *TRANSLATED, *ALONE, *PLAIN, HELD, DECISIONS}


def check_port(path: bytes, *, admin: bool) -> None:
    """RequestError 404 for what the port for probes and scrapes (`admin`) does not serve."""
    if admin and path not in ADMIN:
        raise RequestError(404, "this port is for probes and scrapes: requests go to the other one")


def need(method: bytes, *allowed: bytes) -> None:
    """RequestError 405 for another method."""
    if method not in allowed:
        names = b", ".join(allowed).decode()
        raise RequestError(405, f"{allowed[0].decode()} is needed here", headers=f"allow: {names}\r\n")

"""What the API server itself tells of a time that is over: every state that objects went through, none missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from e2e.faultproxy.lab import Lab, path_of
from fleet_operator.cluster.interface import CONFIG_MAP, POD, Kind
from fleet_wire.endpoints import ENDPOINTS_KEY

QUIET_S = 0.5
ROUTER = "f-router"


@dataclass(frozen=True)
class State:
    """An object as it was from this version on; versions of all kinds are of one store, so they have one order."""

    version: int
    gone: bool
    object: dict[str, Any]


def mark(lab: Lab) -> str:
    """A point in time to tell from."""
    version: str = lab.admin.get(path_of(POD, lab.namespace))["metadata"]["resourceVersion"]
    return version


def _states(lab: Lab, kind: Kind, since: str, **selection: str) -> list[State]:
    found = []
    for event in lab.admin.watch(path_of(kind, lab.namespace), since, QUIET_S, **selection):
        assert event["type"] in ("ADDED", "MODIFIED", "DELETED"), event  # an ERROR: too old to tell
        version = int(event["object"]["metadata"]["resourceVersion"])
        found.append(State(version, event["type"] == "DELETED", event["object"]))
    return found


def pods(lab: Lab, since: str) -> list[State]:
    """Of all pods of the namespace, oldest first."""
    return _states(lab, POD, since)


@dataclass(frozen=True)
class Told:
    """A document that routers were given: pod name to (role, state)."""

    version: int
    workers: dict[str, tuple[str, str]]

    def serving(self, role: str) -> int:
        """How many of a role take requests."""
        return sum(one == (role, "serving") for one in self.workers.values())


def documents(lab: Lab, since: str) -> Iterator[Told]:
    """Every one that the routers of fleet `f` ever got since then, oldest first."""
    for state in _states(lab, CONFIG_MAP, since, fieldSelector=f"metadata.name={ROUTER}"):
        workers = json.loads(state.object["data"][ENDPOINTS_KEY])["workers"]
        yield Told(state.version, {one["name"]: (one["role"], one.get("state", "serving")) for one in workers})

"""The shell of `fleet rollout`: reads and writes one fleet with the user's own credentials."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fleet_cli.errors import EXIT_FAILED, EXIT_OK, InputError, RunError
from fleet_cli.rollout.history import entries, previous, progress, returned, table
from fleet_cli.rollout.kubeconfig import opened
from fleet_cli.streams import complain, emit
from fleet_operator.cluster.interface import Object
from fleet_operator.names import FLEET
from fleet_operator.render.revision import RESTARTED_AT

GROUP, VERSION, PLURAL = "inferencefleet.io", "v1alpha1", "inferencefleets"
MANAGER = "fleet-cli"
WATCH_S = 1.0
WITHIN_S = (10.0, 30.0)
"""To connect, and to answer. Without bounds of its own the client waits for ever."""
CONFLICT, CHANGES_MOST = 409, 5
PASSING = (429, 500, 502, 503, 504)
"""What an API server, or what stands before it, says that restarts."""


class NoAnswerError(RunError):
    """The API server could not be asked at this moment; the next moment it may."""


class ConflictError(RunError):
    """Somebody changed the fleet between our look and our write; the operator does, with each status."""


class Fleets:
    """One namespace of the API server, as the user may see it."""

    def __init__(self, kubeconfig: str | None, context: str | None, namespace: str | None) -> None:
        from kubernetes import client
        from urllib3.exceptions import HTTPError

        asking, default = opened(kubeconfig, context)
        self.namespace = namespace or default
        self._fleets, self._apps = client.CustomObjectsApi(asking), client.AppsV1Api(asking)
        self._errors, self._silence = (client.ApiException, OSError), HTTPError
        self._url = asking.configuration.host

    def get(self, name: str) -> Object:
        """The fleet."""
        found = self._call(
            lambda: self._fleets.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name, _request_timeout=WITHIN_S
            ),
            name,
        )
        if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in ("metadata", "spec")):
            raise RunError(f"what answers at {self._url} is no API server: it sent no fleet {name}")
        return found

    def put(self, fleet: Object) -> None:
        """Replace it; refused when somebody changed it meanwhile."""
        name = fleet["metadata"]["name"]
        self._call(
            lambda: self._fleets.replace_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                name,
                fleet,
                field_manager=MANAGER,
                _request_timeout=WITHIN_S,
            ),
            name,
        )

    def change(self, name: str, change: Callable[[Object], tuple[Object, str]]) -> None:
        """Put what `change` makes of the fleet as it is now, and say its words; as often as the fleet changes under it, within
        reason."""
        for left in reversed(range(CHANGES_MOST)):
            wanted, words = change(self.get(name))
            try:
                self.put(wanted)
            except ConflictError:
                if not left:
                    raise
            else:
                emit(words + "\n")
                return

    def revisions(self, name: str) -> list[Object]:
        """Its stored revisions."""
        found = self._call(
            lambda: self._apps.list_namespaced_controller_revision(
                self.namespace,
                label_selector=f"{FLEET}={name}",
                _preload_content=False,
                _request_timeout=WITHIN_S,
            ),
            name,
        )
        try:
            items: list[Object] = json.loads(found.data)["items"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"what answers at {self._url} is no API server: it sent no list of revisions") from error
        return items

    def _call(self, request: Callable[[], Any], name: str) -> Any:
        try:
            return request()
        except self._silence as error:
            raise NoAnswerError(f"no answer of the API server at {self._url}: {_cause(error)} (fleet {name})") from error
        except ValueError as error:
            raise RunError(f"what answers at {self._url} is no API server: it sent no JSON") from error
        except self._errors as error:
            status = getattr(error, "status", None)
            if status == 404 and _is_status(error):
                raise InputError(f"no fleet {name} in namespace {self.namespace}") from error
            if status == 404:
                raise RunError(
                    f"the API server at {self._url} has no InferenceFleets: `fleet crds` prints what it needs"
                ) from error
            kind = NoAnswerError if status in PASSING else ConflictError if status == CONFLICT else RunError
            raise kind(f"{_words(error)} (fleet {name}, namespace {self.namespace})") from error


def _cause(error: Exception) -> str:
    """What stopped a request, without the library's objects around it."""
    reason = getattr(error, "reason", None) or error
    return re.sub(r"^(<[^>]*>|\w+\(.*?\)): ", "", " ".join(str(reason).split())) or type(reason).__name__


def _is_status(error: Exception) -> bool:
    """The API server speaks of an object; of a kind that it does not know it says so in plain text."""
    try:
        return bool(json.loads(getattr(error, "body", None) or "")["kind"] == "Status")
    except (ValueError, KeyError, TypeError):
        return False


def _words(error: Exception) -> str:
    """The API server's own: which right is missing, which field is wrong. Else the status, or what the system says."""
    try:
        said = json.loads(getattr(error, "body", None) or "")["message"]
    except (ValueError, KeyError, TypeError):
        said = None
    return str(said or getattr(error, "reason", None) or error)


def _open(options: argparse.Namespace) -> Fleets:
    return Fleets(options.kubeconfig, options.context, options.namespace)


def _status(options: argparse.Namespace) -> int:
    fleets, end, last = _open(options), time.monotonic() + options.timeout, ""
    lost = False
    while True:
        try:
            words, over, failed = progress(fleets.get(options.name))
            lost = False
        except NoAnswerError as error:  # while it is followed: a rollout does not fail because its API server restarts
            if not last or time.monotonic() >= end:
                raise
            if not lost:
                complain(f"fleet: {error}; asking again")
            lost = True
            time.sleep(WATCH_S)
            continue
        if words != last:
            emit(f"{words}\n")
            last = words
        if over:
            return EXIT_FAILED if failed else EXIT_OK
        if time.monotonic() >= end:
            raise RunError(f"the rollout of fleet {options.name} is not over after {options.timeout:g} s (--timeout)")
        time.sleep(WATCH_S)


def _history(options: argparse.Namespace) -> int:
    fleets = _open(options)
    emit(table(entries(fleets.revisions(options.name)), fleets.get(options.name)) + "\n")
    return EXIT_OK


def _undo(options: argparse.Namespace) -> int:
    fleets = _open(options)

    def change(fleet: Object) -> tuple[Object, str]:
        names = [tier["name"] for tier in fleet["spec"]["tiers"]]
        tier: str = options.tier or (names[0] if len(names) == 1 else "")
        if tier not in names:
            raise InputError(f"--tier must be one of {', '.join(names)}")
        goal = previous(entries(fleets.revisions(options.name)), fleet, tier, options.to_revision)
        words = f"fleet {options.name}: tier {tier} goes back to revision {goal.number} ({goal.revision})"
        return returned(fleet, tier, goal.inputs), words

    fleets.change(options.name, change)
    return EXIT_OK


def _pause(options: argparse.Namespace) -> int:
    return _set_paused(options, paused=True)


def _resume(options: argparse.Namespace) -> int:
    return _set_paused(options, paused=False)


def _set_paused(options: argparse.Namespace, *, paused: bool) -> int:
    def change(fleet: Object) -> tuple[Object, str]:
        fleet["spec"]["rollout"] = {**fleet["spec"].get("rollout", {}), "paused": paused}
        return fleet, f"fleet {options.name}: rollouts are {'paused' if paused else 'resumed'}"

    _open(options).change(options.name, change)
    return EXIT_OK


def _restart(options: argparse.Namespace) -> int:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def change(fleet: Object) -> tuple[Object, str]:
        fleet["metadata"].setdefault("annotations", {})[RESTARTED_AT] = now
        words = f"fleet {options.name}: every worker is replaced, as one rollout; routers follow the operator's version"
        if fleet["spec"].get("rollout", {}).get("paused"):
            words += f"; rollouts are paused: it begins after `fleet rollout resume {options.name}`"
        return fleet, words

    _open(options).change(options.name, change)
    return EXIT_OK


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "status": _status, "history": _history, "undo": _undo, "pause": _pause, "resume": _resume, "restart": _restart,
}  # fmt: skip

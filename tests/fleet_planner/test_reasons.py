"""Every reason that the code can give, and as what users are told of it. A new one has to be decided here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import fleet_operator
import fleet_planner
from fleet_api.conditions import ConditionType
from fleet_api.v1alpha1.status import Condition, FleetStatus
from fleet_planner.events import IN_ORDER, SEVERE, TOLD_ELSEWHERE, Pass, events_of
from fleet_planner.types import Problem

STATUSES = ("True", "False", "Unknown")
Told = Literal["Warning", "Normal", ""]
"""Empty: by no event of its own."""

CONDITIONS: dict[str, tuple[ConditionType, str, Told, Told]] = {
    # reason: (condition, status, told when it is so from the start, told when it was well before)
    "AdapterFailed": ("AdaptersLoaded", "False", "", ""),  # by an event per adapter
    "AgentsSuspected": ("WithinRatio", "True", "Warning", "Warning"),
    "AllCreated": ("Provisioned", "True", "", ""),
    "AllGood": ("Ready", "True", "", ""),
    "AllLoaded": ("AdaptersLoaded", "True", "", ""),
    "ApplyFailed": ("Provisioned", "False", "", ""),  # by its problems
    "AtZero": ("Available", "True", "", ""),
    "BackedOut": ("CapacityLimited", "True", "Warning", "Warning"),
    "BeyondBudget": ("CapacityLimited", "False", "Warning", "Warning"),
    "Cached": ("ModelCached", "True", "", ""),
    "Complete": ("RollingOut", "False", "", ""),
    "Creating": ("Provisioned", "False", "", ""),
    "Deleting": ("Available", "False", "Normal", "Normal"),
    "DeletionLate": ("Available", "False", "Warning", "Warning"),
    "DevicesFailing": ("WithinRatio", "True", "Warning", "Warning"),
    "DevicesSuspected": ("WithinRatio", "True", "Warning", "Warning"),
    "FabricSuspected": ("Disaggregating", "False", "Warning", "Warning"),
    "Fresh": ("TelemetryFresh", "True", "", ""),
    "HealingBudgetSpent": ("Disaggregating", "False", "Warning", "Warning"),
    "HeldByFinalizer": ("Available", "Unknown", "Normal", "Normal"),
    "InRatio": ("WithinRatio", "True", "", ""),
    "Invalid": ("Accepted", "False", "Warning", "Warning"),
    "KvFailing": ("Disaggregating", "False", "Warning", "Warning"),
    "KvMoved": ("Disaggregating", "True", "", ""),
    "KvNotMoving": ("Disaggregating", "False", "Warning", "Warning"),
    "KvReadLate": ("Disaggregating", "False", "Warning", "Warning"),
    "Loading": ("AdaptersLoaded", "False", "", ""),
    "MemlockTooSmall": ("TransportVerified", "False", "Warning", "Warning"),
    "RdmaEmulated": ("TransportVerified", "False", "Warning", "Warning"),
    "Mismatch": ("TransportVerified", "False", "Warning", "Warning"),
    "NameConflict": ("Provisioned", "False", "", ""),  # by its problem
    "NoData": ("TelemetryFresh", "Unknown", "", "Warning"),
    "NoWorkers": ("AdaptersLoaded", "Unknown", "", ""),  # by Available
    "NoNodes": ("ModelCached", "Unknown", "", ""),  # by CapacityLimited
    "NoPeerKey": ("PeerKey", "False", "Normal", "Normal"),  # everything serves
    "NoRouter": ("Available", "False", "Warning", "Warning"),
    "NoScheduler": ("CapacityLimited", "True", "Warning", "Warning"),
    "NoServingSet": ("WithinRatio", "Unknown", "", ""),  # by Available
    "NoTransferYet": ("Disaggregating", "Unknown", "", ""),
    "NodesUnknown": ("ModelCached", "Unknown", "", ""),
    "NotAccepted": ("Ready", "False", "", ""),  # by Accepted
    "NotProvisioned": ("Ready", "False", "", ""),  # by its problems
    "OutOfRatio": ("WithinRatio", "False", "Warning", "Warning"),
    "PeerKeyPending": ("PeerKey", "False", "Normal", "Normal"),  # everything serves, and the rollout says the rest
    "PairFailing": ("Disaggregating", "False", "Warning", "Warning"),
    "Paused": ("RollingOut", "True", "Normal", "Normal"),
    "Prefetching": ("ModelCached", "False", "Normal", "Normal"),
    "PrefetchFailed": ("ModelCached", "False", "Warning", "Warning"),
    "Progressing": ("RollingOut", "True", "Normal", "Normal"),
    "ProgressDeadlineExceeded": ("RollingOut", "False", "Warning", "Warning"),
    "Queued": ("CapacityLimited", "True", "Normal", "Normal"),
    "QuotaExceeded": ("CapacityLimited", "True", "Warning", "Warning"),
    "RoleMismatch": ("WithinRatio", "True", "Warning", "Warning"),
    "RolledBack": ("RollingOut", "False", "Warning", "Warning"),
    "RoutersFailing": ("Available", "True", "Warning", "Warning"),
    "RouterStarting": ("Available", "False", "", "Warning"),
    "Serving": ("Available", "True", "", ""),
    "SourceFailed": ("TelemetryFresh", "Unknown", "Warning", "Warning"),
    "Stuck": ("RollingOut", "False", "Warning", "Warning"),
    "Sufficient": ("CapacityLimited", "False", "", ""),
    "TcpFallback": ("TransportVerified", "False", "Warning", "Warning"),
    "TriedAgain": ("CapacityLimited", "True", "Normal", "Normal"),
    "Unschedulable": ("CapacityLimited", "True", "Warning", "Warning"),
    "Valid": ("Accepted", "True", "", ""),
    "Verified": ("TransportVerified", "True", "", ""),
    "WishesDisagree": ("WithinRatio", "True", "Warning", "Warning"),
    "Waking": ("Available", "False", "Normal", "Normal"),
    "WorkerPoisoned": ("Disaggregating", "False", "Warning", "Warning"),
    "WorkersFailing": ("Available", "False", "Warning", "Warning"),
    "WorkersLate": ("Available", "False", "Warning", "Warning"),
    "WorkersLost": ("Available", "False", "Normal", "Warning"),
    "WorkersPending": ("Available", "False", "", "Warning"),
    "WorkersSilent": ("Available", "False", "Warning", "Warning"),
    "WorkersStarting": ("Available", "False", "", "Warning"),
}
WELL: dict[ConditionType, str] = {"CapacityLimited": "False", "RollingOut": "False"}
"""The good status where it is not True."""
PROBLEMS = {"Conflict", "Forbidden", "InternalError", "Invalid", "NameConflict", "NotFound", "Refused", "RoutersNotTold"} | {
    "DocumentTooLarge",
    "RevisionLost",
    "Unauthorized",
    "Unavailable",
    "Unknown",
}
"""Reasons of writes that failed: each is a Warning."""
EVENTS: dict[str, Told] = {
    "AdapterFailed": "Warning",
    "AdapterLoaded": "Normal",
    "FlipFailed": "Warning",
    "Flipped": "Normal",
    "PoisonedReplaced": "Warning",
    "PutBack": "Normal",
    "Resized": "Normal",
    "RevisionChanged": "Normal",
    "Workers{}d": "Normal",  # Replaced, Created, Deleted
}
"""Reasons of events about deeds."""


# -- what the code can say -----------------------------------------------------------------------------------------------
def trees() -> Iterator[tuple[str, ast.Module]]:
    for package in (fleet_planner, fleet_operator):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            if "runtime" not in path.parts:  # the node of `fleet up`: its conditions are those of pods
                yield path.name, ast.parse(path.read_text())


TREES = list(trees())
CONSTANTS = {
    target.id: node.value.value
    for _, tree in TREES
    for node in tree.body
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    if isinstance(target, ast.Name) and isinstance(node.value.value, str)
}


def words(node: ast.expr, inside: ast.AST) -> set[str]:
    """All that an expression can be; `inside`: where its names are given values."""
    if isinstance(node, ast.Constant):
        return {node.value}
    if isinstance(node, ast.IfExp):
        return words(node.body, inside) | words(node.orelse, inside)
    if isinstance(node, ast.JoinedStr):
        return {"".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)}  # type: ignore[misc]
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return {CONSTANTS[node.id]}
    if isinstance(node, ast.Name):
        given = [
            one.value for one in ast.walk(inside) if isinstance(one, ast.Assign) and ast.dump(one.targets[0]) == stored(node)
        ]
        if given:
            return set().union(*(words(value, inside) for value in given))
    return set()


def stored(name: ast.Name) -> str:
    return ast.dump(ast.Name(name.id, ast.Store()))


def functions() -> Iterator[tuple[str, ast.AST]]:
    for name, tree in TREES:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def of_conditions() -> set[str]:
    found: set[str] = set()
    for name, function in functions():
        for node in ast.walk(function):
            if isinstance(node, ast.Tuple) and len(node.elts) == 3 and is_status(node.elts[0]):
                told = words(node.elts[1], function)
                assert told, f"{name}:{node.lineno}: no reason can be read here"
                found |= told
            if isinstance(node, ast.Call) and called(node) == "set_condition" and isinstance(node.args[3], ast.Constant):
                found |= words(node.args[3], function)
    return found - set(STATUSES)  # Literal["True", "False", "Unknown"]


def is_status(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return is_status(node.body)
    return isinstance(node, ast.Constant) and node.value in STATUSES


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def of_calls(name: str, at: int) -> set[str]:
    return {
        word
        for _, function in functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and called(node) == name and len(node.args) > at
        for word in words(node.args[at], function)
    }


def of_errors() -> set[str]:
    return {
        node.value.value
        for name, tree in TREES
        if name == "interface.py"
        for one in tree.body
        if isinstance(one, ast.ClassDef)
        for node in one.body
        if isinstance(node, ast.Assign) and ast.dump(node.targets[0]) == stored(ast.Name("reason")) and is_text(node.value)
    }


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_every_reason_of_a_condition_is_decided():
    assert of_conditions() == CONDITIONS.keys()


def test_every_reason_of_a_failed_write_is_decided():
    assert of_calls("Problem", 0) | of_errors() == PROBLEMS


def test_every_event_about_a_deed_is_decided():
    assert of_calls("Event", 1) == EVENTS.keys()


def test_nothing_is_decided_about_reasons_that_nobody_gives():
    assert CONDITIONS.keys() >= SEVERE | IN_ORDER | TOLD_ELSEWHERE


# -- what users are told -------------------------------------------------------------------------------------------------
def status(kind: ConditionType, value: Any, reason: str) -> FleetStatus:
    return FleetStatus(conditions=(Condition(type=kind, status=value, reason=reason, message="m"),))


@pytest.mark.parametrize("reason", sorted(CONDITIONS))
def test_what_is_told_of_a_condition(reason: str):
    """b21: what was bad from the start of a fleet was told as Normal, a Prometheus that never answers not at all."""
    kind, value, from_start, after_good = CONDITIONS[reason]
    after = status(kind, value, reason)
    good = status(kind, WELL.get(kind, "True"), "Complete" if kind == "RollingOut" else "Well")
    unknown = status(kind, "Unknown", "NoData")
    assert [e.type for e in events_of(FleetStatus(), after, Pass())] == [from_start] * bool(from_start)
    if from_start == "Warning":
        assert [event.type for event in events_of(unknown, after, Pass())] == ["Warning"]
    assert [e.type for e in events_of(good, after, Pass())] == [after_good] * bool(after_good)


@pytest.mark.parametrize("reason", sorted(PROBLEMS))
def test_a_failed_write_warns(reason: str):
    (event,) = events_of(FleetStatus(), FleetStatus(), Pass(problems=[Problem(reason, "m")]))
    assert (event.type, event.reason) == ("Warning", reason)


def test_the_runbook_says_of_what_there_is_no_event_and_why():
    """Of whatever is not in order."""
    text = (Path(fleet_operator.__path__[0]).parent / "RUNBOOK.md").read_text()
    said = text.partition("Without one of their own: ")[2].partition("\n\n")[0]
    ever, first = said.split("At a fleet's beginning")
    bad = {reason: told[2:] for reason, told in CONDITIONS.items() if told[1] != WELL.get(told[0], "True")}
    never = {reason for reason, told in bad.items() if not any(told) and reason not in EVENTS and reason not in PROBLEMS}
    assert {
        word for word in CONDITIONS if f"`{word}`" in ever.partition("(`Invalid`)")[0] + ever.partition("(`Invalid`)")[2]
    } == never
    later = {reason for reason, told in bad.items() if told == ("", "Warning")}
    assert {word for word in CONDITIONS if f"`{word}`" in first.partition(" have none")[0]} == later

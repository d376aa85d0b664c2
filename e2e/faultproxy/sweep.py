"""The k-sweep: a scenario is played again and again, and each time the operator dies at another of its writes.

A scenario is a row of a table: what must be there before, what the user does, and when it is over. What the end must look like
is taken from a run of the same scenario in which nobody dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from e2e.faultproxy.lab import Lab
from e2e.faultproxy.ledger import Request
from e2e.faultproxy.state import comparable, differences
from fleet_operator.cluster.interface import EVENT, FLEET
from fleet_operator.cluster.kinds import LEASE
from fleet_operator.names import WRITTEN

When = Literal["before", "after"]
SETTLED_S = 60.0
SAME_S = 10.0
BROKEN_MOST = 3
MISSES_MOST = 2
"""Timing moves the last few writes: the sweep ends when so many k in a row met no write any more."""


@dataclass(frozen=True)
class Scenario:
    """One row."""

    name: str
    prepare: Callable[[Lab], None]
    """With a healthy API; leaves the operator running or not, as the scenario wants it."""
    act: Callable[[Lab, int], None]
    """What the user does; the number makes each time another one (a new image)."""
    over: Callable[[Lab], bool]
    writes_least: int
    """The sweep must reach at least this k, else it proved nothing. 0: by design the operator writes nothing to the fleet's
    children, and the sweep shows that."""
    swaps: Callable[[int], dict[str, str]] = lambda number: {}


@dataclass(frozen=True)
class Clean:
    """The run that nobody disturbed."""

    state: dict[str, Any]
    deleted: frozenset[str]
    writes: int
    of_children: tuple[str, ...]
    """Writes to anything but the fleet itself, events about it and leases."""


def state_of(lab: Lab, scenario: Scenario, number: int) -> dict[str, Any]:
    """The comparable end state."""
    objects = lab.objects()
    revisions = {o["spec"]["revision"]: "REVISION" for (kind, _), o in objects.items() if kind == "WorkerPool"}
    for (kind, _), found in objects.items():
        if kind == "WorkerPool":  # behind the counts stands a digest, of names that differ from run to run
            notes = found["metadata"]["annotations"]
            notes[WRITTEN] = notes[WRITTEN].rpartition(" ")[0]
    earlier: dict[str, int] = {}
    for key in [key for key in objects if key[0] == "ControllerRevision"]:
        number_there = objects[key].pop("revision")  # counts up
        revisions[objects[key]["data"]["compat"]] = "COMPAT"
        if (name := objects[key]["metadata"]["labels"]["inferencefleet.io/revision"]) not in revisions:
            del objects[key]  # the history of earlier rollouts
            earlier[name] = number_there
    if earlier:  # what `fleet rollout undo` goes to
        revisions[max(earlier, key=lambda name: earlier[name])] = "BEFORE"
    return comparable(objects, {lab.namespace: "NAMESPACE", **revisions, **scenario.swaps(number)})


def deletions(requests: list[Request], lab: Lab) -> frozenset[str]:
    """Kind and role of what was deleted; a deletion without uid precondition stands out."""
    found = set()
    for request in requests:
        if request.method == "DELETE":
            sure = "uid" in ((request.body or {}).get("preconditions") or {})
            role = next((role for role in ("prefill", "decode", "router") if role in request.name), request.name)
            found.add(f"{request.kind}/{role}" + ("" if sure else " WITHOUT A UID"))
    return frozenset(found)


def sweep(lab: Lab, scenario: Scenario, when: When, step: int) -> str:
    """Every step-th k until no write is met any more; AssertionError with each k that went wrong."""
    clean = clean_run(lab, scenario)
    broken: dict[int, list[str]] = {}
    misses, k, reached = 0, 1, 0
    while misses < MISSES_MOST and len(broken) < BROKEN_MOST:
        begun = time.monotonic()
        happened, wrong = crash_once(lab, scenario, k, when, clean, number=k)
        print(f"{scenario.name} {when} k={k} killed={happened} wrong={len(wrong)} {time.monotonic() - begun:.1f} s", flush=True)
        misses = 0 if happened else misses + step
        reached = k if happened else reached
        if wrong:
            broken[k] = wrong
        k += step
    assert not broken, "\n".join(f"seed {lab.proxy.seed}, k={k}: {line}" for k, wrong in broken.items() for line in wrong)
    assert reached >= scenario.writes_least, f"{scenario.name}: only {reached} writes were met, expected {scenario.writes_least}"
    assert scenario.writes_least or not clean.of_children, f"written to children: {clean.of_children}"
    lab.at_rest()
    return f"{scenario.name}: killed {when} each write up to {reached}, an undisturbed run has {clean.writes}"


def clean_run(lab: Lab, scenario: Scenario, number: int = 0) -> Clean:
    """Play it without a fault."""
    scenario.prepare(lab)
    mark = lab.proxy.ledger.mark()
    scenario.act(lab, number)
    if not lab.lives or lab.operator.poll() is not None:
        lab.start()
    lab.until(f"{scenario.name} undisturbed", lambda: scenario.over(lab))
    settled(lab)
    writes = lab.proxy.ledger.writes(mark)
    of_children = tuple(str(write) for write in writes if write.kind not in (FLEET.plural, EVENT.plural, LEASE.plural))
    return Clean(state_of(lab, scenario, number), deletions(writes, lab), len(writes), of_children)


def settled(lab: Lab, quiet_s: float = 0.4) -> None:
    """Until no write has come for a moment."""
    while lab.proxy.ledger.writes() and time.monotonic() - lab.proxy.ledger.writes()[-1].at_s < quiet_s:
        time.sleep(0.05)


def crash_once(lab: Lab, scenario: Scenario, k: int, when: When, clean: Clean, number: int) -> tuple[bool, list[str]]:
    """One k: (whether the operator was killed, what is wrong afterwards)."""
    scenario.prepare(lab)
    mark = lab.proxy.ledger.mark()
    running = bool(lab.lives) and lab.operator.poll() is None
    crash = lab.proxy.crash_at(k, when, lab.kill)
    scenario.act(lab, number)
    if not running:
        lab.start()
    end = time.monotonic() + SETTLED_S
    while crash.hit is None and not scenario.over(lab) and time.monotonic() < end:
        time.sleep(0.02)
    if crash.hit is None:
        settled(lab)
    lab.proxy.crash = None
    if crash.hit is not None:
        wait_dead(lab)
        lab.start()
    try:
        lab.until(f"{scenario.name} after the crash at write {k}", lambda: scenario.over(lab), SETTLED_S)
        wrong = converges(lab, scenario, clean, number)
    except AssertionError as error:
        return crash.hit is not None, [str(error)]
    strange = deletions(lab.proxy.ledger.writes(mark), lab) - clean.deleted
    wrong += [f"deleted {what}, which an undisturbed run never does" for what in strange]
    return crash.hit is not None, wrong


def wait_dead(lab: Lab) -> None:
    """The operator must really be gone: killed by signal 9."""
    end = time.monotonic() + 5
    while lab.operator.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert lab.operator.poll() == -9, lab.operator.poll()


def converges(lab: Lab, scenario: Scenario, clean: Clean, number: int) -> list[str]:
    """Differences to the undisturbed end that do not go away."""
    end = time.monotonic() + SAME_S
    while wrong := differences(clean.state, state_of(lab, scenario, number)):
        if time.monotonic() > end:
            return wrong[:8]
        time.sleep(0.1)
    return []

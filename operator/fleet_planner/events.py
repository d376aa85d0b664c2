"""What a fleet's user is told of one pass. Pure: (status before, status after, what was done) in, events out.

Only changes are told: equal statuses and nothing done give no event. Of the causes each is told once: Ready repeats what
Available and Provisioned say, and a failed apply is told by its problems, so those two speak only where they add something.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import Condition, FleetStatus, TierStatus
from fleet_planner.capacity import QUOTA_WORDS
from fleet_planner.roles import ROLES
from fleet_planner.types import Problem

NOTE_MOST_BYTES = 1_000
"""events.k8s.io/v1 refuses notes of more than 1 kB."""
NAMES_MOST = 3
DELETING: Final = "Deleting"
DELETION_LATE: Final = "DeletionLate"
"""Reasons of a fleet that was deleted and is kept by our finalizer: it drains; its time is over, and something still ran."""
HELD_BY_OTHERS: Final = "HeldByFinalizer"
"""It was deleted and is kept by somebody else's: nothing of ours is to be done any more."""
SEVERE: Final = frozenset(
    {
        "AgentsSuspected",
        "BackedOut",
        "BeyondBudget",
        DELETION_LATE,
        "DevicesFailing",
        "DevicesSuspected",
        "FabricSuspected",
        "HealingBudgetSpent",
        "Invalid",
        "KvFailing",
        "KvNotMoving",
        "KvReadLate",
        "MemlockTooSmall",
        "Mismatch",
        "NoRouter",
        "NoScheduler",
        "OutOfRatio",
        "PairFailing",
        "PrefetchFailed",
        "ProgressDeadlineExceeded",
        "QuotaExceeded",
        "RdmaEmulated",
        "RoleMismatch",
        "RolledBack",
        "RoutersFailing",
        "SourceFailed",
        "Stuck",
        "TcpFallback",
        "Unschedulable",
        "WishesDisagree",
        "WorkerPoisoned",
        "WorkersFailing",
        "WorkersLate",
        "WorkersSilent",
    }
)
"""Reasons that warn even when the fleet was never well: somebody has to do something."""
IN_ORDER: Final = frozenset(
    {
        DELETING,
        HELD_BY_OTHERS,
        "NoPeerKey",
        "PeerKeyPending",
        "Progressing",
        "Paused",
        "Prefetching",
        "Queued",
        "TriedAgain",
        "Waking",
    }
)
"""Reasons of states that are neither good nor bad."""
QUOTA: Final = "QuotaExceeded"
NAME_CONFLICT = "NameConflict"
"""A problem and a condition's reason: an object of somebody else has the name of one of ours."""
ANEW: Final = "to be made anew"
"""Why a child is deleted in which somebody else's entries stand."""
UNTOLD = frozenset({"Creating", "NotProvisioned"})
"""Reasons of a beginning: nobody was told that it is not well, and nobody has to be told that it is now."""
TOLD_ELSEWHERE = frozenset({"ApplyFailed", NAME_CONFLICT, "AdapterFailed", "Loading", "NotAccepted"}) | UNTOLD
"""Reasons whose causes have events of their own: the problems, the workers that were created, the spec that was refused."""
AT_FIRST: Final = frozenset({"WorkersStarting", "WorkersPending", "RouterStarting"})
"""What every new fleet is: the workers that are created say so, and CapacityLimited of those that find no node."""
REPEATED: Final = "Ready"
"""That it is not good any more is told by the condition whose words it repeats."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing to tell; `action` is what the operator was doing."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str
    action: str
    at: str = ""
    """When it was decided, RFC 3339, of what the status tells, too: told again by an operator that starts anew, which cannot know
    whether the one before it came to that, it is the same event. Empty: now."""


@dataclass(frozen=True, slots=True)
class Deed:
    """One write that succeeded."""

    verb: Literal["created", "changed", "deleted", "flipped"]
    kind: str
    name: str
    uid: str = ""
    tier: str = ""
    role: str = ""
    """Of a worker pod; empty for everything else."""
    why: str = ""
    member: int = 0
    """Place of a pod in its worker: what happens to the others happens to the leader, and is told once."""
    undid: str = ""
    """Where somebody else's edit was undone; empty when our own wish changed."""

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.name}" + (f": {self.why or self.undid}" if self.why or self.undid else "")


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass did."""

    fleet: str = ""
    """Its name."""
    deeds: Sequence[Deed] = ()
    problems: Sequence[Problem] = ()
    """Only those that the pass before did not have."""
    sizing: Mapping[str, str] = field(default_factory=dict)
    """By tier name: why it has its size."""


def sizing_of(fleet: InferenceFleet, reasons: Sequence[str]) -> dict[str, str]:
    """By tier name: what the plan says of its size, and the limits that it was fitted into."""
    found = {}
    for tier, reason in zip(fleet.spec.tiers, reasons, strict=True):
        prefill, decode = tier.prefill, tier.decode
        limits = (
            f"ratio {tier.ratio.min} to {tier.ratio.max}, {prefill.min_replicas} to {prefill.max_replicas} prefill, "
            f"{decode.min_replicas} to {decode.max_replicas} decode{', or none' if fleet.spec.scaling.to_zero.enabled else ''}"
        )
        found[tier.name] = f"{reason.removeprefix(f'{tier.name}: ')}; allowed: {limits}"
    return found


def events_of(before: FleetStatus, after: FleetStatus, done: Pass) -> tuple[Event, ...]:
    """Everything to tell of one pass; notes are cut to what the API takes."""
    found = [
        *_transitions(before, after),
        *(() if _ends(after) else _tiers(before, after, done.sizing)),
        *_workers(done.deeds),
        *_flips(before, after, done.deeds),
        *_replaced(before, after),
        *_adapters(before, after),
        *_put_back(before, after, done),
        *_problems(done.problems),
    ]
    return tuple(replace(event, note=_cut(event.note)) for event in found)


def _transitions(before: FleetStatus, after: FleetStatus) -> Iterable[Event]:
    """When Ready turns good, that is the news: nothing else that turns good with it is told."""
    told = {now.type: event for now in after.conditions if (event := _transition(before.condition(now.type), now)) is not None}
    ready = after.condition("Ready")
    if ready is None or "Ready" not in told or not _good(ready):
        return tuple(told.values())
    return tuple(told[now.type] for now in after.conditions if now.type in told and (now.type == "Ready" or not _good(now)))


def _transition(before: Condition | None, after: Condition) -> Event | None:
    """A condition that changed its status or reason; what is well from the start is no news."""
    if before is not None and _meaning(before) == _meaning(after):
        return None
    if after.type != "Available" and after.reason in (DELETING, DELETION_LATE, HELD_BY_OTHERS):  # that one says it
        return None
    was_good = before is not None and _good(before)
    if _good(after):
        news = before is not None and not was_good and (before.reason not in UNTOLD or after.type == "Ready")
        return Event("Normal", after.reason, after.message, "Reconcile") if news else None
    unknown = after.status == "Unknown" and after.type != "TelemetryFresh" and after.reason != HELD_BY_OTHERS
    silent = unknown or after.reason in TOLD_ELSEWHERE
    silent |= (before is None or before.reason in AT_FIRST) and after.reason in AT_FIRST
    severe = after.reason in SEVERE
    if silent or after.type == REPEATED or (after.type == "TelemetryFresh" and not was_good and not severe):
        return None
    bad = severe or (was_good and after.reason not in IN_ORDER)
    severity: Literal["Normal", "Warning"] = "Warning" if bad else "Normal"
    return Event(severity, after.reason, after.message, "Reconcile")


def _meaning(condition: Condition) -> tuple[str, ...]:
    """Messages hold counters that move all the time; the words about a refused spec do not, and matter."""
    words = (condition.message,) if condition.type == "Accepted" else ()
    # why a fleet is not ready is told by the condition that Ready repeats
    reason = () if condition.type == "Ready" else (condition.reason,)
    return condition.status, *reason, *words


def _ends(after: FleetStatus) -> bool:
    ready = after.condition("Ready")
    return ready is not None and ready.reason in (DELETING, DELETION_LATE)


def _good(condition: Condition) -> bool:
    if condition.type == "RollingOut":
        return condition.reason == "Complete"
    if condition.reason in SEVERE:  # inside the ratio, with workers that somebody did not ask for
        return False
    return condition.status == ("False" if condition.type == "CapacityLimited" else "True")


def _tiers(before: FleetStatus, after: FleetStatus, sizing: Mapping[str, str]) -> Iterable[Event]:
    known = {tier.name: tier for tier in before.tiers}
    for tier in after.tiers:
        old = known.get(tier.name)
        if old is None:
            continue
        if _sizes(old) != _sizes(tier):
            why = sizing.get(tier.name, "")
            note = f"tier {tier.name}: {_words(old)} → {_words(tier)}{'; ' + why if why else ''}"
            yield Event("Normal", "Resized", note, "Scale")
        if old.revision != tier.revision:
            note = f"tier {tier.name}: workers of revision {old.revision} give way to {tier.revision}"
            yield Event("Normal", "RevisionChanged", note, "Roll")


def _sizes(tier: TierStatus) -> tuple[int, int]:
    return tier.prefill.desired, tier.decode.desired


def _words(tier: TierStatus) -> str:
    return f"{tier.prefill.desired} prefill and {tier.decode.desired} decode"


def _workers(deeds: Sequence[Deed]) -> Iterable[Event]:
    """Per role one event by count; of a role that lost and got workers in one pass, these were replaced."""
    created: dict[tuple[str, str], list[str]] = defaultdict(list)
    deleted: dict[tuple[str, str], list[str]] = defaultdict(list)
    for deed in deeds:
        if deed.member:
            continue
        if deed.role not in ROLES:
            continue  # a pod that only fetches is told of by its condition
        if deed.verb == "created":
            created[deed.tier, deed.role].append(deed.name)
        elif deed.verb == "deleted":
            deleted[deed.tier, deed.role].append(f"{deed.name} ({deed.why})")
    for where in sorted({*created, *deleted}):
        new, gone = created[where], deleted[where]
        both = min(len(new), len(gone))
        groups = (("Replace", gone[:both]), ("Create", new[both:]), ("Delete", gone[both:]))
        yield from (_counted(action, where, texts) for action, texts in groups if texts)


def _counted(action: str, where: tuple[str, str], texts: Sequence[str]) -> Event:
    tier, role = where
    count = f"{len(texts)} {role} worker{'' if len(texts) == 1 else 's'}"
    return Event("Normal", f"Workers{action}d", f"tier {tier}: {count}: {_some(texts, ', ')}", action)


def _flips(before: FleetStatus, after: FleetStatus, deeds: Sequence[Deed]) -> Iterable[Event]:
    """Workers that changed their role, and the failure that a tier's status tells of."""
    for deed in deeds:
        if deed.verb == "flipped":
            yield Event("Normal", "Flipped", f"tier {deed.tier}: {deed.name}: {deed.why}", "Flip")
    known = {tier.name: tier.flip for tier in before.tiers}
    for tier in after.tiers:
        if tier.flip is not None and tier.flip != known.get(tier.name):
            yield Event("Warning", "FlipFailed", f"tier {tier.name}: {tier.flip.message}", "Flip")


def _replaced(before: FleetStatus, after: FleetStatus) -> Iterable[Event]:
    """Workers whose replacement was decided."""
    known = {one.uid for tier in before.tiers if tier.healing is not None for one in tier.healing.replaced}
    for tier in after.tiers:
        for one in tier.healing.replaced if tier.healing is not None else ():
            if one.uid not in known:
                note = f"tier {tier.name}: {one.message}; it is being replaced"
                yield Event("Warning", "PoisonedReplaced", note, "Heal", one.at)


def untold(status: FleetStatus) -> FleetStatus:
    """What an operator that starts may count as told: not the replacements of the last hour."""
    if all(tier.healing is None for tier in status.tiers):
        return status
    return status.model_copy(update={"tiers": tuple(tier.model_copy(update={"healing": None}) for tier in status.tiers)})


def _adapters(before: FleetStatus, after: FleetStatus) -> Iterable[Event]:
    """An adapter that a worker could not load, once per reason; a new version of one; and that none fails any more."""
    known = {adapter.name: adapter for adapter in before.adapters}
    for adapter in after.adapters:
        old = known.get(adapter.name)
        if adapter.reason and (old is None or old.reason != adapter.reason):
            yield Event("Warning", "AdapterFailed", f"adapter {adapter.name}: {adapter.reason}: {adapter.message}", "LoadAdapter")
        elif old is None or adapter.reason:
            continue
        elif adapter.digest and (adapter.digest != old.digest or old.reason):
            note = f"adapter {adapter.name}: version {adapter.digest[:12]} is on {adapter.loaded} of {adapter.desired} workers"
            yield Event("Normal", "AdapterLoaded", note, "LoadAdapter")


def _put_back(before: FleetStatus, after: FleetStatus, done: Pass) -> Iterable[Event]:
    """Edited children always; created ones only when everything existed before, and the spec is the one that it was made from."""
    provisioned = before.condition("Provisioned")
    complete = provisioned is not None and provisioned.status == "True"
    complete &= before.observed_generation == after.observed_generation
    for deed in done.deeds:
        if deed.verb == "changed" and deed.undid:
            yield Event("Normal", "PutBack", f"{deed.kind} {deed.name}: undid somebody else's edit of {deed.undid}", "PutBack")
        elif deed.verb == "deleted" and not deed.role and deed.why.startswith(ANEW):  # else nothing asks for it any more
            yield Event("Normal", "PutBack", f"{deed.kind} {deed.name}: deleted, {deed.why}", "PutBack")
        elif deed.verb == "created" and complete and not deed.role and _was_due(before, deed, done.fleet):
            yield Event("Normal", "PutBack", f"{deed.kind} {deed.name} was missing", "PutBack")


def _was_due(before: FleetStatus, deed: Deed, fleet: str) -> bool:
    """Whether a child that was created should have been there already. A new WorkerPool is a new revision; a disruption budget
    comes with the first ready worker of its role, or with a second router."""
    if deed.kind != "PodDisruptionBudget":
        return deed.kind != "WorkerPool"
    roles = ((tier.name, role, getattr(tier, role).ready) for tier in before.tiers for role in ROLES)
    return any(ready and deed.name == f"{fleet}-{tier}-{role}" for tier, role, ready in roles)


def _problems(problems: Sequence[Problem]) -> Iterable[Event]:
    """One warning per reason: a quota that refuses thirty pods is one piece of news."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for problem in problems:  # a quota's refusal is a 403 as well, and no right is missing
        by_reason[QUOTA if QUOTA_WORDS in problem.message else problem.reason].append(problem.message)
    for reason, messages in by_reason.items():
        yield Event("Warning", reason, _some(messages, "; "), "Apply")


def _some(texts: Sequence[str], separator: str) -> str:
    more = len(texts) - NAMES_MOST
    return separator.join(texts[:NAMES_MOST]) + (f" and {more} more" if more > 0 else "")


def _cut(note: str) -> str:
    raw = note.encode()
    return note if len(raw) <= NOTE_MOST_BYTES else raw[: NOTE_MOST_BYTES - 3].decode(errors="ignore") + "…"

"""What a WorkerPool is of (fleet, tier, role, revision): its name says it, which nobody can edit, and its spec repeats it.

Where the spec of one of ours says something else somebody edited it, or, since our CRD lets nobody change these fields, made it
anew (`kubectl replace --force`). Believed, a decode pool with the other role had its workers relabelled, and served nothing any
more; disbelieved altogether, its name was taken for good. So the name is believed from the first look on, and the spec is put
back: at once, and less and less often where somebody writes it again and again. Where our CRD refuses that a scale target is made
anew, with the size that it asks for: no pod has it as its owner. Of a pool that has workers it is told, and so is what somebody
else's policy refuses: it would refuse the new one, too. Nothing waits for that, because nobody reads that spec but those who look
at it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from fleet_api.rules import POOL_RULES
from fleet_operator.cluster.interface import (
    POOL,
    Cluster,
    ClusterError,
    ConflictError,
    InvalidError,
    NotFoundError,
    Object,
)
from fleet_operator.names import GROUP, MANAGED_BY, REVISION, ROLE, TIER
from fleet_operator.outcome import Outcome, StopError
from fleet_operator.pool_sizes import written_on
from fleet_planner.events import ANEW, Deed
from fleet_planner.roles import ROLES
from fleet_planner.scale_targets import EVERY_REVISION
from fleet_planner.types import Problem

Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of one fleet."""
Told = Mapping[str, str]
"""fleet, tier, role and revision of a pool."""
CALM_S: Final = 900.0
"""An edit after so long is another one, and no fight."""
FIRST_S: Final = 1.0
MOST_S: Final = 300.0
_NAME: Final = re.compile(rf"(.+)-({'|'.join(ROLES)})(?:-([0-9a-f]{{8}}))?")


def named(pool: Object, fleet: Object) -> Told | None:
    """What the name of this pool says it is of; None: it is not one that this fleet's operator made under this name. A copy has
    the owner of what it was copied from, and another's labels and digest."""
    meta = pool["metadata"]
    mine = fleet["metadata"]
    owners = meta.get("ownerReferences") or []
    if not any(owner.get("controller") and owner.get("uid") == mine["uid"] for owner in owners):
        return None
    prefix = f"{mine['name']}-"
    found = _NAME.fullmatch(meta["name"].removeprefix(prefix)) if meta["name"].startswith(prefix) else None
    if found is None:
        return None
    tier, role, revision = found.groups()
    labels, marks = meta.get("labels") or {}, {TIER: tier, ROLE: role, **({REVISION: revision} if revision else {})}
    if written_on(pool) is None and not marks.items() <= labels.items():
        return None
    return {"fleet": mine["name"], "tier": tier, "role": role, "revision": revision or EVERY_REVISION}


def as_named(live: dict[tuple[str, str], Object], fleet: Object) -> tuple[dict[tuple[str, str], Object], list[Object]]:
    """`live` with every pool as its name says, and the pools, as they are, of which that is not what their spec says."""
    edited = []
    found = live
    for at, pool in live.items():
        if at[0] != POOL.kind or not (told := _wrong(pool, fleet)):
            continue
        found = dict(live) if found is live else found
        found[at] = {**pool, "spec": {**pool["spec"], **told}}
        if "deletionTimestamp" not in pool["metadata"]:
            edited.append(pool)
    return found, edited


def _wrong(pool: Object, fleet: Object) -> Told | None:
    """What its name says and its spec does not; None where both agree, or it is not ours."""
    spec, name = pool["spec"], pool["metadata"]["name"]
    base = f"{fleet['metadata']['name']}-{spec['tier']}-{spec['role']}"
    right = name == f"{base}-{spec['revision']}" or (name == base and spec["revision"] == EVERY_REVISION)
    if right and spec["fleet"] == fleet["metadata"]["name"]:
        return None
    told = named(pool, fleet)
    return told and {part: word for part, word in told.items() if spec[part] != word}


@dataclass(frozen=True, slots=True)
class _Fight:
    """About one pool."""

    times: int
    """It was put back."""
    last: float
    until: float
    problem: Problem | None = None
    """It cannot be put back."""


class PoolFights:
    """Of one fleet, by name of the pool (who makes it anew fights on). All of it may be lost: then one is put back
    once more. Times are of a clock that nobody sets."""

    def __init__(self) -> None:
        self._fights: dict[str, _Fight] = {}
        self.wait_s: float | None = None
        """Seconds until one of those that were left is to be put back; None: none was left."""

    async def put_back(
        self, cluster: Cluster, live: Live, edited: list[Object], fleet: Object, now: float
    ) -> tuple[Outcome, dict[tuple[str, str], Object]]:
        """Writes those that are due; `live` with what they are then. One that changed meanwhile is left to the next pass."""
        outcome, found = Outcome(), dict(live)
        self._fights = {at: one for at, one in self._fights.items() if now - one.last < CALM_S}
        with suppress(StopError):  # the API cannot answer now: the pass says so
            for pool in edited:
                if self._until(pool, now) <= now:
                    await self._one(cluster, pool, found, _wrong(pool, fleet) or {}, now, outcome)
        fights = [self._fights.get(_place(pool)) for pool in edited]
        outcome.problems += [one.problem for one in fights if one is not None and one.problem is not None]
        self.wait_s = min((one.until - now for one in fights if one is not None and one.until > now), default=None)
        return outcome, found

    def _until(self, pool: Object, now: float) -> float:
        fight = self._fights.get(_place(pool))
        return fight.until if fight is not None else now

    async def _one(
        self, cluster: Cluster, pool: Object, live: dict[tuple[str, str], Object], told: Told, now: float, outcome: Outcome
    ) -> None:
        meta, said = pool["metadata"], pool["spec"]
        at = meta["namespace"], meta["name"]
        words = ", ".join(f"spec.{part} (it said {said[part]}, and is {word} by its name)" for part, word in told.items())
        patch = {"metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}, "spec": dict(told)}
        try:
            try:
                live[POOL.kind, meta["name"]] = await cluster.patch(POOL, *at, patch)
                done = Deed("changed", POOL.kind, meta["name"], meta["uid"], undid=words + self._again(pool, now))
            except InvalidError as error:
                if not _is_role(meta["name"]) or not _is_ours_to_say(error):
                    self._again(pool, now, _stuck(meta, words, error))
                    outcome.vain += 1
                    return
                await cluster.delete(POOL, *at, uid=meta["uid"])
                del live[POOL.kind, meta["name"]]
                why = f"{ANEW}, for nobody may change {words}{self._again(pool, now)}"
                outcome.writes += 1
                outcome.done.append(Deed("deleted", POOL.kind, meta["name"], meta["uid"], why=why))
                live[POOL.kind, meta["name"]] = made = await cluster.create(_anew(pool, told))
                done = Deed("created", POOL.kind, meta["name"], made["metadata"]["uid"])
        except (NotFoundError, ConflictError):
            return
        except ClusterError as error:
            outcome.fail(f"{POOL.kind} {meta['name']}", error)
            return
        outcome.writes += 1
        outcome.vain += 1
        outcome.done.append(done)

    def _again(self, pool: Object, now: float, problem: Problem | None = None) -> str:
        """Remembers that it was put back; in words what follows when it was not the first time."""
        before, meta = self._fights.get(_place(pool)), pool["metadata"]
        times = 1 if before is None else before.times + 1
        rest_s = min(MOST_S, FIRST_S * 2.0 ** min(times - 1, 16))
        self._fights[_place(pool)] = _Fight(times, now, now + rest_s, problem)
        if times == 1:
            return ""
        look = f"kubectl get wpool {meta['name']} -n {meta['namespace']} -o yaml --show-managed-fields"
        return f"; it comes again and again, so it stays for {rest_s:.0f} s the next time: find who writes it ({look})"


def _place(pool: Object) -> str:
    return str(pool["metadata"]["name"])


def _is_role(name: str) -> bool:
    """A scale target: no pod has it as its owner."""
    return name.endswith(ROLES)


def _is_ours_to_say(error: InvalidError) -> bool:
    """Our CRD lets nobody change these fields: somebody made this object anew. A policy of somebody else's answers 400 and 422,
    too, and who deleted a target for that left its HPA without one."""
    return any(rule.message in str(error) for rule in POOL_RULES)


def _anew(target: Object, told: Told) -> Object:
    """The same wish under the right words, with our own marks alone: a GitOps tool's would make it that one's."""
    meta = target["metadata"]
    ours = {
        part: {key: text for key, text in (meta.get(part) or {}).items() if key.startswith(f"{GROUP}/") or key == MANAGED_BY}
        for part in ("labels", "annotations")
    }
    kept = {part: meta[part] for part in ("name", "namespace", "ownerReferences")}
    return {
        **{part: target[part] for part in ("apiVersion", "kind")},
        "metadata": kept | ours,
        "spec": {**target["spec"], **told},
    }


def _stuck(meta: Object, words: str, error: InvalidError) -> Problem:
    """A pool of a revision owns workers: only somebody who keeps them may delete it."""
    if not _is_ours_to_say(error):
        return Problem("Invalid", f"{POOL.kind} {meta['name']}: {words} cannot be put back: {error}")
    do = f"kubectl delete wpool {meta['name']} -n {meta['namespace']} --cascade=orphan keeps its workers, and it is made anew"
    why = f"{words} cannot be put back, the API server lets nobody change it"
    return Problem("Invalid", f"{POOL.kind} {meta['name']}: {why}: {do}")

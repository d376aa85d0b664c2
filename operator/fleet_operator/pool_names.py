"""What a WorkerPool is of (fleet, tier, role, revision): its name says it, which nobody can edit, and its spec repeats it.

Where the spec of one of ours says something else somebody edited it. Believed, a decode pool with the other role had its workers
relabelled, and served nothing any more; disbelieved altogether, its name was taken for good. So the name is believed from the
first look on, and the spec is put back: at once, and less and less often where somebody writes it again and again. Nothing
waits for that, because nobody reads that spec but those who look at it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from fleet_operator.cluster.interface import POOL, Cluster, ClusterError, ConflictError, NotFoundError, Object
from fleet_operator.names import REVISION, ROLE, TIER
from fleet_operator.outcome import Outcome, StopError
from fleet_operator.pool_sizes import written_on
from fleet_planner.events import Deed
from fleet_planner.scale_targets import EVERY_REVISION
from fleet_planner.types import ROLES

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


class PoolFights:
    """Of one fleet, by uid of the pool. All of it may be lost: then one is put back once more. Times are of a clock that nobody
    sets."""

    def __init__(self) -> None:
        self._fights: dict[str, _Fight] = {}
        self.wait_s: float | None = None
        """Seconds until one of those that were left is to be put back; None: none was left."""

    async def put_back(
        self, cluster: Cluster, live: Live, edited: list[Object], fleet: Object, now: float
    ) -> tuple[Outcome, dict[tuple[str, str], Object]]:
        """Writes those that are due; `live` with what they are then. One that changed meanwhile is left to the next pass."""
        outcome, made = Outcome(), dict(live)
        self._fights = {uid: one for uid, one in self._fights.items() if now - one.last < CALM_S}
        until = {pool["metadata"]["name"]: self._until(pool["metadata"]["uid"], now) for pool in edited}
        with suppress(StopError):  # the API cannot answer now: the pass says so
            for pool in edited:
                name = pool["metadata"]["name"]
                if until[name] <= now and (found := await self._one(cluster, pool, fleet, now, outcome)) is not None:
                    made[POOL.kind, name] = found
        self.wait_s = min((at - now for at in until.values() if at > now), default=None)
        return outcome, made

    def _until(self, uid: str, now: float) -> float:
        fight = self._fights.get(uid)
        return fight.until if fight is not None else now

    async def _one(self, cluster: Cluster, pool: Object, fleet: Object, now: float, outcome: Outcome) -> Object | None:
        told, meta, said = _wrong(pool, fleet) or {}, pool["metadata"], pool["spec"]
        patch = {"metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}, "spec": told}
        try:
            made = await cluster.patch(POOL, meta["namespace"], meta["name"], patch)
        except (NotFoundError, ConflictError):
            return None
        except ClusterError as error:
            outcome.fail(f"{POOL.kind} {meta['name']}", error)
            return None
        outcome.writes += 1
        outcome.vain += 1
        fields = ", ".join(f"spec.{part} (it said {said[part]}, and is {word} by its name)" for part, word in told.items())
        outcome.done.append(Deed("changed", POOL.kind, meta["name"], meta["uid"], undid=fields + self._again(meta, now)))
        return made

    def _again(self, meta: Object, now: float) -> str:
        """Remembers that it was put back; in words what follows when it was not the first time."""
        before = self._fights.get(meta["uid"])
        times = 1 if before is None else before.times + 1
        rest_s = min(MOST_S, FIRST_S * 2.0 ** min(times - 1, 16))
        self._fights[meta["uid"]] = _Fight(times, now, now + rest_s)
        if times == 1:
            return ""
        look = f"kubectl get wpool {meta['name']} -n {meta['namespace']} -o yaml --show-managed-fields"
        return f"; it comes again and again, so it stays for {rest_s:.0f} s the next time: find who writes it ({look})"

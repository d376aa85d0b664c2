"""The operator's clock was set: times that were written down before count as if it always had been so. Pure.

Deadlines are judged by times from three places: what the operator remembers, what it wrote into the status or onto pods, and what
the API server wrote onto pods, by its own clock. `Observed.clock_set_s` says by how much the operator's clock was set since the
last pass (the shell measures it against the monotonic clock: a machine that slept counts as one whose clock was set). All these
times are moved by as much: what had waited for a minute has waited for a minute, so nothing is late and nothing takes an hour
more. An hour that did pass, also one in which no operator ran, counts in full: deadlines are as long as they say.

A time further in the future than clocks differ counts as now, whoever wrote it and whether or not the setting was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FlipStatus, HealingStatus, ReplacedStatus, RolloutStatus, TierStatus, ZeroStatus
from fleet_planner.healed import HealingMemory
from fleet_planner.memory import ClockMemory, RestMemory, ScaleMemory
from fleet_planner.too_few import TooFew
from fleet_planner.types import Observed, ObservedPod, RouterPod, RouterView

FUTURE_S = 60.0
"""The clocks of two machines differ by less."""


@dataclass(slots=True)
class _Moved:
    """What is moved in one pass, and what of it is to be remembered."""

    set_s: float
    now: float
    before: Mapping[str, float]
    stamps: Mapping[str, str]
    ahead_s: float
    pods: dict[str, float] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)

    def time(self, at: float) -> float:
        """A remembered time that has passed."""
        return min(at + self.set_s, self.now)

    def stamp(self, text: str) -> str:
        """A time of the status. What it counts as is remembered for as long as the status says so: writing it may fail."""
        if not text:
            return text
        was = self.stamps.get(text, text)
        at = datetime.fromisoformat(was).timestamp()
        if self.set_s or at > self.now + FUTURE_S:
            was = rfc3339(self.time(at))
        if was != text:
            self.told[text] = was
        return was

    def by_s(self, key: str, newest: float, *, own: bool) -> float:
        """By how much the times of one pod are moved. `own`: the operator wrote them."""
        if key in self.before:
            by = self.before[key] + self.set_s
        elif self.set_s or own:
            by = self.set_s
        else:  # made since: the API server's clock was not set with ours, unless that puts it into the future
            by = self.ahead_s if self.ahead_s > 0 and newest + self.ahead_s <= self.now + FUTURE_S else 0.0
        late = newest + by - self.now
        by -= late if late > (0.0 if self.set_s else FUTURE_S) else 0.0
        if by or self.ahead_s:
            self.pods[key] = by
        return by


def steady(fleet: InferenceFleet, observed: Observed, now: float) -> tuple[InferenceFleet, Observed, ClockMemory]:
    """The fleet and what is seen of it, by the clock as it is now; and what is to be remembered."""
    known = observed.clock
    if not observed.clock_set_s and known == ClockMemory() and not _ahead(fleet, observed, now + FUTURE_S):
        return fleet, observed, known
    moved = _Moved(observed.clock_set_s, now, dict(known.pods), dict(known.stamps), known.ahead_s + observed.clock_set_s)
    tiers = tuple(_tier(tier, moved) for tier in fleet.status.tiers)
    if moved.told:
        fleet = fleet.model_copy(update={"status": fleet.status.model_copy(update={"tiers": tiers})})
    pods = tuple([_pod(pod, moved) for pod in observed.pods])
    fetching = tuple(
        [replace(pod, created_at=pod.created_at + moved.by_s(pod.uid, pod.created_at, own=False)) for pod in observed.fetching]
    )
    memory = {name: _scale(one, moved) for name, one in observed.memory.items()}
    rest, router = _rest(observed.rest, moved), _router(observed.router, moved)
    observed = replace(observed, pods=pods, fetching=fetching, memory=memory, rest=rest, router=router)
    return fleet, observed, ClockMemory(moved.ahead_s, tuple(moved.pods.items()), tuple(moved.told.items()))


def _ahead(fleet: InferenceFleet, observed: Observed, limit: float) -> bool:
    """Whether any time is later than that. Times of the status compare as text."""
    flips = [*(tier.flip for tier in fleet.status.tiers), *(one.flip for one in observed.memory.values())]
    rollouts = [tier.rollout for tier in fleet.status.tiers if tier.rollout is not None]
    zeros = (*(tier.zero for tier in fleet.status.tiers), *(observed.rest.zero or {}).values())
    stamps = [flip.failed_at for flip in flips if flip is not None] + [zero.since for zero in zeros if zero is not None]
    stamps += [stamp for rollout in rollouts for stamp in (rollout.progress_since, rollout.step_since)]
    stamps += [one.at for tier in fleet.status.tiers if tier.healing is not None for one in tier.healing.replaced]
    stamps += [one.at for known in observed.memory.values() for one in known.healing.replaced]
    stamps += [tier.starting_since or "" for tier in fleet.status.tiers]
    times = [time for one in observed.memory.values() for time in _passed(one)] + [pod.created_at for pod in observed.fetching]
    times += [max(*_written(pod), pod.flip_since) for pod in observed.pods]
    times += [pod.created_at for pod in (observed.router.pods if observed.router is not None else ())]
    latest = max(stamps, default="")
    return max(times, default=0.0) > limit or bool(latest and latest > rfc3339(limit))


def _passed(known: ScaleMemory) -> list[float]:
    """Its times that have passed."""
    newest = [known.wants[-1][0]] if known.wants else []
    lacking = [known.lacking[1]] if known.lacking is not None else []
    others = [*[at for _, at in known.healing.since], *[at for _, at, *_ in known.asked]]
    others += [max(few.at, few.more_at or 0.0) for few in known.too_few if few is not None]
    return [*newest, *[at for _, at in known.gated], *lacking, *others]


def _tier(tier: TierStatus, moved: _Moved) -> TierStatus:
    replaced = HealingStatus(replaced=_replaced(tier.healing.replaced, moved)) if tier.healing is not None else None
    flip, zero = _flip(tier.flip, moved), _zero(tier.zero, moved)
    since = moved.stamp(tier.starting_since or "") or None
    rollout = _rollout(tier.rollout, moved)
    update = {"rollout": rollout, "flip": flip, "zero": zero, "healing": replaced, "starting_since": since}
    return tier.model_copy(update=update)


def _replaced(known: tuple[ReplacedStatus, ...], moved: _Moved) -> tuple[ReplacedStatus, ...]:
    return tuple([one.model_copy(update={"at": moved.stamp(one.at)}) for one in known])


def _rollout(known: RolloutStatus | None, moved: _Moved) -> RolloutStatus | None:
    if known is None or not (known.progress_since or known.step_since):
        return known
    since = {"progress_since": moved.stamp(known.progress_since), "step_since": moved.stamp(known.step_since)}
    return known.model_copy(update=since)


def _flip(known: FlipStatus | None, moved: _Moved) -> FlipStatus | None:
    return known if known is None else known.model_copy(update={"failed_at": moved.stamp(known.failed_at)})


def _zero(known: ZeroStatus | None, moved: _Moved) -> ZeroStatus | None:
    return known if known is None else known.model_copy(update={"since": moved.stamp(known.since)})


def _pod(pod: ObservedPod, moved: _Moved) -> ObservedPod:
    by = moved.by_s(pod.uid, max(_written(pod)), own=False)
    flip = moved.by_s(f"{pod.uid}/{pod.flip_since}", pod.flip_since, own=True) if pod.flipping is not None else 0.0
    if not by and not flip:
        return pod
    ready, unready, scheduled, gone_by = (
        at + by if at is not None else None for at in (pod.ready_since, pod.unready_since, pod.scheduled_at, pod.gone_by)
    )
    return replace(
        pod, created_at=pod.created_at + by, ready_since=ready, unready_since=unready, scheduled_at=scheduled,
        flip_since=pod.flip_since + flip, gone_by=gone_by,
    )  # fmt: skip


def _router(known: RouterView | None, moved: _Moved) -> RouterView | None:
    return known if known is None else replace(known, pods=tuple([_router_pod(pod, moved) for pod in known.pods]))


def _router_pod(pod: RouterPod, moved: _Moved) -> RouterPod:
    by = moved.by_s(f"{pod.name}/{pod.created_at}", max(pod.created_at, pod.ended_at or 0.0), own=False)
    return replace(pod, created_at=pod.created_at + by, ended_at=pod.ended_at and pod.ended_at + by) if by else pod


def _written(pod: ObservedPod) -> tuple[float, ...]:
    """Its times that the cluster wrote."""
    return pod.created_at, pod.ready_since or 0.0, pod.unready_since or 0.0, pod.scheduled_at or 0.0


def _scale(known: ScaleMemory, moved: _Moved) -> ScaleMemory:
    """Times that lie ahead are bounded where they are used: each knows the longest that it may last."""
    gangs, set_s, (prefill, decode) = known.gangs, moved.set_s, known.too_few
    if set_s:
        holds = tuple(replace(hold, until=hold.until + set_s) for hold in gangs.holds)
        gangs = replace(gangs, holds=holds, settle_until=gangs.settle_until + set_s)
    return replace(
        known,
        wants=tuple([(moved.time(at), prefill, decode) for at, prefill, decode in known.wants]),
        cap_until=known.cap_until + set_s,
        room_at=moved.time(known.room_at) if known.room_at else 0.0,
        gated=tuple([(uid, moved.time(at)) for uid, at in known.gated]),
        flip=_flip(known.flip, moved),
        gangs=gangs,
        lacking=(known.lacking[0], moved.time(known.lacking[1])) if known.lacking is not None else None,
        asked=tuple([(role, moved.time(at), size, s) for role, at, size, s in known.asked]),
        too_few=(_few(prefill, moved), _few(decode, moved)),
        healing=_healing(known.healing, moved) if known.healing != HealingMemory() else known.healing,
    )


def _few(known: TooFew | None, moved: _Moved) -> TooFew | None:
    if known is None:
        return None
    return replace(known, at=moved.time(known.at), more_at=None if known.more_at is None else moved.time(known.more_at))


def _healing(known: HealingMemory, moved: _Moved) -> HealingMemory:
    return HealingMemory(tuple([(uid, moved.time(at)) for uid, at in known.since]), _replaced(known.replaced, moved))


def _rest(known: RestMemory, moved: _Moved) -> RestMemory:
    zero = {name: state for name, one in known.zero.items() if (state := _zero(one, moved))} if known.zero is not None else None
    return replace(known, used_at=None if known.used_at is None else moved.time(known.used_at), zero=zero)

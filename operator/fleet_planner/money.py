"""What a fleet's budget pays for: devices, and money by the hour; and what its workers cost now. Pure.

Within a tier every device has one price, so that money is so many devices of it, and sizes are found as for a budget of devices.
Money is counted exactly, as the decimal numbers that users write: a sum of a thousand prices is not a part of a cent off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.document import workers_most
from fleet_planner.replicas import Replica
from fleet_planner.roles import ROLES
from fleet_planner.types import Observed, Template

Money = Fraction
FREE = Fraction(0)
LITTLE = 0.001


@dataclass(frozen=True, slots=True)
class Purse:
    """What is left of scaling.budget; less than nothing when minima are beyond it. None: that is not limited."""

    gpus: int | None = None
    per_hour: Money | None = None
    workers: int | None = None
    """That the routers' document has room for, beside the budget."""

    def less(self, devices: int, price: Money, workers: int = 0) -> Purse:
        """After so many devices of this price, and so many workers."""
        return self.after(devices, FREE if self.per_hour is None else devices * price, workers)

    def after(self, devices: int, cost: Money, workers: int) -> Purse:
        """After so many devices that cost that much together, and so many workers."""
        return Purse(
            None if self.gpus is None else self.gpus - devices,
            None if self.per_hour is None else self.per_hour - cost,
            None if self.workers is None else self.workers - workers,
        )

    def devices(self, price: Money) -> int | None:
        """How many of this price it pays for; None: any number."""
        paid = None if self.per_hour is None or not price else math.floor(self.per_hour / price)
        return min((count for count in (self.gpus, paid) if count is not None), default=None)

    def lacking(self, devices: int, price: Money) -> str:
        """Why it does not pay for so many of this price, in words; empty when it does."""
        words = []
        if self.gpus is not None and devices > (gpus := max(0, self.gpus)):
            words.append(f"need {devices} devices, scaling.budget.gpus leaves {gpus}")
        if self.per_hour is not None and (cost := devices * price) > (money := max(FREE, self.per_hour)):
            words.append(
                f"cost {said(cost)} an hour, scaling.budget.perHour leaves {said(money)}: {said(cost - money)} is missing"
            )
        return " and ".join(words)

    def beside(self, left: LeftOver, kept: Money) -> Purse:
        """After workers of tiers that left the spec. Their price may be of long ago, or a guess, for which nobody goes who is
        there: what is `kept`, the cost of those, is paid as far as it was."""
        rest = self.after(left.devices, left.cost, left.workers)
        if self.per_hour is None or rest.per_hour is None:
            return rest
        return Purse(rest.gpus, max(rest.per_hour, min(self.per_hour, kept)), rest.workers)


@dataclass(frozen=True, slots=True)
class LeftOver:
    """What workers hold that serve on though their tiers left the spec: the budget pays for it, and routers are told of them."""

    devices: int
    cost: Money
    """An hour."""
    workers: int


def purse_of(fleet: InferenceFleet) -> Purse:
    """Of the whole fleet."""
    budget, most = fleet.spec.scaling.budget, workers_most(fleet)
    if budget is None:
        return Purse(workers=most)
    return Purse(budget.gpus, None if budget.per_hour is None else exact(budget.per_hour), most)


def beyond(purse: Purse, sizes: Iterable[tuple[TierSpec, int]]) -> str:
    """How far the devices that tiers have at least are beyond it, in words; empty when it pays for them."""
    left, words = purse, list[str]()
    for tier, devices in sizes:
        left = left.less(devices, price_of(tier))
    if left.gpus is not None and left.gpus < 0:
        words.append(f"{-left.gpus} devices more than scaling.budget.gpus, which is {purse.gpus}")
    if left.per_hour is not None and left.per_hour < 0:
        most = FREE if purse.per_hour is None else purse.per_hour
        words.append(f"{said(-left.per_hour)} an hour more than scaling.budget.perHour, which is {said(most)}")
    told = " and ".join(words)
    return (
        f"the least that the tiers may have is made, and takes {told}: lower minReplicas or ratios, or raise it" if told else ""
    )


def exact(number: float) -> Money:
    """The decimal number that was written."""
    return Fraction(repr(number))


def said(money: Money) -> str:
    """With what a price may have behind the point, and no more: 12.5. In a currency of which little is much: 3.1e-05."""
    number = float(money)
    return f"{number:.3g}" if 0 < number < LITTLE else f"{number:.4f}".rstrip("0").rstrip(".")


def price_of(tier: TierSpec) -> Money:
    """Of one device for an hour. A tier that says none is refused where money is limited, and costs nothing elsewhere."""
    return FREE if tier.cost is None else exact(tier.cost.per_gpu_hour)


def dearest(fleet: InferenceFleet) -> Money:
    """What a device of a tier that left the spec is taken to cost while it serves on, where nobody remembers its price."""
    return max(price_of(tier) for tier in fleet.spec.tiers)


def left_over(fleet: InferenceFleet, workers: Sequence[Replica], observed: Observed) -> LeftOver:
    """Of these workers. A price was stored with their revision, but not by older operators, nor of a tier that said none: those
    count as the dearest."""
    most, found = dearest(fleet), LeftOver(0, FREE, len(workers))
    for worker in workers:
        price, devices = stored_price(worker, observed), devices_of(worker, observed)
        cost = devices * (most if price is None else price)
        found = replace(found, devices=found.devices + devices, cost=found.cost + cost)
    return found


def devices_of(worker: Replica, observed: Observed) -> int:
    """Of its template, which is stored as long as it has pods. One that somebody deleted says nothing: as many as any worker of
    its role has."""
    template, place = _template(worker, observed), ROLES.index(worker.role)
    if template is not None:
        return template.gpus[place]
    known = [*observed.templates.values(), *(one for stored in observed.stored.values() for one in stored.values())]
    return max((one.gpus[place] for one in known), default=0)


def stored_price(worker: Replica, observed: Observed) -> Money | None:
    """Of one of its devices for an hour, when its revision was stored; None: nobody knows."""
    template = _template(worker, observed)
    return exact(template.price) if template is not None and template.price is not None else None


def _template(worker: Replica, observed: Observed) -> Template | None:
    wanted, pod = observed.templates.get(worker.leader.tier), worker.leader
    stored = observed.stored.get(pod.tier, {}).get(pod.revision)
    return wanted if stored is None and wanted is not None and wanted.revision == pod.revision else stored


def cost_now(price: float, workers: Sequence[Replica], observed: Observed) -> Money | None:
    """What the devices that these workers hold cost an hour: of pods that have a node, whatever they do there. None: of one of
    them nobody knows how many it holds."""
    held = [_held(worker, observed) for worker in workers]
    known = [one for one in held if one is not None]
    return sum(known, FREE) * exact(price) if len(known) == len(held) else None


def cost_left(workers: Sequence[Replica], observed: Observed) -> Money | None:
    """The same of workers whose tiers left the spec, at the prices that were stored; None: one of them is not known."""
    found = FREE
    for worker in workers:
        price, held = stored_price(worker, observed), _held(worker, observed)
        if held is None or (held and price is None):
            return None
        found += held * (price or FREE)
    return found


def may_hold(worker: Replica, observed: Observed) -> bool:
    """Some device, for all that is known."""
    return _held(worker, observed) != 0


def _held(worker: Replica, observed: Observed) -> Fraction | None:
    """Devices; None: its template is gone, and it has a node."""
    if not worker.placed:
        return FREE
    return (
        Fraction(devices_of(worker, observed) * worker.placed, worker.size) if _template(worker, observed) is not None else None
    )

"""Which tiers a cascade has now: one that never served joins it when it serves. Pure.

Routers send what a draft does not answer, and what only the last tier may answer, to one tier and nowhere else. So a spec that
gets a cascade, a larger tier or another name for one must not take those workers out that answer until the new ones do. What was
told to routers is what is remembered: a tier that is in it stays, also while it is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from fleet_operator.cluster.interface import CONFIG_MAP, Object
from fleet_planner.roles import ROLES
from fleet_planner.wanted import Target
from fleet_router import config as router_config
from fleet_router.config import Cascade, RouterConfig
from fleet_wire.endpoints import ROUTER_CONFIG_KEY
from fleet_wire.unreadable import UNREADABLE


def grown_into(
    config: RouterConfig, targets: Sequence[Target], live: Mapping[tuple[str, str], Object], document: str
) -> RouterConfig:
    """`config` with those tiers in its cascade, and without rules that name others. `live`: (kind, name) → object; `document`:
    name of the routers' ConfigMap."""
    if config.cascade is None:
        return config
    tiers = _tiers_now(config.cascade.tiers, _serving(targets), _told(live.get((CONFIG_MAP.kind, document))))
    if tiers == config.cascade.tiers:
        return config
    if len(tiers) < 2:  # one tier alone serves: there is nothing to climb to
        return msgspec.structs.replace(config, cascade=None)
    rules = tuple(rule for rule in config.tier_rules if rule.tier in tiers)
    return msgspec.structs.replace(config, cascade=msgspec.structs.replace(config.cascade, tiers=tiers), tier_rules=rules)


def _tiers_now(wanted: tuple[str, ...], serving: Collection[str], told: Cascade | str | None) -> tuple[str, ...]:
    """`told`: the cascade of now; a word: nothing is known of it."""
    before = told.tiers if isinstance(told, Cascade) else ()
    here = tuple(tier for tier in wanted if tier in before or tier in serving)
    if isinstance(told, str) or not here or here == wanted:
        return wanted
    if any(tier in serving for tier in before if tier not in wanted):  # it left the spec, and serves until others do
        return tuple(tier for tier in before if tier in wanted or tier in serving)
    return here


def _serving(targets: Sequence[Target]) -> frozenset[str]:
    """Tiers of which routers may use workers of both roles."""
    found = {(target.tier, target.role) for target in targets if target.state == "serving"}
    return frozenset(tier for tier, _ in found if all((tier, role) in found for role in ROLES))


def _told(document: Object | None) -> Cascade | str | None:
    text = ((document or {}).get("data") or {}).get(ROUTER_CONFIG_KEY)
    try:
        return router_config.decode(text).cascade if text else "never"
    except UNREADABLE:  # an edit, which is about to be undone
        return "unreadable"

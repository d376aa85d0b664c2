"""Which tier a request should go to: the first rule that fits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet_router.config import TierRule


def tier_of(rules: Sequence[TierRule], tokens: float, headers: Mapping[bytes, bytes]) -> str:
    """Name of the tier, empty when no rule fits. `headers` by lower-case name."""
    for rule in rules:
        if rule.tokens_lt is not None and tokens >= rule.tokens_lt:
            continue
        if rule.tokens_ge is not None and tokens < rule.tokens_ge:
            continue
        if all(headers.get(name.encode()) == value.encode() for name, value in rule.headers.items()):
            return rule.tier
    return ""

"""What a request says of itself besides its prompt, as far as routing goes by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleet_router.asked import Hints
from fleet_router.config import RouterConfig, SloClass

MOST_PATIENCE: Final = 30.0
FORWARDED: Final = (b"x-forwarded-for", b"forwarded", b"via")
"""Headers of what did not come from its sender itself."""
ALWAYS: Final = frozenset({b"traceparent", b"tracestate", b"x-fleet-explain", *FORWARDED})
"""Headers that are kept for tracing and for who asks to see decisions."""


NO_HINTS: Final = Hints()


def wanted_headers(config: RouterConfig) -> frozenset[bytes]:
    """Headers to keep, by lower-case name."""
    names = {name for rule in config.tier_rules for name in rule.headers}
    return ALWAYS | {name.encode() for name in (*names, config.session_header) if name}


def hints_of(config: RouterConfig, slo_class: SloClass, kept: Mapping[bytes, bytes]) -> Hints:
    """Of one request. A class that may wait N times as long for its first token counts the time of others N times."""
    if not kept and slo_class.ttft_budget_s == config.ttft_budget_s:
        return NO_HINTS
    patience = min(MOST_PATIENCE, max(1 / MOST_PATIENCE, slo_class.ttft_budget_s / config.ttft_budget_s))
    return Hints(session=kept.get(config.session_header.encode(), b""), headers=kept, others=patience)

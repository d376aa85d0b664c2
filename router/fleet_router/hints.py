"""What a request says of itself besides its prompt, as far as routing goes by it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from fleet_router.ask import Hints
from fleet_router.config import RouterConfig, SloClass

MOST_PATIENCE: Final = 30.0
FORWARDED: Final = (b"x-forwarded-for", b"forwarded", b"via")
"""Headers of what did not come from its sender itself."""
ALWAYS: Final = frozenset({b"traceparent", b"tracestate", b"x-fleet-explain", *FORWARDED})
"""Headers that are kept for tracing and for who asks to see decisions."""
KEPT_BYTES: Final = 256
"""Of a header's value."""

NO_HINTS: Final = Hints()


def kept_of(name: bytes, value: bytes) -> bytes | None:
    """What is kept of a header that routing may go by: of a long session what tells it from others (no rule names so long a
    value), of one that was forwarded that it was; None: nothing of a trace that is none."""
    if len(value) <= KEPT_BYTES:
        return value
    if name in FORWARDED:
        return b""
    return None if name in ALWAYS else blake2b(value, digest_size=32).digest()


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

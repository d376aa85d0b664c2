"""What a decision comes to, and what the simple policies are asked. Made for every request: plain classes, as in `terms`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet_router.policy.terms import CostAsk, Offer


class SimpleAsk:
    """What these policies need to know about a request. `min_uncached`: prompts that miss fewer tokens on the decode worker are
    prefilled there."""

    __slots__ = ("min_uncached", "ring_key", "tokens", "turn")

    def __init__(self, ring_key: int, tokens: float, min_uncached: float, turn: int) -> None:
        self.ring_key, self.tokens, self.min_uncached, self.turn = ring_key, tokens, min_uncached, turn


class Choice:
    """`prefill` None: the decode worker prefills itself. kvAware alone says `offer`, what it was chosen for, and `ask`: what was
    asked, and who was compared."""

    __slots__ = ("ask", "decode", "offer", "prefill", "reason")

    def __init__(
        self, prefill: str | None, decode: str, reason: str, offer: Offer | None = None, ask: CostAsk | None = None
    ) -> None:
        self.prefill, self.decode, self.reason, self.offer, self.ask = prefill, decode, reason, offer, ask


class Refusal:
    """No worker; `reason` is for the answer and the metric."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

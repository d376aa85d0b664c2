"""What a decision comes to, and what the simple policies are asked.

The Structs that the compiled modules pass around. They are apart because the compiler (mypyc) does not hand a class's keywords to
msgspec: what is declared frozen here would not be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fleet_router.policy.terms import CostAsk, Offer


class Ask(msgspec.Struct, frozen=True):
    """What these policies need to know about a request."""

    ring_key: int
    tokens: float
    min_uncached: float
    """Prompts that miss fewer tokens on the decode worker are prefilled there."""
    turn: int


class Choice(msgspec.Struct, frozen=True):
    """`prefill` None: the decode worker prefills itself."""

    prefill: str | None
    decode: str
    reason: str
    offer: Offer | None = None
    """kvAware: what it was chosen for."""
    ask: CostAsk | None = None
    """kvAware: what was asked, and who was compared."""


class Refusal(msgspec.Struct, frozen=True):
    """No worker; `reason` is for the answer and the metric."""

    reason: str

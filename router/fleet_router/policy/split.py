"""A canary's share of the requests. Pure.

A conversation stays on the side that holds its KV, else the canary would be judged by cold caches that the split itself made;
new conversations go where the share is short. The share holds within half: stickiness yields where it would starve or flood
the canary.
"""

from __future__ import annotations

from typing import Final

SLACK: Final = 0.5
"""How far the share of one side may fall behind or run ahead before KV no longer decides."""


def to_canary(percent: int, seen: int, taken: int, canary_held: float, other_held: float) -> bool:
    """Whether the next request goes to the canary, after `taken` of `seen` requests did. `..._held`: the longest prefix of the
    prompt that some worker of that side holds."""
    due = (seen + 1) * percent / 100
    if taken < due * (1 - SLACK):
        return True
    if taken > due * (1 + SLACK) + 1:
        return False
    if canary_held != other_held:
        return canary_held > other_held
    return taken < due

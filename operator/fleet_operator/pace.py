"""When may a fleet be reconciled again? Pure: every time is passed in.

Three rules. After a pass that could not do everything the next one comes by itself, with a growing delay. When the API could not
answer, events make it come earlier but not at once; when it asked for time they do not. Writes that come to nothing, because they
are refused or because somebody undoes them again and again, are at most VAIN_PER_S in the long run.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.5
MOST_S = 15.0
"""Half of what may pass between the end of an outage and a fleet in order."""
HELD_MOST_S = 1.0
"""The API may refuse one kind of write only: what happens to a fleet meanwhile must reach its router soon."""
ASKED_MOST_S = 60.0
"""The longest Retry-After that is obeyed."""
VAIN_PER_S = 4.0
"""Of five writes a second that one fleet may cost: the rest is for what succeeds meanwhile, its status and events."""
VAIN_BURST = 10.0


@dataclass(slots=True)
class Pace:
    """One fleet's."""

    failures: int = 0
    not_before: float = float("-inf")
    _vain: float = 0.0
    _vain_at: float = float("-inf")

    def after(self, now: float, *, troubled: bool, stopped: bool, vain: int, asked_s: float | None) -> float | None:
        """Seconds until a pass must come by itself; None when none must."""
        delay_s = self._delay(troubled, asked_s)
        self._vain = max(0.0, self._vain - max(0.0, now - self._vain_at) * VAIN_PER_S) + vain
        self._vain_at = now
        # another pass like this one must find room within the burst, or wait until there is: a pass is not cut short
        rest_s = max(0.0, min(self._vain, self._vain + vain - VAIN_BURST)) / VAIN_PER_S
        held_s = max(min(delay_s, HELD_MOST_S), min(asked_s or 0.0, ASKED_MOST_S)) if stopped else 0.0
        self.not_before = now + max(rest_s, held_s)
        return max(delay_s, rest_s) if troubled else None

    def wait_s(self, now: float) -> float:
        """Seconds until a pass may start; 0 when it may. A clock that jumped back makes nobody wait."""
        left_s = self.not_before - now
        return left_s if 0 < left_s <= max(MOST_S, ASKED_MOST_S) else 0.0

    def _delay(self, troubled: bool, asked_s: float | None) -> float:
        if not troubled:
            self.failures = 0
            return 0.0
        self.failures += 1
        growing_s = min(MOST_S, FIRST_S * 2.0 ** min(self.failures - 1, 16))
        return max(growing_s, min(asked_s or 0.0, ASKED_MOST_S))

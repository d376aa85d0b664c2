"""What moving KV between two workers costs, learnt per pair: from the decode leg's start to its first token, over moved tokens.

Tokens stand for bytes: a token's KV has the same size everywhere in a group, so that seconds per token are its bytes divided
by the pair's bandwidth. The first transfer of a pair pays for its handshake. Bounded: the pair that was met first is forgotten
for the next, and is then a new pair again.
"""

from __future__ import annotations

from typing import Final

from fleet_router.policy.estimate import Line, Mean

HAND_OFF_S: Final = 0.01
PER_TOKEN_S: Final = 1e-5
"""Prior: 128 KiB a token at 13 GB/s."""
HANDSHAKE_S: Final = 0.1
TOKENS_SCALE: Final = 1000.0
PAIRS_MOST: Final = 16_384


class Pairs:
    """The pairs of one group."""

    __slots__ = ("_lines", "common", "handshake", "least_base", "least_slope")

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Line] = {}
        self.common = Line(HAND_OFF_S, PER_TOKEN_S, TOKENS_SCALE)
        """All pairs together: what a new one is believed to be."""
        self.handshake = Mean(HANDSHAKE_S)
        self.least_base, self.least_slope = self.common.base, self.common.slope
        """No pair is cheaper than a line of these two."""

    def __len__(self) -> int:
        return len(self._lines)

    def met(self, prefill: str, decode: str) -> bool:
        """KV has moved between the two."""
        return (prefill, decode) in self._lines

    def cost_s(self, prefill: str, decode: str, tokens: float) -> float:
        """Seconds to move the KV of so many tokens, handshake included when the two have never met."""
        line = self._lines.get((prefill, decode))
        if line is None:
            return self.common.at(tokens) + self.handshake.value
        return line.base + line.slope * tokens

    def above_s(self, prefill: str, decode: str, tokens: float) -> float:
        """What it costs above the least of all pairs."""
        line = self._lines.get((prefill, decode))
        first_s = 0.0 if line is not None else self.handshake.value
        line = line or self.common
        return first_s + line.base - self.least_base + (line.slope - self.least_slope) * tokens

    def least_s(self, tokens: float) -> float:
        """No pair is cheaper than this."""
        return self.least_base + self.least_slope * tokens

    def moves_in(self, prefill: str, decode: str, tokens: float) -> tuple[float, float]:
        """Seconds to move so many tokens, without a handshake, and of how many transfers that is known."""
        line = self._lines.get((prefill, decode), self.common)
        return line.base + line.slope * tokens, line.weight

    def observe(self, prefill: str, decode: str, tokens: float, seconds: float) -> None:
        """A decode leg had its first token."""
        line = self._lines.get((prefill, decode))
        if line is None:
            self.handshake.observe(max(0.0, seconds - self.common.at(tokens)))
            self.meet(prefill, decode)
            return
        self.common.observe(tokens, seconds)
        line.observe(tokens, seconds)
        self.least_base = min(self.least_base, line.base, self.common.base)
        self.least_slope = min(self.least_slope, line.slope, self.common.slope)

    def meet(self, prefill: str, decode: str) -> None:
        """KV has moved between them, in a time that nobody knows: the handshake is over."""
        if not self.met(prefill, decode):
            if len(self._lines) >= PAIRS_MOST:
                self._lines.pop(next(iter(self._lines)))
            self._lines[prefill, decode] = Line(self.common.base, self.common.slope, TOKENS_SCALE)

    def forget(self, worker: str) -> None:
        """This worker is gone."""
        for pair in [pair for pair in self._lines if worker in pair]:
            del self._lines[pair]

    def relax(self, keep: float, part: int, parts: int) -> None:
        """Time passes: a pair that was slow once is tried again. Every `parts`-th pair from `part` on: thousands of them at once
        would be felt by the requests."""
        lines = list(self._lines.values())
        for line in lines[part::parts]:
            line.relax(keep, self.common)
        if part == 0:
            self.common.relax(keep)
            self.least_base, self.least_slope = self.common.base, self.common.slope
        changed = lines if part == 0 else lines[part::parts]
        self.least_base = min([self.least_base, *(line.base for line in changed)])
        self.least_slope = min([self.least_slope, *(line.slope for line in changed)])

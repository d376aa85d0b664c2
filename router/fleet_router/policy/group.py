"""Workers between which KV can move, and what is known of them together: one group per tier and compatibility hash."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from fleet_router.policy.candidate import OUTPUT_TOKENS, Candidate, gap_line, prefill_line
from fleet_router.policy.estimate import Line, Mean
from fleet_router.policy.pairs import Pairs
from fleet_router.policy.side import Side

ANSWER_S: Final = 4.0
"""Prior of how long an answer is being written."""
OUTPUT_MOST: Final = 512.0
PACE_FADES: Final = 1.05
"""Every ten seconds: the least that was seen is forgotten."""
SEEN: Final = 0.5
"""With so much weight something was learnt of a role, in the last minute or so."""


class Group:
    """What a decision needs of one group."""

    __slots__ = ("answer", "decode", "gap", "key", "output", "pace_s", "pairs", "prefill", "speed")

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.prefill, self.decode = Side(), Side()
        self.pairs = Pairs()
        self.speed: dict[str, Line] = {"prefill": prefill_line(), "decode": prefill_line()}
        """Prefill by workers of this role: what a new one is believed to do."""
        self.gap = gap_line()
        self.output, self.answer = Mean(OUTPUT_TOKENS), Mean(ANSWER_S)
        self.pace_s = inf
        """The least time per token that an answer which came as a whole took lately, all of its time counted: no token takes
        longer, however long prompts do."""

    def update(self, workers: Sequence[tuple[Candidate, int]]) -> None:
        """These workers, each with its bit in `Steps`."""
        for role, side in (("prefill", self.prefill), ("decode", self.decode)):
            side.update([(worker, bit) for worker, bit in workers if worker.role == role])

    def adopt(self, worker: Candidate) -> None:
        """A worker that was not seen before: what is known of its like is its prior."""
        common = self.speed[worker.role]
        worker.prefill = Line(common.base, common.slope, 1000.0)
        worker.gap = Line(self.gap.base, self.gap.slope, 8.0)
        worker.note_speed()
        self.note_drag(worker)

    def heat_of(self, role: str) -> float:
        """Heat of a worker of this role in the mean. A new one begins with as much: it owes nothing, or every prompt that nobody
        knows, and those whose workers are at their bound, would go to where nothing is cached."""
        side = self.prefill if role == "prefill" else self.decode
        return side.heat / len(side.members) if side.members else 0.0

    def note_drag(self, worker: Candidate) -> None:
        """After the time between tokens, or their number, has changed."""
        worker.drag_s = min(OUTPUT_MOST, self.output.value) * worker.gap.slope

    def answered(self, worker: Candidate, tokens: int, streams: int, gap_s: float, whole_s: float) -> None:
        """A stream of so many tokens ended on a worker that runs so many streams."""
        self.wrote(worker, tokens, whole_s)
        if tokens > 1:
            self.spaced(worker, streams, gap_s)

    def wrote(self, worker: Candidate, tokens: int, whole_s: float) -> None:
        """An answer of so many tokens took so long, its prompt and all."""
        self.output.observe(tokens)
        self.answer.observe(whole_s)
        self.note_drag(worker)

    def spaced(self, worker: Candidate, streams: int, gap_s: float) -> None:
        """Its tokens came so long after each other, on a worker that runs so many streams."""
        worker.gap.observe(streams, gap_s)
        self.gap.observe(streams, gap_s)
        self.note_drag(worker)

    def relax(self, keep: float, part: int, parts: int) -> None:
        """Time passes: what was learnt long ago counts less, so that a worker that was slow once is tried again. See `Pairs`.

        Of decode workers little is learnt where answers come as a whole, and nothing where all prompts are prefilled elsewhere;
        the other side's legs always tell. Both compute on the same accelerators, so decode workers are believed to be as fast
        meanwhile: by a guess of ours they would seem faster than whoever was seen to work, and get every prompt.
        """
        self.pairs.relax(keep, part, parts)
        if part == 0:
            prefill, decode = self.speed["prefill"], self.speed["decode"]
            prefill.relax(keep)
            decode.relax(keep, prefill if decode.weight < SEEN <= prefill.weight else None)
            self.gap.relax(keep)
            self.pace_s *= PACE_FADES
        for worker in [*self.prefill.members, *self.decode.members][part::parts]:
            worker.prefill.relax(keep, self.speed[worker.role])
            worker.gap.relax(keep, self.gap)
            worker.note_speed()
            self.note_drag(worker)

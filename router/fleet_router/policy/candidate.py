"""A worker as routing sees it: its load, its queue and its speed, learnt from the answers that pass through this router.

Every router learns from its own requests alone. Of the work that others send it counts what they tell (see `gossip`); what
they do not tell shows up as a slower worker, which is what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from fleet_router.policy.estimate import Line
from fleet_router.policy.terms import Prefilling

if TYPE_CHECKING:
    from fleet_router.policy.side import Side

PREFILL_BASE_S: Final = 0.01
PREFILL_PER_TOKEN_S: Final = 1e-4
"""Prior of a worker's prefill: 10,000 tokens/s, between a small GPU and the CPU engine; a few answers replace it."""
GAP_BASE_S: Final = 0.02
GAP_PER_STREAM_S: Final = 2e-4
"""Prior of the time between two tokens, over the streams that run."""
MOST_LATE_S: Final = 30.0
MOST_AT_ONCE: Final = 256
"""Prefills that another router may have sent between two things that it says, a few times a second."""
TOKENS_SCALE: Final = 1000.0
STREAMS_SCALE: Final = 8.0
CROWD_S: Final = 20.0
"""Arrivals are counted over about this long."""
OUTPUT_TOKENS: Final = 128.0
"""Prior of the length of an answer."""


def prefill_line() -> Line:
    """Seconds of a prefill over its uncached tokens."""
    return Line(PREFILL_BASE_S, PREFILL_PER_TOKEN_S, TOKENS_SCALE)


def gap_line() -> Line:
    """Seconds between two tokens over running streams."""
    return Line(GAP_BASE_S, GAP_PER_STREAM_S, STREAMS_SCALE)


@dataclass(eq=False)
class Candidate:
    """One worker. `free_at`, and every time here, is on the clock that the caller passes."""

    uid: str
    role: str
    group: tuple[str, str]
    """(tier, compatibility hash): KV moves only inside a group."""
    inflight: int
    """Legs that run here, those of other routers as far as they say. Changed by `began`, `ended` and `elsewhere` alone."""
    slots: int = 0
    """Requests that its engine runs at once; 0: not known."""
    prefill: Line = field(default_factory=prefill_line)
    gap: Line = field(default_factory=gap_line)
    base_s: float = PREFILL_BASE_S
    token_s: float = PREFILL_PER_TOKEN_S
    """What `prefill` says, one look-up nearer."""
    free_at: float = 0.0
    """When the prefills that were sent here will be done."""
    pending: int = 0
    """Prefills that were sent and not seen done."""
    late_s: float = 0.0
    """How much later than expected everything here was, summed up."""
    done_at: float = 0.0
    """When the last prefill was done."""
    inferred_at: float = 0.0
    inferred: tuple[int, int] = (0, 0)
    """The same as whole answers let us infer it; which prefill that was (of `sent_prefills`), and the tokens behind it."""
    crowd: float = 0.0
    """Half of the prefills per second that come here: work of S seconds makes those wait crowd x S² that come meanwhile."""
    heat: float = 0.0
    """Tokens that it was sent to compute lately."""
    drag_s: float = 0.0
    """What one more stream costs here per stream that runs: output tokens x seconds that each of them comes later."""
    share: float = 1.0
    """Slow start: share of the load that it may have yet."""
    adapters: dict[str, None] = field(default_factory=dict)
    """Adapters that it was sent lately, oldest first: these are loaded."""
    home: Side | None = None
    bit: int = 0
    """Its place in `side.Steps`."""
    others: int = 0
    """Legs of other routers; part of `inflight`."""
    others_pending: int = 0
    """Their prefills that are not seen done."""
    sent_prefills: int = 0
    sent_tokens: float = 0.0
    """What this router ever sent here: prefills and their uncached tokens."""

    @property
    def own(self) -> int:
        """Legs of this router."""
        return self.inflight - self.others

    def began(self) -> None:
        """A leg begins here."""
        if (home := self.home) is not None:
            home.inflight += 1
            if home.large:
                home.moved(self, 1)
        self.inflight += 1

    def ended(self) -> None:
        """A leg is over."""
        if (home := self.home) is not None:
            home.inflight -= 1
            if home.large:
                home.moved(self, -1)
        self.inflight -= 1

    def elsewhere(self, inflight: int, pending: int, now: float) -> None:
        """What other routers have here now."""
        by, self.others, self.others_pending = inflight - self.others, inflight, pending
        if by:
            if self.home is not None:
                self.home.inflight += by
                if self.home.large:
                    self.home.shifted(self, by)
            self.inflight += by
        if not pending and self.pending <= 0:
            self.free_at = min(self.free_at, now)

    def sent_elsewhere(self, prefills: int, tokens: int, now: float) -> None:
        """Others have sent so much since they said it last: it waits in the same queue, bounded because nobody sees it done, and
        because one of them may say what nobody can have sent."""
        if self.token_s * tokens > MOST_LATE_S:
            tokens = int(MOST_LATE_S / self.token_s)
        prefills = min(prefills, MOST_AT_ONCE)
        self.crowd += prefills * 0.5 / CROWD_S
        self.heat += tokens
        if self.home is not None:
            self.home.heat += tokens
            self.home.squares += tokens * tokens / max(1, prefills)
        self.free_at = min(max(self.free_at, now) + self.token_s * tokens, max(self.free_at, now + MOST_LATE_S))

    def note_speed(self) -> None:
        """After `prefill` has learnt."""
        self.base_s, self.token_s = self.prefill.base, self.prefill.slope


def prefill_sent(worker: Candidate, tokens: float, now: float) -> Prefilling:
    """A prefill of `tokens` uncached tokens goes to this worker. Its tokens join the queue; the fixed part of its time does not:
    an engine computes many short prompts in one step."""
    begins = worker.free_at if worker.free_at > now else now
    worker.free_at = begins + worker.token_s * tokens
    worker.heat += tokens
    if worker.home is not None:
        worker.home.heat += tokens
        worker.home.squares += tokens * tokens
    worker.pending += 1
    worker.sent_prefills += 1
    worker.sent_tokens += tokens
    worker.crowd += 0.5 / CROWD_S
    return Prefilling(worker, tokens, now, begins - worker.late_s, worker.free_at + worker.base_s - worker.late_s)


def prefill_done(one: Prefilling, now: float, *, learn: bool) -> float | None:
    """Its first token came, or it ended without (`learn` False). Corrects the queue by how late it was; the seconds that it took
    once the worker was at it, None when nothing was learnt."""
    worker = one.worker
    worker.pending -= 1
    took_s = None
    if learn:
        # it began when those before it were done: as expected, but surely when the last one was seen done
        began = one.begins + worker.late_s
        began = began if began < worker.done_at else worker.done_at
        began = began if began > one.sent_at else one.sent_at
        took_s = now - began if now > began else 0.0
        _learn_prefill(one, took_s, now)
        worker.done_at = now
    if worker.pending + worker.others_pending <= 0:
        worker.free_at = now
    return took_s


def prefill_inferred(one: Prefilling, now: float, began: float, first_at: float) -> float:
    """The whole answer came at `now`, and its prompt is believed to have been computed from `began` to `first_at`, or longer. The
    seconds that it took."""
    worker, took_s = one.worker, first_at - began if first_at > began else 0.0
    worker.pending -= 1
    _learn_prefill(one, took_s, first_at)
    if worker.pending + worker.others_pending <= 0:
        worker.free_at = now
    return took_s


def _learn_prefill(one: Prefilling, took_s: float, over_at: float) -> None:
    """How fast the worker is, and how late everything there."""
    worker = one.worker
    worker.prefill.observe(one.tokens, took_s)
    worker.note_speed()
    late = over_at - (one.due + worker.late_s)
    late = late if late < MOST_LATE_S else MOST_LATE_S
    worker.late_s += late
    worker.free_at += late

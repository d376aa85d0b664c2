"""A request on its way: what was expected of its legs, and what is learnt when they are done. Pure; every call passes `now`."""

from __future__ import annotations

from typing import Final

from fleet_router.kvindex.underway import Underway
from fleet_router.policy.candidate import Candidate, prefill_done, prefill_inferred, prefill_sent
from fleet_router.policy.group import Group
from fleet_router.policy.terms import Offer, Prefilling

ADAPTERS_MOST: Final = 16
WHOLE_TOKENS_LEAST: Final = 32
"""An answer that comes as a whole tells of the time between its tokens when it has so many."""
GUESSED_MOST: Final = 0.25
"""And when so little of its time went to what is not measured: the prompt, or the KV on its way."""
DOUBT: Final = 10.0
"""Of that, little was seen yet: it may take so many times what is believed."""
DISTURBED_MOST: Final = 0.25
"""And when prompts of so many tokens, at most, for each of its own came there after it: what is computed for them makes its own
tokens late."""
KNOWN: Final = 8.0
"""With so much weight a guess of ours is a ninth of what is believed."""
FASTEST_S: Final = 1e-4
"""No engine writes a sequence faster than so much a token: what says so had its answer already, or lies."""
WRITING_MOST: Final = 0.5
"""It tells of its prompt's prefill when so much of its time, at most, went to its tokens."""


class Trip:
    """The legs of one attempt. `stream` False: an answer that comes as a whole tells nothing about first tokens by itself;
    `learns_whole`: its length and its time are to be told (`whole`). `underway`: where the prompt with these `keys` is noted
    until it is computed; None: whoever computes it is not known by its KV events."""

    __slots__ = (
        "_alone", "_first_at", "_full", "_group", "_hedge", "_keys", "_number", "_offer", "_prefilling", "_quiet", "_sent_at",
        "_sent_tokens", "_stream", "_underway", "learns_whole",
    )  # fmt: skip

    def __init__(
        self, group: Group, offer: Offer, now: float, *, stream: bool, adapter: str = "", learns_whole: bool = False,
        underway: Underway | None = None, keys: list[int] | None = None,
    ) -> None:  # fmt: skip
        self._group, self._offer, self._stream = group, offer, stream
        self.learns_whole = learns_whole and not stream
        first = offer.prefill or offer.decode
        self._underway, self._keys = underway, keys or []
        if underway is not None and not underway.sent(self._keys, first.bit):
            self._underway = None
        self._prefilling: Prefilling | None = prefill_sent(first, offer.missing, now)
        self._hedge: Prefilling | None = None
        self._sent_at, self._first_at = now, 0.0
        self._number, self._sent_tokens, self._alone, self._quiet = 0, 0.0, False, False
        """Which of the worker's prefills it is, and the tokens sent there so far; no other one is there, or all are expected to
        be done."""
        if self.learns_whole:
            self._number, self._sent_tokens = first.sent_prefills, first.sent_tokens
            self._alone = first.pending + first.others_pending <= 1
            self._quiet = self._prefilling.begins + first.late_s <= now
        self._full = (stream or self.learns_whole) and is_full(offer.decode)
        if adapter:
            for worker in {first, offer.decode}:
                worker.adapters.pop(adapter, None)
                worker.adapters[adapter] = None
                if len(worker.adapters) > ADAPTERS_MOST:
                    worker.adapters.pop(next(iter(worker.adapters)))

    def prefilled(self, now: float) -> None:
        """The prefill leg answered, and the decode leg is sent."""
        self._prefill_over(now, learn=True)
        self._sent_at = now
        self._full = (self._stream or self.learns_whole) and is_full(self._offer.decode)

    def first_token(self, now: float) -> None:
        """The first bytes of the answer."""
        self._first_at = now
        offer = self._offer
        if self.learns_whole:
            return  # its last one, too: see `whole`
        if offer.prefill is None:
            self._prefill_over(now, learn=self._stream and not self._full)
        elif self._stream and not self._full:
            self._group.pairs.observe(offer.prefill.uid, offer.decode.uid, offer.moved, now - self._sent_at)

    def ended(self, now: float, tokens: int) -> None:
        """The answer is whole: so many tokens came, one write each. Called while the worker still counts this stream."""
        if self._stream and tokens > 1 and self._first_at:
            worker = self._offer.decode
            gap_s = (now - self._first_at) / (tokens - 1)
            self._group.answered(worker, tokens, worker.inflight, gap_s, now - self._sent_at)

    def whole(self, now: float, tokens: int, worker: Candidate) -> None:
        """An answer of so many tokens came as a whole from this worker. Its time is that of its prompt (or of the KV's way) and
        of its tokens together: each is learnt where the other is known, or so little that a wrong guess does no harm."""
        offer, took_s = self._offer, now - self._sent_at
        if tokens < 1 or took_s <= 0.0 or worker is not offer.decode or took_s < (tokens - 1) * FASTEST_S:
            return
        self._group.wrote(worker, tokens, took_s)
        if self._full:
            return
        if tokens > 1:
            self._group.pace_s = min(self._group.pace_s, took_s / (tokens - 1))
        if offer.prefill is None:
            self._whole_here(worker, now, tokens - 1, took_s)
        elif tokens == 1:
            self._group.pairs.observe(offer.prefill.uid, worker.uid, offer.moved, took_s)
        else:
            self._group.pairs.meet(offer.prefill.uid, worker.uid)
            moved_s, weight = self._group.pairs.moves_in(offer.prefill.uid, worker.uid, offer.moved)
            self._learn_gap(worker, tokens - 1, took_s, moved_s, moved_s if weight >= KNOWN else moved_s * DOUBT)

    def _whole_here(self, worker: Candidate, now: float, gaps: int, took_s: float) -> None:
        """The decode worker computed the prompt, too. Its first token is known where the time of tokens was seen; else it was no
        earlier than `pace_s` says. When the prompt was begun is known where none waited there, and behind one of which the same
        was inferred, and that had no more tokens."""
        one, group, sent_at = self._prefilling, self._group, self._sent_at
        if one is None:
            return
        seen, first_s = worker.gap.weight >= KNOWN, one.due + worker.late_s - sent_at
        self._learn_gap(worker, gaps, took_s, first_s, first_s if worker.prefill.weight >= KNOWN else first_s * DOUBT)
        writing_s = gaps * (worker.gap.at(worker.inflight) if seen else group.pace_s) if gaps else 0.0
        (number, behind), before_at, first_at = worker.inferred, worker.inferred_at, max(sent_at, now - writing_s)
        worker.inferred, worker.inferred_at = (self._number, gaps), max(before_at, first_at)
        alone, follows = self._alone or (seen and self._quiet), number == self._number - 1 and behind <= gaps
        disturbed = worker.sent_tokens - self._sent_tokens > DISTURBED_MOST * one.tokens
        if writing_s <= WRITING_MOST * took_s and (alone or follows) and not disturbed:
            self._prefilling = None
            self._computed(worker)
            began = sent_at if alone or before_at < sent_at else before_at
            group.speed[worker.role].observe(one.tokens, prefill_inferred(one, now, began, first_at))

    def _learn_gap(self, worker: Candidate, gaps: int, took_s: float, before_s: float, most_s: float) -> None:
        """`before_s`: what is believed to have passed before its first token, `most_s`: at most."""
        if gaps >= WHOLE_TOKENS_LEAST and most_s <= GUESSED_MOST * took_s:
            self._group.spaced(worker, worker.inflight, (took_s - before_s) / gaps)

    def expected_s(self, now: float) -> float:
        """How long its prefill is expected to take from now on."""
        one = self._prefilling
        return 0.0 if one is None else max(0.0, one.due + one.worker.late_s - now)

    def hedged(self, worker: Candidate, missing: float, now: float) -> float:
        """A second worker was sent the prompt, of which it lacks so many tokens. How long that is expected to take."""
        self._hedge = one = prefill_sent(worker, missing, now)
        return max(0.0, one.due + worker.late_s - now)

    def overtaken(self, *, second: bool) -> Prefilling | None:
        """That leg runs on without the request: what was expected of it is ended by whoever has it now."""
        if second:
            one, self._hedge = self._hedge, None
            return one
        one, self._prefilling = self._prefilling, None
        if one is not None:
            self._computed(one.worker)
        return one

    def hedge_over(self, now: float, *, won: bool) -> None:
        """It answers, or is waited for alone (`won`); or it is given up. Of the other one nothing is learnt."""
        one, self._hedge = self._hedge, None
        if one is None:
            return
        if not won:
            prefill_done(one, now, learn=False)
            return
        self._prefill_over(now, learn=False)
        self._prefilling, offer = one, self._offer
        self._offer = Offer(offer.cost_s, one.worker, offer.decode, one.tokens, offer.moved, offer.reason, offer.looked)

    def over(self, now: float) -> None:
        """However it ended: it waits in no queue any more."""
        self._prefill_over(now, learn=False)

    def _computed(self, worker: Candidate) -> None:
        """No event is to be waited for: its prompt is there, or will not be. Once: of a second worker nothing is noted."""
        underway, self._underway = self._underway, None
        if underway is not None and worker.home is not None:  # else its bit may be another's
            underway.over(self._keys, worker.bit)

    def _prefill_over(self, now: float, *, learn: bool) -> None:
        one, self._prefilling = self._prefilling, None
        if one is None:
            return
        self._computed(one.worker)
        took_s = prefill_done(one, now, learn=learn)
        if took_s is not None:
            self._group.speed[one.worker.role].observe(one.tokens, took_s)


def is_full(worker: Candidate) -> bool:
    """Its engine has no slot left: a wait would be taken for its speed."""
    return 0 < worker.slots <= worker.inflight

"""A request on its way: what was expected of its legs, and what is learnt when they are done. Pure; every call passes `now`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fleet_router.kvindex.underway import Underway
from fleet_router.policy.candidate import Candidate, prefill_done, prefill_sent
from fleet_router.policy.group import Group
from fleet_router.policy.terms import Offer, Prefilling

ADAPTERS_MOST: Final = 16


class Trip:
    """The legs of one attempt. `stream` False: an answer that comes as a whole tells nothing about first tokens. `underway`:
    where the prompt with these `keys` is noted until it is computed; None: whoever computes it is not known by its KV events."""

    __slots__ = ("_first_at", "_full", "_group", "_keys", "_offer", "_prefilling", "_sent_at", "_stream", "_underway")

    def __init__(
        self, group: Group, offer: Offer, now: float, *, stream: bool, adapter: str = "", underway: Underway | None = None,
        keys: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._group, self._offer, self._stream = group, offer, stream
        first = offer.prefill or offer.decode
        self._underway, self._keys = underway, keys
        if underway is not None and not underway.sent(keys, first.bit):
            self._underway = None
        self._prefilling: Prefilling | None = prefill_sent(first, offer.missing, now)
        self._sent_at, self._first_at = now, 0.0
        self._full = stream and _full(offer.decode)
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
        self._full = self._stream and _full(self._offer.decode)

    def first_token(self, now: float) -> None:
        """The first bytes of the answer."""
        self._first_at = now
        offer = self._offer
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

    def over(self, now: float) -> None:
        """However it ended: it waits in no queue any more."""
        self._prefill_over(now, learn=False)

    def _prefill_over(self, now: float, *, learn: bool) -> None:
        one, self._prefilling = self._prefilling, None
        if one is None:
            return
        if self._underway is not None and one.worker.home is not None:  # else its bit may be another's
            self._underway.over(self._keys, one.worker.bit)
        took_s = prefill_done(one, now, learn=learn)
        if took_s is not None:
            self._group.speed[one.worker.role].observe(one.tokens, took_s)


def _full(worker: Candidate) -> bool:
    """Its engine has no slot left: a wait would be taken for its speed."""
    return 0 < worker.slots <= worker.inflight

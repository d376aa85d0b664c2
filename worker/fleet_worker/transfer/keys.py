"""What every proof by the fleet's key needs (`fleet_wire.peerkey`): the keys of now for one purpose, numbers that count once, and
refusals that are counted. Used by `trust.py` (hot prefixes) and `handoff.py` (greetings), each in the transfer thread alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from fleet_wire.keyfile import KeyFile
from fleet_wire.peerkey import MOST_KEYS, derived

NONCE_BYTES: Final = 16
MOST_NONCES: Final = 8_192
"""Numbers that are remembered, each of a message that was proven: who has no key fills nothing."""
LOOK_S: Final = 2.0
SPREAD_S: Final = 180.0
"""Kubelets bring what a Secret says to all pods within a minute or two."""
LOG = logging.getLogger("fleet.worker.transfer")


def overlapping(
    before: Mapping[bytes, float], lines: tuple[bytes, ...], replaced_at: float, now: float, spread_s: float
) -> tuple[bytes, ...]:
    """Keys in force after `lines` took the place of others all at once at `replaced_at`, as those of a Secret that is deleted and
    made anew do: the steps of a rotation, by the clock. Nobody signs with the next one before all can have it, and each of those
    `before` is accepted until its own time is over, however often it is replaced anew."""
    old = tuple(key for key, until in before.items() if now < until)
    both = (*old, *lines) if now - replaced_at < spread_s else (*lines, *old)
    return tuple(dict.fromkeys(both))


class Keys:
    """The lines of one file, derived for one purpose. `path` None: this worker was given no file. `spread_s`: how long it takes
    to bring others to all pods, where that is to be waited for."""

    def __init__(
        self,
        path: Path | None,
        scope: str,
        purpose: str,
        clock: Callable[[], float] = time.monotonic,
        spread_s: float = 0.0,
    ) -> None:
        self._file = None if path is None else KeyFile(path)
        self._scope, self._purpose, self._clock, self._spread_s = scope, purpose, clock, spread_s
        self._keys: tuple[bytes, ...] = ()
        self._used: tuple[bytes, ...] = ()
        """What they are derived of."""
        self._lines: tuple[bytes, ...] = ()
        """Of the file."""
        self._before: dict[bytes, float] = {}
        """Those that were used when lines came of which none was known, and until when each is accepted."""
        self._replaced_at = float("-inf")
        self._looked_at = float("-inf")
        self.since = float("inf")
        """When the first key came, by `clock`; -inf: the first look found one; inf: none has come."""

    def current(self) -> tuple[bytes, ...]:
        """The first one signs; empty: none. The file is looked at every 2 s at most."""
        now = self._clock()
        if self._file is not None and now - self._looked_at >= LOOK_S:
            is_first, self._looked_at = self._looked_at == float("-inf"), now
            if problem := self._file.look():
                LOG.warning("the key that the fleet's workers share (%s, for %s): %s", self._file.path, self._purpose, problem)
            if self._file.keys is not self._lines:
                self._replace(self._file.keys, now)
                self.since = min(self.since, float("-inf") if is_first else now)
            self._use(overlapping(self._before, self._lines, self._replaced_at, now, self._spread_s))
        return self._keys

    def _replace(self, lines: tuple[bytes, ...], now: float) -> None:
        if self._lines and self._spread_s and not set(lines) & set(self._lines):
            until = {key: now + 2 * self._spread_s for key in self._lines}
            kept = [(key, until.get(key, self._before.get(key, now))) for key in self._used]
            latest = sorted(kept, key=lambda one: -one[1])[: MOST_KEYS - 1]
            self._before, self._replaced_at = dict(one for one in kept if one in latest), now
            words = (
                "the key that the fleet's workers share (for %s) was replaced all at once: the one before signs for %.0f s more"
            )
            LOG.warning(words, self._purpose, self._spread_s)
        self._lines = lines

    def _use(self, lines: tuple[bytes, ...]) -> None:
        if lines != self._used:
            self._used, self._keys = lines, derived(lines, self._purpose, self._scope)


class Once:
    """Numbers that nobody may use again, and until when, in the order of their coming. At most MOST_NONCES."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._swept_at = clock, float("-inf")
        self._until_ms: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_ms)

    def take(self, nonce: bytes, now_ms: int, until_ms: int) -> str:
        """Empty: it is remembered until then; `again`: it was used; `full`: nothing more can be remembered now. Numbers whose
        time is over are forgotten; a clock that is set back keeps them, and they keep their place before newer ones: these are
        looked through, too, once there is no room."""
        while self._until_ms and next(iter(self._until_ms.values())) < now_ms:
            self._until_ms.popitem(last=False)
        if nonce in self._until_ms:
            return "again"
        if len(self._until_ms) >= MOST_NONCES and not self._has_room(now_ms):
            return "full"
        self._until_ms[nonce] = until_ms
        return ""

    def _has_room(self, now_ms: int) -> bool:
        """After a look through all of them, every 2 s at most: who has the key and asks without end costs no more."""
        now = self._clock()
        if now - self._swept_at >= LOOK_S:
            self._swept_at = now
            self._until_ms = OrderedDict((nonce, until) for nonce, until in self._until_ms.items() if until >= now_ms)
        return len(self._until_ms) < MOST_NONCES


class Refusals(Counter[str]):
    """By reason. Written by one thread, read by others."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        self._topic = topic

    def count(self, why: str, words: str) -> None:
        """Said for the 1st, 2nd, 4th, 8th... of a reason: whoever tries does not fill the disk."""
        self[why] += 1
        count = self[why]
        if count & (count - 1) == 0:
            LOG.warning("%s: refused: %s, %d so far", self._topic, words, count)


def place(host: str, port: int) -> str:
    """One spelling of a worker's address, whatever form it was given in."""
    bare = host.strip("[]")
    try:
        bare = ip_address(bare).compressed
    except ValueError:
        bare = bare.lower()
    return f"{bare}|{port}"

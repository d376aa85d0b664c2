"""What every proof by the fleet's key needs (`fleet_wire.peerkey`): the keys of now for one purpose, numbers that count once, and
refusals that are counted. Used by `trust.py` (hot prefixes) and `handoff.py` (greetings), each in the transfer thread alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from fleet_wire.keyfile import KeyFile
from fleet_wire.peerkey import derived

NONCE_BYTES: Final = 16
MOST_NONCES: Final = 8_192
"""Numbers that are remembered, each of a message that was proven: who has no key fills nothing."""
LOOK_S: Final = 2.0
LOG = logging.getLogger("fleet.worker.transfer")


class Keys:
    """The lines of one file, derived for one purpose. `path` None: this worker was given no file."""

    def __init__(self, path: Path | None, scope: str, purpose: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = None if path is None else KeyFile(path)
        self._scope, self._purpose, self._clock = scope, purpose, clock
        self._keys: tuple[bytes, ...] = ()
        self._lines: tuple[bytes, ...] = ()
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
                self._lines = self._file.keys
                self._keys = derived(self._lines, self._purpose, self._scope)
                self.since = min(self.since, float("-inf") if is_first else now)
        return self._keys


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

"""What was found to be as wished, so that it is not compared again while neither side changes.

Most passes follow an event about one pod, and find a dozen other objects as they were: the same wish, rendered anew, and the very
same object of the cache, which never changes in place. Comparing those field by field, and hashing the wish for its stamp, took
about a sixth of a pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

import msgspec

from fleet_operator.cluster.interface import Object
from fleet_operator.fleet_telling import Words
from fleet_operator.in_order import InOrder
from fleet_operator.peer_keys import KeyMemory

Name = tuple[str, str]
"""(kind, name)"""
_ENCODER = msgspec.json.Encoder()


class Settled:
    """Of one fleet. All of it may be lost: then it is compared once more."""

    def __init__(self) -> None:
        self._found: dict[Name, tuple[bytes, Object]] = {}
        self.all = InOrder()
        self.words = Words()
        self.key = KeyMemory()

    def holds(self, digest: bytes, name: Name, live: Object | None) -> bool:
        """Whether this object was found to be as the wish of this digest says."""
        known = self._found.get(name)
        return known is not None and known[1] is live and known[0] == digest

    def remember(self, digest: bytes, name: Name, live: Object) -> None:
        """It was."""
        self._found[name] = (digest, live)

    def keep(self, names: Container[Name]) -> None:
        """Forget all others: their objects are gone."""
        for name in [name for name in self._found if name not in names]:
            del self._found[name]


def digest_of(wish: Object) -> bytes:
    """Of a wish before its stamp. Another order of its fields is another digest: that costs a comparison."""
    return hashlib.blake2b(_ENCODER.encode(wish), digest_size=16).digest()

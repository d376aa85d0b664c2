"""What to say next: rows that changed, everything once a second, new prefixes. Datagrams of bounded size and number. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from typing import Final

import msgspec

from fleet_router.gossip.message import DATAGRAM_BYTES, MAC_BYTES, MOST_KEYS, Hint, Load, Message, Use

REFRESH_S: Final = 1.0
HINT_AGAIN_S: Final = 5.0
"""The same prefix at the same worker is not told again sooner."""
MOST_HINTS_KNOWN: Final = 16_384
MOST_DATAGRAMS: Final = 24
"""In one round. What does not fit waits for the next one, and hints are dropped."""
LOAD_BYTES: Final = 9 + 5 + 5 + 9 + 9 + 1
USE_BYTES: Final = 9 + 5 + 9 + 9 + 1
MOST_USES: Final = MOST_DATAGRAMS * (DATAGRAM_BYTES // USE_BYTES)
"""No more fit into a round."""
KEY_BYTES: Final = 9
HEAD_BYTES: Final = MAC_BYTES + 1 + 1 + 4 * 9 + 3 * 3

MOST_LOADS: Final = 3 * MOST_DATAGRAMS // 4 * ((DATAGRAM_BYTES - HEAD_BYTES) // LOAD_BYTES)
"""In a round in which there is something to say of tenants as well: of a thousand workers all may have changed since the last."""

Row = Load | Use | Hint


class Report:
    """Remembers what was said. `sender`: this process's number, unlike any other's."""

    def __init__(self, sender: int, began: float) -> None:
        self.sender = sender
        self._began = began
        self._number = 0
        self._loads: dict[int, tuple[Load, float]] = {}
        self._uses: dict[int, tuple[Use, float]] = {}
        """Those that were said longest ago first."""
        self._later: dict[int, Use] = {}
        """What is another than was said, or was never said."""
        self._hints: dict[tuple[int, int], float] = {}
        """(worker, last key) → when it was told; the oldest first."""
        self._spoke_at = -REFRESH_S

    def next(self, loads: Iterable[Load], uses: Iterable[Use], hints: Iterable[Hint], now: float, stamp_ms: int) -> list[Message]:
        """The datagrams of this round; none when there is nothing new, but one a second anyhow. `uses`: of every tenant that has
        changed since the last round, others do no harm."""
        of_workers, of_tenants = self._loads_to_say(loads, now), self._uses_to_say(uses, now)
        said: list[Row] = [*(of_workers[:MOST_LOADS] if of_tenants else of_workers), *of_tenants]
        said += [hint for hint in hints if self._is_new_hint(hint, now)]
        if not said and now - self._spoke_at < REFRESH_S:
            return []
        self._spoke_at = now
        out = []
        for part in islice(_packed(said), MOST_DATAGRAMS):
            self._note(part, now)
            out.append(self._message(part, now, stamp_ms))
        return out

    def _loads_to_say(self, loads: Iterable[Load], now: float) -> list[Load]:
        """Where not all may fit into a round, who was spoken of longest ago first."""
        found = [row for row in loads if self._is_news(row, now)]
        if len(found) > MOST_LOADS:
            never = (None, float("-inf"))
            found.sort(key=lambda row: self._loads.get(row.worker, never)[1])
        return found

    def _is_news(self, row: Load, now: float) -> bool:
        before = self._loads.get(row.worker)
        if before is None:
            return any(msgspec.structs.astuple(row)[1:])
        return before[0] != row or now - before[1] >= REFRESH_S

    def _uses_to_say(self, uses: Iterable[Use], now: float) -> list[Use]:
        """Who was never spoken of, then who was spoken of longest ago: where not all fit into a round it is everybody's turn."""
        for row in uses:
            before = self._uses.get(row.tenant)
            if before[0] == row if before is not None else not (row.inflight or row.requests or row.tokens):
                self._later.pop(row.tenant, None)
            else:
                self._later[row.tenant] = row
        told = self._uses
        fresh = (row for name, row in self._later.items() if name not in told)
        due = takewhile(lambda one: now - one[1][1] >= REFRESH_S, told.items())
        again = (self._later.get(name, row) for name, (row, _) in due)
        others = (row for name, row in self._later.items() if name in told and now - told[name][1] < REFRESH_S)
        return list(islice(chain(fresh, again, others), MOST_USES))

    def _is_new_hint(self, hint: Hint, now: float) -> bool:
        told_at = self._hints.get((hint.worker, hint.keys[-1]))
        return told_at is None or now - told_at >= HINT_AGAIN_S

    def _note(self, part: list[Row], now: float) -> None:
        for row in part:
            if isinstance(row, Load):
                self._loads[row.worker] = (row, now)
            elif isinstance(row, Use):
                self._uses.pop(row.tenant, None)
                self._uses[row.tenant] = (row, now)
                self._later.pop(row.tenant, None)
            else:
                self._hints.pop((row.worker, row.keys[-1]), None)
                self._hints[row.worker, row.keys[-1]] = now
                if len(self._hints) > MOST_HINTS_KNOWN:
                    del self._hints[next(iter(self._hints))]

    def _message(self, part: list[Row], now: float, stamp_ms: int) -> Message:
        self._number += 1
        return Message(
            1, self.sender, self._number, stamp_ms, int((now - self._began) * 1000),
            tuple(row for row in part if isinstance(row, Load)),
            tuple(row for row in part if isinstance(row, Use)),
            tuple(row for row in part if isinstance(row, Hint)),
        )  # fmt: skip

    @property
    def told(self) -> Mapping[int, object]:
        """Workers of which something was ever said."""
        return self._loads

    def forget(self, workers: set[int], tenants: set[int]) -> None:
        """Only these exist still."""
        self._loads = {name: row for name, row in self._loads.items() if name in workers}
        self._uses = {name: row for name, row in self._uses.items() if name in tenants}
        self._later = {name: row for name, row in self._later.items() if name in tenants}


def hint_of(worker: int, keys: Sequence[int]) -> Hint:
    """As much of a prompt as one datagram takes."""
    return Hint(worker, tuple(keys[:MOST_KEYS]))


def _bytes_of(row: Row) -> int:
    if isinstance(row, Hint):
        return KEY_BYTES * (len(row.keys) + 1) + 4
    return LOAD_BYTES if isinstance(row, Load) else USE_BYTES


def _packed(rows: list[Row]) -> Iterator[list[Row]]:
    """In order, as many into each datagram as surely fit; one that is empty when there is nothing."""
    part: list[Row] = []
    left = DATAGRAM_BYTES - HEAD_BYTES
    for row in rows:
        size = _bytes_of(row)
        if size > left and part:
            yield part
            part, left = [], DATAGRAM_BYTES - HEAD_BYTES
        part.append(row)
        left -= size
    yield part

"""Which events are written: the same words once in five minutes, and never a flood. Pure: memory and clock are passed in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet_planner.events import Deed, Event

AGAIN_S = 300.0
"""The same reason and note within this time is the same piece of news."""
RATE_S = 60.0
RATE_MOST = 20
"""Events of one fleet per RATE_S; what is above is dropped and counted."""
DEEDS_MOST = 4_096


@dataclass(frozen=True, slots=True)
class Told:
    """What one fleet's user was told; all of it may be lost (then something is told twice)."""

    events: tuple[tuple[float, str], ...] = ()
    """(time, reason and note), oldest first; bounded by rate and window."""
    deeds: tuple[tuple[float, str], ...] = ()
    """(time, verb and uid), oldest first."""


def news(told: Told, deeds: Iterable[Deed], now: float) -> tuple[Told, tuple[Deed, ...]]:
    """Deeds that were not told: a pass on a cache that lags creates and deletes again what it did already, without effect; and
    a child that was deleted to be made anew is not missing when it is created."""
    known = [entry for entry in told.deeds if _fresh(entry, AGAIN_S, now)]
    seen = {key for _, key in known}
    fresh: list[Deed] = []
    for deed in deeds:
        anew = f"anew {deed.kind} {deed.name}"
        if deed.verb == "created" and anew in seen:
            known = [entry for entry in known if entry[1] != anew]
            continue
        key = f"{deed.verb} {deed.uid} {deed.role if deed.verb == 'flipped' else ''}"
        once = deed.verb != "changed" and bool(deed.uid)
        if once and key in seen:
            continue
        fresh.append(deed)
        keys = [key] if once else []
        keys += [anew] if deed.verb == "deleted" and not deed.role else []
        seen.update(keys)
        known += [(now, each) for each in keys]
    return Told(told.events, tuple(known[-DEEDS_MOST:])), tuple(fresh)


def admit(told: Told, events: Sequence[Event], now: float) -> tuple[Told, tuple[Event, ...], int]:
    """(memory, events to write, how many the rate dropped). A dropped event is not remembered: it may come later."""
    known = [entry for entry in told.events if _fresh(entry, AGAIN_S, now)]
    seen = {key for _, key in known}
    left = RATE_MOST - sum(_fresh(entry, RATE_S, now) for entry in known)
    written: list[Event] = []
    dropped = 0
    for event in events:
        key = f"{event.reason}\n{event.note}"
        if key in seen:
            continue
        if len(written) >= left:
            dropped += 1
            continue
        written.append(event)
        seen.add(key)
        known.append((now, key))
    return Told(tuple(known), told.deeds), tuple(written), dropped


def _fresh(entry: tuple[float, str], within_s: float, now: float) -> bool:
    """A clock that was set back must not silence a fleet for ever."""
    return 0 <= now - entry[0] < within_s

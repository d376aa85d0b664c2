"""Which adapters to load and unload now. Pure: what is wished, what is there, what failed, what is under way, and the time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleet_worker.config import AdapterWish

AGAIN_FIRST_S = 5.0
AGAIN_MOST_S = 120.0
"""What failed is tried again after 5, 10, 20 … 120 s: a file may be mended, a hub may come back."""


@dataclass(frozen=True, slots=True)
class Held:
    """A version that the engine has."""

    source: str
    digest: str
    folder: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the wished source of an adapter is not there."""

    source: str
    reason: str
    message: str
    again_at: float
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Steps:
    """What to begin now, and when to look again though nothing happens (None: no need)."""

    load: tuple[AdapterWish, ...] = ()
    unload: tuple[str, ...] = ()
    wake_at: float | None = None


def plan(
    wished: Sequence[AdapterWish],
    held: Mapping[str, Held],
    failed: Mapping[str, Failure],
    busy: Collection[str],
    now: float,
    unsure: Collection[str] = (),
) -> Steps:
    """Level-based: planning again after the steps were done gives none. `unsure`: what the engine was told to load and may have,
    although it did not say so."""
    names = {wish.name for wish in wished}
    missing = [wish for wish in wished if wish.name not in held or held[wish.name].source != wish.source]
    waits = {
        wish.name: failure.again_at
        for wish in missing
        if (failure := failed.get(wish.name)) is not None and failure.source == wish.source and now < failure.again_at
    }
    return Steps(
        load=tuple(wish for wish in missing if wish.name not in busy and wish.name not in waits),
        unload=tuple(sorted({*held, *unsure} - names - set(busy))),
        wake_at=min(waits.values(), default=None),
    )


def failed_again(before: Failure | None, source: str, reason: str, message: str, now: float) -> Failure:
    """The failure with its next try."""
    tries = before.tries + 1 if before is not None and before.source == source else 1
    pause_s = min(AGAIN_MOST_S, AGAIN_FIRST_S * 2 ** min(tries - 1, 10))
    return Failure(source, reason, message, now + pause_s, tries)


def report(
    wished: Sequence[AdapterWish], held: Mapping[str, Held], failed: Mapping[str, Failure], busy: Collection[str]
) -> list[dict[str, str]]:
    """For /state, in order of names. `digest` is of the version that the engine has, empty when it has none; `state` is about
    the wished source."""
    found = {name: _entry(name, "", held.get(name), "Unloading") for name in held}
    for wish in wished:
        there, failure = held.get(wish.name), failed.get(wish.name)
        if there is not None and there.source == wish.source:
            found[wish.name] = _entry(wish.name, wish.source, there, "Loaded")
        elif failure is not None and failure.source == wish.source:
            found[wish.name] = _entry(wish.name, wish.source, there, "Failed", failure)
        else:
            found[wish.name] = _entry(wish.name, wish.source, there, "Loading")
    return [found[name] for name in sorted(found)]


def settled(wished: Sequence[AdapterWish], held: Mapping[str, Held], failed: Mapping[str, Failure]) -> bool:
    """Each was tried at least once."""
    return all(entry["state"] != "Loading" for entry in report(wished, held, failed, ()))


def _entry(name: str, source: str, held: Held | None, state: str, failure: Failure | None = None) -> dict[str, str]:
    return {
        "name": name, "source": source, "state": state, "digest": held.digest if held is not None else "",
        "reason": failure.reason if failure is not None else "", "message": failure.message if failure is not None else "",
    }  # fmt: skip

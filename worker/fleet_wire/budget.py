"""What one rendering of a chat template may cost (`template.py` has the whole): steps, which are about a microsecond each on any
machine, and the size of what it makes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any, Final

import jinja2
from jinja2.utils import Namespace

MADE: Final = 1_000_000
MADE_PER_CHARACTER: Final = 16
"""Characters of one text that is made on the way, and of all that is written."""
CHARACTERS_PER_STEP: Final = 256
"""To copy so many costs a step."""
CHARACTERS_READ_PER_STEP: Final = 512
"""To look through so many, for another text or to compare them, costs a step."""
ITEMS_READ_PER_STEP: Final = 64
"""Of a list."""
TEXTS: Final = (str, bytes)
SIZED: Final = (str, bytes, list, tuple)
now: Final = threading.local()
"""`budget` and `source` (characters of the template) of this thread's rendering."""


class TooMuchError(jinja2.TemplateError):
    """The template asks for more time or memory than its conversation may cost."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a conversation may cost: turns, calls and so on, each about a microsecond."""

    each: int = 500_000
    per_character: int = 64


class Budget:
    """Of one rendering."""

    def __init__(self, characters: int, steps: Steps) -> None:
        self.steps = steps.each + steps.per_character * characters
        self.most = MADE + MADE_PER_CHARACTER * characters

    def charge(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise TooMuchError("it comes to no end")

    def allows(self, size: int) -> None:
        """Before so much is made: afterwards is too late."""
        if size > self.most:
            raise TooMuchError(f"it makes a text of more than {self.most} characters")

    def makes(self, size: int) -> None:
        """A text or list of this size."""
        self.allows(size)
        self.charge(1 + size // CHARACTERS_PER_STEP)


def budget_now() -> Budget:
    """Of this thread's rendering; constants are also computed when a template is compiled."""
    found: Budget | None = getattr(now, "budget", None)
    return found if found is not None else Budget(0, Steps())


def size_of(value: Any) -> int:
    return len(value) if isinstance(value, SIZED) else 0


def weight_of(*values: Any) -> int:
    """Characters of them as text, about, and not far beyond the bound: a list may hold one long text a million times."""
    return weighed(values)[0]


def weighed(values: Iterable[Any]) -> tuple[int, int]:
    """(characters, texts and numbers and what holds them)."""
    budget, left, size, looks = budget_now(), list[Any](values), 0, 0
    while left and size <= budget.most:
        one, looks = left.pop(), looks + 1
        if isinstance(one, str | bytes):
            size += len(one)
        elif one is None or isinstance(one, int):
            size += 1 + (one or 0).bit_length() // 3
        elif isinstance(one, Collection | Namespace):
            held = one._Namespace__attrs if isinstance(one, Namespace) else one  # what its repr shows
            left += held
            left += held.values() if isinstance(held, Mapping) else ()
            size += len(held)
        else:
            size += 1
    budget.charge(looks // 8)
    return size, looks


def looks_at(*values: Any) -> None:
    """Charges for texts that are looked through, and lists, but not what these hold."""
    steps = 0
    for one in values:
        if isinstance(one, TEXTS):
            steps += len(one) // CHARACTERS_READ_PER_STEP
        elif isinstance(one, Collection):
            steps += len(one) // ITEMS_READ_PER_STEP
    if steps:
        budget_now().charge(steps)


def compares(left: Any, right: Any) -> None:
    """Charges for whether one is the other, or before it: of two texts the shorter one is read, of two lists all that one has."""
    if isinstance(left, TEXTS) or isinstance(right, TEXTS):
        looks_at(min(left, right, key=size_of) if size_of(left) and size_of(right) else "")
    elif isinstance(left, Collection) and isinstance(right, Collection):
        budget_now().charge(weight_of(left) // CHARACTERS_READ_PER_STEP)


def searches(what: Any, where: Any) -> None:
    """Charges for whether `where` holds it: a list compares it with all that it holds."""
    if isinstance(where, TEXTS):
        looks_at(where)
    elif isinstance(where, Collection) and not (isinstance(where, dict) and isinstance(what, TEXTS)):
        listed = not isinstance(where, Mapping | Set)
        looks_at(where if listed else "")
        if isinstance(what, Collection) and (not isinstance(what, TEXTS) or len(what) >= CHARACTERS_READ_PER_STEP):
            most = weight_of(what) * (len(where) if listed else 1)
            if listed and most > MADE:
                most = min(most, weight_of(where))
            budget_now().charge(most // CHARACTERS_READ_PER_STEP)

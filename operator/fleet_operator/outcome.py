"""What one pass did, could not do, and must try again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from fleet_operator.cluster.interface import ClusterError, ConflictError, ForbiddenError, InvalidError, Object, UnavailableError
from fleet_planner.capacity import QUOTA_WORDS
from fleet_planner.events import Deed
from fleet_planner.types import Problem

DENIED: Final = ("denied request", "denied the request")
"""What the API says of a write that a policy or a webhook refuses: it would refuse to make the object anew, too."""
NO_WEBHOOK: Final = "failed calling webhook"
"""What it says, with 500, where it is well and a webhook is not, mostly one of a single kind: whether it is all of them is what
the next write tells."""
NO_RIGHT: Final = ('user "', "cannot set blockownerdeletion")
"""What it says of one for which we lack a right; of 403 for anything else (Pod Security, a LimitRange) it says neither."""

_WORD: Final = re.compile(r"[^\s,;]+")


def is_denied(why: str) -> bool:
    """Whether a policy or a webhook refused a write, by the API's words."""
    return any(words in why for words in DENIED)


def reason_of(error: ClusterError) -> str:
    """Of a problem. A quota's refusal is known by its words."""
    why = str(error)
    no_policy = QUOTA_WORDS in why or any(words in why.lower() for words in NO_RIGHT)
    by_admission = type(error) is ForbiddenError and " is forbidden: " in why and not no_policy
    return "Refused" if by_admission or (isinstance(error, ForbiddenError | InvalidError) and is_denied(why)) else error.reason


def in_words_of(before: Iterable[Problem], problems: Iterable[Problem]) -> list[Problem]:
    """The problems, in the words of before where they are the same in another order: an API server lists what it is against as a
    map gives it, and each order would be news."""
    known = {_unordered(problem): problem for problem in before}
    return [known.get(_unordered(problem), problem) for problem in problems]


def _unordered(problem: Problem) -> tuple[str, ...]:
    return problem.reason, *sorted(_WORD.findall(problem.message))


@dataclass(slots=True)
class Outcome:
    """What happened: words for the events, problems for the status."""

    done: list[Deed] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    conflicts: list[Problem] = field(default_factory=list)
    """Writes that came too late: the plan was made from an older picture. Nobody is told unless it does not end."""
    read: list[Object] = field(default_factory=list)
    """Objects that were read on the way: as new as anything that a watch will tell."""
    gone: bool = False
    """The API has no fleet of this name any more."""
    writes: int = 0
    vain: int = 0
    """Writes that changed nothing for good: refused ones, and those that undo somebody's edit."""
    stopped: bool = False
    """The API cannot answer now: nothing more was tried, or no more than until a second webhook did not answer."""
    retry_after_s: float | None = None

    def add(self, before: Outcome) -> None:
        """What was done before this, in the same pass."""
        self.done[:0], self.problems[:0], self.conflicts[:0] = before.done, before.problems, before.conflicts
        self.writes += before.writes
        self.vain += before.vain

    def fail(self, what: str, error: ClusterError) -> None:
        """One write that did not happen."""
        self.vain += 1
        problem = Problem(reason_of(error), f"{what}: {error}")
        (self.conflicts if isinstance(error, ConflictError) else self.problems).append(problem)
        if isinstance(error, UnavailableError):
            one_kind, self.stopped = NO_WEBHOOK in str(error) and not self.stopped, True
            self.retry_after_s = max(self.retry_after_s or 0.0, error.retry_after_s or 0.0) or None
            if not one_kind:
                raise StopError


class StopError(Exception):
    """The rest of a pass makes no sense now."""

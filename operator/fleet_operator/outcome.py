"""What one pass did, could not do, and must try again."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_operator.cluster.interface import ClusterError, ConflictError, Object, UnavailableError
from fleet_planner.events import Deed
from fleet_planner.types import Problem


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
    """The API cannot answer now: nothing more was tried."""
    retry_after_s: float | None = None

    def add(self, before: Outcome) -> None:
        """What was done before this, in the same pass."""
        self.done[:0], self.problems[:0], self.conflicts[:0] = before.done, before.problems, before.conflicts
        self.writes += before.writes
        self.vain += before.vain

    def fail(self, what: str, error: ClusterError) -> None:
        """One write that did not happen."""
        self.vain += 1
        problem = Problem(error.reason, f"{what}: {error}")
        (self.conflicts if isinstance(error, ConflictError) else self.problems).append(problem)
        if isinstance(error, UnavailableError):
            self.stopped = True
            self.retry_after_s = max(self.retry_after_s or 0.0, error.retry_after_s or 0.0) or None
            raise StopError


class StopError(Exception):
    """The rest of a pass makes no sense now."""

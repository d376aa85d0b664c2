"""One worker's KV events in order: sequence numbers, gaps, replays, restarts and silence. Pure: says what to do, does nothing.

The index of a worker is trusted while it is `live`: everything since its first event was applied. A gap makes it `behind` until
a replay has filled it. A replay that begins too late, or none at all, leaves it `partial`: what it says is true, but not all of
it, until the worker cannot hold anything else any more (`doubt`). It is `stale` when the worker answered prompts and said nothing
of them. In all states but `live` the approximate index is believed as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["apply", "drop", "replay", "restart"]
State = Literal["new", "live", "behind", "partial", "stale"]
STALE_AFTER_S = 5.0
"""A worker that answered a prompt with new blocks says so with the same step; longer silence than this means lost events."""
REPLAY_AGAIN_S = 5.0


@dataclass(slots=True)
class EventStream:
    """Where we are in one worker's events."""

    expected: int | None = None
    """Number of the next batch; None: nothing was read yet."""
    state: State = "new"
    last_ts: float = 0.0
    owed_since: float | None = None
    """Since when the worker owes us an event."""
    asked_at: float | None = None
    """When a replay was asked for."""
    asked_from: int = 0
    """Its first number."""
    late: bool = False
    """One that broke off began too late."""

    @property
    def trusted(self) -> bool:
        """The precise index alone says what this worker holds."""
        return self.state == "live"

    def judge(self, number: int, ts: float) -> Verdict:
        """What to do with a live batch. `replay`: ask for all from `replay_from` on, the batch is among them; `restart`: forget
        what the worker held, then the same."""
        if self.expected is None or number > self.expected:
            if self.state in ("live", "stale"):
                self.state = "behind"
            return "replay"
        if number == self.expected:
            return "apply"
        return "restart" if ts > self.last_ts else "drop"

    @property
    def replay_from(self) -> int:
        """First number that is missing."""
        return self.expected or 0

    def is_asking(self, now: float) -> bool:
        """A replay is under way."""
        return self.asked_at is not None and now - self.asked_at < REPLAY_AGAIN_S

    def may_ask(self, now: float) -> bool:
        """A replay may be asked for now; says so once per REPLAY_AGAIN_S."""
        if self.is_asking(now):
            return False
        self.asked_at, self.asked_from = now, self.replay_from
        return True

    def applied(self, number: int, ts: float) -> None:
        """This batch, and all before it, are in the index."""
        self.expected = number + 1
        self.last_ts = max(self.last_ts, ts)
        self.owed_since = None
        if self.state == "stale":
            self.state = "live"

    def lost(self) -> None:
        """The connection broke, or the worker began anew: its next life numbers from 0."""
        self.expected, self.state, self.last_ts = None, "new", 0.0
        self.owed_since = self.asked_at = None
        self.late = False

    def replayed(self, asked_from: int, first: int | None) -> None:
        """A replay is over and applied; `first`: its first number, None when it was empty."""
        self.asked_at = None
        if first is None:  # nothing has been published since
            self.expected = asked_from
            self.state = "partial" if self.state == "partial" else "live"
        elif first <= asked_from:
            self.state = "partial" if self.state == "partial" else "live"
        else:
            self.state = "partial"
        if self.late:
            self.state = "partial"

    def broke_off(self, asked_from: int, first: int | None, now: float) -> None:
        """A replay ended in the middle: its rest is asked for after a while."""
        self.asked_at = now
        self.late = self.late or (first is not None and first > asked_from)

    def not_replayed(self) -> None:
        """No replay is to be had: what was missed is not known, and what is heard from now on is true."""
        self.asked_at, self.state = None, "partial"

    def healed(self) -> None:
        """What it may have held besides is gone."""
        self.state, self.late = "live", False

    def answered(self, now: float) -> None:
        """The worker computed a block that is not in the index: it owes an event."""
        if self.owed_since is None:
            self.owed_since = now

    def check(self, now: float) -> None:
        """Called now and then: silence where there should be events."""
        if self.state == "live" and self.owed_since is not None and now - self.owed_since > STALE_AFTER_S:
            self.state = "stale"

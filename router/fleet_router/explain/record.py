"""What is remembered of one request: references and times, filled in by its flow. Text is made when somebody asks for it.

Never a prompt, a key or a body: sizes and names only, so that whoever may read records learns nothing that was said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from fleet_router.admission.lanes import Lane
    from fleet_router.errors import RequestError
    from fleet_router.explain.trace import Trace
    from fleet_router.policy.choose import Choice, Refusal
    from fleet_router.workers import Worker

Ended = Literal["", "answered", "refused", "failed", "left"]
"""Empty: it runs. `left`: the client did not wait for the first byte."""


class Try(msgspec.Struct, eq=False):
    """One attempt: what was decided, and when its legs were sent and over. Times are on the router's clock, 0: not so far."""

    at: float
    """When the first leg was sent."""
    decided_s: float
    found: Choice | Refusal
    prefill: Worker | None
    """None: the decode worker prefills; both None: nobody was found."""
    decode: Worker | None
    prefilled_at: float = 0.0
    """When the KV was ready and the decode leg was sent."""
    wrong_at: float = 0.0
    why: str = ""
    """What went wrong, in our words."""


class Record(msgspec.Struct, eq=False):
    """One request. A Struct, like `Try`, because it is made for every one of them: its fields are set in C."""

    request_id: str
    leg_id: str
    path: bytes
    lane: Lane
    adapter: str
    prompt_bytes: int
    came_at: float
    stream: bool
    waited: bool
    """For a slot, or for workers."""
    begun_at: float = 0.0
    """When a slot was free and the first decision was begun."""
    tries: list[Try] = []
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    writes: int = 0
    """Times that the answer's bytes came."""
    status: int = 0
    """Of the answer; 0: none was begun."""
    ended: Ended = ""
    error: RequestError | None = None
    """What the client was told instead of an answer, or at its end."""
    shown: bool = False
    """The answer's head tells of the decision."""
    trace: Trace | None = None
    """Set while its spans are wanted."""
    onward: bytes = b""
    """Header lines for workers."""

    def tried(self, at: float, decided_s: float, found: Choice | Refusal, prefill: Worker | None, decode: Worker | None) -> None:
        """A decision was made; both workers None: nobody can answer now."""
        if self.tries and self.tries[-1].decode is None:
            self.tries.pop()  # it waited for workers: how often it looked says nothing
            self.waited = True
        if not self.tries:
            self.begun_at = at - decided_s
        self.tries.append(Try(at, decided_s, found, prefill, decode))
        if self.trace is not None:
            self.onward = self.trace.to_leg(2 * len(self.tries) - 1)

    def prefilled(self, at: float) -> None:
        """The prefill leg is done, the decode leg is sent."""
        self.tries[-1].prefilled_at = at
        if self.trace is not None:
            self.onward = self.trace.to_leg(2 * len(self.tries))

    def went_wrong(self, at: float, why: str) -> None:
        """The last attempt failed; there may be another."""
        if self.tries:
            self.tries[-1].wrong_at, self.tries[-1].why = at, why

    @property
    def smooth(self) -> bool:
        """Answered, at the first attempt."""
        return self.ended == "answered" and self.error is None and len(self.tries) == 1 and not self.tries[0].why

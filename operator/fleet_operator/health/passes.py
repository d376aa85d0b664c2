"""What the work loop tells whoever measures it."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Protocol


class Passes(Protocol):
    """Hears of the loop's turns and of each pass over a fleet."""

    def turned(self) -> None:
        """The work loop turned."""
        ...

    def began(self) -> int:
        """A pass begins; give what this returns to `ended`."""
        ...

    def ended(self, begun: int, reasons: Iterable[str], *, failed: bool = False) -> None:
        """That pass is over; `reasons` of its problems, `failed` when it could not be carried out at all."""
        ...

    def told(self, kind: str, reason: str) -> None:
        """A user was told something: Normal or Warning, and the event's reason."""
        ...

    async def weighed(self, passing: Awaitable[None]) -> None:
        """Carry it out."""
        ...


class Unmeasured:
    """Nobody listens."""

    def turned(self) -> None:
        """Nothing."""

    def began(self) -> int:
        """Nothing."""
        return 0

    def ended(self, begun: int, reasons: Iterable[str], *, failed: bool = False) -> None:
        """Nothing."""

    def told(self, kind: str, reason: str) -> None:
        """Nothing."""

    async def weighed(self, passing: Awaitable[None]) -> None:
        """No more than it."""
        await passing

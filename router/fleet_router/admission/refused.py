"""Why a request is not admitted.

The Structs that the compiled modules pass around. They are apart because the compiler (mypyc) does not hand a class's keywords to
msgspec: what is declared frozen here would not be there.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Full(msgspec.Struct, frozen=True):
    """The queue has no place for the request."""

    reason: Literal["overloaded", "queue_share"]
    retry_after_s: int


class Over(msgspec.Struct, frozen=True):
    """A quota is used up."""

    reason: str
    message: str
    retry_after_s: int | None
    """Whole seconds after which it passes; None: never."""

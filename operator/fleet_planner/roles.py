"""The two roles of a worker."""

from __future__ import annotations

from typing import Final, Literal

Role = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")

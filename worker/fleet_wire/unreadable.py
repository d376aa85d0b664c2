"""What decoding bytes that somebody else wrote raises: one list for every place that reads any."""

from __future__ import annotations

from typing import Final

UNREADABLE: Final = (ValueError, RecursionError)
"""They are no JSON or MessagePack, or of another shape (msgspec.DecodeError and json.JSONDecodeError are ValueErrors), their text
is no UTF-8 (UnicodeError is one, too), or their depth has no end."""

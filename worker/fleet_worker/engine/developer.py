"""The role `developer`, OpenAI's newer name for `system`: for chat templates that do not know it its messages are the system's,
as with vLLM (renderers/hf.py of 0.32). Qwen2.5's wrote none of them: the instructions were gone, without a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

DEVELOPER: Final = "developer"
SYSTEM: Final = "system"
Row = dict[str, Any]


def knows_developers(template: str) -> bool:
    """It says something of the role."""
    return f'"{DEVELOPER}"' in template or f"'{DEVELOPER}'" in template


def as_system(messages: Sequence[Row]) -> list[Row]:
    """With every developer's message as the system's. Many templates take one of those, and at the beginning alone: where there
    are others they are put together there."""
    rows = [{**row, "role": SYSTEM} if row["role"] == DEVELOPER else row for row in messages]
    places = [place for place, row in enumerate(rows) if row["role"] == SYSTEM]
    if places in ([], [0]):
        return rows
    said = [text for place in places if (text := _text(rows[place].get("content")))]
    others = [row for row in rows if row["role"] != SYSTEM]
    return [{"role": SYSTEM, "content": "\n\n".join(said)}, *others]


def _text(content: Any) -> str:
    """Of parts: on lines of their own."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""

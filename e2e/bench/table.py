"""How a benchmark prints: a table for people, then one JSON object as the last line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """First column left, the others right; figures with three significant digits."""
    cells = [[*header], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    )


def _text(cell: Any) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) and cell < 100 else f"{cell:.0f}" if isinstance(cell, float) else str(cell)


def report(header: Sequence[str], rows: Sequence[Sequence[Any]], figures: dict[str, Any]) -> None:
    """Print both."""
    print(table(header, rows))
    print(json.dumps(figures))

"""Follow a folder that holds router.json and endpoints.json (a mounted ConfigMap, or `fleet up`): polled by modification time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fleet_router.follow.documents import Documents, parse
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY

POLL_S = 0.1


async def follow_directory(
    folder: Path, apply: Callable[[Documents], None], failed: Callable[[str], None], same: Callable[[], None]
) -> None:
    """Call `apply` with every new pair of documents, `failed` with every problem, `same` whenever the pair that was applied is
    still there; for ever."""
    seen: object = None
    good = False
    while True:
        stamp = _stamp(folder)
        if stamp != seen:
            seen, good = stamp, False
            try:
                apply(parse({key: (folder / key).read_bytes() for key in (ROUTER_CONFIG_KEY, ENDPOINTS_KEY)}))
                good = True
            except (OSError, ValueError) as error:
                failed(f"{folder}: {error}")
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                    seen = None  # no file was left to open it with: it may be readable as it is
        elif good:
            same()
        await asyncio.sleep(POLL_S)


def _stamp(folder: Path) -> object:
    stamps: list[tuple[int, int, int] | None] = []
    for key in (ROUTER_CONFIG_KEY, ENDPOINTS_KEY):
        try:
            found = (folder / key).stat()
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append(None)
    return stamps

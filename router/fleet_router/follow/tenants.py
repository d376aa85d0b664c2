"""Follow the tenants file, a key of a mounted Secret: read again whenever it changes. The last good one stays in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fleet_router.admission.tenants import MAX_BYTES, Tenants, TenantsError, parse_tenants

POLL_S = 1.0


async def follow_tenants(file: Path, apply: Callable[[Tenants], None], failed: Callable[[str], None]) -> None:
    """Call `apply` with every new version, `failed` with every problem; for ever."""
    seen: object = None
    while True:
        seen = read_again(file, seen, apply, failed)
        await asyncio.sleep(POLL_S)


def read_again(file: Path, seen: object, apply: Callable[[Tenants], None], failed: Callable[[str], None]) -> object:
    """Read the file unless it is the one that was `seen`; returns what stands for the present one."""
    try:
        found = file.stat()
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == seen:
            return seen
        with file.open("rb") as opened:
            apply(parse_tenants(opened.read(MAX_BYTES + 1)))
    except OSError as error:
        failed(f"tenants: {file}: {error.strerror or type(error).__name__}")
        return None
    except TenantsError as error:
        failed(f"tenants: {error}")
    return stamp

"""Several coroutines as one: the first that ends ends all of them, and its error is the error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first_ends(*parts: Coroutine[Any, Any, Any]) -> None:
    """Run all; when one ends, cancel the others, wait until they have ended, and raise what the first raised. A part that
    somebody else cancelled has ended without an error: when told to stop, kopf cancels every task of the process."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if not task.cancelled():
            task.result()

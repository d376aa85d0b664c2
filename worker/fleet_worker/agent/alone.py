"""Work that may take for ever, beside the agent's loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def alone(function: Callable[..., T], *given: Any) -> T:
    """What the function returns or raises. Whoever does not wait any more leaves its thread to itself, and so does the process's
    end: the threads of asyncio.to_thread are waited for, and a fetch may wait for its hub, or for another process's lock."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: object) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            outcome = partial(tell, done.set_result, function(*given))
        except Exception as error:
            outcome = partial(tell, done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(outcome)

    threading.Thread(target=run, name="alone", daemon=True).start()
    return await done

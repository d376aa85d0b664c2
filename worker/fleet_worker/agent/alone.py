"""Work that may take for ever, beside the agent's loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")
THREADS: Final = "alone"
"""How their threads are called."""


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

    threading.Thread(target=run, name=THREADS, daemon=True).start()
    return await done


def end_without_them(code: int) -> int:
    """The exit code where no such work is left. Else the process ends here: a fetch loads its files in threads of the library's
    own pool, which the interpreter waits for at its end, and so a model of hundreds of GB was loaded to its end."""
    if any(thread.name == THREADS for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)
    return code

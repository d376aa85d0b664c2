"""A test that runs into its timeout is red, also where it does not listen.

pytest-timeout raises once. Inside a callback of an event loop that is caught and logged like any error there, and a loop that
never ends (or one that comes again with the next event) goes on for ever. So it is raised again and again, as SystemExit, which
loops let through and pytest reports. Where that ends nothing either (uvloop hears of no signal in a loop that is run to be
closed) a thread ends the process and says where it stood.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

AGAIN_S = 60.0
"""Behind the timeout and behind each exception: longer than what ends in order takes to do so."""
MOST = 5


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[object]:
    """What pytest-timeout has set stays, and comes again. Its own way to cancel the timer cancels it for good."""
    told = yield
    first = signal.getsignal(signal.SIGALRM)
    if settings.method != "signal" or not callable(first) or not signal.getitimer(signal.ITIMER_REAL)[0]:
        return told
    fired = 0

    def again(number: int, frame: Any) -> None:
        nonlocal fired
        fired += 1
        if fired == 1:
            first(number, frame)
            return
        raise SystemExit(f"{item.nodeid} went on {AGAIN_S * (fired - 1):g} s after its timeout of {settings.timeout:g} s")

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    uncaptured = item.config.stash.get(fault_handler_stderr_fd_key, 2)
    faulthandler.dump_traceback_later(settings.timeout + MOST * AGAIN_S, file=uncaptured, exit=True)
    return told


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Iterator[object]:
    """It has ended."""
    faulthandler.cancel_dump_traceback_later()
    return (yield)

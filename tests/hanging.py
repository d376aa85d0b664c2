"""A test that runs into its timeout is red, also where it does not listen.

pytest-timeout raises once. Inside a callback of an event loop that is caught and logged like any error there, and a loop that
never ends (or one that comes again with the next event) goes on for ever. So it is raised again and again, as SystemExit, which
loops let through (uvloop not always) and pytest reports; after some of them the process ends and names the test.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

AGAIN_S = 60.0
"""Behind the timeout and behind each exception: longer than what ends in order takes to do so."""
MOST = 10


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[object]:
    """What pytest-timeout has set stays, and comes again. Its own way to cancel cancels this as well."""
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
        if fired > MOST:
            if (capture := item.config.pluginmanager.getplugin("capturemanager")) is not None:
                capture.suspend_global_capture(in_=True)
            print(f"{item.nodeid} cannot be ended after its timeout", file=sys.stderr)
            faulthandler.dump_traceback()
            os._exit(1)
        raise SystemExit(f"{item.nodeid} went on {AGAIN_S * (fired - 1):g} s after its timeout of {settings.timeout:g} s")

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    return told

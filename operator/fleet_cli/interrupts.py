"""Signals that end a command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def ending() -> tuple[signal.Signals, ...]:
    """The signals that end a command. A hang-up that the caller ignores (`nohup fleet up`) is none."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGINT, signal.SIGTERM, *hangup


@contextmanager
def interruptible() -> Iterator[None]:
    """Each of them is a KeyboardInterrupt, in `fleet up` until its `Stops` takes over: what SIGTERM ends at once leaves folders,
    the private key that the Kubernetes client writes to a file, and processes that it began."""
    if threading.current_thread() is not threading.main_thread():  # signals are not its business
        yield
        return
    before = {number: signal.getsignal(number) for number in ending() if number != signal.SIGINT}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

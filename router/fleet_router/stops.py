"""Which signals end a router: they begin its drain."""

from __future__ import annotations

import os
import signal


def ending() -> tuple[signal.Signals, ...]:
    """A hang-up that is ignored (`nohup`, no terminal) is none."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGTERM, signal.SIGINT, *hangup


def ignore_reload() -> None:
    """Without a terminal a hang-up is somebody's word for "read your configuration anew" (`kill -HUP`, `ExecReload`), which a
    router does whenever it changes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

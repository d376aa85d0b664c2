"""What runs in threads beside the loop does not keep the interpreter from it: every first token of that moment would wait."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_router import __main__ as command


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """What the command sets for its whole process."""
    before = sys.getswitchinterval(), gc.get_threshold(), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    yield
    sys.setswitchinterval(before[0])
    gc.set_threshold(*before[1])
    gc.unfreeze()
    signal.signal(signal.SIGTERM, before[2])
    signal.signal(signal.SIGHUP, before[3])


@pytest.mark.usefixtures("as_it_was")
def test_threads_give_the_interpreter_back_soon(monkeypatch: pytest.MonkeyPatch):
    found: list[float] = []

    def begun(running: Any) -> int:
        running.close()
        found.append(sys.getswitchinterval())
        return 0

    monkeypatch.setattr("uvloop.run", begun)
    monkeypatch.setattr(command, "files", lambda: None)
    monkeypatch.setattr(command, "huge_pages", lambda: None)  # it would begin this process again
    monkeypatch.setattr(sys, "argv", ["fleet-router", "--follow", "dir:/nowhere", "--admin-port", "0"])
    assert command.main() == 0
    assert found == [pytest.approx(command.SWITCH_S)]
    assert command.SWITCH_S <= 0.001

"""What runs in threads beside the loop does not keep the interpreter from it: every first token of that moment would wait."""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_router import __main__ as command
from fleet_router.config import TraceConfig
from fleet_router.explain import export
from fleet_router.explain.export import Exporter


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """What the command sets for its whole process."""
    before = sys.getswitchinterval(), gc.get_threshold(), signal.getsignal(signal.SIGTERM)
    yield
    sys.setswitchinterval(before[0])
    gc.set_threshold(*before[1])
    gc.unfreeze()
    signal.signal(signal.SIGTERM, before[2])


@pytest.mark.usefixtures("as_it_was")
def test_threads_give_the_interpreter_back_soon(monkeypatch: pytest.MonkeyPatch):
    found: list[float] = []

    def begun(running: Any) -> int:
        running.close()
        found.append(sys.getswitchinterval())
        return 0

    monkeypatch.setattr("uvloop.run", begun)
    monkeypatch.setattr(command, "files", lambda: None)
    monkeypatch.setattr(sys, "argv", ["fleet-router", "--follow", "dir:/nowhere", "--admin-port", "0"])
    assert command.main() == 0
    assert found == [pytest.approx(command.SWITCH_S)]
    assert command.SWITCH_S <= 0.001


def test_after_each_request_that_becomes_spans_the_loop_may_run(monkeypatch: pytest.MonkeyPatch):
    """Incident: with traces on a tenth of the first tokens on kept connections took 3.8 ms, and 3.2 since."""
    turns: list[Any] = []

    def spans_of(record: str, *_: object) -> list[dict[str, str]]:
        turns.append(record)
        return [{"name": f"{record}0"}, {"name": f"{record}1"}]

    monkeypatch.setattr(export, "spans_of", spans_of)
    monkeypatch.setattr(export.time, "sleep", turns.append)
    exporter = Exporter(TraceConfig(endpoint="http://127.0.0.1:1"), "f", lambda: 0.0)
    exporter._waiting.extend([("a", None), ("b", None), ("c", None)])  # type: ignore[list-item]
    sent = json.loads(exporter._rendered(2))
    assert turns == ["a", 0, "b", 0]
    (scope,) = sent["resourceSpans"][0]["scopeSpans"]
    assert [span["name"] for span in scope["spans"]] == ["a0", "a1", "b0", "b1"]
    assert [one for one, _ in exporter._waiting] == ["c"]

"""The parent of several processes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_router import supervisor
from fleet_router.supervisor import Supervisor
from tests.fleet_router.rig import until


class Child:
    """A process that runs until it is told to end."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def send_signal(self, _number: int) -> None:
        self._ended.set()


def test_a_process_that_cannot_be_started_now_ends_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """No memory or no process ids for a second process: the first one and its streams ended with the parent."""
    starts: list[str] = []

    async def started(*argv: Any, **_: Any) -> Child:
        starts.append(argv[-1].partition("/")[0])
        if starts.count("1") == 1 and starts[-1] == "1":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return Child()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.0)

    async def go() -> int:
        parent = Supervisor([], "127.0.0.1", 0, 2)
        running = asyncio.create_task(parent.run(own_key=False))
        await until(lambda: starts.count("1") > 1 or running.done())
        parent._stop.set()
        return await running

    assert asyncio.run(go()) == 0
    assert sorted(starts) == ["0", "1", "1"]
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["index"]) for line in lines] == [("process-not-started", 1), ("process-died", 1)]
    assert "temporarily unavailable" in lines[0]["problem"]
    assert (lines[1]["code"], lines[1]["quick"]) == (1, 1)

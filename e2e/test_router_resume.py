"""Streams go on when the engine that makes them is killed: real engines, real router, tokens equal to an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_up import free_port, gone, running

TOKENS, KILL_AT = 600, 60
MEASURED_S = 0.25
PROMPT = "the router sends this to a worker, and the worker dies in the middle of it " * 6


def cpu_ticks(pid: int) -> int:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def engines(state: Path) -> list[int]:
    """Engine processes of this `fleet up`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"={state.resolve()}:".encode() in (process / "environ").read_bytes()
            if ours and b"fleet_worker.engine" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def kill_busiest(state: Path) -> None:
    """SIGKILL the engine that computes."""
    before = {pid: cpu_ticks(pid) for pid in engines(state)}
    time.sleep(MEASURED_S)
    os.kill(max(before, key=lambda pid: cpu_ticks(pid) - before[pid]), signal.SIGKILL)


def events(url: str, body: dict[str, Any], decision: list[str] | None = None) -> Iterator[str]:
    """The data lines of one stream; `decision` gets what the router tells of who answers."""
    asked = {"x-fleet-explain": "1"} if decision is not None else {}
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, headers=asked, timeout=120) as answer:
        assert answer.status_code == 200
        if decision is not None:
            decision.append(answer.headers["x-fleet-decision"])
        yield from (line[6:] for line in answer.iter_lines() if line.startswith("data: "))


def text_of(found: Iterator[str], at_kill: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """(text, last event); `at_kill` is called in the middle."""
    text, last = "", ""
    for number, last in enumerate(found, 1):
        if number == KILL_AT:
            at_kill()
        if last != "[DONE]":
            event = json.loads(last)
            text += "".join(choice["text"] for choice in event.get("choices", []))
    return text, last


@pytest.mark.parametrize("draws", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_a_stream_goes_on_token_for_token_when_its_engine_is_killed(tmp_path: Path, draws: dict[str, Any]):
    port, state = free_port(), tmp_path / "state"
    url, body = f"http://127.0.0.1:{port}", {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, **draws}
    with running("--port", str(port), "--state", str(state)) as fleet:
        fleet.until("ready after")
        whole = text_of(events(url, body))
        assert whole[1] == "[DONE]"
        assert text_of(events(url, body), lambda: kill_busiest(state)) == whole
        assert 'fleet_router_resumed_total{outcome="done"} 1' in httpx.get(f"{url}/metrics").text
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.end() == 0, "".join(fleet.lines)
    assert gone(state)


def test_a_stream_whose_tokens_nobody_can_know_again_ends_with_an_error(tmp_path: Path):
    port, state = free_port(), tmp_path / "state"
    url, body = f"http://127.0.0.1:{port}", {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0}
    with running("--port", str(port), "--state", str(state)) as fleet:
        fleet.until("ready after")
        found = []
        for number, event in enumerate(events(url, body), 1):
            found.append(event)
            if number == KILL_AT:
                kill_busiest(state)
        assert "error" in json.loads(found[-1])
        assert "[DONE]" not in found
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.end() == 0, "".join(fleet.lines)
    assert gone(state)

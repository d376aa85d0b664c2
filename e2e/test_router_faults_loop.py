"""The closed loop: requests of all kinds while a worker is killed every five seconds and comes back as another one.

Every request ends with tokens that are proven, or with an explicit error; errors are for streams that nobody can carry on. 600
requests by default; `FLEET_LOOP_REQUESTS=10000` is the full form (`FLEET_LOOP_REQUESTS=10000 make e2e-router`: 84 s).
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path

import pytest

from e2e.emulated.asking import Ask, Ledger, closed_loop
from e2e.emulated.fleet import Emulated

REQUESTS = int(os.environ.get("FLEET_LOOP_REQUESTS", "600"))
SEED = int(os.environ.get("FLEET_FAULT_SEED", "20261121"))
KILL_EVERY_S = 5.0
BACK_AFTER_S = 1.5
CLIENTS = 32
pytestmark = pytest.mark.timeout(300 + REQUESTS)


def mixed(count: int, numbers: random.Random) -> list[Ask]:
    """Short and long prompts; streams, whole answers and chat; greedy, seeded and neither."""
    found = []
    for i in range(count):
        prompt = (i, *(numbers.randrange(9_000) for _ in range(numbers.choice([8, 120]))))
        kind, chat = numbers.choice(["greedy", "greedy", "seeded", "free"]), numbers.random() < 0.2
        found.append(
            Ask(
                prompt, numbers.choice([8, 40, 150]), chat or numbers.random() < 0.6, kind == "greedy",
                numbers.randrange(1, 10**6) if kind == "seeded" else None, ids=numbers.random() < 0.5, chat=chat,
            )
        )  # fmt: skip
    return found


class Killer(threading.Thread):
    """Kills a worker every five seconds; the operator hears of it a second later, and of its successor when that is ready."""

    def __init__(self, fleet: Emulated, numbers: random.Random) -> None:
        super().__init__(daemon=True)
        self.fleet, self.numbers = fleet, numbers
        self.stop = threading.Event()
        self.killed: list[str] = []
        self.failed: list[BaseException] = []

    def run(self) -> None:
        try:
            due = time.monotonic() + KILL_EVERY_S
            while not self.stop.wait(max(0.0, due - time.monotonic())):
                due += KILL_EVERY_S  # by the clock, however long the last one takes to come back
                victim = self.numbers.choice(self.fleet.workers)
                self.killed.append(victim.uid)
                assert victim.kill() == -9
                time.sleep(BACK_AFTER_S)
                self.fleet.publish([worker for worker in self.fleet.workers if worker is not victim])
                victim.start().wait()
                self.fleet.publish()
        except BaseException as error:
            self.failed.append(error)


def test_every_request_ends_with_proven_tokens_or_an_error(tmp_path: Path):
    print(f"seed {SEED}, {REQUESTS} requests")
    numbers = random.Random(SEED)
    with Emulated(tmp_path, 121, 2, 4) as fleet:
        for worker in fleet.workers:
            worker.fault(tick_s=0.01)
        killer, ledger = Killer(fleet, numbers), Ledger()
        killer.start()
        begun = time.monotonic()
        asyncio.run(closed_loop(fleet.address, mixed(REQUESTS, random.Random(SEED + 1)), CLIENTS, ledger))
        took_s = time.monotonic() - begun
        killer.stop.set()
        killer.join()
        resumed = {name: fleet.metric("resumed_total", f'"{name}"') for name in ("done", "differs", "refused")}
        print(f"{took_s:.0f} s, killed {killer.killed}, {dict(ledger.ends)}, slowest {ledger.slowest_s:.1f} s, {resumed}")
        print("\n".join(ledger.odd))
        assert killer.failed == []
        assert len(killer.killed) >= max(1, int(0.6 * took_s / KILL_EVERY_S))
        assert ledger.all == REQUESTS
        assert ledger.ends["wrong"] == ledger.ends["hung"] == 0
        explicit = sum(count for end, count in ledger.ends.items() if end == "event" or end.startswith("error 50"))
        assert ledger.right + explicit == REQUESTS
        assert ledger.lost == 0  # only streams whose tokens nobody can know again may end with an error
        assert ledger.right >= 0.97 * REQUESTS
        assert resumed["differs"] == 0
        fleet.quiet()

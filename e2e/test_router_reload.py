"""Every field of the routers' configuration is changed, and changed back, while requests come and streams run: nobody is refused,
no stream ends early, no answer is another, and nothing is left behind.

The table names every field of the struct: a new one without a row is an error here.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e.emulated.asking import Ask, Ledger, ask
from e2e.emulated.fleet import CONFIG, Emulated, until
from fleet_router.config import (
    Cascade,
    ExplainBounds,
    HedgeBounds,
    HoldBounds,
    HttpBounds,
    PrewarmBounds,
    RouterConfig,
    SloClass,
    TierRule,
    TraceConfig,
)

pytestmark = pytest.mark.timeout(300)
EVERY_S, CHANGED_S, BACK_S = 0.02, 0.7, 0.3
LONG, STREAMS = 500, 6
BASE = msgspec.structs.replace(
    CONFIG, worker_slots=64, adapters=("a",), classes=(SloClass(name="fast", priority=5), SloClass(name="slow", priority=-5)),
)  # fmt: skip
TIGHT = HttpBounds(
    header_bytes=2_000, header_count=20, url_bytes=100, body_bytes=100_000, header_deadline_s=1.0, body_deadline_s=1.0,
    idle_s=0.2, stalled_client_s=1.0, linger_s=0.0, linger_bytes=0, connections=300,
)  # fmt: skip
RULES = (TierRule(tier="t", tokens_ge=10), TierRule(tier="gone", headers={"x-a": "b"}))
VALUES: dict[str, list[Any]] = {
    "fleet": ["other"], "adapters": [("a", "b"), ()], "policy": ["prefixHash", "leastLoad", "roundRobin"],
    "load_bound": [1.0, 5.0], "min_uncached_tokens": [0, 100_000], "decide": ["cost"], "slow_start_s": [60.0],
    "session_header": ["x-session"], "tier_rules": [RULES], "cascade": [Cascade(tiers=("t", "u"))], "prefix_index": ["precise"],
    "max_input_tokens": [100_000], "max_output_tokens": [1_000], "max_model_len": [100_000], "first_token_deadline_s": [5.0],
    "inter_token_deadline_s": [1.0], "resume": ["off", "replay"], "whole_answer_most_s": [100.0], "silent_s": [1.0],
    "reused_close_s": [0.0], "upstream_idle_s": [0.1], "bounds": [TIGHT], "hold": [HoldBounds(requests=1, bytes=1, time_s=1.0)],
    "hedge": [HedgeBounds(after=1.0, least_s=0.001, share=0.5)],
    "prewarm": [PrewarmBounds(pairs=8, parallel=8)], "return_wait_s": [0.0, 60.0], "worker_slots": [0, 8],
    "queue_per_slot": [1, 100], "ttft_budget_s": [5.0],
    "classes": [(), (SloClass(name="fast", priority=-50, max_output_tokens=900),)], "runaway": [True],
    "explain": [ExplainBounds(records=0, troubled=0, refused=0, log="all", log_lines_per_s=1)],
    "traces": [TraceConfig(endpoint="http://127.0.0.1:1", sample=1.0, per_second=100_000, queue=10)],
}  # fmt: skip
ELSEWHERE = {"served_name"}
"""Who asks must know the new one: tests/fleet_router/test_renaming.py."""


class Load:
    """A request every 20 ms and some long streams, until `stop`."""

    def __init__(self, address: str) -> None:
        self.address, self.stopped, self.during = address, False, ""
        self.ends: Counter[tuple[str, str]] = Counter()

    async def one(self, number: int, long: bool) -> None:
        during, seeded, chat = self.during, number % 3 == 0, number % 7 == 0
        prompt = tuple((number * 31 + k) % 9_000 for k in range(8 if number % 3 else 90))
        asked = Ask(
            prompt, LONG if long else 12, long or chat or number % 2 == 0, not seeded, number + 1 if seeded else None,
            ids=number % 4 < 2, chat=chat,
        )  # fmt: skip
        self.ends[await ask(self.address, asked, Ledger()), f"{during} to {self.during}"] += 1

    async def steady(self) -> None:
        number, running = 0, set[asyncio.Task[None]]()
        while not self.stopped:
            task = asyncio.create_task(self.one(number, long=False))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1
            await asyncio.sleep(EVERY_S)
        await asyncio.gather(*running)

    async def streams(self, first: int) -> None:
        while not self.stopped:
            await self.one(first, long=True)
            first += 1


async def changes(fleet: Emulated, load: Load) -> None:
    running = [asyncio.create_task(load.steady())]
    running += [asyncio.create_task(load.streams(1_000 * (1 + i))) for i in range(STREAMS)]
    for name, values in VALUES.items():
        for value in values:
            for one, wait_s in ((value, CHANGED_S), (getattr(BASE, name), BACK_S)):
                load.during = f"{name}={str(one)[:40]}"
                await asyncio.to_thread(fleet.publish, **{name: one})
                await asyncio.sleep(wait_s)
    load.stopped = True
    await asyncio.gather(*running)


def test_every_field_is_changed_under_load_and_nobody_notices(tmp_path: Path):
    assert VALUES.keys() | ELSEWHERE == set(RouterConfig.__struct_fields__)
    with Emulated(tmp_path, 125, 1, 2, config=BASE) as fleet:
        assert fleet._router is not None
        for worker in fleet.workers:
            worker.fault(tick_s=0.004)
        threads = Path(f"/proc/{fleet._router.pid}/task")
        before, load = len(os.listdir(threads)), Load(fleet.address)
        asyncio.run(changes(fleet, load))
        print(sum(load.ends.values()), "requests")
        assert {row: count for row, count in load.ends.items() if row[0] != "right"} == {}
        until("its threads have ended", lambda: len(os.listdir(threads)) <= before, 15.0)
        fleet.quiet()  # descriptors: when it is left

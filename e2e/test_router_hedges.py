"""Hedged prefill legs on a router process: one worker that stalls now and then is nobody's p99, no KV stays, every token is
right, and where all workers are slow the budget is all that is computed twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from e2e.emulated.asking import Ask, Ledger, ask
from e2e.emulated.fleet import CONFIG, Emulated
from fleet_router.config import HedgeBounds

pytestmark = pytest.mark.timeout(300)
CLIENTS, WARM, COUNT = 4, 60, 400
STALL_S = 2.0
HEDGE = HedgeBounds(after=3.0, least_s=0.05, share=0.2)


def asks(first: int, count: int) -> list[Ask]:
    """No two have a beginning in common: each is prefilled remotely."""
    return [Ask((first + i, *range(120)), max_tokens=8, stream=i % 2 == 0) for i in range(count)]


async def timed(address: str, wanted: list[Ask], ledger: Ledger) -> list[float]:
    """Seconds of each."""
    left, took = iter(wanted), []

    async def client() -> None:
        for one in left:
            begun = time.monotonic()
            await ask(address, one, ledger)
            took.append(time.monotonic() - begun)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return sorted(took)


def p99(seconds: list[float]) -> float:
    return seconds[-(-len(seconds) * 99 // 100) - 1]


@pytest.mark.parametrize("hedged", [True, False], ids=["hedged", "off"])
def test_a_prefill_worker_that_stalls_is_nobodys_p99(tmp_path: Path, hedged: bool):
    config = msgspec.structs.replace(CONFIG, hedge=HEDGE if hedged else None, silent_s=30.0)
    with Emulated(tmp_path, 143 + hedged, prefill=3, decode=2, config=config) as fleet:
        ledger = Ledger()
        asyncio.run(timed(fleet.address, asks(1_000, WARM), ledger))
        fleet.prefill[0].fault(stall_every=4, stall_s=STALL_S)
        took = asyncio.run(timed(fleet.address, asks(10_000, COUNT), ledger))
        fleet.quiet()
        stats = [worker.stats() for worker in fleet.prefill]
        started, won = (int(fleet.metric("hedges_total", f'"{event}"')) for event in ("started", "won"))
        stalled, released = stats[0]["stalled"], sum(one["released"] for one in stats)
        print(
            f"p99 {p99(took) * 1e3:.0f} ms, slowest {took[-1] * 1e3:.0f} ms; {stalled} stalls, {stats[0]['left']} left; "
            f"{started} hedges, {won} won; {released} leases given back, {sum(one['reads'] for one in stats)} read"
        )
        assert (ledger.right, ledger.all) == (WARM + COUNT, WARM + COUNT), ledger
        assert stalled >= 0.01 * COUNT, "there is something to hedge"
        assert sum(one["reads"] for one in stats) == fleet.metric("handed_over_total") == WARM + COUNT
        if hedged:
            assert p99(took) < STALL_S / 2
            assert stats[0]["left"] <= won <= started <= HEDGE.share * (WARM + COUNT)
            assert stats[0]["left"] >= 0.9 * stalled
            assert fleet.metric("hedge_tokens_total") > 0
        else:
            assert p99(took) >= STALL_S
            assert started == stats[0]["left"] == released == 0


def test_where_all_are_slow_the_budget_is_all_that_is_computed_twice(tmp_path: Path):
    bounds = msgspec.structs.replace(HEDGE, share=0.05)
    config = msgspec.structs.replace(CONFIG, hedge=bounds)
    with Emulated(tmp_path, 145, prefill=3, decode=2, config=config) as fleet:
        ledger = Ledger()
        asyncio.run(timed(fleet.address, asks(1_000, WARM), ledger))
        for worker in fleet.prefill:
            worker.fault(stall_every=1, stall_s=0.4)
        asyncio.run(timed(fleet.address, asks(10_000, COUNT // 4), ledger))
        fleet.quiet()
        started, refused = (fleet.metric("hedges_total", f'"{event}"') for event in ("started", "refused"))
        asked, twice = fleet.metric("remote_prefill_total"), sum(worker.stats()["prefills"] for worker in fleet.prefill)
        print(f"{started:.0f} hedges and {refused:.0f} refused of {asked:.0f} prompts; {twice} prefill legs")
        assert ledger.right == ledger.all == asked == WARM + COUNT // 4, ledger
        assert 0 < started <= bounds.share * asked
        assert refused > 0
        assert twice == asked + started

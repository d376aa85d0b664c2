"""R5, R8, R10 and R11 of the reliability list: a router that begins anew, pairs whose KV does not move, a source of endpoints
that fails, an address that belongs to somebody else."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import msgspec
import pytest

from e2e.emulated.asking import Ask, Ledger, closed_loop
from e2e.emulated.fleet import CONFIG, Emulated, until
from e2e.test_router_faults_workers import asks, loop
from fleet_router.follow.emptied import AGAIN_S, KEPT_S
from fleet_router.health.breaker import OPEN_FIRST_S, PAIR_FAILURES_MOST
from fleet_router.kvindex.pieces import FINE_BYTES, FINE_PIECES, MAX_PIECES, PIECE_BYTES
from fleet_router.policy.routing import INDEX_ENTRIES
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY

pytestmark = pytest.mark.timeout(300)
LONG = 120


def long_asks(count: int, *, first: int = 0) -> list[Ask]:
    """Prompts that are worth a prefill worker."""
    return asks(count, first=first, size=LONG)


def test_r5_a_router_that_begins_anew(tmp_path: Path):
    with Emulated(tmp_path, 111, 1, 2) as fleet:
        assert loop(fleet, long_asks(60)).right == 60
        assert fleet.metric("prefix_keys") >= 60
        assert fleet.kill_router() == -9
        fleet.start_router()
        assert fleet.metric("prefix_keys") == 0
        assert loop(fleet, long_asks(60)).right == 60
        fleet.quiet()


def fine_asks(count: int) -> list[Ask]:
    """Prompts that share nothing, each as long as what is cut finest: most keys for a prompt's bytes. Few ids of many digits."""
    made = []
    for i in range(count):
        numbers = random.Random(i)
        made.append(Ask(tuple(numbers.randrange(10**8, 10**9) for _ in range(FINE_BYTES // 11 + 1)), 1, stream=False, ids=False))
    return made


def test_r5_an_index_that_is_full(tmp_path: Path):
    """Stage one: more keys were sent than it holds, so that it had to forget. Stage two: it is within its bounds, entries and
    memory, and every answer is right: of prompts that it forgot, that it knows, that it never saw."""
    count = int(1.1 * INDEX_ENTRIES / FINE_PIECES)
    with Emulated(tmp_path, 110, 0, 2, msgspec.structs.replace(CONFIG, max_input_tokens=200_000)) as fleet:
        before, sent = fleet.rss_mb(), fine_asks(count)
        assert loop(fleet, sent, clients=16).right == count
        keys = fleet.metric("prefix_keys")
        print(f"{count * FINE_PIECES} keys sent, {keys:g} held, {before:.0f} -> {fleet.rss_mb():.0f} MB")
        assert count * FINE_PIECES > INDEX_ENTRIES
        assert 0.75 * INDEX_ENTRIES < keys <= INDEX_ENTRIES
        assert fleet.rss_mb() < before + 150
        assert loop(fleet, [*sent[:60], *sent[-60:], *long_asks(60)]).right == 180
        assert fleet.metric("prefix_keys") <= INDEX_ENTRIES
        fleet.quiet()


def test_r5_prompts_that_are_very_long_are_cut_coarser(tmp_path: Path):
    """Behind its beginning: else a few of them filled the index."""
    with Emulated(tmp_path, 111, 1, 2, msgspec.structs.replace(CONFIG, max_input_tokens=200_000)) as fleet:
        sent = [Ask(tuple((i * 131 + k * k) % 50_000 for k in range(60_000)), 2, ids=False) for i in range(160)]
        assert loop(fleet, sent, clients=4).right == len(sent)
        keys, pieces = fleet.metric("prefix_keys"), sum(len(one.body()) for one in sent) / PIECE_BYTES
        print(f"{keys:g} keys of {pieces:g} pieces, {fleet.rss_mb():.0f} MB")
        assert 30_000 < keys <= MAX_PIECES * len(sent) < pieces / 2
        assert fleet.rss_mb() < 250
        fleet.quiet()


def test_r8_kv_does_not_move_between_one_prefill_and_one_decode_worker(tmp_path: Path):
    """Their connections are reset; everything else works."""
    with Emulated(tmp_path, 112, 2, 2) as fleet:
        assert loop(fleet, long_asks(20)).right == 20
        giver, taker = fleet.prefill[0], fleet.decode[0]
        giver.fault(cut=[taker.uid])
        seen, clients = 20, 8  # with fewer the pairs that were cheapest so far have room for all, and others are left alone
        while not fleet.metric("pair_ejections_total"):
            assert seen < 1_000, "nobody asked the two together"
            assert loop(fleet, long_asks(50, first=seen), clients=clients).right == 50
            seen += 50
        stats = giver.stats()
        print(stats, fleet.metric("pairs_out"))
        assert 1 <= stats["cut_reads"] <= PAIR_FAILURES_MOST + clients
        again = stats["cut_reads"] - PAIR_FAILURES_MOST  # on a slow machine its five seconds are over meanwhile: it is tried once
        assert 1 <= fleet.metric("pair_ejections_total") <= 1 + again
        before = stats["reads"], taker.stats()["finished"]
        assert loop(fleet, long_asks(100, first=seen), clients=clients).right == 100
        assert fleet.metric("workers_out") == 0  # both go on with others
        assert giver.stats()["reads"] > before[0]
        assert taker.stats()["finished"] > before[1]
        giver.fault()
        until(
            "it is tried again", lambda: loop(fleet, long_asks(40, first=900)).right == 40 and not fleet.metric("pairs_out"), 30
        )
        fleet.quiet()


def test_r8_a_pair_is_avoided_after_five_failures_at_most(tmp_path: Path):
    """One request at a time, so that none is under way when the pair is put out: no more than five failures. The decode worker
    prefills for itself then, and takes KV of a prefill worker that comes."""
    with Emulated(tmp_path, 116, 2, 1) as fleet:
        (giver, other), (taker,) = fleet.prefill, fleet.decode
        fleet.publish([giver, taker])
        until("it follows", lambda: fleet.metric("endpoints") == 2, 10)
        assert loop(fleet, long_asks(5), clients=1).right == 5
        assert giver.stats()["reads"] >= 1  # stage one: they were a pair, and then they could not be
        giver.fault(cut=[taker.uid])
        begun = time.monotonic()
        assert loop(fleet, long_asks(40, first=100), clients=1).right == 40
        failures, took_s = giver.stats()["cut_reads"], time.monotonic() - begun
        print(f"{failures} failures in {took_s:.1f} s")
        assert 1 <= failures <= 5 + took_s // OPEN_FIRST_S  # a slow machine: it is tried once when its time is over
        assert fleet.metric("local_prefill_total") >= 30
        fleet.publish()
        until("it follows", lambda: fleet.metric("endpoints") == 3, 10)
        assert loop(fleet, long_asks(20, first=200), clients=1).right == 20
        assert other.stats()["reads"] >= 1
        fleet.quiet()


def test_r8_kv_moves_to_nobody_and_decode_workers_prefill(tmp_path: Path):
    with Emulated(tmp_path, 113, 1, 2) as fleet:
        (giver,) = fleet.prefill
        giver.fault(cut=[worker.uid for worker in fleet.decode])
        ledger = loop(fleet, long_asks(200), clients=4)
        stats = giver.stats()
        print(stats)
        assert 1 <= stats["cut_reads"] <= 2 * (PAIR_FAILURES_MOST + 4)
        assert ledger.right == 200
        assert fleet.metric("local_prefill_total") > 100
        fleet.quiet()


def test_r10_a_source_of_endpoints_that_fails_or_says_nothing(tmp_path: Path):
    """The last good set serves on; its age and the errors are told."""
    with Emulated(tmp_path, 114, 1, 2) as fleet:
        assert loop(fleet, asks(20)).right == 20
        good = (fleet.documents / ENDPOINTS_KEY).read_bytes()
        for number, broken in enumerate([b"{", b"[]", b"null", b"", good[: len(good) // 2], b'{"fleet": 1}'], start=1):
            fleet.write(ENDPOINTS_KEY, broken)
            until("it says so", lambda n=number: fleet.metric("follow_errors_total") >= n, 10)
            assert loop(fleet, asks(20, first=100 * number)).right == 20
        (fleet.documents / ENDPOINTS_KEY).unlink()
        (fleet.documents / ROUTER_CONFIG_KEY).unlink()
        until("it says so", lambda: fleet.metric("follow_errors_total") >= 7, 10)
        assert loop(fleet, asks(20, first=900)).right == 20
        assert fleet.metric("endpoints_age_seconds") > 0.5
        fleet.publish([])
        until("it says so", lambda: fleet.metric("follow_errors_total") >= 8, 10)
        assert loop(fleet, asks(20, first=1000)).right == 20
        assert fleet.metric("endpoints") == 3
        fleet.publish()
        until("it follows again", lambda: fleet.metric("endpoints_age_seconds") < 0.5, 10)
        fleet.quiet()


def test_r10_endpoints_that_name_nobody_are_believed_when_nobody_serves(tmp_path: Path):
    """Nodes that the control plane has lost have no pod that is ready; scaled to nothing, there is none."""
    with Emulated(tmp_path, 116, 0, 2) as fleet:
        fleet.publish([])
        until("it was asked more than once", lambda: fleet.metric("endpoints_age_seconds") > KEPT_S + 2 * AGAIN_S, 90)
        assert loop(fleet, asks(20)).right == 20
        for worker in fleet.decode:
            worker.kill()
        until("it is believed", lambda: fleet.metric("endpoints") == 0, AGAIN_S + 5)
        assert loop(fleet, asks(5, first=50)).ends == {"error 503 no_worker": 5}
        for worker in fleet.decode:
            worker.start().wait()
        fleet.publish()
        until("it follows again", lambda: fleet.metric("endpoints") == 2, 10)
        assert loop(fleet, asks(20, first=100)).right == 20
        fleet.quiet()


@pytest.mark.parametrize("other", ["model", "weights"])
def test_r11_an_address_that_belongs_to_another_worker(tmp_path: Path, other: str):
    """A worker dies, and its address goes to a pod of another fleet: with another model, or with the same name for other weights.
    The router has not heard of it. No token of that pod reaches a client."""
    with Emulated(tmp_path, 115, 0, 3) as fleet:
        assert loop(fleet, asks(60, mixed=True)).right == 60
        victim, ledger = fleet.decode[0], Ledger()

        async def go() -> None:
            before = asyncio.create_task(closed_loop(fleet.address, asks(80, first=100), 4, ledger))
            await asyncio.sleep(0.1)
            victim.kill()
            await before
            victim.life -= 1
            await asyncio.to_thread(victim.start("stranger").wait)
            victim.fault(**({"model": "other"} if other == "model" else {"weights": 7}))
            await closed_loop(fleet.address, asks(400, first=1_000), 8, ledger)
            await asyncio.sleep(6.0)  # its five seconds are over
            await closed_loop(fleet.address, asks(200, first=5_000), 8, ledger)

        asyncio.run(go())
        stats = victim.stats()
        print(dict(ledger.ends), ledger.odd, stats)
        assert stats["uid"] == "stranger"
        assert ledger.ends["wrong"] == 0
        assert ledger.right == ledger.all == 680
        assert stats["finished"] == 0 if other == "weights" else True

"""R1, R2, R3, R7 and R9 of the reliability list: workers that die, flap, answer errors at once, or answer nonsense.

Real router process, real worker processes (emulated engines whose tokens a test can compute). Each row has two stages: the
workers' own counters prove that the fault happened, then every request's end is judged.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import msgspec
import pytest

from e2e.emulated.asking import Ask, Ledger, ask, closed_loop
from e2e.emulated.fleet import CONFIG, Emulated, until
from fleet_router.health.breaker import FAILURES_MOST
from fleet_router.health.budget import FIRST

pytestmark = pytest.mark.timeout(300)
OUTAGE_S = float(os.environ.get("FLEET_R7_S", "6"))
"""The list says 30; workers that were put out are tried again after five."""


def asks(count: int, *, first: int = 0, mixed: bool = False, size: int = 8, max_tokens: int = 24) -> list[Ask]:
    """Short prompts, each another one; `mixed`: streams and whole answers, greedy and seeded, ids and none, chat."""
    found = []
    for i in range(first, first + count):
        prompt = tuple((i * 31 + k) % 9_000 for k in range(size))
        one = Ask(prompt, max_tokens)
        if mixed:
            chat, seeded = i % 7 == 0, i % 3 == 0
            stream = chat or i % 2 == 0
            one = Ask(prompt, max_tokens, stream, not seeded, i + 1 if seeded else None, ids=i % 4 < 2, chat=chat)
        found.append(one)
    return found


def loop(fleet: Emulated, sent: list[Ask], clients: int = 8) -> Ledger:
    ledger = Ledger()
    asyncio.run(closed_loop(fleet.address, sent, clients, ledger))
    print(dict(ledger.ends), f"slowest {ledger.slowest_s:.2f} s", ledger.odd[:5])
    return ledger


@pytest.mark.smoke
def test_r1_all_workers_gone_then_back(tmp_path: Path):
    """Without the wait for workers that were there just now, of which the next rows are."""
    with Emulated(tmp_path, 101, 1, 2, config=msgspec.structs.replace(CONFIG, return_wait_s=0.0)) as fleet:
        assert loop(fleet, asks(20)).right == 20
        assert [worker.kill() for worker in fleet.decode] == [-9, -9]
        ledger = loop(fleet, asks(20, first=20), clients=1)
        assert set(ledger.ends) == {"error 503 no_worker"}
        assert ledger.slowest_s <= 1.0
        assert ledger.retry_after_s == {1}
        for worker in fleet.decode:  # the same addresses; the operator says nothing meanwhile
            worker.life -= 1
            worker.start()
        back = until("a worker answers", lambda: any(worker._answers() for worker in fleet.decode), 30)
        after = Ledger()

        async def serving() -> float:
            begun = time.monotonic()
            for i in range(10_000):
                if await ask(fleet.address, Ask((1, 2, i)), after) == "right":
                    return time.monotonic() - begun
                await asyncio.sleep(0.05)
            raise AssertionError(after.ends)

        took_s = asyncio.run(serving())
        print(f"listening again after {back:.1f} s, serving {took_s:.2f} s later: {dict(after.ends)}")
        assert took_s <= 5.0
        fleet.quiet()


@pytest.mark.parametrize("named", [True, False], ids=["named", "not-ready"])
def test_r1_the_only_decode_worker_is_away_for_a_moment(tmp_path: Path, named: bool):
    """It dies under requests and starts anew. `named`: the operator's document says all the while that it serves; else it leaves
    the worker out until it is ready again, as long as the start takes. Nobody is refused."""
    with Emulated(
        tmp_path, 113, 1, 1, config=msgspec.structs.replace(CONFIG, return_wait_s=60.0, first_token_deadline_s=90.0)
    ) as fleet:
        (worker,) = fleet.decode
        assert loop(fleet, asks(20)).right == 20
        ledger = Ledger()

        async def away() -> None:
            clients = asyncio.create_task(closed_loop(fleet.address, asks(200, first=100, size=100), 8, ledger))
            await asyncio.sleep(0.1)
            worker.kill()
            if not named:
                fleet.publish(fleet.prefill)
            await asyncio.sleep(1.0)
            held = await asyncio.to_thread(fleet.metric, "held")
            answered = ledger.all
            worker.life -= 1
            worker.start()
            if not named:
                await asyncio.to_thread(worker.wait)
                fleet.publish()
            await clients
            print(f"{answered} ends before it was back, {held:g} held: {dict(ledger.ends)}, slowest {ledger.slowest_s:.2f} s")
            assert held == 8
            assert ledger.all == 200

        asyncio.run(away())
        assert fleet.metric("held_for_total", "returning") >= 8
        broken = ledger.ends["event"]  # streams that had begun, and no other worker to carry them on
        assert ledger.right + broken == 200
        assert broken <= 8
        fleet.quiet()


def test_r1_the_only_decode_worker_stays_away(tmp_path: Path):
    """Who asks just after waits for as long as is allowed, and no longer; then it is refused at once."""
    with Emulated(tmp_path, 114, 1, 1, config=msgspec.structs.replace(CONFIG, return_wait_s=2.0)) as fleet:
        assert loop(fleet, asks(20)).right == 20
        assert fleet.decode[0].kill() == -9
        ledger = loop(fleet, asks(8, first=20), clients=8)
        assert ledger.ends == {"error 503 no_worker": 8}
        assert ledger.retry_after_s == {1}
        assert 1.5 <= ledger.slowest_s <= 4.0
        time.sleep(0.5)
        after = loop(fleet, asks(20, first=40), clients=1)
        assert after.ends == {"error 503 no_worker": 20}
        assert after.slowest_s <= 1.0
        assert fleet.metric("held_total", "expired") == 8


def test_r1_all_prefill_workers_gone_then_back(tmp_path: Path):
    """Decode workers prefill meanwhile: nobody notices. The router hears of nothing."""
    with Emulated(tmp_path, 109, 2, 2) as fleet:
        assert loop(fleet, asks(20, size=120)).right == 20
        assert [worker.kill() for worker in fleet.prefill] == [-9, -9]
        ledger = loop(fleet, asks(60, first=20, size=120))
        assert ledger.right == 60
        assert fleet.metric("local_prefill_total") >= 60
        for worker in fleet.prefill:
            worker.life -= 1
            worker.start().wait()
        legs = Ledger()

        def prefilled() -> bool:
            asyncio.run(closed_loop(fleet.address, asks(4, first=1_000 + legs.all, size=120), 4, legs))
            return sum(worker.stats()["reads"] for worker in fleet.prefill) > 0

        took_s = until("prefill workers prefill again", prefilled, 30)
        print(f"{took_s:.1f} s after they were back")
        assert legs.right == legs.all
        fleet.quiet()


def test_r2_one_of_three_flaps(tmp_path: Path):
    with Emulated(tmp_path, 102, 0, 3) as fleet:
        fleet.decode[0].fault(flap_s=0.5)
        end, sent, ledger, out = time.monotonic() + 12, 0, Ledger(), 0.0
        while time.monotonic() < end:
            asyncio.run(closed_loop(fleet.address, asks(100, first=sent, mixed=True, max_tokens=8), 8, ledger))
            sent += 100
            out = max(out, fleet.metric("workers_out", "decode"))
        stats = fleet.decode[0].stats()
        print(dict(ledger.ends), ledger.odd, stats, f"at most {out:g} out")
        assert stats["flaps"] >= 5
        assert fleet.metric("ejections_total") >= 1
        assert out <= 1
        assert ledger.right >= 0.999 * ledger.all
        assert ledger.ends["wrong"] == ledger.ends["hung"] == 0
        fleet.decode[0].fault()
        fleet.quiet()


@pytest.mark.parametrize("hot", [False, True], ids=["idle", "hot-prefix"])
def test_r3_a_worker_that_answers_errors_in_a_millisecond(tmp_path: Path, hot: bool):
    """It looks idle for ever; or it is the one that has the prefix which everybody asks for."""
    count, shared = 300, tuple(range(400)) if hot else ()
    sent = [Ask((*shared, i), 8) for i in range(count)]
    with Emulated(tmp_path, 103, 0, 3) as fleet:
        loop(fleet, [Ask((*shared, 9_999), 8)] * 3, clients=1)
        bad = max(fleet.decode, key=lambda worker: worker.stats()["asked"])
        before = bad.stats()["asked"]
        bad.fault(mode="errors")
        ledger = loop(fleet, sent)
        stats = bad.stats()
        print(stats)
        assert stats["faulty"] >= 1
        assert ledger.right == count
        assert stats["asked"] - before <= FAILURES_MOST + 8 + count / 3 / 10  # eight clients were under way when it was put out
        assert fleet.metric("workers_out", "decode") == 1
        bad.fault()
        until("it serves again", lambda: loop(fleet, asks(30, first=7_000)).right == 30 and fleet.metric("workers_out") == 0, 30)


def test_r3_a_worker_that_says_nothing(tmp_path: Path):
    with Emulated(tmp_path, 104, 0, 3) as fleet:
        fleet.decode[0].fault(mode="hang")
        ledger = loop(fleet, asks(120, max_tokens=8), clients=12)
        stats = fleet.decode[0].stats()
        assert stats["faulty"] >= 1
        assert ledger.right == 120
        assert stats["asked"] <= 120 / 3
        assert ledger.slowest_s < fleet.config.first_token_deadline_s
        assert fleet.metric("workers_out", "decode") == 1


@pytest.mark.smoke
def test_r7_everything_fails_at_twice_the_load(tmp_path: Path):
    """Stage one: twice as many come in a second as six clients had answered, and every attempt failed."""
    with Emulated(tmp_path, 105, 0, 3) as fleet:
        begun = time.monotonic()
        assert loop(fleet, asks(100), clients=6).right == 100
        usual_per_s = 100 / (time.monotonic() - begun)
        for worker in fleet.decode:
            worker.fault(mode="errors")
        before = sum(worker.stats()["asked"] for worker in fleet.decode)
        end, ledger = time.monotonic() + OUTAGE_S, Ledger()

        async def client(number: int) -> None:
            i = number * 100_000
            while time.monotonic() < end:
                i += 1
                await ask(fleet.address, Ask((number, i)), ledger)
                await asyncio.sleep(0.02)

        async def outage() -> None:
            await asyncio.gather(*(client(number) for number in range(12)))

        asyncio.run(outage())
        attempts = sum(worker.stats()["asked"] for worker in fleet.decode) - before
        times = ledger.all / OUTAGE_S / usual_per_s
        print(f"{ledger.all} requests, {times:.1f} times the load, {attempts} attempts: {dict(ledger.ends)}")
        assert times >= 2
        assert sum(worker.stats()["faulty"] for worker in fleet.decode) == attempts
        assert ledger.right == 0
        assert set(ledger.ends) <= {"error 502 bad_gateway", "error 503 no_worker", "error 503 no_retry_left"}
        assert ledger.all >= 200
        assert attempts <= 1.2 * ledger.all + FIRST
        for worker in fleet.decode:
            worker.fault()
        again = loop(fleet, asks(200, first=1_000), clients=12)
        after = sum(worker.stats()["asked"] for worker in fleet.decode) - before - attempts
        print(f"after it: {after} attempts for {again.all}")
        assert again.right >= 199
        assert after <= 1.2 * again.all
        fleet.quiet()


MODES = ["drip", "reset", "half_close", "bad_json", "extra", "huge", "not_http", "errors"]


@pytest.mark.parametrize("mode", MODES)
def test_r9_a_worker_that_answers_nonsense(tmp_path: Path, mode: str):
    """One of two workers; determined streams go on at the other one, others end with an error. Nothing hangs."""
    with Emulated(tmp_path, 106, 0, 2) as fleet:
        fleet.decode[0].fault(mode=mode)
        sent = [Ask((i, 5), 12, stream=i % 6 != 5, greedy=i % 4 != 3) for i in range(36)]
        ledger = loop(fleet, sent, clients=4)
        assert fleet.decode[0].stats()["faulty"] >= 1
        explicit = sum(count for end, count in ledger.ends.items() if end == "event" or end.startswith("error 502"))
        assert ledger.right + explicit == ledger.all  # nothing wrong, nothing that hangs, nothing that ends without a word
        assert ledger.lost == 0
        # some faults are in streams alone: a whole answer may have brought it back since
        assert fleet.metric("ejections_total") >= 1 or fleet.decode[0].stats()["faulty"] < FAILURES_MOST
        assert fleet.rss_mb() < 200
        fleet.decode[0].fault()
        until("nothing runs", lambda: fleet.metric("inflight") == 0, 10)


def test_r9_an_event_that_a_worker_says_twice_is_the_answer_that_it_gave(tmp_path: Path):
    """TCP brings every byte once, so that only an engine can say a token twice, and a text may well have one twice: nothing in a
    stream tells the two apart. Nobody is blamed, nothing hangs, and no other stream is touched."""
    with Emulated(tmp_path, 107, 0, 2) as fleet:
        fleet.decode[0].fault(mode="twice")
        ledger = loop(fleet, asks(36, size=2), clients=4)
        said_twice = fleet.decode[0].stats()["faulty"]
        assert 0 < said_twice < 36
        assert ledger.ends == {"right": 36 - said_twice, "wrong": said_twice}
        assert fleet.metric("ejections_total") == 0
        fleet.quiet()

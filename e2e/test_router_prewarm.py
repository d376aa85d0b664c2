"""Pairs meet before clients' requests: a real router over emulated workers whose first transfer takes HANDSHAKE_S longer."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import msgspec
import pytest
import yaml

from e2e.emulated.asking import Ask, Ledger, closed_loop
from e2e.emulated.fleet import CONFIG, Emulated, get, until
from e2e.fleet_up import free_port, gone, running
from e2e.test_router_decides import MOVED
from fleet_cli.up.bundled import bundled_manifest, tiny_model
from fleet_router.config import PrewarmBounds, RouterConfig
from fleet_router.health.breaker import PAIR_FAILURES_MOST

pytestmark = pytest.mark.timeout(300)
HANDSHAKE_S = 1.0
PREFILLS, DECODES = 2, 2
PAIRS = PREFILLS * DECODES
ON = PrewarmBounds(pairs=8, parallel=2, timeout_s=10.0)
QUICK: RouterConfig = msgspec.structs.replace(CONFIG, min_uncached_tokens=0, policy="roundRobin")
"""Every prompt is prefilled elsewhere, and soon every pair is used."""
COUNTED = "KV moved: 2 transfers"
"""As `fleet up` shows a status."""


def asks(count: int, first: int = 0) -> list[Ask]:
    return [Ask(tuple((i * 31 + k) % 9_000 for k in range(100)), max_tokens=4) for i in range(first, first + count)]


def slowest(fleet: Emulated, count: int, first: int = 0) -> float:
    """Seconds of the slowest of so many requests, each answered right."""
    ledger = Ledger()
    asyncio.run(closed_loop(fleet.address, asks(count, first), 1, ledger))
    assert ledger.right == count, ledger.odd
    return ledger.slowest_s


def pulled(fleet: Emulated) -> int:
    return sum(worker.stats()["pulled"] for worker in fleet.decode)


def slow_first(fleet: Emulated) -> None:
    for worker in fleet.decode:
        worker.fault(handshake_s=HANDSHAKE_S)


def done(fleet: Emulated) -> float:
    return fleet.metric("prewarms_total", "done")


@pytest.mark.smoke
def test_no_request_waits_for_a_handshake_that_was_made_before_and_each_pairs_first_one_does_without(tmp_path: Path):
    with Emulated(tmp_path, 197, PREFILLS, DECODES, config=QUICK) as fleet:
        slow_first(fleet)
        without_s = slowest(fleet, 2)
        assert without_s >= HANDSHAKE_S  # the penalty is there
    (tmp_path / "on").mkdir()
    with Emulated(tmp_path / "on", 197, PREFILLS, DECODES, config=QUICK) as fleet:
        slow_first(fleet)
        fleet.publish(prewarm=ON)
        took_s = until("all pairs have met", lambda: done(fleet) == PAIRS, 30)
        assert took_s >= PAIRS / DECODES * HANDSHAKE_S  # a worker is in one pair at a time
        assert pulled(fleet) == PAIRS
        for name in ("requests_total", "arrivals_total", "remote_prefill_total", "handed_over_total", "prefill_tokens_total"):
            assert fleet.metric(name) == 0, name
        assert fleet.metric("prefix_keys") == fleet.metric("inflight") == fleet.metric("revision_requests_total") == 0
        fleet.quiet()
        warm_s = slowest(fleet, 8 * PAIRS)
        print(f"slowest of {8 * PAIRS} requests {warm_s:.3f} s after prewarming, without it {without_s:.3f} s")
        assert warm_s < HANDSHAKE_S / 2
        assert pulled(fleet) == PAIRS + 8 * PAIRS
        assert done(fleet) == PAIRS
        fleet.quiet()


def test_a_pair_between_which_no_kv_moves_is_put_out_before_any_request_and_its_leases_come_back(tmp_path: Path):
    with Emulated(tmp_path, 198, 1, 3, config=QUICK) as fleet:
        giver, cut = fleet.prefill[0], fleet.decode[0]
        giver.fault(cut=[cut.uid])
        fleet.publish(prewarm=ON)
        until("the pair is put out", lambda: fleet.metric("pairs_out") == 1, 30)
        until("the others have met", lambda: done(fleet) == 2, 30)
        assert fleet.metric("prewarms_total", "failed") == giver.stats()["cut_reads"] == PAIR_FAILURES_MOST
        assert fleet.metric("prewarms_left") == 0
        assert fleet.metric("workers_out") == 0  # the pair, and neither of its workers
        fleet.quiet()
        slowest(fleet, 12)
        assert giver.stats()["cut_reads"] == PAIR_FAILURES_MOST  # no request was given to that pair
        assert sum(worker.stats()["failed_pulls"] for worker in fleet.decode) == PAIR_FAILURES_MOST
        lines = [json.loads(line) for line in (tmp_path / "router.log").read_text().splitlines()]
        told = [line for line in lines if line["event"] == "prewarm"]
        assert {(line["prefill"], line["decode"], line["outcome"]) for line in told} == {("prefill-0", "decode-0", "failed")}
        fleet.quiet()


def test_who_joins_is_warmed_who_hangs_is_left_alone_and_nothing_stays_pinned(tmp_path: Path):
    """A decode worker that hangs under prewarms: their time runs out, KV comes back, and the other pairs meet."""
    config = msgspec.structs.replace(QUICK, policy="kvAware", prewarm=msgspec.structs.replace(ON, timeout_s=1.0))
    with Emulated(tmp_path, 199, 1, 3, config=config) as fleet:
        until("all pairs have met", lambda: done(fleet) == 3, 30)
        fleet.decode[1].kill()
        fleet.decode[1].start().wait().fault(mode="hang")
        began = time.monotonic()
        fleet.publish()
        until("its prewarms are over", lambda: fleet.metric("prewarms_total", "failed") == PAIR_FAILURES_MOST, 30)
        assert time.monotonic() - began >= PAIR_FAILURES_MOST * 1.0
        until("nothing is pinned", lambda: fleet.prefill[0].stats()["pinned"] == 0, 10)
        assert fleet.metric("pairs_out") == 1
        fleet.decode[1].fault()
        slowest(fleet, 6)
        [row] = json.loads(get(f"http://{fleet.address}/debug/decisions?limit=1"))["decisions"]
        assert row["tries"][0]["prewarmed_s"] > 0
        until("nothing runs", lambda: fleet.metric("inflight") == 0, 10)


def test_real_engines_meet_too_and_no_client_had_needed_it(tmp_path: Path):
    """Torch workers, a whole fleet: both pairs' first transfer is ours, KV is proven as ever and nothing is left pinned."""
    made = bundled_manifest(tiny_model())
    tier = made["spec"]["tiers"][0]
    tier |= {"ratio": {"prefill": 1, "decode": 2, "min": "1:2", "max": "1:2"}}
    tier["prefill"], tier["decode"] = {"minReplicas": 1, "maxReplicas": 1}, {"minReplicas": 2, "maxReplicas": 2}
    made["spec"]["routing"] = {"prewarm": {"pairs": 4}}
    path, port = tmp_path / "fleet.yaml", free_port()
    path.write_text(yaml.safe_dump(made))
    with running(str(path), "--port", str(port), "--state", str(tmp_path / "state")) as fleet:
        fleet.until("curl")

        def metrics() -> str:
            return get(f"http://127.0.0.1:{port}/metrics").decode()

        until("both pairs have met", lambda: 'fleet_router_prewarms_total{outcome="done"} 2' in metrics(), 60, metrics)
        assert 'fleet_router_handed_over_total{tier="local"} 0' in metrics()  # `fleet up` itself asked something short
        assert 'fleet_router_prewarms_total{outcome="failed"} 0' in metrics()
        assert 'fleet_router_handed_over_total{tier="local"} 0' in metrics()  # what `fleet up` itself asked was short
        if not any(COUNTED in line for line in fleet.lines):
            fleet.until(COUNTED)  # its last line is of the last status, and that of the operator's last look at the engines
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.end() == 0, "".join(fleet.lines)
    found = MOVED.search("".join(fleet.lines))
    assert found is not None, "".join(fleet.lines)
    assert found[1] == "2"
    assert gone(tmp_path / "state")

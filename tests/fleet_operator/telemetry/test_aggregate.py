"""Readings of workers and routers become one tier's load; a part is never taken for the whole."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fleet_operator.telemetry import aggregate
from fleet_operator.telemetry.aggregate import METRICS, Reading, WorkerReading, tier_telemetry
from fleet_operator.telemetry.parse import parse_text
from fleet_planner.roles import Role
from fleet_planner.types import KvProof

NOW = 1_000.0


def router(prefill: float, decode: float, at: float = NOW, more: str = "") -> Reading:
    rows = [f'fleet_router_inflight{{role="{role}",tier="t"}} {n}' for role, n in (("prefill", prefill), ("decode", decode))]
    return Reading(parse_text("\n".join([*rows, more])), at)


def worker(role: Role, held: float | None, at: float = NOW, tier: str = "t") -> WorkerReading:
    if held is None:
        return WorkerReading(tier, role, None)
    return WorkerReading(tier, role, Reading(parse_text(f"vllm:num_requests_running {held}\nvllm:num_requests_waiting 0"), at))


def inflight(workers: list[WorkerReading], routers: list[Reading | None]) -> tuple[float | None, float | None]:
    found = tier_telemetry("t", workers, routers, [None] * len(routers), NOW)
    return found.prefill.inflight, found.decode.inflight


@pytest.mark.parametrize(
    ("workers", "routers", "expected"),
    [
        ([worker("prefill", 1), worker("decode", 2)], [router(3, 1)], (3, 2)),
        ([worker("prefill", 1), worker("decode", None)], [router(0, 5)], (1, 5)),
        ([worker("prefill", 1), worker("decode", None)], [None], (1, None)),
        ([worker("prefill", 1), worker("decode", 1), worker("decode", None)], [None], (1, None)),
        ([worker("prefill", 1), worker("decode", 1)], [router(2, 2), None], (1, 1)),
        ([worker("prefill", 1), worker("decode", 1)], [router(2, 2), router(2, 2)], (4, 4)),
        ([], [router(2, 0)], (2, 0)),
        ([], [], (None, None)),
        ([worker("prefill", 9, tier="other")], [router(1, 1)], (1, 1)),
    ],
    ids=[
        "the-larger-counts", "routers-know-all-they-sent", "unreadable-worker", "a-part-of-the-workers", "a-part-of-the-routers",
        "two-routers-add-up", "no-workers", "nothing", "another-tier",
    ],
)  # fmt: skip
def test_inflight(workers: list[WorkerReading], routers: list[Reading | None], expected: tuple[float | None, float | None]):
    assert inflight(workers, routers) == expected


def queue(*lengths: str) -> str:
    return "\n".join(f'fleet_router_queue_length{{class="c{at}"}} {length}' for at, length in enumerate(lengths))


@pytest.mark.parametrize(
    ("routers", "expected"),
    [
        pytest.param([router(4, 12, more=queue("32"))], (12, 36), id="as-those-that-run"),
        pytest.param([router(2, 16, more=queue("6", "3", "0"))], (3, 24), id="every-class"),
        pytest.param([router(4, 12, more=queue("0"))], (4, 12), id="nobody-waits"),
        pytest.param([router(4, 12, more=queue("16")), router(0, 8)], (8, 32), id="each-router-its-own"),
        pytest.param(
            [router(2, 2, more='fleet_router_inflight{role="decode",tier="u"} 4\n' + queue("8"))], (4, 4), id="other-tiers"
        ),
        pytest.param([router(0, 0, more=queue("5"))], (1, 1), id="nobody-runs-yet"),
        pytest.param([router(4, 12, more=queue("-1"))], (1, 1), id="negative"),
        pytest.param([router(4, 12, more=queue("1e6"))], (1, 1), id="more-than-any-holds"),
        pytest.param([router(4, 12, more=queue("16")), None], (1, 1), id="a-router-that-is-not-read"),
    ],
)
def test_who_waits_in_a_router_s_queue_is_load_of_the_roles_that_run_its_requests(
    routers: list[Reading | None], expected: tuple[float, float]
):
    """A decode worker is sent engine.maxBatch requests at most: where scaling aims at as many, no number of waiting ones made the
    tier grow."""
    assert inflight([worker("prefill", 1), worker("decode", 1)], routers) == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(("40", "60", "50"), 50.0, id="the-median"),
        pytest.param(("40", None, "1e9", "-1", "NaN"), 40.0, id="no-word-and-no-time-at-all"),
        pytest.param((None,), None, id="older-agents"),
        pytest.param((), None, id="nobody"),
    ],
)
def test_how_long_engines_took_to_start(told: tuple[str | None, ...], expected: float | None):
    def says(text: str | None) -> WorkerReading:
        lines = "" if text is None else f"fleet_agent_engine_start_seconds {text}"
        return WorkerReading("t", "decode", Reading(parse_text(lines), NOW))

    workers = [*map(says, told), WorkerReading("t", "prefill", None)]
    assert tier_telemetry("t", workers, [], [], NOW).engine_start_s == expected


@pytest.mark.parametrize(
    ("routers", "unheard"), [([None, None], True), ([None, router(0, 0)], False), ([router(0, 0)], False), ([], False)]
)
def test_it_is_told_that_no_router_could_be_read(routers: list[Reading | None], unheard: bool):
    assert tier_telemetry("t", [], routers, [None] * len(routers), NOW).unheard is unheard


def test_load_is_as_old_as_its_oldest_reading():
    found = tier_telemetry("t", [worker("prefill", 1, at=990.0), worker("prefill", 1, at=999.0)], [router(0, 0)], [None], NOW)
    assert found.prefill.measured_at == 990.0


def test_latency_is_the_worst_routers_over_the_window():
    old, new = (
        router(0, 0, more="\n".join(f'fleet_router_ttft_seconds_bucket{{tier="t",le="{le}"}} {n}' for le, n in counts))
        for counts in ([("1", 100), ("2", 100), ("+Inf", 100)], [("1", 100), ("2", 110), ("+Inf", 110)])
    )
    found = tier_telemetry("t", [], [new, new], [old, None], NOW)
    assert found.prefill.ttft_p99_s == pytest.approx(1.99)
    assert found.decode.itl_p99_s is None


def test_the_proof_counts_decode_workers_only():
    text = (
        "vllm:nixl_xfer_time_seconds_count 3\nfleet:kv_blocks_received_total 40\nvllm:nixl_bytes_transferred_sum 4096\n"
        "vllm:nixl_num_failed_transfers_total 1"
    )
    text += '\nfleet_agent_transport_info{transport="shm"} 1'
    readings = [WorkerReading("t", role, Reading(parse_text(text), NOW)) for role in ("decode", "decode", "prefill")]
    found = tier_telemetry("t", readings, [], [], NOW)
    assert found.kv == KvProof(transfers=6, blocks=80, bytes=8192, failed=2, measured_at=NOW)
    assert found.transport == "shm"
    assert tier_telemetry("t", [worker("decode", None)], [], [], NOW).kv is None


@pytest.mark.parametrize(
    "text",
    ["vllm:nixl_bytes_transferred_sum -1", "vllm:nixl_bytes_transferred_sum 1e300",
     'vllm:nixl_bytes_transferred_sum{a="1"} 1e308\nvllm:nixl_bytes_transferred_sum{a="2"} 1e308'],
    ids=["negative", "more-than-a-status-holds", "infinite-sum"],
)  # fmt: skip
def test_counters_that_cannot_be_are_no_proof(text: str):
    reading = WorkerReading("t", "decode", Reading(parse_text(text), NOW))
    assert tier_telemetry("t", [reading], [], [], NOW).kv is None


def says(role: Role, *lines: str, tier: str = "t") -> WorkerReading:
    """A worker by its label, and what its agent exposes."""
    return WorkerReading(tier, role, Reading(parse_text("\n".join(lines)), NOW), f"{tier}-{role}")


PREFILL, DECODE = (f'fleet_agent_role_epoch{{role="{role}"}} 1' for role in ("prefill", "decode"))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param([says("decode", PREFILL), says("prefill", PREFILL)], {"t-decode": "prefill"}, id="one-of-two"),
        pytest.param([says("prefill", DECODE)], {"t-prefill": "decode"}, id="the-other-way"),
        pytest.param([says("decode", DECODE)], {}, id="its-own"),
        pytest.param([says("decode", "fleet_agent_ready 1")], {}, id="an-agent-that-says-none"),
        pytest.param([says("decode", "fleet_agent_role_epoch 1")], {}, id="no-label"),
        pytest.param([says("decode", 'fleet_agent_role_epoch{role="x"} 1')], {}, id="a-role-that-nobody-knows"),
        pytest.param([says("decode", PREFILL, DECODE)], {}, id="both"),
        pytest.param([WorkerReading("t", "decode", None, "t-decode")], {}, id="unreadable"),
        pytest.param([says("decode", PREFILL, tier="u")], {}, id="of-another-tier"),
    ],
)
def test_what_agents_say_that_their_pods_labels_do_not(workers: list[WorkerReading], expected: dict[str, Role]):
    assert tier_telemetry("t", workers, [], [], NOW).astray == expected


def test_every_metric_that_is_read_is_asked_for():
    """Prometheus returns only what METRICS names."""
    text = Path(aggregate.__file__).read_text()
    read = {name for name in re.findall(r'"((?:vllm:|fleet:|fleet_router_|fleet_agent_)[a-z_]+)"', text)}
    assert {name if f"{name}_bucket" not in METRICS else f"{name}_bucket" for name in read} == METRICS


def test_what_each_worker_runs_is_known_by_pod_and_unknown_is_absent():
    known = [
        replace(worker("prefill", 0), pod="p"),
        replace(worker("decode", 2), pod="d"),
        replace(worker("decode", None), pod="x"),
    ]
    assert tier_telemetry("t", known, [], [], NOW).busy == {"p": 0.0, "d": 2.0}


@pytest.mark.parametrize(
    ("leases", "idle"), [("", True), ("\nfleet:kv_leases_open 0", True), ("\nfleet:kv_leases_open 1", False)]
)
def test_a_worker_with_a_lease_open_is_not_idle(leases: str, idle: bool):
    """vLLM does not say it: then the requests count."""
    text = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0" + leases
    mine = WorkerReading("t", "prefill", Reading(parse_text(text), NOW - 1), "p")
    others = [replace(worker("decode", 2), pod="d"), replace(worker("decode", None), pod="x")]
    assert tier_telemetry("t", [mine, *others], [], [], NOW).idle == ({"p": NOW - 1} if idle else {})

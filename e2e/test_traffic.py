"""Traffic of a real trace through the whole system: every token right, KV really moved, twice the load makes the tier grow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.fleet import Fleet, manifest
from e2e.shared_memory import ownerless
from e2e.traffic import Ledger, Request, read_trace, send, send_all
from fleet_cli.up.bundled import tiny_model
from tests.conformance.workers import running, worker_config

CLIENTS = 4
"""Targets of 4 requests per prefill and 2 per decode worker: 4 clients never need more than 1 + 2 workers, 8 always do."""
MIN_RATIO, MAX_RATIO = 1 / 3, 1.0

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(500)]


def test_200_requests_of_a_real_trace_then_twice_the_load(fleet: Fleet, tmp_path: Path):
    requests = read_trace()
    assert len(requests) == 200
    expected = single_process_answers(requests, tmp_path)
    shared_memory = ownerless()
    fleet.apply(wish(fleet.namespace))
    fleet.wait_serving(1, 2)

    ledger = send_all(fleet.router(), requests, CLIENTS)
    assert ledger.errors == {}
    assert ledger.tokens == expected.tokens
    assert fleet.desired() == (1, 2), "four clients fit into what the fleet began with"
    fleet.wait("proof that KV moved", lambda: fleet.condition("Disaggregating")["status"] == "True", 20)
    # half of the trace is new text: its KV must have come from the prefill worker; counters alone are written every 30 s
    fleet.wait("100 transfers", lambda: fleet.status()["tiers"][0]["kv"]["transfers"] >= 100, 45)
    assert fleet.status()["tiers"][0]["kv"]["failed"] == 0

    with load(fleet.router(), requests, 2 * CLIENTS) as doubled:
        fleet.wait("a larger tier", lambda: within_ratio(fleet) > 3, 60)
        fleet.wait("its workers serving", lambda: sum(fleet.serving()) > 3, 60)
    assert doubled.errors == {}
    assert doubled.tokens == {number: expected.tokens[number] for number in doubled.tokens}
    assert len(doubled.tokens) >= 100
    fleet.delete_and_leave_nothing()
    assert ownerless() <= shared_memory


def wish(namespace: str) -> dict[str, object]:
    made = manifest(namespace, tiny_model())
    made["spec"]["scaling"]["targetInflight"] = {"prefill": 4, "decode": 2}
    return made


def single_process_answers(requests: list[Request], folder: Path) -> Ledger:
    """One engine that prefills and decodes everything itself."""
    with running(worker_config("decode", tiny_model()), "127.79.0.9", folder) as alone:
        ledger = send_all(alone.engine, requests, CLIENTS)
    assert ledger.errors == {}
    assert len(ledger.tokens) == len(requests)
    return ledger


def within_ratio(fleet: Fleet) -> int:
    """Size of the tier; its ratio holds at every look."""
    prefill, decode = fleet.desired()
    assert MIN_RATIO <= prefill / decode <= MAX_RATIO, (prefill, decode)
    assert (prefill <= 2, decode <= 4) == (True, True), (prefill, decode)
    return prefill + decode


@contextmanager
def load(url: str, requests: list[Request], clients: int) -> Iterator[Ledger]:
    """The same requests again and again while the block runs; what was sent is answered before it ends."""
    ledger, stop = Ledger(), threading.Event()

    def until_stopped() -> Iterator[Request]:
        while True:
            for request in requests:
                if stop.is_set() and len(ledger.tokens) >= 100:
                    return
                yield request

    sending = threading.Thread(target=lambda: asyncio.run(send(url, until_stopped(), clients, ledger)))
    sending.start()
    try:
        yield ledger
    finally:
        stop.set()
        sending.join()

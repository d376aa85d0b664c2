"""What the Endpoint Picker makes of answers that it sees only as far, and as fast, as a gateway shows them."""

from __future__ import annotations

from typing import Any

from tests.fleet_router.rig import Rig, ask, run
from tests.fleet_router.test_picker import answer_of, body_of, exchanged, head_of, known


def overloaded() -> list[Any]:
    """As Envoy answers above its bound of requests under way."""
    found = answer_of(b"upstream connect error or disconnect/reset before headers. reset reason: overflow")
    found[0].response_headers.headers.headers[0].raw_value = b"503"
    found[0].response_headers.headers.headers.add(key="x-envoy-overloaded", raw_value=b"true")
    return found


def test_what_a_gateway_lets_through_no_more_is_nothing_against_its_worker():
    """Envoy has a bound of its own (`circuit_breakers`, 1,024 unless told): five such answers put a worker out that was never
    asked, and counted as errors of its revision, by which canaries are rolled back."""

    async def go(rig: Rig) -> None:
        known(rig)
        for _ in range(5):
            await exchanged(rig, head_of(), body_of(ask(prompt="short")), *overloaded())
        account, (worker,) = rig.context.desk.accounts["acme"], rig.context.table.by_role["decode"]
        assert (rig.context.metrics.of("t", "r").errors, worker.breaker.closed, worker.inflight) == (0, True, 0)
        assert (account.counts["failed"], account.inflight) == (5, 0)
        (found,) = {one.tries[-1].why for one in rig.context.recorder.records()}
        assert found == "the gateway let no more through: it answered 503"

    run(go, prefill=0)

"""What a gateway answers by itself, of the worker that was picked or before any was."""

from __future__ import annotations

import pytest

from fleet_router.epp.picked import Picked, address_of
from fleet_router.hints import NO_HINTS
from fleet_router.request import parse_body
from tests.fleet_router.rig import Rig, run
from tests.fleet_router.test_picked import Gateway


@pytest.mark.parametrize(
    ("stream", "waited_s", "errors"),
    [(b"false", 15.0, 0), (b"false", 59.0, 0), (b"false", 601.0, 1), (b"true", 1.0, 0), (b"true", 15.1, 1), (b"true", 45.0, 1)],
)
def test_how_long_a_gateway_waits_is_no_failure_of_the_worker(stream: bytes, waited_s: float, errors: int):
    """Envoy waits 15 s unless its route says otherwise, Envoy AI Gateway 60 s, and a client may ask for less
    (x-envoy-upstream-rq-timeout-ms): five such 504 of long whole answers put out a healthy worker."""

    async def go(rig: Rig) -> None:
        lane, (worker,) = rig.context.desk.lane(b"", b""), rig.context.table.by_role["decode"]
        body = b'{"model":"m","prompt":"short","max_tokens":2000,"stream":%b}' % stream
        ask, ticket = rig.context.desk.admit(lane, parse_body(body, False, lane.config))
        flow = Picked(rig.context, Gateway(), b"/v1/completions", ask, ticket, NO_HINTS, None)  # type: ignore[arg-type]
        rig.context.desk.start(ticket, flow)
        flow.sent_at -= waited_s
        flow.started_at -= waited_s
        flow.deadline -= waited_s
        flow.served(address_of(worker), 504)
        flow.end()
        assert (rig.context.metrics.of("t", "r").errors, worker.inflight) == (errors, 0)
        (record,) = rig.context.recorder.records()
        assert record.tries[-1].why == "the gateway waited no longer: it answered 504"

    run(go, prefill=0)

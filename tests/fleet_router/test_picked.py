"""What a gateway is told to send to the decode worker: its client's request, and nothing that only we would need."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fleet_router.epp.picked import Picked
from fleet_router.hints import NO_HINTS
from fleet_router.request import parse_body
from fleet_router.workers import Worker
from tests.fleet_router.admission.made import key_of, parsed
from tests.fleet_router.rig import CONFIG, Rig, run


class Gateway:
    """Keeps what it is told."""

    request_id = leg_id = "r1"
    last_answer = False

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.told: list[list[str]] = []

    def picked(self, workers: list[Worker], body: bytes) -> None:
        self.told.append([worker.endpoint.name for worker in workers])
        self.bodies.append(json.loads(body))

    def write(self, data: bytes) -> None: ...


@pytest.mark.parametrize("resume", ["replay", "prefill"])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"temperature": 0}])
def test_a_gateways_stream_is_asked_for_as_its_client_asked(resume: str, more: dict[str, Any]):
    """Incident: with tenants its client got an event with the usage that it had not asked for."""

    async def go(rig: Rig) -> None:
        desk = rig.context.desk
        desk.tenants_needed = True
        desk.know(parsed(acme={}))
        body = {"model": "m", "prompt": "short", "max_tokens": 4, "stream": True, **more}
        lane, gateway = desk.lane(key_of("acme").encode(), b""), Gateway()
        ask, ticket = desk.admit(lane, parse_body(json.dumps(body).encode(), False, lane.config))
        flow = Picked(rig.context, gateway, b"/v1/completions", ask, ticket, NO_HINTS, None)  # type: ignore[arg-type]
        desk.start(ticket, flow)
        assert [set(told) - set(body) for told in gateway.bodies] == [{"cache_salt"}]  # keeps tenants' caches apart
        flow.cancel()
        assert desk.accounts["acme"].inflight == 0

    run(go, config=msgspec.structs.replace(CONFIG, resume=resume))


def test_a_worker_outside_of_the_gateways_subset_is_not_picked_because_it_came_later():
    """While the request waits for workers others join: the gateway asked for one of its subset."""

    async def go(rig: Rig) -> None:
        rig.apply([], rig.decode[:1], waits)
        body = {"model": "m", "prompt": "short", "max_tokens": 4}
        lane, gateway = rig.context.desk.lane(b"", b""), Gateway()
        ask, ticket = rig.context.desk.admit(lane, parse_body(json.dumps(body).encode(), False, lane.config))
        mine = frozenset({f"127.0.0.1:{rig.decode[0].port}"})
        flow = Picked(rig.context, gateway, b"/v1/completions", ask, ticket, NO_HINTS, mine)  # type: ignore[arg-type]
        rig.apply([], rig.decode[1:], waits)
        rig.context.desk.start(ticket, flow)
        assert (gateway.told, len(rig.context.holding)) == ([], 1)
        rig.apply([], rig.decode[2:], waits)
        assert (gateway.told, len(rig.context.holding)) == ([], 1)
        rig.apply([], rig.decode, waits)
        assert gateway.told == [[f"decode-{rig.decode[0].port}"]]
        flow.cancel()

    waits = msgspec.structs.replace(CONFIG, return_wait_s=10.0)
    run(go, prefill=0, decode=3, config=waits)

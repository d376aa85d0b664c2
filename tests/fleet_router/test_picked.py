"""What a gateway is told to send to the decode worker: its client's request, and nothing that only we would need."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.epp.picked import Picked, address_of
from fleet_router.errors import RequestError
from fleet_router.hints import NO_HINTS
from fleet_router.request import parse_alone, parse_body
from fleet_router.workers import Worker
from tests.fleet_router.admission.made import key_of, parsed
from tests.fleet_router.fake_worker import FakeWorker
from tests.fleet_router.rig import CONFIG, LONG, Rig, run, until


class Gateway:
    """Keeps what it is told."""

    request_id = leg_id = "r1"
    last_answer = False

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.workers: list[list[Worker]] = []
        self.told: list[list[str]] = []

    def picked(self, workers: list[Worker], body: bytes) -> None:
        self.told.append([worker.endpoint.name for worker in workers])
        self.bodies.append(json.loads(body))
        self.workers.append(workers)

    def write(self, data: bytes) -> None: ...

    def finish(self, *, last: bool) -> None: ...

    def break_off(self, error: RequestError, *, stream: bool, last: bool) -> None: ...


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


def test_a_gateway_is_told_the_name_that_its_worker_knows():
    """Incident: of a fleet whose model was renamed, workers of the revision before it answered 404 behind a gateway. A fallback
    gets the same body, so that it must know the same name."""

    async def go(rig: Rig) -> None:
        old, *_ = rig.context.table.by_role["decode"]
        for worker, name in zip(rig.context.table.by_role["decode"], ("old", "old", ""), strict=True):
            worker.endpoint = msgspec.structs.replace(worker.endpoint, model=name)
        lane, gateway = rig.context.desk.lane(b"", b""), Gateway()
        for only in (None, frozenset({address_of(old)})):
            ask, ticket = rig.context.desk.admit(lane, parse_body(b'{"model":"m","prompt":"short"}', False, lane.config))
            flow = Picked(rig.context, gateway, b"/v1/completions", ask, ticket, NO_HINTS, only)  # type: ignore[arg-type]
            rig.context.desk.start(ticket, flow)
            flow.cancel()
        for workers, body in zip(gateway.workers, gateway.bodies, strict=True):
            assert {worker.endpoint.model for worker in workers} == {"old" if body["model"] == "old" else ""}
        assert gateway.bodies[-1]["model"] == "old"

    run(go, prefill=0, decode=3)


def test_a_long_answer_of_a_gateway_is_nothing_against_its_worker():
    """Incident: of embeddings above 8 MiB the slot was given back, and the worker blamed, while the gateway handed them on."""

    async def go(rig: Rig) -> None:
        lane, (worker,) = rig.context.desk.lane(b"", b""), rig.context.table.by_role["decode"]
        ask, ticket = rig.context.desk.admit(lane, parse_alone(b'{"model":"m","input":"a"}', lane.config))
        flow = Picked(rig.context, Gateway(), b"/v1/embeddings", ask, ticket, NO_HINTS, None)  # type: ignore[arg-type]
        rig.context.desk.start(ticket, flow)
        flow.served(address_of(worker), 200)
        for _ in range(12):
            flow.raw(b"A" * 1_048_576)
        assert (flow.done, rig.context.metrics.of("t", "r").errors) == (False, 0)
        flow.end()

    run(go, prefill=0)


@pytest.mark.parametrize(("status", "errors"), [(200, 0), (400, 0), (501, 0), (429, 1), (500, 1)])
def test_which_answers_of_a_gateway_are_against_its_worker(status: int, errors: int):
    async def go(rig: Rig) -> None:
        lane, (worker,) = rig.context.desk.lane(b"", b""), rig.context.table.by_role["decode"]
        ask, ticket = rig.context.desk.admit(lane, parse_alone(b'{"model":"m","input":"a"}', lane.config))
        flow = Picked(rig.context, Gateway(), b"/v1/embeddings", ask, ticket, NO_HINTS, None)  # type: ignore[arg-type]
        rig.context.desk.start(ticket, flow)
        flow.served(address_of(worker), status)
        flow.end()
        assert rig.context.metrics.of("t", "r").errors == errors

    run(go, prefill=0)


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


def test_no_prefill_worker_is_picked_where_all_decode_workers_are_full():
    """Incident: a gateway was told to send it to a prefill worker, which is none of its pool's: 503."""

    async def go(rig: Rig) -> None:
        lane, gateway = rig.context.desk.lane(b"", b""), Gateway()
        (decode,) = rig.context.table.by_role["decode"]
        decode.elsewhere(1, 0, rig.context.clock())
        body = json.dumps({"model": "m", "prompt": LONG}).encode()
        ask, ticket = rig.context.desk.admit(lane, parse_body(body, False, lane.config))
        flow = Picked(rig.context, gateway, b"/v1/completions", ask, ticket, NO_HINTS, frozenset({address_of(decode)}))  # type: ignore[arg-type]
        rig.context.desk.start(ticket, flow)
        await until(lambda: bool(gateway.told))
        assert gateway.told == [[decode.endpoint.name]]
        flow.cancel()
        decode.elsewhere(0, 0, rig.context.clock())

    run(go, config=msgspec.structs.replace(CONFIG, worker_slots=1, decide="cost"))


def test_a_prefill_worker_that_falls_silent_is_left_for_another_one_as_for_any_request():
    """What the gateway was told cannot be taken back, but it was told nothing yet. It was told 502, and the KV stayed pinned."""

    async def go(rig: Rig) -> None:
        asked: list[FakeWorker] = []

        def hangs(worker: FakeWorker) -> Any:
            async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
                asked.append(worker)
                if len(asked) == 1:
                    await until(lambda: worker.is_left(writer))
                return len(asked) == 1

            return behave

        for worker in rig.prefill:
            worker.behave = hangs(worker)
        lane, gateway = rig.context.desk.lane(b"", b""), Gateway()
        body = json.dumps({"model": "m", "prompt": LONG}).encode()
        ask, ticket = rig.context.desk.admit(lane, parse_body(body, False, lane.config))
        flow = Picked(rig.context, gateway, b"/v1/completions", ask, ticket, NO_HINTS, None)  # type: ignore[arg-type]
        rig.context.desk.start(ticket, flow)
        await until(lambda: len(asked) == 1)
        flow.silent()
        await until(lambda: len(gateway.bodies) == 1)
        assert gateway.bodies[0]["kv_transfer_params"]["lease_id"] == "lease-1"
        assert asked[0] is not asked[1]
        await until(lambda: asked[0].released == ["r1"])
        flow.silent()
        assert not flow.done, "what it was told"
        flow.cancel()

    run(go, prefill=2)


def test_a_fallback_that_answered_instead_is_the_one_that_is_busy_and_the_other_one_is_out():
    """Nobody listens at the one that was picked: the gateway went to the next, and said so."""

    async def go(rig: Rig) -> None:
        desk, gateway = rig.context.desk, Gateway()
        lane = desk.lane(b"", b"")
        ask, ticket = desk.admit(lane, parse_body(b'{"model": "m", "prompt": "short"}', False, lane.config))
        flow = Picked(rig.context, gateway, b"/v1/completions", ask, ticket, NO_HINTS, None)  # type: ignore[arg-type]
        desk.start(ticket, flow)
        ((first, second),) = gateway.workers
        assert (first.inflight, second.inflight) == (1, 0)
        flow.served(address_of(second), 200)
        assert (first.inflight, second.inflight) == (0, 1)
        assert (first.breaker.closed, second.breaker.closed) == (False, True)
        flow.end()
        assert (first.inflight, second.inflight, rig.context.metrics.of("t", "r").errors) == (0, 0, 1)

    run(go, prefill=0, decode=2)


def test_a_fallback_has_the_adapter_too_in_the_same_version():
    """While an adapter was being replaced one with the other version was named as well: it would have read KV that is not its own
    adapter's, and an engine that takes blocks by number (vLLM) goes on with wrong tokens."""

    async def go(rig: Rig) -> None:
        config = msgspec.structs.replace(CONFIG, adapters=("a",))
        rig.apply([], rig.decode, config)
        for worker in rig.context.table.by_role["decode"][:2]:
            worker.follow(msgspec.structs.replace(worker.endpoint, adapters={"a": "v1"}))
        other = rig.context.table.by_role["decode"][2]
        other.follow(msgspec.structs.replace(other.endpoint, adapters={"a": "v2"}))
        desk, gateway = rig.context.desk, Gateway()
        lane = desk.lane(b"", b"")
        ask, ticket = desk.admit(lane, parse_body(b'{"model": "a", "prompt": "short"}', False, lane.config))
        flow = Picked(rig.context, gateway, b"/v1/completions", ask, ticket, NO_HINTS, None)  # type: ignore[arg-type]
        desk.start(ticket, flow)
        (told,) = gateway.workers
        assert {worker.uid for worker in told} == {worker.uid for worker in rig.context.table.by_role["decode"][:2]}
        flow.cancel()

    run(go, prefill=0, decode=4)

"""Requests that wait for a decode worker that was there just now: not ready, held, not reached, dead under a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.config import RouterConfig
from fleet_router.explain.shown import shown
from fleet_router.follow.documents import Documents
from fleet_router.health.absent import Absent
from fleet_router.retrying import UNREACHED_MOST
from fleet_router.watching import RETURN_MOST, RETURN_STEP_S, Returns
from fleet_wire.endpoints import AtZero, Endpoint, Endpoints
from tests.fleet_router.fake_worker import FakeWorker
from tests.fleet_router.fake_worker import stream as stream_of
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

WAITS = msgspec.structs.replace(CONFIG, return_wait_s=10.0)


def endpoint(uid: str, **more: Any) -> Endpoint:
    said = {"role": "decode", "tier": "t", "revision": "r", "compat": "c", **more}
    return Endpoint(name=uid, uid=uid, address="127.0.0.1", http_port=1, agent_port=2, **said)


def document(*workers: Endpoint, zero: tuple[str, ...] = ()) -> Endpoints:
    return Endpoints(fleet="f", namespace="n", workers=workers, at_zero=tuple(AtZero(tier=tier) for tier in zero))


# -- a router on sockets --------------------------------------------------------------------------------------------------
def leave(rig: Rig, config: RouterConfig = WAITS, *workers: Endpoint) -> None:
    """The operator names no decode worker: its pod is not ready."""
    prefill = tuple(worker.endpoint for worker in rig.context.table.workers.values() if worker.role == "prefill")
    rig.router.apply(Documents(config, document(*prefill, *workers)))


async def asking(rig: Rig, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    before = len(rig.context.holding)
    reader, writer, _ = await rig.connect()
    writer.write(http(ask(**more)))
    await until(lambda: len(rig.context.holding) == before + 1)
    return reader, writer


def later(rig: Rig, by_s: float) -> None:
    clock = rig.context.clock
    rig.context.clock = rig.router._clock = lambda: clock() + by_s


def test_requests_wait_for_a_worker_that_is_not_ready_for_a_moment():
    """vLLM-cpu of the only decode worker failed one probe: everybody got 503 until the next document."""

    async def go(rig: Rig) -> None:
        leave(rig)
        assert rig.router.plain(b"/ready")[0] == 200  # or nobody's request would come in
        clients = [await asking(rig, prompt=f"{i}", stream=i == 1) for i in range(3)]
        rig.apply(rig.prefill, rig.decode, WAITS)
        assert (await answer_of(clients[0][0]))[0] == 200
        assert b"data: [DONE]" in await clients[1][0].readuntil(b"0\r\n\r\n")
        assert (await answer_of(clients[2][0]))[0] == 200
        assert [body["prompt"] for body in rig.decode[0].seen] == ["0", "1", "2"]
        text = await rig_metrics(rig)
        assert 'fleet_router_held_for_total{reason="returning"} 3\n' in text
        assert 'fleet_router_held_total{outcome="released"} 3\n' in text

    run(go, config=WAITS)


async def rig_metrics(rig: Rig) -> str:
    return rig.router.plain(b"/metrics")[2].decode()


def test_the_record_tells_what_it_waited_for():
    async def go(rig: Rig) -> None:
        leave(rig)
        reader, _ = await asking(rig)
        (connection,) = rig.connections
        record = connection.flow.record  # type: ignore[union-attr]
        assert shown(record, 0.0)["tries"][0]["reason"] == "no decode worker is serving; waits for one that was there"
        rig.apply(rig.prefill, rig.decode, WAITS)
        await answer_of(reader)
        tries = shown(record, 0.0)["tries"]
        assert [one.get("why", "") for one in tries] == ["waited until a decode worker was there again", ""]

    run(go, config=WAITS)


@pytest.mark.parametrize(
    ("gone", "config"),
    [
        pytest.param("draining", WAITS, id="it goes"),
        pytest.param("held", msgspec.structs.replace(WAITS, return_wait_s=0.0), id="switched off"),
        pytest.param("never", WAITS, id="there was none"),
    ],
)
def test_where_nobody_is_to_come_back_it_is_refused_at_once(gone: str, config: RouterConfig):
    async def go(rig: Rig) -> None:
        one = rig.context.table.workers[f"u{rig.decode[0].port}"].endpoint
        if gone == "never":
            rig.context.table.absent = {}
            leave(rig, config, msgspec.structs.replace(one, state="draining"))
        else:
            leave(rig, config, msgspec.structs.replace(one, state=gone))
        assert rig.router.plain(b"/ready")[0] == 503
        status, body = await rig.post(ask())
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_worker")

    run(go, config=config)


def test_who_was_told_to_go_meanwhile_is_waited_for_no_longer():
    async def go(rig: Rig) -> None:
        one = rig.context.table.workers[f"u{rig.decode[0].port}"].endpoint
        leave(rig)
        reader, _ = await asking(rig)
        leave(rig, WAITS, msgspec.structs.replace(one, state="draining"))
        assert (await answer_of(reader))[0] == 503

    run(go, config=WAITS)


def test_it_is_a_moment_only():
    async def go(rig: Rig) -> None:
        leave(rig)
        reader, _ = await asking(rig)
        leave(rig, msgspec.structs.replace(WAITS, min_uncached_tokens=65))  # a document that changes nothing for it
        rig.sweep(9.9)
        assert len(rig.context.holding) == 1
        rig.sweep(10.1)
        status, headers, body = await answer_of(reader)
        error = json.loads(body)["error"]
        assert rig.context.holding.reasons == {"returning": 1}
        assert (status, headers["retry-after"], error["code"], error["retryable"]) == (503, "1", "no_worker", True)
        assert "no worker was there again within 10 s" in error["message"]
        later(rig, 10.1)  # it left so long ago
        assert (await rig.post(ask()))[0] == 503
        assert rig.router.plain(b"/ready")[0] == 503

    run(go, config=WAITS)


def test_one_that_waits_is_not_refused_because_documents_come():
    async def go(rig: Rig) -> None:
        leave(rig)
        later(rig, 8.0)
        reader, _ = await asking(rig)
        later(rig, 4.0)  # it left twelve seconds ago, and is waited for until eighteen
        leave(rig, msgspec.structs.replace(WAITS, min_uncached_tokens=65))
        assert len(rig.context.holding) == 1
        rig.apply(rig.prefill, rig.decode, WAITS)
        assert (await answer_of(reader))[0] == 200

    run(go, config=WAITS)


def test_one_whose_fleet_woke_without_its_adapter_waits_on_as_long_as_for_that():
    config = msgspec.structs.replace(WAITS, adapters=("lora",))

    async def go(rig: Rig) -> None:
        one = rig.context.table.workers[f"u{rig.decode[0].port}"].endpoint
        rig.router.apply(Documents(config, document(zero=("t",))))
        await asking(rig, model="lora")
        rig.context.table.absent = {"x": Absent("t", {"lora": "1"}, rig.context.clock())}
        leave(rig, config, one)
        (connection,) = rig.connections
        assert connection.flow is not None
        assert connection.flow.deadline - rig.context.clock() > 200.0
        leave(rig, config, msgspec.structs.replace(one, adapters={"lora": "1"}))
        await until(lambda: connection.flow is None)

    run(go, config=config)


def test_it_does_not_outlive_the_requests_own_deadline():
    async def go(rig: Rig) -> None:
        leave(rig, msgspec.structs.replace(WAITS, first_token_deadline_s=4.0))
        reader, _ = await asking(rig)
        rig.sweep(4.1)
        assert (await answer_of(reader))[0] == 503

    run(go, config=WAITS)


def test_what_it_waited_is_part_of_its_time():
    """A request at zero has all of its time when the fleet is awake; this one has what is left."""

    async def go(rig: Rig) -> None:
        async def silent(_: Any, writer: asyncio.StreamWriter) -> bool:
            return True

        rig.decode[0].behave = silent
        leave(rig, msgspec.structs.replace(WAITS, first_token_deadline_s=20.0))
        reader, _ = await asking(rig, stream=True)
        later(rig, 8.0)
        rig.apply(rig.prefill, rig.decode, msgspec.structs.replace(WAITS, first_token_deadline_s=20.0))
        await until(lambda: len(rig.decode[0].seen) == 1)
        rig.sweep(12.5)
        assert (await answer_of(reader))[0] == 504

    run(go, config=WAITS)


def test_a_client_that_leaves_waits_for_nobody():
    async def go(rig: Rig) -> None:
        leave(rig)
        _, writer = await asking(rig)
        writer.close()
        await until(lambda: rig.sweep() is None and len(rig.context.holding) == 0)
        assert rig.context.holding.returning == 0
        assert rig.context.holding.outcomes == {"left": 1}

    run(go, config=WAITS)


def test_those_that_wait_take_a_part_of_the_slots_while_others_serve():
    """An adapter whose only worker restarts: a flood for it must not keep the model's own requests out."""
    config = msgspec.structs.replace(WAITS, adapters=("lora",), worker_slots=8)

    async def go(rig: Rig) -> None:
        workers = list(rig.context.table.workers.values())
        mine, other = [worker.endpoint for worker in workers if worker.role == "decode"]
        mine = msgspec.structs.replace(mine, adapters={"lora": "1"})
        leave(rig, config, mine, other)
        leave(rig, config, other)
        for _ in range(2):  # a quarter of eight slots
            await asking(rig, model="lora")
        status, body = await rig.post(ask(model="lora"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "adapter_not_loaded")
        assert (await rig.post(ask()))[0] == 200
        leave(rig, config, mine, other)
        await until(lambda: not rig.context.holding.returning)
        await until(rig.idle)

    run(go, decode=2, config=config)


# -- the only worker died under it ------------------------------------------------------------------------------------------
async def dies(_: Any, writer: asyncio.StreamWriter) -> bool:
    writer.close()
    return True


async def here(_endpoint: Endpoint, _timeout_s: float) -> bool:
    return True


async def away(_endpoint: Endpoint, _timeout_s: float) -> bool:
    return False


async def look(rig: Rig, returns: Returns) -> None:
    returns.look(rig.context.clock())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    returns.look(rig.context.clock())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_only_worker_died_waits_until_it_is_back(stream: bool):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = dies
        reader, _ = await asking(rig, prompt="p", stream=stream)
        await look(rig, Returns(rig.context, away))
        assert len(rig.context.holding) == 1
        assert all(worker.pending == 0 for worker in rig.context.table.workers.values())
        rig.decode[0].behave = None
        await look(rig, Returns(rig.context, here))
        if stream:
            assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
        else:
            assert (await answer_of(reader))[0] == 200
        assert rig.context.metrics.retries == 1

    run(go, config=WAITS)


def test_one_that_dies_each_time_is_asked_twice():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = dies
        reader, _ = await asking(rig, prompt="p")
        await look(rig, Returns(rig.context, here))
        assert (await answer_of(reader))[0] == 502
        assert len(rig.decode[0].seen) == 2

    run(go, config=WAITS)


@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("decode", [2, 5])
def test_requests_whose_workers_cannot_be_reached_wait_until_one_is_back(decode: int, back: int):
    async def go(rig: Rig) -> None:
        ports = [worker.port for worker in rig.decode]
        for worker in rig.decode:
            await worker.stop()
        clients = [await asking(rig, prompt=f"{i} {'x' * i}") for i in range(8)]
        tried = rig.context.metrics.retries
        leave(rig, WAITS, *(worker.endpoint for worker in rig.context.table.workers.values()))
        await asyncio.sleep(0.02)
        assert (len(rig.context.holding), rig.context.metrics.retries) == (8, tried)  # none of them can be reached
        again = rig.decode[back]
        again._server = await asyncio.start_server(again._serve, "127.0.0.1", ports[back])

        async def there(endpoint: Endpoint, _timeout_s: float) -> bool:
            return endpoint.http_port == ports[back]

        await look(rig, Returns(rig.context, there))
        assert [(await answer_of(reader))[0] for reader, _ in clients] == [200] * 8
        assert len(again.seen) == 8

    run(go, prefill=0, decode=decode, config=WAITS)


def test_those_that_cannot_be_reached_are_passed_over_up_to_a_bound():
    """Three of four workers were on a node that died: who met two of them was told that no worker can be reached."""

    async def go(rig: Rig) -> None:
        for worker in rig.decode[:3]:
            await worker.stop()
        for i in range(8):
            for worker in rig.context.table.workers.values():
                worker.answers(rig.context.clock(), rig.context.clock())  # as if none of it were known
            assert (await rig.post(ask(prompt=f"{i} {'x' * i}")))[0] == 200
        assert len(rig.decode[3].seen) == 8

    run(go, prefill=0, decode=4)


def test_not_every_worker_is_tried_before_it_is_told():
    async def go(rig: Rig) -> None:
        for worker in rig.decode:
            await worker.stop()
        status, body = await rig.post(ask(prompt="p"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_worker")
        assert rig.context.metrics.retries == UNREACHED_MOST

    run(go, prefill=0, decode=UNREACHED_MOST + 3)


def test_the_last_of_several_that_died_is_waited_for():
    async def go(rig: Rig) -> None:
        first, last = rig.decode
        port = first.port
        await first.stop()
        rig.context.table.workers[f"u{port}"].failed(rig.context.clock(), gone=True)
        last.behave = dies
        reader, _ = await asking(rig, prompt="p")
        last.behave = None
        await look(rig, Returns(rig.context, here))
        assert (await answer_of(reader))[0] == 200

    run(go, prefill=0, decode=2, config=WAITS)


@pytest.mark.parametrize("dropped", [False, True], ids=["named", "not-ready"])
def test_workers_that_were_lost_long_ago_are_waited_for_by_nobody(dropped: bool):
    async def go(rig: Rig) -> None:
        await rig.decode[0].stop()
        reader, _ = await asking(rig, prompt="p")
        rig.sweep(10.1)
        assert (await answer_of(reader))[0] == 503
        later(rig, 10.1)
        if dropped:
            rig.router.apply(Documents(WAITS, document(endpoint("p", role="prefill"))))
        status, body = await rig.post(ask(prompt="q"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_worker")

    run(go, prefill=0, config=WAITS)


@pytest.mark.parametrize("said", [b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", b"nonsense\r\n\r\n"], ids=["error", "nonsense"])
def test_an_error_of_a_worker_that_is_there_is_told_at_once(said: bytes):
    async def fails(_: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(said)
        return True

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = fails
        assert (await rig.post(ask(prompt="p")))[0] == 503
        assert not rig.context.holding.reasons

    run(go, prefill=0, config=WAITS)


def test_a_stream_that_broke_and_that_nobody_else_can_carry_on_ends_at_once():
    async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
        await stream_of(writer, ["a"], end=False)
        writer.close()
        return True

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = breaks
        status, body = await rig.post(ask(prompt="p", stream=True, temperature=0))
        assert status == 200
        assert b'"error"' in body
        assert not rig.context.holding.reasons

    run(go, prefill=0, config=WAITS)


def test_without_a_retry_left_nobody_waits_for_one():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = dies
        while rig.context.budget.take(rig.context.clock()):
            pass
        status, _ = await rig.post(ask(prompt="p"))
        assert (status, rig.context.holding.reasons) == (503, {})

    run(go, prefill=0, config=WAITS)


def test_lost_workers_are_asked_now_and_then_some_at_a_time():
    asked: list[str] = []

    async def never(endpoint: Endpoint, _timeout_s: float) -> bool:
        asked.append(endpoint.uid)
        await asyncio.Event().wait()
        return True

    async def go(rig: Rig) -> None:
        fakes = [FakeWorker() for _ in range(RETURN_MOST + 4)]
        for number, fake in enumerate(fakes):
            fake.port = 40_000 + number
        rig.apply([], fakes, WAITS)
        for worker in rig.context.table.workers.values():
            worker.lost(1.0)
        returns = Returns(rig.context, never)
        returns.look(0.0)
        assert not returns._asked  # nobody waits
        rig.context.holding.returning = 1
        for step in range(4):
            returns.look(1.0 + step * RETURN_STEP_S / 2)
            await asyncio.sleep(0)
        assert len(asked) == len(set(asked)) == RETURN_MOST
        for task in returns._asked.values():
            task.cancel()
        await asyncio.sleep(0.01)
        returns.look(3.0)
        await asyncio.sleep(0)
        assert len(set(asked)) == RETURN_MOST + 4  # the others' turn first
        for task in returns._asked.values():
            task.cancel()
        rig.context.holding.returning = 0

    run(go, prefill=0, config=WAITS)


def test_the_only_worker_with_an_adapter_that_died_under_a_request_is_asked_again():
    """Others serve, so that the retry looked for a worker with the adapter, found none and waited; never for whom it knew."""
    config = msgspec.structs.replace(WAITS, adapters=("lora",))

    async def go(rig: Rig) -> None:
        mine, other = [worker.endpoint for worker in rig.context.table.workers.values()]
        leave(rig, config, msgspec.structs.replace(mine, adapters={"lora": "1"}), other)
        rig.decode[0].behave = dies
        reader, _ = await asking(rig, prompt="p", model="lora")
        rig.decode[0].behave = None
        await look(rig, Returns(rig.context, here))
        assert (await answer_of(reader))[0] == 200

    run(go, prefill=0, decode=2, config=config)


def test_a_request_is_not_tried_again_and_again_because_others_serve():
    """Each look sent it: twenty prefills a second of one request, and a connect to a worker that was not there."""
    config = msgspec.structs.replace(WAITS, adapters=("lora",))

    async def go(rig: Rig) -> None:
        prefill, mine, other = [worker.endpoint for worker in rig.context.table.workers.values()]
        with_it = [msgspec.structs.replace(one, adapters={"lora": "1"}) for one in (prefill, mine)]
        rig.router.apply(Documents(config, document(*with_it, other)))
        port = rig.decode[0].port
        await rig.decode[0].stop()
        reader, _ = await asking(rig, model="lora")
        assert (await rig.post(ask()))[0] == 200
        returns, tried, prefilled = Returns(rig.context, away), rig.context.metrics.retries, len(rig.prefill[0].seen)
        for _ in range(5):
            await look(rig, returns)
            await asyncio.sleep(0.01)
        assert (len(rig.context.holding), rig.context.metrics.retries) == (1, tried)
        assert len(rig.prefill[0].seen) == prefilled
        rig.decode[0]._server = await asyncio.start_server(rig.decode[0]._serve, "127.0.0.1", port)
        await look(rig, Returns(rig.context, here))
        assert (await answer_of(reader))[0] == 200

    run(go, decode=2, config=config)

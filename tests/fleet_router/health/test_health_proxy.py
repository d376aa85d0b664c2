"""Who is asked after failures: a router on real sockets in front of workers that fail in their own ways."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleet_router.follow.liveness import TIMEOUT_S
from fleet_router.health.breaker import FAILURES_MOST, OPEN_FIRST_S, PAIR_FAILURES_MOST
from fleet_router.health.budget import FIRST, SHARE
from fleet_router.watching import not_there, watch
from tests.fleet_router.fake_worker import FakeWorker, answer, stream
from tests.fleet_router.rig import CONFIG, LONG, Rig, answer_of, ask, http, run, until

KV_ERROR = {"error": {"type": "KvTransferError"}}


async def fails(_: Any, writer: asyncio.StreamWriter) -> bool:
    answer(writer, 500, {"error": {"message": "no"}})
    return True


def stop_clock(rig: Rig) -> None:
    """Nobody's time is over because this machine is slow."""
    now = rig.context.clock()
    rig.context.clock = lambda: now


def seen(workers: list[FakeWorker]) -> list[int]:
    return [len(worker.seen) for worker in workers]


@pytest.mark.parametrize("policy", ["kvAware", "leastLoad", "roundRobin", "prefixHash"])
def test_r3_a_worker_that_answers_errors_at_once_is_left_alone(policy: str):
    async def go(rig: Rig) -> None:
        stop_clock(rig)
        await rig.post(ask(prompt="short"))
        (bad,) = [worker for worker in rig.decode if worker.seen]  # some policies have a favourite while all are idle
        bad.behave = fails
        for i in range(60):
            assert (await rig.post(ask(prompt=f"{i} short")))[0] == 200
        assert 1 < len(bad.seen) <= 1 + FAILURES_MOST
        bad.behave = None
        worker = next(w for w in rig.context.table.workers.values() if w.endpoint.http_port == bad.port)
        assert not worker.breaker.closed
        worker.breaker.until = rig.context.clock()  # its time is over: one request tries it
        for i in range(40):
            assert (await rig.post(ask(prompt=f"{i} again")))[0] == 200
        if policy == "leastLoad":  # while all are idle it asks the same one for a long time
            return
        assert worker.breaker.closed
        assert rig.context.table.trouble.out == 0

    run(go, prefill=0, decode=3, config=msgspec.structs.replace(CONFIG, policy=policy))


def test_a_worker_that_does_not_listen_costs_one_connect():
    async def go(rig: Rig) -> None:
        stop_clock(rig)
        await rig.decode[0].stop()
        for i in range(20):
            assert (await rig.post(ask(prompt=f"{i} short")))[0] == 200
        out = [w for w in rig.context.table.by_role["decode"] if not w.breaker.closed]
        assert [w.endpoint.http_port for w in out] == [rig.decode[0].port]
        assert rig.context.metrics.retries == 1
        text = b"".join(line.encode() + b"\n" for line in rig.context.table.lines(rig.context.clock()))
        assert b'fleet_router_workers_out{role="decode"} 1' in text

    run(go, prefill=0, decode=2)


def test_r1_when_nobody_listens_it_is_503_and_the_first_who_does_is_found():
    async def go(rig: Rig) -> None:
        for worker in rig.decode:
            await worker.stop()
        for _ in range(5):
            status, body = await rig.post(ask(prompt="short"))
            assert (status, b"no worker can be reached" in body) == (503, True)
        port, back = rig.decode[0].port, rig.decode[0]
        back._server = await asyncio.start_server(back._serve, "127.0.0.1", port)
        got = [(await rig.post(ask(prompt="short")))[0] for _ in range(6)]
        assert got[-2:] == [200, 200]  # found within a few tries, not after its five seconds

    run(go, prefill=0, decode=2)


def test_r8_a_pair_whose_kv_does_not_move_is_left_out_and_its_workers_serve():
    async def go(rig: Rig) -> None:
        stop_clock(rig)
        one = rig.prefill[0].port

        async def unproven(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if body.get("kv_transfer_params", {}).get("lease_id") != f"lease-{one}":
                return False
            answer(writer, 503, KV_ERROR)
            return True

        for worker in rig.prefill:
            worker.behave = prefilled(worker.port)
        rig.decode[0].behave = unproven
        for i in range(60):
            assert (await rig.post(ask(prompt=f"{i} {LONG}")))[0] == 200
        bad = [one for one in rig.decode[0].seen if one.get("kv_transfer_params", {}).get("lease_id") == f"lease-{one}"]
        assert len(bad) <= PAIR_FAILURES_MOST
        moved = [body["kv_transfer_params"]["lease_id"] for w in rig.decode for body in w.seen if "kv_transfer_params" in body]
        assert moved.count(f"lease-{one}") > PAIR_FAILURES_MOST  # it goes on for the other decode worker
        assert all(worker.breaker.closed for worker in rig.context.table.workers.values())
        assert len(rig.context.table.pairs.out(rig.context.clock())) <= 1

    run(go, prefill=2, decode=2, config=msgspec.structs.replace(CONFIG, policy="kvAware"))


@pytest.mark.parametrize("gone", ["prefill", "decode"])
def test_kv_that_moved_to_or_from_a_worker_that_left_meanwhile_is_told_of_nobody(gone: str):
    """Beside a pair that failed again it was noted, and /metrics answered 500 for five minutes: of whom is left nobody had a
    name."""

    async def go(rig: Rig) -> None:
        goes_on = asyncio.Event()

        async def waits(*_: Any) -> bool:
            await goes_on.wait()
            return False

        (giver, another), (taker, other) = rig.prefill, rig.decode
        rig.apply([giver], [taker])
        taker.behave = waits
        reader, writer, _ = await rig.connect()
        writer.write(http(ask()))
        await until(lambda: bool(taker.seen))
        rig.apply(rig.prefill, rig.decode)
        pairs, now = rig.context.table.pairs, rig.context.clock()
        fails = (f"u{giver.port}", f"u{other.port}") if gone == "decode" else (f"u{another.port}", f"u{taker.port}")
        for at in (now - OPEN_FIRST_S - 1, now):
            while not pairs.failed(*fails, at):
                pass
        rig.apply(*(([giver], [other]) if gone == "decode" else ([another], [taker])))
        goes_on.set()
        assert (await answer_of(reader))[0] == 200
        writer.write(http(b"", path="/metrics", method="GET"))
        status, _, text = await answer_of(reader)
        assert (status, b"fleet_router_pair_failing{" in text, b"fleet_router_pair_moved{" in text) == (200, True, False)

    run(go, prefill=2, decode=2)


def prefilled(port: int) -> Any:
    async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
        answer(writer, 200, {"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "lease_id": f"lease-{port}"}})
        return True

    return behave


def test_r8_kv_that_moves_to_nobody_is_the_prefill_workers_fault():
    async def go(rig: Rig) -> None:
        async def unproven(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if "kv_transfer_params" not in body:
                return False
            answer(writer, 503, KV_ERROR)
            return True

        stop_clock(rig)
        for worker in rig.decode:
            worker.behave = unproven
        got = []
        for i in range(60):
            rig.context.budget.saved = 10.0
            got.append((await rig.post(ask(prompt=f"{i} {LONG}")))[0])
        assert set(got) == {200}
        failed = sum("kv_transfer_params" in body for worker in rig.decode for body in worker.seen)
        assert failed <= 2 * PAIR_FAILURES_MOST
        (giver,) = rig.context.table.by_role["prefill"]
        assert not giver.breaker.closed
        assert all(worker.breaker.closed for worker in rig.context.table.by_role["decode"])

    run(go, prefill=1, decode=2)


def test_r7_when_all_fail_the_retries_are_a_share_of_the_requests():
    async def go(rig: Rig) -> None:
        for worker in rig.decode:
            worker.behave = fails
        count = 200
        got = await asyncio.gather(*(rig.post(ask(prompt=f"{i} short")) for i in range(count)))
        assert {status for status, _ in got} <= {502, 503}
        assert sum(seen(rig.decode)) <= count * (1 + SHARE) + FIRST + 1
        for worker in rig.decode:
            worker.behave = None
        assert (await rig.post(ask(prompt="short")))[0] == 200

    run(go, prefill=0, decode=4)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_worker_that_says_nothing_is_put_out_and_who_waits_is_moved(streamed: bool):
    """Where answers come as a whole, once it does not answer either that it is there."""

    async def go(rig: Rig) -> None:
        async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(30)
            return True

        rig.decode[0].behave = hang
        posts = [asyncio.create_task(rig.post(ask(prompt=f"{i} short", stream=streamed))) for i in range(8)]
        await until(lambda: len(rig.decode[0].seen) > 0 and sum(seen(rig.decode)) == 8)
        waiting = len(rig.decode[0].seen)
        await until(lambda: sum(post.done() for post in posts) == 8 - waiting)
        watch(rig.context, rig.connections, rig.context.clock() + CONFIG.silent_s - 1)
        assert rig.context.metrics.retries == 0
        unheard = watch(rig.context, rig.connections, rig.context.clock() + CONFIG.silent_s + 1)
        assert [worker.endpoint.http_port for worker in unheard] == ([] if streamed else [rig.decode[0].port])
        for worker in unheard:
            asked_at = rig.context.clock() + CONFIG.silent_s + 1
            not_there(rig.context, rig.connections, worker, asked_at, asked_at + TIMEOUT_S)
        assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 8
        assert rig.context.metrics.retries == waiting
        assert (await rig.post(ask(prompt="short")))[0] == 200
        assert len(rig.decode[0].seen) == waiting

    run(go, prefill=0, decode=2)


def test_a_byte_now_and_then_is_no_progress():
    async def go(rig: Rig) -> None:
        more, over = asyncio.Event(), asyncio.Event()

        async def drips(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a"], end=False)
            await more.wait()
            for byte in b"5a\r\ndata: {":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.005)
            await over.wait()
            return True

        rig.decode[0].behave = drips
        posted = asyncio.create_task(rig.post(ask(prompt="short", stream=True)))
        await until(lambda: any(c.flow is not None and c.flow.started for c in rig.connections))
        (flow,) = [c.flow for c in rig.connections if c.flow is not None]
        deadline = flow.deadline
        more.set()
        await until(lambda: flow.last_byte_at > deadline - CONFIG.inter_token_deadline_s + 0.04)
        assert flow.deadline == deadline
        rig.sweep(CONFIG.inter_token_deadline_s + 1)
        _, body = await posted
        assert b"[DONE]" not in body
        assert rig.context.metrics.streams_broken == 1
        over.set()

    run(go, prefill=0)


def test_an_answer_of_which_the_client_saw_nothing_is_asked_for_again():
    async def go(rig: Rig) -> None:
        async def stops(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5a\r\nda")
            await writer.drain()
            writer.close()
            return True

        stop_clock(rig)
        await rig.post(ask(prompt="short"))
        (bad,) = [worker for worker in rig.decode if worker.seen]
        bad.behave = stops
        for i in range(12):
            body = ask(prompt=f"{i} short", stream=True, temperature=0)
            status, got = await rig.post(body)
            assert (status, got.count(b"[DONE]")) == (200, 1)
        assert len(bad.seen) <= 1 + FAILURES_MOST

    run(go, prefill=0, decode=2)


def test_prefill_that_answers_no_json_is_asked_elsewhere_and_its_kv_given_back():
    async def go(rig: Rig) -> None:
        async def garbage(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{oops")
            return True

        for worker in rig.prefill:
            worker.behave = garbage
        assert (await rig.post(ask()))[0] == 200
        assert seen(rig.prefill) == [1, 1]
        await until(lambda: all(len(worker.released) == 1 for worker in rig.prefill))
        assert all(w.breaker.failures == 1 for w in rig.context.table.by_role["prefill"])

    run(go, prefill=2)


def test_a_lease_is_given_back_also_when_the_pooled_connection_is_closed():
    async def go(rig: Rig) -> None:
        release = asyncio.Event()

        async def one_answer(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, 200, {"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "lease_id": "lease-1"}})
            await writer.drain()
            release.set()
            await asyncio.sleep(0.05)
            writer.close()
            return True

        async def refuses(_: Any, writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(0.1)
            answer(writer, 400, {"error": {"message": "no"}})
            return True

        rig.prefill[0].behave, rig.decode[0].behave = one_answer, refuses
        assert (await rig.post(ask()))[0] == 400
        await until(lambda: rig.prefill[0].released == ["lease-1"])

    run(go)


@pytest.mark.parametrize("streamed", [False, True])
def test_r8_errors_of_a_decode_worker_whose_kv_came_from_elsewhere_put_the_pair_out_before_it(streamed: bool):
    """Engines that do not say what went wrong answer 500 where KV cannot be read, or with an error as a stream's first event."""

    async def go(rig: Rig) -> None:
        async def cannot_read(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if "kv_transfer_params" not in body:
                return False
            if streamed:
                event = b'data: {"error": {"message": "no", "code": 500}}\n\ndata: [DONE]\n\n'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
            else:
                answer(writer, 500, {"error": {"message": "EngineDeadError"}})
            return True

        rig.decode[0].behave = cannot_read
        told = [(await rig.post(ask(prompt=f"{i} {LONG}", stream=streamed)))[0] for i in range(PAIR_FAILURES_MOST + 2)]
        assert told == [503] * PAIR_FAILURES_MOST + [200, 200]
        (worker,) = rig.context.table.by_role["decode"]
        assert (worker.breaker.closed, rig.context.table.pairs.opened, rig.context.table.trouble.ejections) == (True, 1, 0)
        assert len(rig.prefill[0].seen) == PAIR_FAILURES_MOST

    run(go)

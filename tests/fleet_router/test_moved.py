"""Discovery documents that say something new of a worker that is known: another place, another role, the same one once more."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from fleet_router.ask import Hints
from fleet_router.follow.documents import Documents
from fleet_router.health.breaker import PAIR_FAILURES_MOST
from fleet_router.knowledge import NOT_KNOWN, Counted
from fleet_router.metrics import COMPILED
from fleet_router.process import Router
from fleet_router.watching import not_there, watch
from fleet_router.workers import Worker, WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints
from tests.fleet_router.fake_worker import stream
from tests.fleet_router.rig import CONFIG, LONG, Rig, answer_of, ask, http, run, until
from tests.fleet_router.test_hedging import HEDGED, Stalls, with_stalls


def told(rig: Rig, *workers: Endpoint) -> None:
    rig.router.apply(Documents(CONFIG, Endpoints(fleet="f", namespace="n", workers=workers)))


async def hangs(*_: Any) -> bool:
    await asyncio.sleep(30)
    return True


def known(rig: Rig) -> Endpoint:
    return rig.context.table.by_role["decode"][0].endpoint


def test_a_pod_with_its_old_uid_and_a_new_address_is_asked_there():
    """After a node's restart a pod has its uid and another address: the old one was asked for as long as the pod lived."""

    async def go(rig: Rig) -> None:
        old, new = rig.decode

        async def slow(_body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a", "b"], end=False)
            await goes_on.wait()
            await stream_end(writer)
            return True

        goes_on = asyncio.Event()
        old.behave = slow
        one = known(rig)
        told(rig, one)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="short", stream=True)))
        await reader.readuntil(b'"b"')
        told(rig, msgspec.structs.replace(one, http_port=new.port))
        reader2, writer2, _ = await rig.connect()
        writer2.write(http(ask(prompt="short")))
        assert (await answer_of(reader2))[0] == 200
        assert (len(old.seen), len(new.seen)) == (1, 1)
        goes_on.set()  # what ran there goes on there
        assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")

    run(go, prefill=0, decode=2)


def test_what_is_answered_at_the_old_address_is_not_cached_at_the_new_one():
    """The worker of that uid was believed to hold a prompt's KV that its pod had lost with its node."""

    async def go(rig: Rig) -> None:
        goes_on, (old, new) = asyncio.Event(), rig.decode

        async def waits(*_: Any) -> bool:
            await goes_on.wait()
            return False

        old.behave = waits
        one, index = known(rig), rig.context.table.routing.index
        told(rig, one)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask()))
        await until(lambda: bool(old.seen))
        told(rig, msgspec.structs.replace(one, http_port=new.port))
        goes_on.set()
        assert (await answer_of(reader))[0] == 200
        assert index.entries == 0
        writer.write(http(ask()))
        assert (await answer_of(reader))[0] == 200
        assert index.entries > 0

    run(go, prefill=0, decode=2)


def test_kv_that_did_not_move_to_the_old_address_says_nothing_of_the_new_one():
    """The pair was put out where it had just begun, and with two such pairs its prefill worker."""
    table = WorkerTable()
    said: dict[str, Any] = {"address": "127.0.0.1", "agent_port": 2, "tier": "t", "revision": "r", "compat": "c"}
    one, two = (
        Endpoint(name=role, uid=role, role=role, http_port=port, **said) for role, port in (("prefill", 3), ("decode", 4))
    )
    moved = msgspec.structs.replace(two, http_port=5)

    def follow(decode: Endpoint) -> tuple[Worker, Worker]:
        table.update(Endpoints(fleet="f", namespace="n", workers=(one, decode)))
        return table.workers["prefill"], table.workers["decode"]

    prefill, old = follow(two)
    for _ in range(PAIR_FAILURES_MOST):
        table.transfer_failed(prefill, old, 0.0)
    assert table.pairs.blocks("prefill", "decode", 0.1)
    _, new = follow(moved)
    assert not table.pairs.blocks("prefill", "decode", 0.1)
    for _ in range(PAIR_FAILURES_MOST):  # of what was under way
        table.transfer_failed(prefill, old, 0.0)
    assert not table.pairs.breakers
    table.transfer_failed(prefill, new, 0.0)
    assert table.pairs.breakers


@pytest.mark.parametrize("sent", [[], ["a"]])
def test_what_broke_at_the_old_address_is_asked_at_the_new_one(sent: list[str]):
    """The only worker had moved: its pod was there, and what had been under way was told that nobody is."""

    async def go(rig: Rig) -> None:
        (old, new), one, goes_on = rig.decode, known(rig), asyncio.Event()

        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            if sent:
                await stream(writer, sent, end=False)
            await goes_on.wait()
            writer.close()
            return True

        async def says_all(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a", "b"])
            return True

        old.behave, new.behave = breaks, says_all
        told(rig, one)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="short", stream=True, temperature=0)))
        await until(lambda: bool(old.seen))
        if sent:
            await reader.readuntil(b'"a"')
        told(rig, msgspec.structs.replace(one, http_port=new.port))
        goes_on.set()
        async with asyncio.timeout(3):
            assert b'"b"' in await reader.readuntil(b"data: [DONE]\n\n")
        assert len(new.seen) == 1

    run(go, prefill=0, decode=2)


def test_who_is_silent_at_the_old_address_is_not_put_out_at_the_new_one():
    """What was sent to a pod whose sandbox is gone waits in vain: the pod, back at another address, was put out for that."""

    async def go(rig: Rig) -> None:
        (old, new), one = rig.decode, known(rig)
        old.behave = hangs
        told(rig, one)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="short")))
        reader2, writer2, _ = await rig.connect()
        writer2.write(http(ask(prompt="short", stream=True)))
        await until(lambda: len(old.seen) == 2)
        told(rig, msgspec.structs.replace(one, http_port=new.port))
        watch(rig.context, rig.connections, rig.context.clock() + CONFIG.silent_s + 1)
        (worker,) = rig.context.table.by_role["decode"]
        assert (worker.breaker.closed, rig.context.table.trouble.ejections) == (True, 0)
        async with asyncio.timeout(3):  # both were asked there
            assert (await answer_of(reader))[0] == 200
            assert b"[DONE]" in await reader2.readuntil(b"0\r\n\r\n")

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("streamed", [True, False])
def test_who_waits_for_a_worker_that_hangs_and_is_not_ready_any_more_is_moved(role: str, streamed: bool):
    """Who hangs is left out of the document before it was silent for long enough: nobody looked at it any more, and who waited
    for it did so until its container was restarted, or for a minute and then in vain."""

    async def go(rig: Rig) -> None:
        side = rig.prefill if role == "prefill" else rig.decode
        for worker in side:
            worker.behave = hangs
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt=LONG if role == "prefill" else "short", stream=streamed)))
        await until(lambda: any(worker.seen for worker in side))
        hung, other = sorted(side, key=lambda worker: not worker.seen)
        other.behave = None
        rig.apply([w for w in rig.prefill if w is not hung], [w for w in rig.decode if w is not hung])
        rig.sweep()
        assert other.seen == []
        now = rig.context.clock() + CONFIG.silent_s + 1
        for silent in watch(rig.context, rig.connections, now):  # a whole answer's, who was asked, and did not answer
            not_there(rig.context, rig.connections, silent, now - 1, now)
        async with asyncio.timeout(3):
            if streamed:
                assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
            else:
                assert (await answer_of(reader))[0] == 200
        assert (len(other.seen), rig.context.table.trouble.ejections) == (1, 0)

    run(go, prefill=2, decode=2)


def test_what_a_second_prefill_leg_computed_at_the_old_address_is_not_cached_at_the_new_one():
    """Its pod came back with its uid meanwhile, and was believed to hold KV that its node had lost."""

    async def test(stalls: Stalls) -> None:
        task, table = await stalls.both(), stalls.rig.context.table
        second = next(worker for worker in table.by_role["prefill"] if worker.endpoint.http_port == stalls.asked[1].port)
        moved = [
            msgspec.structs.replace(one, http_port=1) if one is second.endpoint else one
            for one in (worker.endpoint for worker in table.workers.values())
        ]
        stalls.rig.router.apply(Documents(HEDGED, Endpoints(fleet="f", namespace="n", workers=tuple(moved))))
        stalls.told[1].set_result(200)
        assert (await task)[0] == 200
        assert stalls.events()["won"] == 1
        assert table.routing.index._held[second.uid].keys == 0

    with_stalls(test)


@pytest.mark.skipif(COMPILED, reason="compiled code takes real knowledge only: `make unit` runs this one")
def test_who_has_moved_owes_no_events_of_what_was_prefilled_at_the_old_address(monkeypatch: pytest.MonkeyPatch):
    """It was not believed any more until it spoke, for it had computed nothing that it could have told of."""

    async def go(rig: Rig) -> None:
        goes_on, (prefill,), (decode,), owes = asyncio.Event(), rig.prefill, rig.decode, list[str]()

        async def waits(*_: Any) -> bool:
            await goes_on.wait()
            return False

        prefill.behave = waits
        (one,) = (worker.endpoint for worker in rig.context.table.by_role["prefill"])
        rig.context.knowledge = cast("Any", Told(owes))
        reader, writer, _ = await rig.connect()
        writer.write(http(ask()))
        await until(lambda: bool(prefill.seen))
        monkeypatch.setattr(rig.router, "_know_caches", lambda _config: None)
        told(rig, msgspec.structs.replace(one, http_port=1), known(rig))
        goes_on.set()
        assert (await answer_of(reader))[0] == 200
        assert owes == [f"u{decode.port}"]
        rig.context.knowledge = None

    run(go)


class Told:
    """Knows no prompt, and who was believed to have computed one."""

    def __init__(self, owes: list[str]) -> None:
        self._owes = owes

    def count(self, *_: Any) -> Counted:
        return NOT_KNOWN

    def hints(self, _counted: Counted, hints: Hints) -> Hints:
        return hints

    def answered(self, worker: str, _counted: Counted) -> None:
        self._owes.append(worker)


async def stream_end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await writer.drain()


def test_a_stranger_at_the_old_address_does_not_bar_the_new_one():
    async def go(rig: Rig) -> None:
        one = known(rig)
        rig.router.stranger(one)
        assert rig.context.table.by_role["decode"] == []
        assert b"\nfleet_router_workers_strange 1\n" in rig.router.plain(b"/metrics")[2]
        told(rig, msgspec.structs.replace(one, adapters={"a": "d"}))
        assert rig.context.table.by_role["decode"] == []
        told(rig, msgspec.structs.replace(one, address="127.0.0.2"))
        assert [worker.uid for worker in rig.context.table.by_role["decode"]] == [one.uid]
        assert b"\nfleet_router_workers_strange 0\n" in rig.router.plain(b"/metrics")[2]
        rig.router.stranger(one)  # the answer of a question that was asked at the old address
        assert [worker.uid for worker in rig.context.table.by_role["decode"]] == [one.uid]

    run(go, prefill=0, decode=1)


@pytest.mark.parametrize("how", ["role", "gone"])
def test_how_much_a_worker_holds_is_asked_again_when_it_joins_again(how: str, monkeypatch: pytest.MonkeyPatch):
    """The index forgot it with the worker, and nobody asked a second time: it was never emptied as the worker's cache is."""
    monkeypatch.setattr("fleet_router.follow.capacity.EVERY_S", 0.005)
    monkeypatch.setattr("fleet_router.follow.capacity.kv_tokens", tokens)

    async def go(rig: Rig) -> None:
        one = known(rig)
        other = msgspec.structs.replace(one, uid="other", name="other")
        index = rig.context.table.routing.index
        measuring = asyncio.create_task(Router._measure(rig.router))
        await until(lambda: index._held[one.uid].most_bytes > 0)
        if how == "role":
            told(rig, msgspec.structs.replace(one, role="prefill"), other)
        else:
            told(rig, other)
            told(rig, one, other)
        assert index._held[one.uid].most_bytes == 0
        await until(lambda: index._held[one.uid].most_bytes > 0)
        measuring.cancel()

    run(go, prefill=0, decode=1)


def test_no_connection_is_left_to_a_worker_that_left_while_a_translated_request_was_prefilled():
    """Answers that are read have connections of their own, made when the first is needed: these were kept for nobody, until the
    worker closed them."""

    async def go(rig: Rig) -> None:
        goes_on, (prefill,), (decode,) = asyncio.Event(), rig.prefill, rig.decode

        async def waits(*_: Any) -> bool:
            await goes_on.wait()
            return False

        prefill.behave = waits
        reader, writer, _ = await rig.connect()
        asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}
        writer.write(http(asked, path="/v1/messages"))
        await until(lambda: bool(prefill.seen))
        rig.apply([prefill], [])
        goes_on.set()
        await answer_of(reader)
        assert len(decode.seen) == 1
        await until(lambda: not decode.readers)

    run(go)


async def tokens(_address: str, _port: int) -> int:
    return 100_000

"""The router's own requests that make pairs meet: what each answer comes to, and that they are nobody's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fleet_router.config import PrewarmBounds
from fleet_router.follow.asking import posted
from fleet_router.follow.documents import Documents
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.fake_worker import REFERENCE, answer
from tests.fleet_router.rig import CONFIG, Rig, ask, run, until

ON = msgspec.structs.replace(CONFIG, prewarm=PrewarmBounds(pairs=4, timeout_s=30.0))
IMPATIENT = msgspec.structs.replace(CONFIG, prewarm=PrewarmBounds(pairs=4, timeout_s=1.6))
"""For who never answers. Half of it, and what `slowly` leaves, is more than a busy machine takes for an answer: with 0.3 s for
all an answer that was late by the machine's load alone was `lost`."""
Behaviour = Callable[[dict[str, Any], asyncio.StreamWriter], Any]


def says(status: int, body: dict[str, Any]) -> Behaviour:
    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        answer(writer, status, body)
        return True

    return behave


async def hangs(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    await asyncio.sleep(30)
    return True


async def cuts(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    writer.transport.abort()
    return True


async def warmed(rig: Rig) -> str:
    """How the first one ended."""
    prewarm = rig.router._prewarm
    prewarm.step(rig.context.clock())
    await until(lambda: bool(prewarm.outcomes), 20.0)
    [outcome] = prewarm.outcomes
    return outcome


@pytest.mark.parametrize(
    ("prefill", "decode", "outcome", "given_back", "blamed"),
    [
        pytest.param(None, None, "done", [], False, id="KV moves"),
        pytest.param(None, says(503, {"error": {"type": "KvTransferError"}}), "failed", ["lease-1"], True, id="KV does not"),
        pytest.param(None, says(500, {}), "failed", ["lease-1"], True, id="decode breaks"),
        pytest.param(None, hangs, "failed", ["lease-1"], True, id="decode hangs"),
        pytest.param(None, cuts, "failed", ["lease-1"], True, id="decode is cut"),
        pytest.param(None, says(400, {}), "refused", ["lease-1"], False, id="decode refuses"),
        pytest.param(says(400, {}), None, "refused", ["prewarm"], False, id="prefill refuses"),
        pytest.param(says(200, {"choices": []}), None, "refused", ["prewarm"], False, id="no KV is handed over"),
        pytest.param(says(500, {}), None, "lost", ["prewarm"], False, id="prefill breaks"),
        pytest.param(hangs, None, "lost", ["prewarm"], False, id="prefill hangs"),
    ],
)
def test_what_becomes_of_it(
    prefill: Behaviour | None, decode: Behaviour | None, outcome: str, given_back: list[str], blamed: bool
):
    async def test(rig: Rig) -> None:
        giver, taker = rig.prefill[0], rig.decode[0]
        giver.behave, taker.behave = prefill, decode
        assert await warmed(rig) == outcome
        await until(lambda: len(giver.released) == len(given_back))
        assert [name.split("-")[0] for name in giver.released] == [name.split("-")[0] for name in given_back]
        pair = (f"u{giver.port}", f"u{taker.port}")
        [group] = rig.context.table.routing.groups.values()
        assert group.pairs.met(*pair) == (outcome == "done")
        assert (pair in rig.context.table.pairs.breakers) == blamed
        assert rig.context.table.trouble.ejections == 0
        assert f'fleet_router_prewarms_total{{outcome="{outcome}"}} 1' in "\n".join(rig.router._prewarm.lines())
        rig.router._prewarm.stop()

    run(test, config=IMPATIENT if hangs in (prefill, decode) else ON)


def test_it_is_asked_as_a_request_is_and_nothing_counts_it():
    async def test(rig: Rig) -> None:
        await warmed(rig)
        [first], [second] = rig.prefill[0].seen, rig.decode[0].seen
        assert (first["max_tokens"], first["kv_transfer_params"]["do_remote_decode"]) == (1, True)
        assert (second["max_tokens"], second["kv_transfer_params"]) == (1, REFERENCE)
        assert first["prompt"] == second["prompt"]
        assert rig.prefill[0].request_ids[-1] == rig.decode[0].request_ids[-1]
        metrics, table = rig.context.metrics, rig.context.table
        assert (metrics.arrivals, metrics.remote_prefills, metrics.prefill_tokens, metrics.requests, metrics.served) == (
            0,
            0,
            0,
            {},
            {},
        )
        assert len(table.routing.index) == 0
        assert all(worker.inflight == worker.pending == worker.heat == 0 for worker in table.workers.values())
        assert metrics.handed_over == {}

    run(test, config=ON)


def test_the_prompt_is_another_one_each_time_and_short_enough_for_a_small_model():
    small = msgspec.structs.replace(ON, max_input_tokens=20)

    async def test(rig: Rig) -> None:
        await until(lambda: rig.router._prewarm.step(rig.context.clock()) or len(rig.decode[0].seen) == 3)
        prompts = [body["prompt"] for body in rig.decode[0].seen]
        assert len(set(prompts)) == 3
        assert {len(prompt) for prompt in prompts} == {19}

    run(test, prefill=3, config=small)


def test_off_asks_nobody_and_a_pair_that_met_by_a_request_is_not_asked_again():
    async def test(rig: Rig) -> None:
        rig.router._prewarm.step(rig.context.clock())
        await asyncio.sleep(0.05)
        assert not rig.prefill[0].seen
        assert (await rig.post(ask(stream=True)))[0] == 200
        asked = len(rig.prefill[0].seen)
        rig.apply(rig.prefill, rig.decode, ON)
        rig.router._prewarm.step(rig.context.clock())
        await asyncio.sleep(0.05)
        assert asked == len(rig.prefill[0].seen) == 1
        assert "fleet_router_prewarms_left 0" in rig.router._prewarm.lines()

    run(test)


def test_who_is_out_is_not_asked_until_it_is_back():
    async def test(rig: Rig) -> None:
        now = rig.context.clock()
        [worker] = rig.context.table.by_role["decode"]
        worker.put_out(now)
        rig.router._prewarm.step(now)
        await asyncio.sleep(0.05)
        assert not rig.prefill[0].seen
        worker.answers(now + 1.0, now + 1.0)
        assert await warmed(rig) == "done"

    run(test, config=ON)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}more", (200, b"{}")),
        (b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", (503, b"{}")),
        (b"HTTP/1.0 404 X\r\nserver: x\r\n\r\nall of it", (404, b"all of it")),
        (b"SSH-2.0\r\n\r\n", ValueError),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200, ValueError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", asyncio.IncompleteReadError),
        (b"HTTP/1.1 200", asyncio.IncompleteReadError),
    ],
)
def test_an_answer_to_a_question_of_ours(said: bytes, expected: tuple[int, bytes] | type[Exception]):
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(said)
        writer.close()

    async def proven() -> bool:
        return True

    async def go() -> tuple[int, bytes]:
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        async with server:
            return await posted("127.0.0.1", server.sockets[0].getsockname()[1], "/x", "id", b"{}", 100, proven)

    if isinstance(expected, tuple):
        assert asyncio.run(go()) == expected
    else:
        with pytest.raises(expected):
            asyncio.run(go())


def test_two_routers_that_warm_the_same_pair_call_it_by_different_names():
    """A worker knows a request by its name: the first one's that gives its KV back would end the other one's, or take its KV."""

    async def test(rig: Rig) -> None:
        other = Rig(rig.prefill, rig.decode, ON)
        for one in (rig, other):
            await warmed(one)
        assert len(rig.prefill[0].seen) == 2
        assert len(set(rig.prefill[0].request_ids)) == 2
        for worker in other.context.table.workers.values():
            worker.retire()

    run(test, config=ON)


def is_full(rig: Rig) -> None:
    [worker] = rig.context.table.by_role["decode"]
    worker.slots = worker.inflight = 4


async def slowly(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    await asyncio.sleep(1.0)
    answer(writer, 200, {"choices": [], "kv_transfer_params": REFERENCE})
    return True


@pytest.mark.parametrize("why", ["its slots are taken", "its prefill took most of the time"])
def test_a_decode_worker_that_has_no_time_is_no_pair_that_fails(why: str):
    """A fleet under load grows: the new worker's pairs would all be put out, and it with them, when it is needed most."""

    async def fills(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        is_full(rigs[0])
        return await hangs(body, writer)

    rigs: list[Rig] = []

    async def test(rig: Rig) -> None:
        rigs.append(rig)
        giver, taker = rig.prefill[0], rig.decode[0]
        if why == "its slots are taken":
            taker.behave = fills
        else:
            giver.behave, taker.behave = slowly, hangs
        assert await warmed(rig) == "lost"
        assert not rig.context.table.pairs.breakers
        await until(lambda: giver.released == ["lease-1"])
        for worker in rig.context.table.workers.values():
            worker.inflight = 0

    run(test, config=IMPATIENT)


def test_who_has_no_slot_free_is_asked_later():
    async def test(rig: Rig) -> None:
        is_full(rig)
        rig.router._prewarm.step(rig.context.clock())
        await asyncio.sleep(0.05)
        assert not rig.prefill[0].seen
        [worker] = rig.context.table.by_role["decode"]
        worker.inflight = 0
        assert await warmed(rig) == "done"

    run(test, config=ON)


@pytest.mark.parametrize("what", ["place", "group"])
@pytest.mark.parametrize("moved", [True, False])
def test_what_is_told_by_a_worker_that_was_another_one_is_not_learnt(moved: bool, what: str):
    async def test(rig: Rig) -> None:
        giver, taker = rig.prefill[0], rig.decode[0]
        table, pair = rig.context.table, (f"u{giver.port}", f"u{taker.port}")

        async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            found = [worker.endpoint for worker in table.workers.values()]
            change = {"agent_port": 7} if what == "place" else {"compat": "another"}
            found = [msgspec.structs.replace(one, **change) if one.role == "decode" else one for one in found]
            rig.router.apply(Documents(ON, Endpoints(fleet="f", namespace="n", workers=tuple(found))))
            for worker in table.by_role["decode"]:
                worker.put_out(rig.context.clock())  # who it is now is not warmed yet
            answer(writer, 200 if moved else 503, {"error": {"type": "KvTransferError"}})
            return True

        taker.behave = behave
        assert await warmed(rig) == ("done" if moved else "failed")
        assert not table.pairs.breakers
        assert not any(group.pairs.met(*pair) for group in table.routing.groups.values())
        rig.router._prewarm.stop()

    run(test, config=ON)


def test_a_worker_whose_group_changed_is_warmed_with_none_of_its_old_one():
    async def test(rig: Rig) -> None:
        prewarm, table = rig.router._prewarm, rig.context.table
        is_full(rig)
        prewarm.step(rig.context.clock())  # they wait
        found = [worker.endpoint for worker in table.workers.values()]
        found = [msgspec.structs.replace(one, compat="another") if one.role == "decode" else one for one in found]
        rig.router.apply(Documents(ON, Endpoints(fleet="f", namespace="n", workers=tuple(found))))
        for worker in table.by_role["decode"]:
            worker.inflight = 0
        prewarm.step(rig.context.clock())
        await asyncio.sleep(0.05)
        assert not rig.prefill[0].seen
        assert "fleet_router_prewarms_left 0" in prewarm.lines()

    run(test, config=ON)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nothing_is_sent_to_a_pod_that_is_not_the_one_that_was_meant(role: str):
    """Between the death of a pod and the next one at its address no document needs to have come: its agent is asked, as for
    requests, and who is somebody else gets no prompt, no reference and no blame."""

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"uid": "another"}')
        writer.close()

    async def test(rig: Rig) -> None:
        server = await asyncio.start_server(agent, "127.0.0.1", 0)
        async with server:
            port, table = server.sockets[0].getsockname()[1], rig.context.table
            found = [worker.endpoint for worker in table.workers.values()]
            found = [msgspec.structs.replace(one, agent_port=port) if one.role == role else one for one in found]
            rig.router.apply(Documents(ON, Endpoints(fleet="f", namespace="n", workers=tuple(found))))
            for worker in table.workers.values():
                worker.unproven = False
            assert await warmed(rig) == "lost"
            giver, taker = rig.prefill[0], rig.decode[0]
            assert (len(giver.seen), len(taker.seen)) == (int(role == "decode"), 0)
            await until(lambda: giver.released == (["lease-1"] if role == "decode" else []))
            assert [worker.role for worker in table.suspects()] == [role], "it is asked who it is, and found out"
            assert not table.pairs.breakers
            assert table.trouble.out == 0

    run(test, config=ON)


@pytest.mark.parametrize(("answers_s", "timeout_s", "outcome"), [(0.3, 3.0, "done"), (30.0, 0.3, "lost")])
def test_an_agent_that_takes_its_time_is_no_handshake_and_no_pair_that_fails(answers_s: float, timeout_s: float, outcome: str):
    """Its decode worker answers at once when it is sent something; or is sent nothing."""
    config = msgspec.structs.replace(ON, prewarm=PrewarmBounds(pairs=4, timeout_s=timeout_s))
    answered = asyncio.Event()

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(), answers_s)  # or until it is asked no more
        writer.close()
        answered.set()

    async def test(rig: Rig) -> None:
        server = await asyncio.start_server(agent, "127.0.0.1", 0)
        async with server:
            port, table = server.sockets[0].getsockname()[1], rig.context.table
            found = [worker.endpoint for worker in table.workers.values()]
            found = [msgspec.structs.replace(one, agent_port=port) if one.role == "decode" else one for one in found]
            rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=tuple(found))))
            assert await warmed(rig) == outcome
            assert not table.pairs.breakers
            assert len(rig.decode[0].seen) == (outcome == "done")
            [prefill] = table.by_role["prefill"]
            assert all(took_s < answers_s for took_s in prefill.warmed.values())
            assert len(prefill.warmed) == (outcome == "done")
            await answered.wait()

    run(test, config=config)


def test_a_bug_of_ours_is_told_and_holds_nobody_up():
    """Nobody waits for the task."""

    async def test(rig: Rig) -> None:
        said: list[tuple[str, str]] = []
        rig.context.desk.faults.tell = lambda name, kind, _: said.append((name[:8], kind))

        async def breaks(*_: object) -> str:
            raise KeyError("words")

        rig.router._prewarm._asked = breaks  # type: ignore[method-assign, assignment]
        assert await warmed(rig) == "lost"
        assert said == [("prewarm-", "KeyError")]
        assert not rig.router._prewarm._plan.running

    run(test, config=ON)


def test_a_prefill_worker_that_stays_while_decode_workers_come_and_go_remembers_the_last_of_them_alone():
    """It did each that it had ever met: some hundred bytes for every growth of its tier, in every router process."""

    async def test(rig: Rig) -> None:
        prewarm, table = rig.router._prewarm, rig.context.table
        [giver], [taker] = ([w.endpoint for w in table.by_role[role]] for role in ("prefill", "decode"))
        for number in range(300):
            found = (giver, msgspec.structs.replace(taker, uid=f"u-{number}"))
            rig.router.apply(Documents(CONFIG, Endpoints(fleet="f", namespace="n", workers=found)))
            prewarm._learn(table.by_role["prefill"][0], table.by_role["decode"][0], 10.0, 0.1)
        assert "u-299" in (known := table.by_role["prefill"][0].warmed)
        assert len(known) <= 256

    run(test)

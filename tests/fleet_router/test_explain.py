"""Decision records: what they say, who may read them, how many there are."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import select
import sys
import threading
from datetime import datetime
from types import ModuleType
from typing import Any

import msgspec
import pytest

from fleet_router.admission.lanes import Lane
from fleet_router.admission.tenants import parse_tenants
from fleet_router.config import ExplainBounds
from fleet_router.explain.journal import Journal
from fleet_router.explain.route import rights_of
from fleet_router.follow.documents import Documents
from fleet_router.health.breaker import PAIR_FAILURES_MOST
from fleet_router.workers import Worker
from fleet_wire.endpoints import AtZero, Endpoints
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

KEYS = {"own": "sk-own-key", "all": "sk-all-key", "none": "sk-none-key"}


def tenants(**limits: float) -> bytes:
    rows = [
        {"name": f"t-{name}", "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()], "decisions": name, **limits}
        for name, key in KEYS.items()
    ]
    return json.dumps({"salt": "s" * 32, "tenants": rows}).encode()


async def said(rig: Rig, query: str = "", *headers: str) -> tuple[int, Any]:
    got = await rig.raw(http(b"", "connection: close", *headers, path=f"/debug/decisions{query}", method="GET"))
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)


def test_a_record_names_candidates_costs_choice_and_reason():
    async def go(rig: Rig) -> None:
        await rig.raw(http(ask(), "connection: close", "x-request-id: mine"))
        status, found = await said(rig, "?id=mine")
        assert status == 200
        (one,) = found["decisions"]
        assert (one["state"], one["status"], one["prompt_bytes"], one["class"]) == ("answered", 200, 2002, "default")
        (first,) = one["tries"]
        assert (first["reason"], first["prefill"]) == ("remote prefill", f"prefill-{rig.prefill[0].port}")
        assert 0 < first["at_s"] <= first["prefilled_s"] <= one["first_byte_s"] <= one["ended_s"]
        sides = {(row["role"], row["worker"]) for row in first["candidates"]}
        assert sides == {("prefill", first["prefill"]), *(("decode", f"decode-{w.port}") for w in rig.decode)}
        assert all(row["cost_s"] >= 0 and row["missing_tokens"] > 0 for row in first["candidates"])
        cost_s = {row["worker"]: row["cost_s"] for row in first["candidates"]}
        parts_s = cost_s[first["prefill"]] + cost_s[first["decode"]] + first["pair_s"]
        assert (first["cost_s"], first["pair_s"] > 0) == (pytest.approx(parts_s, abs=1e-5), True)  # a pair that never met
        assert (await said(rig, f"?id={one['worker_request_id']}"))[0] == 200

    run(go, decode=2)  # fmt: skip


@pytest.mark.parametrize("blocked", [1, 2])
def test_a_record_tells_each_candidate_once_also_where_pairs_are_put_out(blocked: int):
    """Everything that was weighed on the way was told, up to nine times."""

    async def go(rig: Rig) -> None:
        table, now = rig.context.table, rig.context.clock()
        for prefill in table.by_role["prefill"][:blocked]:
            for decode in table.by_role["decode"]:
                for _ in range(PAIR_FAILURES_MOST):
                    table.pairs.failed(prefill.uid, decode.uid, now)
        await rig.post(ask())
        (one,) = (await said(rig))[1]["decisions"][0]["tries"]
        told = [row["worker"] for row in one["candidates"]]
        assert (len(told), {one["decode"], one.get("prefill", one["decode"])} <= set(told)) == (len(set(told)), True)
        assert ("prefill" in one) == (blocked < 2)

    run(go, prefill=2, decode=2)


def reached(record: Any) -> set[str]:
    """Classes of what a record alone keeps alive: not through what lives as long as its workers and its tenant."""
    seen, found, ahead = {id(record)}, set(), [record]
    while ahead:
        for one in gc.get_referents(ahead.pop()):
            if id(one) not in seen and not isinstance(one, type | Worker | Lane | ModuleType):
                seen.add(id(one))
                found.add(type(one).__name__)
                ahead.append(one)
    return found


def test_a_record_keeps_the_numbers_of_a_decision_and_none_of_its_objects():
    """A thousand decisions of thirty objects each would fill a core's cache."""

    async def go(rig: Rig) -> None:
        await rig.post(ask())
        (record,) = rig.context.recorder.smooth
        kept = reached(record)
        assert {"Try", "Weighed", "bytes"} <= kept
        assert all(isinstance(side.costs, bytes) for side in record.tries[0].sides)
        assert not kept & {"Choice", "Offer", "CostAsk", "Ask", "Flow", "Ticket", "Incoming"}

    run(go, decode=2)


def test_no_record_holds_what_a_client_wrote():
    async def go(rig: Rig) -> None:
        await rig.post(ask(prompt="CANARY " * 200, user="CANARY"))
        await rig.post({"model": "CANARY", "prompt": "CANARY"})
        await rig.raw(http(b"", "connection: close", path="/CANARY?CANARY", method="GET"))
        _, found = await said(rig)
        assert len(found["decisions"]) == 3
        assert "CANARY" not in json.dumps(found)

    run(go)


def test_a_failed_attempt_and_the_next_one_are_both_told():
    async def go(rig: Rig) -> None:
        async def break_once(_: Any, writer: asyncio.StreamWriter) -> bool:
            rig.decode[0].behave = rig.decode[1].behave = None
            answer(writer, 500, {})
            return True

        rig.decode[0].behave = rig.decode[1].behave = break_once
        await rig.post(ask(prompt="short"))
        _, found = await said(rig)
        first, second = found["decisions"][0]["tries"]
        assert (first["why"], "why" in second) == ("decode answered 500", False)
        assert first["decode"] != second["decode"]
        assert len(rig.context.recorder.troubled) == 1

    run(go, decode=2)


def test_what_runs_is_there_already_and_who_left_is_told_apart():
    async def go(rig: Rig) -> None:
        async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
            await over.wait()
            answer(writer, 200, {})
            return True

        over = asyncio.Event()
        rig.decode[0].behave = hang
        _, writer, connection = await rig.connect()
        writer.write(http(ask(prompt="short")))
        await until(lambda: connection.flow is not None)
        assert [one["state"] for one in (await said(rig))[1]["decisions"]] == ["running"]
        writer.transport.abort()
        await until(lambda: rig.sweep() is None and not rig.context.recorder.running)
        (one,) = (await said(rig))[1]["decisions"]
        assert (one["state"], one["tries"][0]["why"]) == ("left", "the client left")
        over.set()

    run(go)


@pytest.mark.parametrize("waits_for", ["slot", "workers"])
def test_who_leaves_while_it_waits_has_left_and_has_not_failed(waits_for: str):
    """It was told and counted as a failure of ours, without a word; its request of requests/s is given back as before."""

    async def go(rig: Rig) -> None:
        over = asyncio.Event()

        async def hang(_: Any, __: asyncio.StreamWriter) -> bool:
            await over.wait()
            return False

        rig.decode[0].behave = hang
        desk, key = rig.context.desk, f"authorization: Bearer {KEYS['all']}"
        desk.tenants_needed = True
        desk.know(parse_tenants(tenants(requestsPerSecond=0.001, requestsBurst=9)))
        reader, first, _ = await rig.connect()
        first.write(http(ask(prompt="short"), f"authorization: Bearer {KEYS['own']}"))
        await until(lambda: desk.gate.running == 1)
        if waits_for == "workers":
            nobody = Endpoints(fleet="f", namespace="n", at_zero=(AtZero(tier="t"),))
            rig.router.apply(Documents(rig.context.config, nobody))
        _, writer, connection = await rig.connect()
        writer.write(http(ask(prompt="gone"), key, "x-request-id: gone"))
        await until(lambda: connection.flow is not None and len(rig.context.holding) + desk.gate.waiting == 1)
        writer.transport.abort()
        await until(lambda: rig.sweep() is None and len(rig.context.holding) + desk.gate.waiting == 0)
        (one,) = (await said(rig, "?id=gone", key))[1]["decisions"]
        account = desk.accounts["t-all"]
        assert (one["state"], account.counts["left"], account.counts["failed"]) == ("left", 1, 0)
        assert account.requests is not None
        assert account.requests.taken == 0
        over.set()
        assert (await answer_of(reader))[0] == 200

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, worker_slots=1, ttft_budget_s=5.0))


def test_without_a_worker_the_reason_is_told():
    async def go(rig: Rig) -> None:
        rig.apply(rig.prefill, [])
        assert (await rig.post(ask()))[0] == 503
        (one,) = (await said(rig))[1]["decisions"]
        assert (one["state"], one["error"]["code"], one["tries"][0]["reason"]) == (
            "failed", "no_worker", "no decode worker is serving",
        )  # fmt: skip

    run(go)


def test_rings_are_bounded_and_trouble_is_not_pushed_out():
    bounds = ExplainBounds(records=3, troubled=2, refused=2, log="none")

    async def go(rig: Rig) -> None:
        for _ in range(4):
            await rig.post({"model": "m"})  # refused before any decision
        rig.apply(rig.prefill, [], msgspec.structs.replace(CONFIG, explain=bounds))
        for _ in range(4):
            await rig.post(ask())
        rig.apply(rig.prefill, rig.decode, msgspec.structs.replace(CONFIG, explain=bounds))
        for _ in range(5):
            await rig.post(ask(prompt="short"))
        recorder = rig.context.recorder
        assert (len(recorder.smooth), len(recorder.troubled), len(recorder.refusals)) == (3, 2, 2)
        text = rig.router.plain(b"/metrics")[2].decode()
        assert 'fleet_router_records{kind="troubled"} 2' in text
        assert len((await said(rig, "?limit=5"))[1]["decisions"]) == 5
        rig.apply(rig.prefill, rig.decode, msgspec.structs.replace(CONFIG, explain=ExplainBounds(records=0)))
        assert len(recorder.smooth) == 0

    run(go)


@pytest.mark.parametrize(
    ("key", "status", "seen"), [("own", 200, {"t-own"}), ("all", 200, {"t-own", "t-all", "t-none"}), ("none", 403, None)]
)
@pytest.mark.parametrize("several", [False, True])
def test_a_key_reads_what_its_tenant_may(key: str, status: int, seen: set[str] | None, several: bool):
    """`several`: processes behind one port, which are told whose question it is."""

    async def go(rig: Rig) -> None:
        rig.context.gather = rig.router.gather if several else None
        rig.router._desk.tenants_needed = True
        rig.router.know(parse_tenants(tenants()))
        for value in KEYS.values():
            await rig.raw(http(ask(prompt="short"), f"authorization: Bearer {value}", "connection: close"))
        assert (await said(rig))[0] == 401
        got, found = await said(rig, "", f"x-api-key: {KEYS[key]}")
        assert got == status
        if seen is not None:
            assert {one["tenant"] for one in found["decisions"] if one["tries"]} == seen
            assert all(one.get("tenant") == "t-own" for one in found["decisions"]) == (key == "own")
        else:
            assert found["error"]["code"] == "decisions_not_allowed"

    run(go)


@pytest.mark.parametrize(
    ("peer", "headers", "rights"),
    [
        (("127.0.0.1", 1), {}, "all"),
        (("::1", 1, 0, 0), {}, "all"),
        (("::ffff:127.0.0.1", 1, 0, 0), {}, "all"),  # over IPv4, where both families have one socket
        (("::ffff:10.0.0.7", 1, 0, 0), {}, "none"),
        (("fe80::1%eth0", 1, 0, 2), {}, "none"),
        (("10.0.0.7", 1), {}, "none"),
        (("127.0.0.1", 1), {b"x-forwarded-for": b"10.0.0.7"}, "none"),
        (None, {}, "none"),
        ("", {}, "none"),
    ],
)
def test_without_tenants_only_the_routers_own_host_reads(peer: object, headers: dict[bytes, bytes], rights: str):
    assert rights_of(False, "none", peer, headers) == rights
    assert rights_of(True, "none", peer, headers) == "none"


def test_the_longest_name_that_workers_know_a_request_by_finds_it():
    """It was cut in the question, and there was no record of it."""

    async def go(rig: Rig) -> None:
        await rig.raw(http(ask(), "connection: close", "x-request-id: " + "i" * 128))
        (name,) = {worker.request_ids[-1] for worker in (rig.prefill[0], rig.decode[0])}
        status, found = await said(rig, f"?id={name}")
        assert (status, [one["worker_request_id"] for one in found["decisions"]]) == (200, [name])

    run(go)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("?id=nobody", 404), ("?limit=0", 400), ("?limit=x", 400), ("?limit=201", 400), ("?limit=00000199999", 400),
        pytest.param("?" + "a=1&" * 9, 400, id="no answer at all"),
    ],
)  # fmt: skip
def test_bad_questions_get_an_error(query: str, status: int):
    async def go(rig: Rig) -> None:
        await rig.post(ask(prompt="short"))
        assert (await said(rig, query))[0] == status

    run(go)


def test_the_answers_head_tells_the_decision_to_who_may_and_asks():
    async def go(rig: Rig) -> None:
        async def headers(*more: str) -> dict[str, str]:
            reader, writer, _ = await rig.connect()
            writer.write(http(ask(prompt=f"{len(rig.writers)}" * 2000), *more))
            return (await answer_of(reader))[1]

        assert "x-fleet-decision" not in await headers()
        told = (await headers("x-fleet-explain: 1"))["x-fleet-decision"]
        assert told.startswith(f'reason="remote prefill"; prefill="prefill-{rig.prefill[0].port}"; decode="decode-')
        assert told.endswith("tries=1")
        assert "x-fleet-decision" not in await headers("x-fleet-explain: 1", "x-forwarded-for: 10.0.0.1")
        assert not rig.decode[0].headers or "x-fleet-explain" not in rig.decode[0].headers[-1]

    run(go)


def test_ended_requests_are_lines_of_json_and_bounded():
    lines: list[dict[str, Any]] = []
    journal = Journal(lambda line: lines.append(json.loads(line)))

    async def go(rig: Rig) -> None:
        recorder = rig.context.recorder
        recorder._journal = journal
        config = msgspec.structs.replace(CONFIG, explain=ExplainBounds(log="troubled", log_lines_per_s=1))
        rig.apply(rig.prefill, rig.decode, config)
        await rig.post(ask(prompt="short CANARY"))
        assert lines == []
        rig.apply(rig.prefill, [], config)
        for _ in range(3):
            rig.apply(rig.prefill, [], config)  # as endpoints change: each time there was a second's lines more
            await rig.post(ask(prompt="CANARY"))
        (one,) = lines
        assert (one["event"], one["ended"], one["status"], one["code"]) == ("request", "failed", 503, "no_worker")
        before = rig.context.clock
        rig.context.clock = lambda: before() + 10
        await rig.post(ask(prompt="CANARY"))
        assert lines[1]["left_out"] == 2
        assert "CANARY" not in json.dumps(lines)

    run(go)


def test_metrics_have_the_names_of_the_gateway_api_extension():
    async def go(rig: Rig) -> None:
        for _ in range(3):
            await rig.post(ask())
        rig.apply(rig.prefill, [])
        await rig.post(ask())
        text = rig.router.plain(b"/metrics")[2].decode()
        for line in (
            'inference_objective_request_total{model_name="m",target_model_name="m"} 4',
            'inference_objective_request_error_total{model_name="m",target_model_name="m",error_code="no_worker"} 1',
            'inference_objective_request_duration_seconds_count{model_name="m",target_model_name="m"} 3',
            'inference_objective_request_sizes_bucket{model_name="m",target_model_name="m",le="2048.0"} 4',
            'inference_objective_running_requests{model_name="m"} 0',
            'inference_pool_ready_pods{name="f"} 0',
            'inference_extension_scheduler_e2e_duration_seconds_count{name="f"} 3',
            'inference_extension_prefix_indexer_hit_ratio_bucket{name="f",le="0.0"} 1',
            'inference_extension_flow_control_queue_size{inference_pool="f"} 0',
        ):
            assert line in text, line

    run(go)


@pytest.mark.parametrize("how", ["gone", "closed", "never there"])
def test_a_log_that_nobody_reads_costs_lines_and_no_requests(how: str, monkeypatch: pytest.MonkeyPatch):
    """A request whose line could not be written kept its slot for ever; a router that was started with standard error closed
    (`2>&-`, of which Python makes None) ended at its first line, without a word."""
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    if how == "closed":
        broken.close()

    async def go(rig: Rig) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", None if how == "never there" else broken)
            assert (await rig.post(ask(prompt="short")))[0] == 200
            assert (await rig.post(ask(prompt="short")))[0] == 200
        assert rig.context.desk.gate.running == 0

    try:
        run(go, config=msgspec.structs.replace(CONFIG, explain=ExplainBounds(log="all")))
    finally:
        with contextlib.suppress(OSError):
            broken.close()


def test_a_log_that_is_not_read_for_a_while_holds_nobody_up(monkeypatch: pytest.MonkeyPatch):
    """A full pipe stopped the loop, and every stream with it, until somebody read it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 512)
    os.set_blocking(writing, True)
    out, journal, bounds = os.fdopen(writing, "w"), Journal(), ExplainBounds(log="all")
    journal.follow(bounds)
    monkeypatch.setattr(sys, "stderr", out)
    saying = threading.Thread(target=lambda: [journal.say("a"), journal.say("b")], daemon=True)
    saying.start()
    saying.join(2)
    held_up = saying.is_alive()
    os.read(reading, 1 << 20)
    saying.join(2)
    journal.say("c")
    lines = os.read(reading, 1 << 20)
    monkeypatch.undo()
    out.close()
    os.close(reading)
    assert not held_up
    assert (b'"a"' in lines, b'"c"' in lines, journal._left_out) == (False, True, 2)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"problem": "x" * 100_000, "n": 7}, {"n": 7}),
        ({"problem": "\x01" * 100_000, "b": "\u00e9\u20ac" * 9_000, "ok": True}, {"ok": True}),
        ({f"f{number}": "\x01" * 500 for number in range(40)}, {}),
        ({"problems": [f"tenant {number}: no such model" for number in range(9_000)], "tenants": 3}, {"tenants": 3}),
    ],
    ids=["long", "escapes", "many", "list"],
)
def test_a_line_is_no_longer_than_what_a_pipe_with_room_takes_at_once(fields: dict[str, Any], kept: dict[str, Any]):
    """A pipe that said that it has room took PIPE_BUF bytes of a longer line, and the loop waited for the rest."""
    lines: list[str] = []
    Journal(lines.append).say("event", **fields)
    told = json.loads(lines[0])
    assert len(lines[0].encode()) < select.PIPE_BUF
    assert (told["event"], told["cut"], set(told)) == ("event", True, {"time", "event", "cut", *fields})
    assert kept.items() <= told.items()
    assert datetime.fromisoformat(told["time"])


def test_a_line_that_is_long_enough_for_a_pipe_is_whole():
    lines: list[str] = []
    Journal(lines.append).say("event", problem="x" * 3_900)
    assert json.loads(lines[0])["problem"] == "x" * 3_900


def test_names_of_models_are_labels_whatever_is_in_them():
    config = msgspec.structs.replace(CONFIG, served_name='a"b\\c\nd', fleet='f"')

    async def go(rig: Rig) -> None:
        assert (await rig.post({"model": config.served_name, "prompt": "short"}))[0] == 200
        lines = rig.router.plain(b"/metrics")[2].decode().splitlines()
        assert r'inference_objective_request_total{model_name="a\"b\\c\nd",target_model_name="a\"b\\c\nd"} 1' in lines
        assert not [line for line in lines if line.startswith('d"')]
        assert r'inference_pool_ready_pods{name="f\""} 1' in lines

    run(go, config=config)


@pytest.mark.parametrize(
    ("key", "seen"), [("own", {"mine": "t-own"}), ("all", {"mine": "t-own", "theirs": "t-all", "nobodys": None})]
)
def test_who_was_refused_is_told_to_whom_it_was_and_to_nobody_else(key: str, seen: dict[str, str | None]):
    """The name of its tenant was never remembered: who may see its own records did not see why it got a 429."""

    async def go(rig: Rig) -> None:
        rig.context.desk.tenants_needed = True
        rig.context.desk.know(parse_tenants(tenants()))
        for name, secret in (("mine", KEYS["own"]), ("theirs", KEYS["all"]), ("nobodys", "sk-wrong")):
            reader, writer, _ = await rig.connect()
            writer.write(http(ask(model="other"), f"x-request-id: {name}", f"authorization: Bearer {secret}"))
            assert (await answer_of(reader))[0] in (401, 404)
        _, found = await said(rig, "", f"authorization: Bearer {KEYS[key]}")
        assert {one["request_id"]: one.get("tenant") for one in found["decisions"]} == seen
        assert rig.context.desk.refused_keys == 1

    run(go)

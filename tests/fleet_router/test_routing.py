"""The routing fields of the configuration, each by what it does to requests of a real router."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from fleet_router.config import HttpBounds, RouterConfig, SloClass, TierRule
from fleet_router.hints import ALWAYS, NO_HINTS, hints_of, kept_of, wanted_headers
from fleet_router.inbound import Inbound
from fleet_router.policy.tiers import tier_of
from fleet_router.workers import WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints
from tests.fleet_router.rig import LONG, Rig, ask, run, until

BASE = RouterConfig(fleet="f", served_name="m", bounds=HttpBounds(body_bytes=20_000), max_input_tokens=10_000)


def config(**changes: object) -> RouterConfig:
    return msgspec.structs.replace(BASE, **changes)


async def send(rig: Rig, body: dict, *headers: str) -> None:
    raw = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "host: h", "connection: close", *headers, f"content-length: {len(raw)}", "", ""]
    assert b" 200 " in (await rig.raw("\r\n".join(lines).encode() + raw))[:20]


@pytest.mark.parametrize(("decide", "remote"), [("threshold", 6), ("cost", 0)])
def test_decide_sends_long_prompts_to_prefill_or_where_they_cost_least(decide: str, remote: int):
    async def go(rig: Rig) -> None:
        for i in range(6):
            await send(rig, ask(prompt=f"{i} {LONG}"))
        assert len(rig.prefill[0].seen) == remote  # the fleet is idle: its decode worker is as fast and needs no transfer
        assert len(rig.decode[0].seen) == 6

    run(go, config=config(decide=decide))


def test_a_session_stays_whatever_it_says():
    async def go(rig: Rig) -> None:
        for i in range(8):
            await send(rig, ask(prompt=f"{i} something else every time {LONG}"), "X-Session-Id: alice")
        assert sorted(len(worker.seen) for worker in rig.decode) == [0, 0, 0, 8]
        for i in range(24):
            await send(rig, ask(prompt=f"{i} and again {LONG}"), f"X-Session-Id: user-{i}")
        assert sum(bool(worker.seen) for worker in rig.decode) > 2

    run(go, prefill=0, decode=4, config=config(session_header="x-session-id"))


def test_without_a_session_header_it_is_passed_over():
    async def go(rig: Rig) -> None:
        for i in range(24):
            await send(rig, ask(prompt=f"{i} something else every time {LONG}"), "X-Session-Id: alice")
        assert sum(bool(worker.seen) for worker in rig.decode) > 2

    run(go, prefill=0, decode=4, config=config())


RULES = (
    TierRule(tier="large", headers={"x-tier": "large"}),
    TierRule(tier="small", tokens_lt=500),
    TierRule(tier="middle", tokens_ge=500, tokens_lt=2000),
)


@pytest.mark.parametrize(
    ("tokens", "headers", "tier"),
    [
        (10, {}, "small"), (499.9, {}, "small"), (500, {}, "middle"), (2000, {}, ""), (10, {b"x-tier": b"large"}, "large"),
        (10, {b"x-tier": b"Large"}, "small"), (9999, {b"other": b"large"}, ""),
    ],
)  # fmt: skip
def test_the_first_rule_that_fits(tokens: float, headers: dict[bytes, bytes], tier: str):
    assert tier_of(RULES, tokens, headers) == tier


def tiers_of(policy: str, config_: RouterConfig, prompt: bytes, headers: dict[bytes, bytes]) -> set[str]:
    table = WorkerTable()
    rows = tuple(
        Endpoint(
            name=f"{tier}{i}", uid=f"{tier}{i}", address="127.0.0.1", http_port=1, agent_port=2, role="decode", tier=tier,
            revision="r", compat=tier,
        )
        for tier in ("small", "large") for i in range(2)
    )  # fmt: skip
    table.update(Endpoints(fleet="f", namespace="n", workers=rows))
    config_ = msgspec.structs.replace(config_, policy=policy)
    hints = hints_of(config_, SloClass(name="default"), headers)
    found = [table.choose(b"%d " % i + prompt, config_, 0.0, frozenset(), 0, "", hints)[0] for i in range(20)]
    return {table.workers[one.decode].endpoint.tier for one in found}


@pytest.mark.parametrize("policy", ["kvAware", "prefixHash", "leastLoad", "roundRobin"])
def test_tier_rules_bind_every_policy_and_a_tier_that_is_not_there_binds_nobody(policy: str):
    ruled = config(tier_rules=(*RULES[:2], TierRule(tier="gone", headers={"x-tier": "gone"})))
    assert tiers_of(policy, ruled, b"short", {}) == {"small"}
    assert tiers_of(policy, ruled, b"short", {b"x-tier": b"large"}) == {"large"}
    assert tiers_of(policy, ruled, b"long " * 1000, {b"x-tier": b"gone"}) <= {"small", "large"}


def test_headers_are_kept_only_when_routing_goes_by_them():
    assert wanted_headers(BASE) == ALWAYS
    assert wanted_headers(config(session_header="x-s", tier_rules=RULES)) == {b"x-s", b"x-tier"} | ALWAYS
    assert hints_of(BASE, SloClass(name="default"), {}) is NO_HINTS
    hints = hints_of(config(session_header="x-s"), SloClass(name="default"), {b"x-s": b"alice"})
    assert (hints.session, hints.others) == (b"alice", 1.0)


@pytest.mark.parametrize(("budget_s", "others"), [(60.0, 1.0), (600.0, 10.0), (6.0, 0.1), (6e6, 30.0)])
def test_a_class_that_may_wait_counts_the_others_more(budget_s: float, others: float):
    assert hints_of(BASE, SloClass(name="c", ttft_budget_s=budget_s), {}).others == pytest.approx(others)


def test_a_failing_worker_is_avoided_and_panic_uses_it_all_the_same():
    async def go(rig: Rig) -> None:
        table, now = rig.context.table, rig.context.clock()
        one, two = table.by_role["decode"]
        for _ in range(5):
            one.failed(now)
        for i in range(10):
            await send(rig, ask(prompt=f"{i} {LONG}"))
        seen = {worker.port: len(worker.seen) for worker in rig.decode}
        assert (seen[one.endpoint.http_port], seen[two.endpoint.http_port]) == (0, 10)
        for _ in range(5):
            two.failed(now)
        await send(rig, ask(prompt=LONG))  # rather one that failed lately than nobody

    run(go, prefill=0, decode=2)


def test_legs_leave_no_trace_in_queues_however_they_end():
    async def go(rig: Rig) -> None:
        over = asyncio.Event()

        async def never(body: dict, writer: asyncio.StreamWriter) -> bool:
            await over.wait()
            return True

        rig.prefill[0].behave = never
        _, writer, connection = await rig.connect()
        raw = json.dumps(ask()).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
        worker = next(iter(rig.context.table.by_role["prefill"]))
        await until(lambda: worker.pending == 1)
        assert worker.free_at > rig.context.clock()
        connection.cut()
        assert (worker.pending, worker.inflight) == (0, 0)
        assert worker.free_at <= rig.context.clock()
        assert worker.prefill.weight == 0.0  # nothing was learnt from it
        over.set()
        await until(lambda: bool(rig.prefill[0].released))

    run(go)


def test_a_session_is_kept_however_long_its_name_is():
    """Above 256 bytes (a cookie, a token) it was passed over without a word, and each of its requests went elsewhere."""
    ruled, cls = config(session_header="x-s"), SloClass(name="default")

    def session(value: bytes) -> bytes:
        inbound = Inbound()
        inbound.feed(b"GET / HTTP/1.1\r\nhost: h\r\nx-s: %b\r\n\r\n" % value, HttpBounds(), wanted_headers(ruled))
        return hints_of(ruled, cls, inbound.requests[0].kept).session

    names = [b"s" * 256, b"s" * 257, b"s" * 9_000, b"s" * 8_999 + b"t"]
    kept = [session(name) for name in names]
    assert kept == [session(name) for name in names]
    assert len(set(kept)) == 4
    assert kept[0] == names[0]
    assert {len(one) for one in kept[1:]} == {32}


@pytest.mark.parametrize(("name", "kept"), [(b"x-forwarded-for", b""), (b"tracestate", None), (b"traceparent", None)])
def test_other_long_headers_tell_that_they_were_there_or_nothing(name: bytes, kept: bytes | None):
    assert kept_of(name, b"v" * 257) == kept
    assert kept_of(name, b"v" * 256) == b"v" * 256


@pytest.mark.parametrize("name", ["x-slo-class", "x-api-key", "authorization", "x-request-id", "host", "x-slo-ttft-ms"])
def test_routing_goes_by_a_header_that_says_something_else_as_well(name: str):
    """A rule for the class that a request names (batch to the small tier) was accepted and fitted nobody."""
    rules = (TierRule(tier="t", headers={name: "250"}),)
    ruled = config(session_header=name, tier_rules=rules, classes=(SloClass(name="250"),))

    inbound = Inbound()
    head = b"" if name == "host" else b"%b: 250\r\n" % name.encode()
    data = b"GET / HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (b"250" if name == "host" else b"h", head)
    inbound.feed(data, HttpBounds(), wanted_headers(ruled))
    hints = hints_of(ruled, SloClass(name="250"), inbound.requests[0].kept)
    assert (hints.session, tier_of(rules, 10, hints.headers)) == (b"250", "t")

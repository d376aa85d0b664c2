"""A request's way through the tiers, on real sockets: who is asked, what the client gets, what is counted and left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_router.config import AnswerCheck, TierRule
from fleet_router.watching import not_there, watch
from tests.fleet_router.cascade.ladder import CHAT, SMALL, TALK, Ladder, climbing, config, text_of
from tests.fleet_router.chat_worker import says
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import http, until

LOGPROBS = {"content": [{"token": "s", "logprob": -0.25, "bytes": None, "top_logprobs": []}]}
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@BOTH
def test_a_good_draft_is_the_answer(stream: bool):
    async def go(ladder: Ladder) -> None:
        status, tier, body = await ladder.talk(stream=stream)
        assert (status, tier, text_of(body)) == (200, "small", "small")
        assert ladder.asked == {"small": 1, "large": 0}
        found = ladder.counted()
        assert found['fleet_router_drafts_total{tier="small",outcome="kept"}'] == 1
        assert (found['fleet_router_requests_total{code="200"}'], found["fleet_router_arrivals_total"]) == (1, 1)

    climbing(go, config())


@BOTH
def test_the_next_tier_answers_where_a_draft_is_not_good_enough(stream: bool):
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, "length"))
        status, tier, body = await ladder.talk(stream=stream)
        assert (status, tier, text_of(body)) == (200, "large", "large")
        assert ladder.asked == {"small": 1, "large": 1}
        found = ladder.counted()
        assert found['fleet_router_drafts_total{tier="small",outcome="finish_length"}'] == 1
        assert (found['fleet_router_requests_total{code="200"}'], found["fleet_router_arrivals_total"]) == (1, 1)
        assert found['inference_objective_request_total{model_name="m",target_model_name="m"}'] == 1

    climbing(go, config())


@pytest.mark.parametrize(("finish", "expected"), [("stop", "small"), ("length", "large")])
def test_text_completions_climb_too(finish: str, expected: str):
    async def go(ladder: Ladder) -> None:
        async def text(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            answer(writer, 200, {"choices": [{"text": "a", "finish_reason": finish, "logprobs": {"token_logprobs": [-0.1]}}]})
            return True

        ladder.behave("small", text)
        status, tier, _ = await ladder.talk("/v1/completions", model="m", prompt="x" * 40)
        assert (status, tier, ladder["small"].seen[0]["logprobs"]) == (200, expected, 1)
        assert all("logprobs" not in seen for seen in ladder["large"].seen)

    climbing(go, config(check=AnswerCheck(finish_reasons=("length",), least_mean_logprob=-1.0)))


def test_three_tiers():
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, "length"))
        ladder.behave("middle", says([{"content": "I do not know."}]))
        assert (await ladder.talk())[:2] == (200, "large")
        assert ladder.asked == {"small": 1, "middle": 1, "large": 1}
        ladder.behave("middle", says([{"content": "I know."}]))
        assert (await ladder.talk())[:2] == (200, "middle")

    climbing(go, config("small", "middle", "large", check=AnswerCheck(finish_reasons=("length",), phrases=("i do not know",))))


def test_a_client_hears_nothing_of_a_draft_before_it_was_judged():
    async def go(ladder: Ladder) -> None:
        more = asyncio.Event()

        async def slowly(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            first, *rest = (b"%x\r\n%b\r\n" % (len(e), e) for e in _events(SMALL, "length"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + first)
            await more.wait()
            writer.write(b"".join(rest) + b"0\r\n\r\n")
            return True

        ladder.behave("small", slowly)
        reader, writer, connection = await ladder.rig.connect()
        writer.write(http({**TALK, "stream": True}, path=CHAT))
        await until(lambda: ladder.rig.context.drafts.bytes > 0)
        flow = connection.flow
        assert flow is not None
        assert not flow.started
        more.set()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"x-fleet-tier: large" in head
        assert b"sma" not in await reader.readuntil(b"0\r\n\r\n")

    climbing(go, config())


def _events(deltas: list[dict[str, Any]], finish: str) -> list[bytes]:
    from tests.fleet_router.chat_worker import events

    return events(deltas, finish)


# -- what is judged ------------------------------------------------------------------------------------------------------------
def told(logprob: float) -> Any:
    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        choice: dict[str, Any] = {"message": {"content": "small"}, "finish_reason": "stop"}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{**LOGPROBS["content"][0], "logprob": logprob}]}
        answer(writer, 200, {"choices": [choice]})
        return True

    return behave


@pytest.mark.parametrize(
    ("logprob", "asks", "tier", "sees"),
    [(-0.25, False, "small", False), (-0.25, True, "small", True), (-3.0, False, "large", False)],
    ids=["sure", "the-client-wants-them", "unsure"],
)
def test_a_draft_is_judged_by_its_log_probabilities(logprob: float, asks: bool, tier: str, sees: bool):
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", told(logprob))
        status, by, body = await ladder.talk(**({"logprobs": True} if asks else {}))
        assert (status, by) == (200, tier)
        assert ladder["small"].seen[0]["logprobs"] is True
        assert bool(json.loads(body)["choices"][0].get("logprobs")) == sees
        assert all(bool(seen.get("logprobs")) == asks for seen in ladder["large"].seen)

    climbing(go, config(check=AnswerCheck(least_mean_logprob=-1.0)))


def test_an_answer_that_was_to_be_json_is():
    async def go(ladder: Ladder) -> None:
        shape = {"response_format": {"type": "json_object"}}
        for said in ("small", "7", '[{"a": 1}]'):
            ladder.behave("small", says([{"content": said}]))
            assert (await ladder.talk(**shape))[1] == "large"
        ladder.behave("small", says([{"content": '{"a": 1}'}]))
        assert (await ladder.talk(**shape))[1] == "small"

    climbing(go, config())


# -- small tiers that fail -----------------------------------------------------------------------------------------------------
async def broken(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    """A stream that ends in the middle."""
    part = _events(SMALL, "stop")[0]
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"%x\r\n%b\r\n" % (len(part), part))
    await writer.drain()
    writer.close()
    return True


async def failing(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    answer(writer, 500, {"error": {"message": "no"}})
    return True


async def babbling(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    answer(writer, 200, {"choices": "what?"})
    return True


def bottomless(value: bytes) -> Any:
    """An answer with a field that no reader of ours can take."""

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        said = b'{"choices":[{"message":{"content":"small"},"finish_reason":"stop","logprobs":null}],"odd":' + value + b"}"
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
        return True

    return behave


def test_an_answer_that_cannot_be_put_together_again_is_no_answer():
    """A number that is too large for anybody, beside log-probabilities that are to be taken out."""

    async def go(ladder: Ladder) -> None:
        said = {"choices": [{"message": {"content": "small"}, "finish_reason": "stop", "logprobs": LOGPROBS}]}

        async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            raw = json.dumps(said).encode()[:-1] + b',"odd":1e400}'
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
            return True

        ladder.behave("small", behave)
        assert (await ladder.talk())[:2] == (200, "large")

    climbing(go, config(check=AnswerCheck(least_mean_logprob=-1.0)))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_tier_that_falls_silent_is_passed_over_as_soon_as_a_worker_is_put_out(streamed: bool):
    """Where the draft comes as a whole, once it does not answer either that it is there."""

    async def go(ladder: Ladder) -> None:
        async def silent(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            await until(lambda: ladder.asked["large"] > 0)
            return True

        ladder.behave("small", silent)
        asking = asyncio.create_task(ladder.talk(stream=streamed))
        await until(lambda: ladder.asked["small"] == 1)
        context = ladder.rig.context
        now = context.clock() + context.config.silent_s + 1
        for worker in watch(context, ladder.rig.connections, now):
            not_there(context, ladder.rig.connections, worker, now, now)
        assert (await asking)[:2] == (200, "large")

    climbing(go, config())


@pytest.mark.parametrize(
    ("behave", "stream", "why"),
    [
        (broken, True, "failed"),
        (failing, False, "failed"),
        (failing, True, "failed"),
        (babbling, False, "unreadable"),
        (bottomless(b"[" * 20_000 + b"]" * 20_000), False, "failed"),
    ],
    ids=["broken-stream", "500", "500-streamed", "no-answer", "without-a-bottom"],
)
def test_a_tier_that_fails_is_passed_over(behave: Any, stream: bool, why: str):
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", behave)
        status, tier, body = await ladder.talk(stream=stream)
        assert (status, tier, text_of(body)) == (200, "large", "large")
        found = ladder.counted()
        assert found[f'fleet_router_drafts_total{{tier="small",outcome="{why}"}}'] == 1
        codes = {name: count for name, count in found.items() if name.startswith("fleet_router_requests_total") and count}
        assert codes == {'fleet_router_requests_total{code="200"}': 1}
        assert found["fleet_router_streams_broken_total"] == 0

    climbing(go, config())


def test_a_tier_without_workers_is_passed_over_and_one_that_is_down():
    async def go(ladder: Ladder) -> None:
        await ladder["small"].stop()
        assert (await ladder.talk())[:2] == (200, "large")
        ladder.rig.apply([], ladder.tiers["large"], ladder.rig.context.config)
        assert (await ladder.talk())[:2] == (200, "large")

    climbing(go, config())


def test_a_draft_that_does_not_come_in_time_is_the_next_tiers_turn():
    async def go(ladder: Ladder) -> None:
        async def silent(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            await until(lambda: writer.is_closing() or ladder.asked["large"] > 0)
            return True

        ladder.behave("small", silent)
        asking = asyncio.create_task(ladder.talk())
        await until(lambda: ladder.asked["small"] == 1)
        ladder.rig.sweep(later_s=ladder.rig.context.config.whole_answer_most_s + 1)
        assert (await asking)[:2] == (200, "large")

    climbing(go, config())


def test_another_worker_of_the_tier_is_asked_before_the_next_tier():
    async def go(ladder: Ladder) -> None:
        for _ in range(4):  # whoever is asked first
            first, second = ladder.tiers["small"]
            first.behave, second.behave = failing, says(SMALL)
            assert (await ladder.talk())[:2] == (200, "small")
        assert ladder.asked["large"] == 0

    climbing(go, config(), per_tier=2)


def test_what_a_client_did_wrong_it_is_told_at_once():
    async def go(ladder: Ladder) -> None:
        async def refusing(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            answer(writer, 400, {"error": {"message": "temperature is 9", "code": "invalid_request"}})
            return True

        ladder.behave("small", refusing)
        status, tier, body = await ladder.talk(temperature=9)
        assert (status, tier, json.loads(body)["error"]["message"]) == (400, "small", "temperature is 9")
        status, _, body = await ladder.talk("/v1/messages", **{**TALK, "max_tokens": 9})
        assert (status, json.loads(body)["error"]["message"]) == (400, "temperature is 9")
        assert ladder.asked["large"] == 0
        found = ladder.counted()
        assert found['fleet_router_drafts_total{tier="small",outcome="refused"}'] == 2
        assert found['fleet_router_requests_total{code="400"}'] == 2

    climbing(go, config())


def test_no_small_answer_stands_in_for_a_large_one():
    """A draft that was not good enough is no answer, and neither is another tier's to a rule's request."""

    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, "length"))
        ladder.behave("large", failing)
        status, _, body = await ladder.talk()
        assert status == 503
        assert b"small" not in body.replace(b"small-", b"")
        ladder.rig.apply([], ladder.tiers["small"], ladder.rig.context.config)
        assert (await ladder.talk())[0] == 503
        assert (await ladder.talk(headers=("x-tier: large",)))[0] == 503

    climbing(go, config(tier_rules=(TierRule(tier="large", headers={"x-tier": "large"}),)))


# -- who climbs ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "more", "headers", "expected"),
    [
        (CHAT, {}, ("x-tier: large",), {"small": 0, "large": 1}),
        (CHAT, {}, ("x-tier: other",), {"small": 1, "large": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 9_000}]}, (), {"small": 0, "large": 1}),
        (CHAT, {"n": 2}, (), {"small": 0, "large": 1}),
        ("/v1/embeddings", {"model": "m", "input": "x"}, (), {"small": 0, "large": 1}),
        (CHAT, {"model": "a"}, (), {"small": 0, "large": 1}),
    ],
    ids=["a-rule-by-header", "no-rule", "a-rule-by-length", "several-choices", "embeddings", "an-adapter"],
)
def test_rules_come_first_and_what_cannot_be_judged_goes_to_the_last_tier(
    path: str, more: dict[str, Any], headers: tuple[str, ...], expected: dict[str, int]
):
    async def go(ladder: Ladder) -> None:
        for worker in ladder.rig.context.table.by_role["decode"]:
            worker.endpoint.adapters["a"] = "v1"
        assert (await ladder.talk(path, headers, **more))[0] == 200
        assert ladder.asked == expected

    rules = (TierRule(tier="large", headers={"x-tier": "large"}), TierRule(tier="large", tokens_ge=2_000))
    climbing(go, config(tier_rules=rules, adapters=("a",)))


@pytest.mark.parametrize("finish", ["stop", "length"], ids=["kept", "climbs"])
@BOTH
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_dialects(path: str, stream: bool, finish: str):
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, finish))
        more = {"input": "x"} if path == "/v1/responses" else {**TALK, "max_tokens": 9}
        status, tier, body = await ladder.talk(path, **{"model": "m", **more, "stream": stream})
        wanted = "small" if finish == "stop" else "large"
        assert (status, tier) == (200, wanted)
        assert (b"sma" if wanted == "small" else b"lar") in body
        assert (b"lar" if wanted == "small" else b"sma") not in body.replace(b"small-", b"")
        if not stream:
            assert wanted in json.dumps(json.loads(body))

    climbing(go, config())


# -- bounds and ends -------------------------------------------------------------------------------------------------------------
@BOTH
def test_a_draft_that_is_too_long_to_hold_is_dropped(stream: bool):
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says([{"content": "s" * 500}] * 40))
        assert (await ladder.talk(stream=stream))[:2] == (200, "large")
        assert ladder.counted()['fleet_router_drafts_total{tier="small",outcome="too_long"}'] == 1

    climbing(go, config(held_bytes=4_000))


def test_drafts_of_all_requests_together_are_bounded():
    async def go(ladder: Ladder) -> None:
        ladder.rig.context.drafts.bytes = 256 * 1024 * 1024
        assert (await ladder.talk())[:2] == (200, "large")
        assert ladder.asked["small"] == 0
        ladder.rig.context.drafts.bytes = 0
        assert (await ladder.talk())[:2] == (200, "small")

    climbing(go, config())


async def waiting(ladder: Ladder, *, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Event]:
    """A client whose draft has begun; its worker says no more until the event is set."""
    go_on = asyncio.Event()

    async def endless(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if stream:
            part = _events(SMALL, "stop")[0]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await go_on.wait()
        return True

    ladder.behave("small", endless)
    reader, writer, _ = await ladder.rig.connect()
    writer.write(http({**TALK, "stream": stream}, path=CHAT))
    await until(lambda: ladder.asked["small"] == 1 and (ladder.rig.context.drafts.bytes > 0) == stream)
    return reader, writer, go_on


@BOTH
def test_a_client_that_leaves_ends_its_draft(stream: bool):
    async def go(ladder: Ladder) -> None:
        _, writer, go_on = await waiting(ladder, stream=stream)
        assert ladder.counted().get('fleet_router_requests_total{code="200"}', 0) == 0  # a counter never goes down
        writer.close()
        await until(lambda: bool(ladder.rig.sweep() or ladder.settled()))  # a sweep finds out who only closed its half
        go_on.set()
        await until(lambda: ladder["small"].closed_early == 1)
        assert ladder.asked["large"] == 0
        found = ladder.counted()
        assert (found["fleet_router_client_left_total"], found.get('fleet_router_requests_total{code="200"}', 0)) == (1, 0)
        assert found['fleet_router_drafts_total{tier="small",outcome="left"}'] == 1

    climbing(go, config())


@BOTH
def test_a_router_that_goes_tells_who_waits_for_a_draft(stream: bool):
    async def go(ladder: Ladder) -> None:
        reader, _, go_on = await waiting(ladder, stream=stream)
        for connection in list(ladder.rig.connections):
            connection.cut()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        go_on.set()
        await until(lambda: ladder["small"].closed_early == 1)
        found = ladder.counted()
        assert found['fleet_router_requests_total{code="503"}'] == 1
        assert found.get('fleet_router_requests_total{code="200"}', 0) == 0

    climbing(go, config())


def test_one_slot_is_enough_for_all_drafts_of_a_request():
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, "length"))
        found = await asyncio.gather(*(ladder.talk() for _ in range(6)))
        assert [one[:2] for one in found] == [(200, "large")] * 6

    climbing(go, config(worker_slots=1, queue_per_slot=8))


def test_kv_stays_within_a_tier():
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, "length"))
        assert (await ladder.talk())[:2] == (200, "large")
        giver = {worker.tier: worker for worker in ladder.rig.prefill}
        assert [len(giver[tier].seen) for tier in ("small", "large")] == [1, 1]
        for tier in ("small", "large"):
            assert ladder[tier].seen[0]["kv_transfer_params"]["lease_id"] == "lease-1"
        found = ladder.counted()
        assert [found[f'fleet_router_handed_over_total{{tier="{tier}"}}'] for tier in ("small", "large")] == [1, 1]

    climbing(go, config(), prefill=1)


@pytest.mark.parametrize("policy", ["kvAware", "prefixHash", "leastLoad", "roundRobin"])
def test_every_policy_stays_within_the_tier(policy: Any):
    async def go(ladder: Ladder) -> None:
        for _ in range(4):
            assert (await ladder.talk())[:2] == (200, "small")
            assert (await ladder.talk(headers=("x-tier: large",)))[:2] == (200, "large")
        assert ladder.asked == {"small": 4, "large": 4}

    climbing(go, config(policy=policy, tier_rules=(TierRule(tier="large", headers={"x-tier": "large"}),)), per_tier=2)


def test_a_stream_that_breaks_is_not_carried_on_by_another_model():
    async def go(ladder: Ladder) -> None:
        ladder.behave("large", broken)
        status, tier, body = await ladder.talk(headers=("x-tier: large",), stream=True, temperature=0)
        assert (status, tier) == (200, "large")
        assert b"[DONE]" not in body
        assert b"error" in body
        assert ladder.asked["small"] == 0

    climbing(go, config(tier_rules=(TierRule(tier="large", headers={"x-tier": "large"}),)))


@BOTH
def test_a_draft_that_is_no_utf8_is_the_next_tiers_turn(stream: bool):
    """It was an exception in the worker's connection: the draft was asked for once more, and its worker blamed."""

    async def go(ladder: Ladder) -> None:
        async def garbled(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            said = {"index": 0, "finish_reason": "stop", "delta" if stream else "message": {"content": "X!"}}
            body = json.dumps({"choices": [said]}).encode().replace(b"X!", b"\xff")
            kind, body = (
                (b"text/event-stream", b"data: " + body + b"\n\ndata: [DONE]\n\n") if stream else (b"application/json", body)
            )
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body))
            return True

        ladder.behave("small", garbled)
        status, tier, body = await ladder.talk(stream=stream)
        assert (status, tier, text_of(body), ladder.asked) == (200, "large", "large", {"small": 1, "large": 1})
        assert ladder.counted()['fleet_router_drafts_total{tier="small",outcome="unreadable"}'] == 1

    climbing(go, config())

"""The desk: who may ask, what a refusal says, who begins when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fleet_router.admission.lanes import Lane
from fleet_router.admission.runaway import SLACK
from fleet_router.ask import Ask
from fleet_router.config import SloClass
from fleet_router.desk import Desk
from fleet_router.errors import RequestError
from fleet_router.request import decode_body, parse_alone, parse_body, prefill_body
from tests.fleet_router.admission.made import CONFIG, Clock, Remembers, ask_of, desk_with, key_of, parsed

KEY = key_of("acme").encode()


def come(desk: Desk, key: bytes = KEY, slo_class: bytes = b"", ttft_ms: int = 0, **more: Any):
    """(flow, ticket, body as the decode worker gets it)."""
    lane = desk.lane(key, slo_class)
    ask, ticket = desk.admit(lane, ask_of(lane.config, **more), ttft_ms)
    flow = Remembers()
    desk.start(ticket, flow)
    return flow, ticket, ask


def body_of(ask: Ask) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(decode_body(ask, None))
    return found


def refused(desk: Desk, *args: Any, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as told:
        come(desk, *args, **more)
    return told.value


LONG = msgspec.structs.replace(CONFIG, max_model_len=100_000)
"""Where prompt and answer fit together for sure."""


def test_without_tenants_everybody_may_ask_and_nothing_is_added_but_the_limit():
    flow, _, ask = come(desk_with(Clock(), 9, LONG), b"")
    assert (flow.begun, body_of(ask)) == (1, {"model": "m", "prompt": "x" * 300, "max_tokens": 16})
    _, _, ask = come(desk_with(Clock(), 9, LONG), b"", max_completion_tokens=7)
    assert body_of(ask) == {"model": "m", "prompt": "x" * 300, "max_tokens": 7}


def test_with_tenants_nobody_is_anybody_without_a_key():
    desk = desk_with(Clock(), acme={})
    for key in (b"", b"wrong", KEY[:-1], KEY + b"x"):
        error = refused(desk, key)
        assert (error.status, error.code) == (401, "invalid_api_key")
        assert "www-authenticate" in error.headers
    assert desk.refused_keys == 4
    assert come(desk)[0].begun == 1


def test_before_the_file_was_read_everything_is_refused():
    desk = Desk(Clock())
    desk.tenants_needed = True
    desk.follow(CONFIG, {"t": 2}, [])
    assert not desk.ready
    assert refused(desk).status == 503


def test_a_key_that_is_gone_from_the_file_is_nobodys():
    desk = desk_with(Clock(), acme={}, other={})
    _, ticket, _ = come(desk)
    desk.know(parsed(other={}))
    assert refused(desk).status == 401
    desk.leave(ticket, "answered", (1, 1))  # what runs ends as ever
    assert (desk.gate.running, list(desk.accounts)) == (0, ["other"])


def test_what_a_tenant_runs_is_what_it_has_less_what_waits():
    """Who holds least is next: its waiting requests hold no slot."""
    clock = Clock()
    desk = desk_with(clock, acme={})
    tickets, account = [come(desk)[1] for _ in range(5)], desk.accounts["acme"]
    assert (account.inflight, account.waiting, account.running) == (5, 3, 2)
    desk.leave(tickets[0], "answered", (1, 1))
    assert (account.inflight, account.waiting, account.running) == (4, 2, 2)
    desk.leave(tickets[4], "left", (0, 0))
    assert (account.inflight, account.waiting, account.running) == (3, 1, 2)
    for ticket in tickets[1:4]:
        desk.leave(ticket, "answered", (1, 1))
    assert (account.inflight, account.waiting, account.running) == (0, 0, 0)


def test_classes_are_rights():
    desk = desk_with(Clock(), acme={"class": "interactive", "classes": ["batch"]}, poor={})
    assert come(desk)[1].lane.slo_class.name == "interactive"
    assert come(desk, slo_class=b"batch")[1].lane.slo_class.name == "batch"
    error = refused(desk, key_of("poor").encode(), b"interactive")
    assert (error.status, error.code) == (403, "class_not_allowed")
    assert refused(desk_with(Clock()), b"", b"nonsense").param == "x-slo-class"
    assert come(desk_with(Clock()), b"", b"batch")[0].begun == 1


def test_a_class_that_the_fleet_does_not_have_is_reported_and_the_default_used():
    desk = desk_with(Clock(), acme={})
    assert desk.know(parsed(acme={"class": "interactive", "classes": ["batch"]})) == []
    assert desk.know(parsed(acme={"class": "gold"})) == ["tenant acme: no class gold in this fleet"]
    assert come(desk)[1].lane.slo_class.name == "default"


def test_models_are_rights():
    desk = desk_with(Clock(), acme={"models": ["other"]})
    error = refused(desk)
    assert (error.status, error.code, error.param) == (403, "model_not_allowed", "model")
    assert desk.accounts["acme"].inflight == 0


@pytest.mark.parametrize("more", [{}, {"cache_salt": "mine"}, {"priority": 3}])
def test_the_cache_salt_is_the_tenants_on_both_legs_whatever_the_client_says(more: dict[str, Any]):
    desk = desk_with(Clock(), slots=4, acme={}, other={})
    mine, theirs = come(desk, **more)[2], come(desk, key_of("other").encode(), **more)[2]
    salts = [body_of(ask)["cache_salt"] for ask in (mine, theirs)]
    assert len({*salts, "mine"}) == 3
    assert msgspec.json.decode(prefill_body(mine))["cache_salt"] == salts[0]
    assert "priority" not in body_of(mine)
    assert desk.lane(KEY, b"").seed != desk.lane(key_of("other").encode(), b"").seed != 0


def test_limits_of_class_and_tenant():
    small = SloClass(name="default", max_output_tokens=50)
    config = msgspec.structs.replace(CONFIG, classes=(small,))
    desk = desk_with(Clock(), 9, config, acme={"maxOutputTokens": 20, "maxInputTokens": 10}, other={})
    assert body_of(come(desk, prompt="short")[2])["max_tokens"] == 20
    assert body_of(come(desk, prompt="short", max_tokens=None)[2])["max_tokens"] == 20
    assert body_of(come(desk, prompt="short", max_tokens=5)[2])["max_tokens"] == 5
    assert body_of(come(desk, key_of("other").encode())[2])["max_tokens"] == 50
    assert refused(desk, prompt="short", max_tokens=21).param == "max_tokens"
    assert refused(desk, prompt=list(range(11))).param == "prompt"


CHAT = [{"role": "user", "content": "x" * 300}]


def chat_limit(desk: Desk, messages: list[dict[str, Any]] = CHAT, key: bytes = b"", **more: Any) -> Any:
    """What the engine is told of a chat that names no limit; None: nothing."""
    lane = desk.lane(key, b"")
    ask = parse_body(msgspec.json.encode({"model": "m", "messages": messages, **more}), True, lane.config)
    return body_of(desk.admit(lane, ask)[0]).get("max_tokens")


def test_the_fleets_limit_reaches_the_engine_where_a_client_names_none():
    """vLLM generated to the end of its context: 300 tokens at a limit of 16."""
    small = msgspec.structs.replace(LONG, max_output_tokens=8)
    assert body_of(come(desk_with(Clock(), 9, small), b"")[2])["max_tokens"] == 8
    assert body_of(come(desk_with(Clock(), 9, small), b"", max_tokens=None, n=3)[2])["max_tokens"] == 8
    assert body_of(come(desk_with(Clock(), 9, LONG), b"")[2])["max_tokens"] == 16  # OpenAI's default of completions stays
    assert (chat_limit(desk_with(Clock(), 9, LONG)), chat_limit(desk_with(Clock(), 9, small))) == (4096, 8)


@pytest.mark.parametrize(
    ("longest", "messages", "tools", "limit"),
    [
        (8192, CHAT, None, 4096),
        (5200, CHAT, None, None),  # the engine gives what is left of its context, and knows the limit itself
        (8192, CHAT, [{"x": "y" * 3000}], None),
        (1_000_000, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}], None, None),
        (0, CHAT, None, None),  # nobody said how long that is: an engine of 1,024 refused every chat
    ],
)
def test_a_limit_of_ours_never_makes_a_request_too_long(longest: int, messages: Any, tools: Any, limit: int | None):
    """Engines refuse prompt + max_tokens above their context, and the client asked for no such thing."""
    config = msgspec.structs.replace(CONFIG, max_model_len=longest, max_input_tokens=100_000)
    more = {} if tools is None else {"tools": tools}
    assert chat_limit(desk_with(Clock(), 9, config), messages, **more) == limit
    desk = desk_with(Clock(), 9, config, acme={"maxOutputTokens": 20})
    assert chat_limit(desk, messages, KEY, **more) == 20  # the engine knows nothing of tenants


def test_a_limit_of_ours_is_no_wish_to_the_fair_queue():
    clock = Clock()
    desk = desk_with(clock, 1, acme={"maxOutputTokens": 20})
    come(desk)
    assert [come(desk, **more)[1].cost for more in ({}, {"max_tokens": 5})] == [120, 105]
    desk = desk_with(clock, 1)
    come(desk, b"")
    assert come(desk, b"")[1].cost == 100 + 256


def test_what_only_counts_tokens_holds_no_slot_and_costs_none():
    desk = desk_with(Clock(), 1, acme={"requestsPerSecond": 2, "tokensPerMinute": 50})
    lane = desk.lane(KEY, b"")
    ask, ticket = desk.admit(lane, parse_alone(msgspec.json.encode({"prompt": "x" * 600}), lane.config, counts=True))
    assert (ask.counts, ticket.state, ticket.charged, desk.gate.running) == (True, "free", 0, 0)
    other = come(desk, prompt="short")[1]  # the only slot is free
    assert (other.state, desk.gate.running) == ("running", 1)
    assert refused(desk, prompt="short").reason == "requests_per_second"  # it was a request
    for one in (ticket, ticket, other):
        desk.leave(one, "answered", (0, 0))
    assert (desk.gate.running, desk.accounts["acme"].inflight, ticket.state) == (0, 0, "done")


def test_who_owes_tokens_may_still_count_them():
    clock = Clock()
    desk = desk_with(clock, acme={"tokensPerMinute": 60})
    desk.leave(come(desk, prompt="short")[1], "answered", (1, 90))
    lane = desk.lane(KEY, b"")
    assert refused(desk, prompt="short").reason == "tokens_per_minute"
    assert desk.admit(lane, parse_alone(msgspec.json.encode({"prompt": "x"}), lane.config, counts=True))[1].charged == 0


def test_a_quota_says_when_it_passes():
    clock = Clock()
    desk = desk_with(clock, 9, acme={"requestsPerSecond": 0.5})
    come(desk)
    error = refused(desk)
    assert (error.status, error.code, error.reason) == (429, "rate_limit_exceeded", "requests_per_second")
    assert "retry-after: 2\r\n" in error.headers
    assert "x-ratelimit-remaining-requests: 0\r\n" in error.headers
    clock.now += 2
    come(desk)


def test_what_never_passes_is_not_worth_a_retry():
    error = refused(desk_with(Clock(), acme={"tokensPerMinute": 10}))
    assert (error.status, error.code, error.headers) == (400, "request_too_large", "")


def test_a_slot_that_is_free_goes_to_who_waits_and_a_client_that_leaves_frees_its_place_at_once():
    desk = desk_with(Clock(), 1, acme={"requestsPerSecond": 100})
    _, first, _ = come(desk)
    second, gone, _ = come(desk)
    third, _, _ = come(desk)
    desk.leave(gone, "failed", None)
    assert (desk.gate.waiting, second.begun) == (1, 0)
    desk.leave(first, "answered", (3, 4))
    assert (third.begun, desk.gate.waiting, desk.gate.running) == (1, 0, 1)
    account = desk.accounts["acme"]
    assert (account.inflight, account.input_tokens, account.output_tokens) == (1, 3, 4)
    assert account.requests is not None
    assert account.requests.left(int(1000.0 * 1e9)) == 98  # the one that left the queue got its request back


def test_a_request_is_settled_once_however_often_it_ends():
    desk = desk_with(Clock(), 2, acme={"tokensPerMinute": 6000})
    _, one, _ = come(desk)
    come(desk)
    for _ in range(3):
        desk.leave(one, "answered", (10, 5))
    account = desk.accounts["acme"]
    assert (account.inflight, account.input_tokens, account.output_tokens, desk.gate.running) == (1, 10, 5, 1)


def test_who_waits_too_long_is_told_so_early():
    clock = Clock()
    desk = desk_with(clock, 1, acme={"class": "interactive"})
    come(desk)
    late, _, _ = come(desk)
    hasty, _, _ = come(desk, ttft_ms=100)
    clock.now += 0.09
    desk.tick()
    assert (hasty.error is not None, late.error) == (True, None)
    clock.now += 0.77
    desk.tick()
    assert late.error is not None
    assert (late.error.status, late.error.reason) == (503, "queue_timeout")
    assert "retry-after: 1\r\n" in late.error.headers
    assert (desk.gate.waiting, desk.accounts["acme"].inflight) == (0, 1)


def test_a_client_can_only_shorten_its_budget():
    clock = Clock()
    desk = desk_with(clock, 1, acme={"class": "interactive"})
    come(desk)
    assert come(desk, ttft_ms=999_999_999)[1].deadline == clock.now + 0.85


def test_a_full_queue_refunds_and_says_why():
    desk = desk_with(Clock(), 1, acme={"tokensPerMinute": 10_000}, other={})
    flows = [come(desk)[0] for _ in range(5)]
    error = refused(desk)
    assert (error.status, error.code, error.reason) == (529, "overloaded", "overloaded")
    other, _, _ = come(desk, key_of("other").encode())
    assert other.error is None
    cut = [flow.error for flow in flows if flow.error is not None]
    assert [(one.status, one.reason) for one in cut] == [(529, "overloaded")]
    error = refused(desk)
    assert (error.status, error.reason) == (429, "queue_share")
    assert desk.accounts["acme"].inflight == 4


def test_flows_that_end_as_they_begin_do_not_recurse():
    desk = desk_with(Clock(), 1, msgspec.structs.replace(CONFIG, queue_per_slot=5000), acme={})
    _, first, _ = come(desk)

    class Ends(Remembers):
        def admitted(self) -> None:
            super().admitted()
            desk.leave(tickets[id(self)], "failed", None)

    tickets, flows = {}, [Ends() for _ in range(3000)]
    for flow in flows:
        lane = desk.lane(KEY, b"")
        _, tickets[id(flow)] = desk.admit(lane, ask_of())
        desk.start(tickets[id(flow)], flow)
    desk.leave(first, "answered", (1, 1))
    assert all(flow.begun == 1 for flow in flows)
    assert (desk.gate.running, desk.gate.waiting, desk.accounts["acme"].inflight) == (0, 0, 0)


def test_workers_that_left_give_their_slots_back_while_their_requests_end():
    class Gone:
        own = 1

    desk, worker = desk_with(Clock(), 1, acme={}), Gone()
    come(desk)
    waits, _, _ = come(desk)
    desk.follow(CONFIG, {"t": 1}, [worker])
    assert waits.begun == 1
    waits2, _, _ = come(desk)
    assert waits2.begun == 0
    worker.own = 0
    desk.tick()
    assert (waits2.begun, desk.gate.strays) == (0, 0)


def test_a_reload_keeps_what_was_used():
    desk = desk_with(Clock(), 9, acme={"requestsPerSecond": 0.01})
    come(desk)
    desk.know(parsed(acme={"requestsPerSecond": 0.01}))
    assert refused(desk).status == 429
    desk.follow(msgspec.structs.replace(CONFIG, max_output_tokens=7), {"t": 9}, [])
    assert refused(desk).status == 429
    assert desk.lane(KEY, b"").config.max_output_tokens == 7


@pytest.mark.parametrize(
    ("alone", "more", "size"),
    [(True, {"input": ["x" * 1_000_000] * 3}, 3_000_000), (False, {"prompt": "x", "tools": ["x" * 200_000]}, 200_000)],
)
def test_the_queue_counts_all_that_waits_in_it(alone: bool, more: dict[str, Any], size: int):
    """Inputs of embeddings counted as nothing: per_slot x slots of them, of 4 MiB each, could wait."""
    desk = desk_with(Clock(), slots=1, acme={})
    come(desk)
    lane = desk.lane(KEY, b"")
    config = msgspec.structs.replace(lane.config, max_input_tokens=1_000_000)
    body = msgspec.json.encode({"model": "m", **more})
    _, ticket = desk.admit(lane, parse_alone(body, config) if alone else parse_body(body, False, config))
    assert ticket.waiting
    assert size <= desk.gate.waiting_bytes <= size + 1_000


@pytest.mark.parametrize(
    ("more", "work"),
    [
        ({"max_tokens": 50}, 150), ({"max_tokens": 50, "n": 8}, 500), ({"max_tokens": 50, "n": 2, "best_of": 4}, 300),
        ({"max_tokens": 50, "n": None}, 150), ({"n": 3}, 868), ({"input": "x" * 298}, 100),
    ],
    ids=["one", "eight", "best-of", "null", "no-limit", "embedding"],
)  # fmt: skip
def test_who_waits_is_weighed_by_all_that_it_asks_for(more: dict[str, Any], work: int):
    """Incident: eight answers weighed as one, so that who asks for them got eight times its share; an embedding weighed as if it
    had an answer of 256 tokens."""
    desk = desk_with(Clock(), slots=1, acme={})
    come(desk)
    lane = desk.lane(KEY, b"")
    if "input" in more:
        ask = parse_alone(msgspec.json.encode({"model": "m", **more}), lane.config)
    else:
        ask = parse_body(msgspec.json.encode({"model": "m", "prompt": "x" * 298, **more}), False, lane.config)
    _, ticket = desk.admit(lane, ask)
    assert ticket.cost == work


TEXT = '"' + "x" * 300 + '"'
PICTURE = '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,' + "A" * 300_000 + '"}}]}]'


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ('"input":[1,2,3]', 3), (f'"input":{TEXT}', 100), (f'"input":{TEXT},"messages":null', 100),
        ('"input":[[100200,100300],[7,8,9]]', 5), (f'"messages":{PICTURE}', 1_050),
        (f'"input":[1,2,3],"messages":{PICTURE}', 1_053),
    ],
    ids=["ids", "text", "null", "lists-of-ids", "picture", "both"],
)  # fmt: skip
@pytest.mark.parametrize("other", ['"model":"m"', '"model":"m","user":"' + "u" * 3_000 + '"'])
def test_an_embedding_is_charged_its_input_wherever_it_stands(given: str, tokens: int, other: str):
    """Incident: all fields were charged as one text by its bytes, a picture of 300 KB as 100,000 tokens, lists of ids twice; who
    had fewer tokens a minute than that was told that no retry helps. Ids counted as such where `input` was the first field."""
    desk = desk_with(Clock(), slots=9, acme={"tokensPerMinute": 2_000})
    lane = desk.lane(KEY, b"")
    config = msgspec.structs.replace(lane.config, max_input_tokens=1_000_000)
    for body in (f"{{{given},{other}}}", f"{{{other},{given}}}"):
        _, ticket = desk.admit(lane, parse_alone(body.encode(), config))
        assert ticket.charged == pytest.approx(tokens, abs=10 if tokens > 1_000 else 0)
        desk.leave(ticket, "failed", None)


def test_a_request_without_a_flow_leaves_nothing_behind_and_nobody_waiting():
    """Also where it waits, and where another was pushed out of the queue for it."""
    desk = desk_with(Clock(), 1, msgspec.structs.replace(CONFIG, queue_per_slot=2), acme={}, other={})
    come(desk)
    others = [come(desk, key_of("other").encode())[0] for _ in range(2)]
    _, ticket = desk.admit(desk.lane(KEY, b""), ask_of())
    assert ticket.waiting
    desk.forget(ticket)
    assert [flow.error.status if flow.error else None for flow in others] == [None, 529]
    assert (desk.gate.waiting, desk.gate.running) == (1, 1)
    assert [desk.accounts[name].inflight for name in ("acme", "other")] == [1, 1]


class Chained:
    """A flow whose connection has its next request there already: it comes when this one is turned away."""

    def __init__(self, following: Callable[[], None]) -> None:
        self.following, self.told = following, list[int]()

    def begin(self) -> None:
        self.told.append(200)

    def admitted(self) -> None:
        self.told.append(200)

    def cut(self, error: RequestError) -> None:
        self.told.append(error.status)
        self.following()


def test_who_gives_way_and_asks_again_at_once_does_not_recurse():
    """Each connection sent a request of a low class and one of a high class behind it: the one that was turned away brought the
    next newcomer, who turned away the next one, as deep as the queue was long."""
    desk = desk_with(Clock(), slots=500)
    low, high = desk.lane(b"", b"batch"), desk.lane(b"", b"interactive")
    flows = list[Chained]()

    def come(lane: Lane, following: Callable[[], None]) -> None:
        _, ticket = desk.admit(lane, ask_of())
        flows.append(Chained(following))
        desk.start(ticket, flows[-1])

    def again() -> None:
        come(high, lambda: None)

    for _ in range(500):
        come(low, lambda: None)
    come(low, lambda: None)
    for _ in range(1999):
        come(low, again)
    come(high, lambda: None)
    assert desk.faults.count == 0
    assert [flow.told for flow in flows[500:2500]] == [[529]] * 2000
    assert desk.gate.lengths() == {"interactive": 2000, "default": 0, "batch": 0}


@pytest.mark.parametrize(
    ("limits", "asked", "most"), [({}, 1, 4096), ({"maxOutputTokens": 50}, 1, 50), ({"maxOutputTokens": 50}, 3, 150)]
)
def test_a_stream_is_watched_for_the_limit_that_its_tenant_has(limits: dict[str, Any], asked: int, most: int):
    config = msgspec.structs.replace(CONFIG, runaway=True, max_output_tokens=4096)
    desk = desk_with(Clock(), config=config, acme=limits)
    _, ticket, ask = come(desk, n=asked)
    detector = desk.detector(ticket, ask)
    assert detector is not None
    assert detector._most == most + SLACK
    desk.follow(msgspec.structs.replace(config, runaway=False), {"t": 2}, [])
    assert desk.detector(ticket, ask) is None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"echo": True}, None), ({"return_prompt_text": True}, None), ({"echo": False}, "control_tokens"),
        ({"return_prompt_text": None}, "control_tokens"), ({}, "control_tokens"),
    ],
)  # fmt: skip
def test_control_tokens_of_a_prompt_that_is_told_again_are_no_runaway(more: dict[str, Any], why: str | None):
    """A conversation that its client had rendered was ended behind its own echo, and what the model had to say was lost."""
    desk = desk_with(Clock(), config=msgspec.structs.replace(CONFIG, runaway=True), acme={})
    _, ticket, ask = come(desk, stream=True, **more)
    detector = desk.detector(ticket, ask)
    assert detector is not None
    assert detector.saw(b'data: {"choices":[{"text":"%b"}]}\n\n\r\n' % (b"<|im_start|>w" * 1_000)) == why

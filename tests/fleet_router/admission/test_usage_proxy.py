"""What a tenant is charged: the engine's own count, wherever it stands in an answer and however it is cut into reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest

from fleet_router.admission.usage import usage_in, with_usage
from fleet_router.ask import Hints
from fleet_router.config import RouterConfig
from fleet_router.ending import END, framed, unframed, without_usage
from fleet_router.follow.documents import Documents
from fleet_router.knowledge import Counted
from fleet_router.metrics import COMPILED
from fleet_router.request import decode_body
from fleet_wire.endpoints import AtZero, Endpoints
from tests.fleet_router.admission.made import ask_of, key_of, parsed
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, Rig, ask, http, run

WATCHED = msgspec.structs.replace(CONFIG, runaway=True)
KEY = f"authorization: Bearer {key_of('acme')}"
USAGE = {"prompt_tokens": 1500, "total_tokens": 1540, "completion_tokens": 40}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOLD = b"data: " + json.dumps({"id": "c", "choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


def text(number: int, path: str = "") -> bytes:
    choice = {"index": 0, "text": f"w{number}"} if path == "/v1/completions" else {"index": 0, "delta": {"content": f"w{number}"}}
    return b"data: " + json.dumps({"id": "c", "choices": [choice], "usage": None}).encode() + b"\n\n"


def streams(reads: list[bytes]) -> Any:
    """A worker that writes these, each in a read of its own."""

    async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD)
        for read in reads:
            await writer.drain()
            await asyncio.sleep(0.005)
            writer.write(read)
        return True

    return behave


def charged(rig: Rig) -> tuple[int, int]:
    account = rig.context.desk.accounts["acme"]
    return account.input_tokens, account.output_tokens


def metered(rig: Rig) -> None:
    rig.context.desk.tenants_needed = True
    rig.context.desk.know(parsed(acme={"tokensPerMinute": 100_000}))


PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "short"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/messages", {"max_tokens": 40, "messages": [{"role": "user", "content": "x"}]}), ("/v1/responses", {"input": "x"}),
]  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, WATCHED], ids=["unwatched", "watched"])
@pytest.mark.parametrize(("path", "body"), PATHS, ids=[path for path, _ in PATHS])
@pytest.mark.parametrize("asks", [False, True], ids=["", "asked-for"])
def test_usage_is_found_when_the_end_comes_in_reads_of_its_own(path: str, body: dict[str, Any], asks: bool, config: RouterConfig):
    """uvicorn writes the last event, [DONE] and the body's end one after the other: 10 output tokens were charged, not 40."""

    async def go(rig: Rig) -> None:
        metered(rig)
        rig.decode[0].behave = streams([framed(text(i, path)) for i in range(10)] + [framed(TOLD), framed(DONE), END])
        more = {"stream_options": {"include_usage": True}} if asks and "completions" in path else {}
        got = await rig.raw(http({"model": "m", "stream": True, **body, **more}, KEY, "connection: close", path=path))
        assert charged(rig) == (1500, 40)
        if "completions" in path:
            assert rig.decode[0].seen[-1]["stream_options"] == {"include_usage": True}
            assert (b"prompt_tokens" in got) == asks  # nobody gets what he did not ask for
            assert (got.count(b'"w'), got.endswith(framed(DONE) + END)) == (10, True)

    run(go, prefill=0, config=config)


@pytest.mark.parametrize(("path", "body"), PATHS, ids=[path for path, _ in PATHS])
@pytest.mark.parametrize("said", [(10**30, 40), (5, 10**30), (-1500, 40), (5, -40)])
def test_a_usage_that_no_request_can_have_is_not_charged(path: str, body: dict[str, Any], said: tuple[int, int]):
    """In another dialect it was: a tenant was shut out for as many years, or had its quota back; its events are counted."""

    async def go(rig: Rig) -> None:
        metered(rig)
        usage = {"prompt_tokens": said[0], "completion_tokens": said[1]}
        told = b"data: " + json.dumps({"id": "c", "choices": [], "usage": usage}).encode() + b"\n\n"
        rig.decode[0].behave = streams([framed(text(i, path)) for i in range(10)] + [framed(told), framed(DONE), END])
        await rig.raw(http({"model": "m", "stream": True, **body}, KEY, "connection: close", path=path))
        taken, written = charged(rig)
        assert 0 < taken < 1500
        assert 0 <= written <= 12

    run(go, prefill=0)


TOLD_LATE = text(0) + TOLD + DONE
READS: list[Any] = [
    pytest.param([framed(text(0) + TOLD + DONE) + END], id="one-chunk"),
    pytest.param([framed(text(0)) + framed(TOLD) + framed(DONE) + END], id="one-read"),
    pytest.param([framed(text(0)), framed(TOLD) + framed(DONE), END], id="two-reads"),
    pytest.param([framed(text(0)), framed(TOLD)[:50], framed(TOLD)[50:], framed(DONE) + END], id="cut-in-the-event"),
    pytest.param([framed(text(0) + TOLD[:40]), framed(TOLD[40:] + DONE) + END], id="cut-across-chunks"),
    pytest.param([b"".join(framed(TOLD_LATE[at:][:9]) for at in range(0, len(TOLD_LATE), 9)) + END], id="cut-in-both-names"),
    pytest.param([framed((text(0) + TOLD + DONE).replace(b"\n", b"\r\n")) + END], id="crlf"),
    pytest.param([framed((text(0) + TOLD + DONE).replace(b"data: ", b"data:")) + END], id="no-space"),
    pytest.param([framed(b": ping\nid: 1\n" + one) for one in (text(0), TOLD, DONE)] + [END], id="lines-before"),
    pytest.param([framed((b"id: 1\n" + TOLD + DONE + text(0)).replace(b"\n", b"\r\n")) + END], id="crlf-lines-before"),
]


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("seed", [{}, {"temperature": 0}], ids=["plain", "kept-to-be-carried-on"])
def test_a_count_that_only_we_asked_for_goes_to_nobody_however_it_is_cut(reads: list[bytes], seed: dict[str, Any]):
    async def go(rig: Rig) -> None:
        metered(rig)
        rig.decode[0].behave = streams(reads)
        got = await rig.raw(http(ask(prompt="short", stream=True, **seed), KEY, "connection: close"))
        said = unframed(got.partition(b"\r\n\r\n")[2])
        assert (charged(rig), b"prompt_tokens" in said, b"w0" in said, b"[DONE]" in said) == ((1500, 40), False, True, True)
        assert got.endswith(END)

    run(go, prefill=0)


def test_a_count_that_is_held_to_the_end_goes_to_nobody_either():
    """The last event was cut in its end, and a trailer stood behind it: the client got our count, and paid for the events."""

    async def go(rig: Rig) -> None:
        metered(rig)
        said = (text(0) + TOLD + DONE).replace(b"\n", b"\r\n")
        chunks = [framed(said[:9]), framed(said[9:-3]), framed(said[-3:]), b"0\r\nx-trailer: 1\r\n\r\n"]
        rig.decode[0].behave = streams([b"".join(chunks)])
        got = await rig.raw(http(ask(prompt="short", stream=True), KEY, "connection: close"))
        assert charged(rig) == (1500, 40)
        assert (b"prompt_tokens" in got, b"w0" in got, b"[DONE]" in got) == (False, True, True)
        assert got.endswith(chunks[-1])

    run(go, prefill=0)


def test_without_tenants_nobody_is_asked_to_count():
    async def go(rig: Rig) -> None:
        await rig.raw(http(ask(prompt="short", stream=True), "connection: close"))
        assert "stream_options" not in rig.decode[0].seen[0]

    run(go, prefill=0)


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("behind", [0, 5_000, 300_000])
def test_usage_is_found_with_long_lists_behind_it(pieces: int, behind: int):
    """vLLM puts prompt_logprobs and prompt_token_ids there: a request of 5,500 tokens was charged one."""

    async def go(rig: Rig) -> None:
        metered(rig)
        said: dict[str, Any] = {
            "choices": [{"text": 'I say "usage":{"prompt_tokens":1}'}],
            "usage": USAGE,
            "prompt_token_ids": [7] * (behind // 3),
        }
        body = json.dumps(said).encode()

        async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
            step = -(-len(body) // pieces)
            for at in range(0, len(body), step):
                writer.write(body[at:][:step])
                await writer.drain()
                await asyncio.sleep(0.005)
            return True

        rig.decode[0].behave = behave
        for _ in range(2):  # a head that came before makes another way through
            await rig.raw(http(ask(prompt="short"), KEY, "connection: close"))
        assert charged(rig) == (3000, 80)

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"usage": USAGE, "tokens": ["usage", '"usage"', "usage"]}, (1500, 40)), ({"usage": None, "a": [{"usage": 1}]}, None),
        ({"text": '"usage":{"prompt_tokens":9}'}, None), ({}, None),
    ],
)  # fmt: skip
def test_words_of_a_model_are_no_usage(body: dict[str, Any], usage: tuple[int, int] | None):
    assert usage_in(json.dumps(body).encode()) == usage


@pytest.mark.parametrize(
    ("given", "sent", "ours"),
    [
        ({}, {"include_usage": True}, True), ({"stream_options": None}, {"include_usage": True}, True),
        ({"stream_options": {"include_usage": True, "x": 1}}, {"include_usage": True, "x": 1}, False),
        ({"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
         {"include_usage": True, "continuous_usage_stats": False}, True),
    ],
)  # fmt: skip
def test_what_is_asked_of_the_engine(given: dict[str, Any], sent: dict[str, Any], ours: bool):
    ask, hidden = with_usage(ask_of(stream=True, **given))
    assert (msgspec.json.decode(ask.fields["stream_options"]), hidden) == (sent, ours)
    assert msgspec.json.decode(decode_body(ask, None))["stream_options"] == sent


@pytest.mark.parametrize(
    "read", [b"", framed(text(0)), b"zz\r\n" + TOLD, TOLD, framed(TOLD)[:-1], framed(b'data: {"choices":[],"usage":\n\n')]
)
def test_what_is_not_understood_goes_on_as_it_is(read: bytes):
    assert without_usage(read) == (read, None)


def test_who_has_half_an_answer_and_gets_no_more_of_it_pays_for_what_came():
    """It waited for a tier to wake, and who left meanwhile was taken for one that had waited since it came, and paid nothing: a
    long stream's worker was gone with its tier. Now nobody waits with half an answer."""

    async def go(rig: Rig) -> None:
        metered(rig)
        gone = asyncio.Event()

        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(HEAD + b"".join(framed(text(i)) for i in range(20)))
            await gone.wait()
            writer.transport.abort()
            return True

        rig.decode[0].behave = breaks
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="short", stream=True, temperature=0), KEY))
        await reader.readuntil(b'"w19"')
        rig.router.apply(Documents(rig.context.config, Endpoints(fleet="f", namespace="n", at_zero=(AtZero(tier="t"),))))
        gone.set()
        assert b"no_worker" in await reader.readuntil(b"0\r\n\r\n")
        assert len(rig.context.holding) == 0
        account = rig.context.desk.accounts["acme"]
        assert (account.counts["answered"], account.counts["failed"], account.output_tokens, account.inflight) == (1, 0, 19, 0)

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("path", "body", "costs"),
    [
        ("/tokenize", {"prompt": "x" * 4000}, False), ("/detokenize", {"tokens": [1] * 2000}, False),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 4000}]}, False),
        ("/v1/embeddings", {"input": "x" * 4000}, True),
    ],
)  # fmt: skip
def test_what_only_counts_tokens_costs_none_and_needs_no_slot(path: str, body: dict[str, Any], costs: bool):
    async def go(rig: Rig) -> None:
        async def counts(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, 200, {"count": 1000, "tokens": [1], "data": []})
            return True

        metered(rig)
        rig.decode[0].behave = counts
        account, gate = rig.context.desk.accounts["acme"], rig.context.desk.gate
        got = await rig.raw(http({"model": "m", **body}, KEY, "connection: close", path=path))
        assert b" 200 OK" in got
        assert (charged(rig)[0] > 0, gate.starts, account.counts["answered"], account.inflight) == (costs, costs, 1, 0)

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, worker_slots=1))


@pytest.mark.skipif(COMPILED, reason="compiled code takes real knowledge only: `make unit` runs this one")
def test_the_precise_index_looks_for_a_tenants_prompt_under_the_salt_that_its_engine_gets():
    asked: list[str] = []

    class Knows:
        def count(self, _ask: object, _chat: bool, _then: object, salt: str = "") -> Counted:
            asked.append(salt)
            return Counted(0, {})

        def hints(self, _counted: object, hints: Hints) -> Hints:
            return hints

        def answered(self, *_: object) -> None: ...

    async def go(rig: Rig) -> None:
        rig.context.desk.tenants_needed = True
        rig.context.desk.know(parsed(acme={}, other={}))
        rig.context.knowledge = cast("Any", Knows())
        for name in ("acme", "other"):
            await rig.raw(http(ask(prompt="short"), f"authorization: Bearer {key_of(name)}", "connection: close"))
        assert asked == [body["cache_salt"] for body in rig.decode[0].seen]
        assert len(set(asked)) == 2
        rig.context.knowledge = None

    run(go, prefill=0)

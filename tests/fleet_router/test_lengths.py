"""Input limits: every path that computes a prompt has them, exactly where somebody can count; nobody is refused by a guess."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.config import RouterConfig
from fleet_router.errors import RequestError
from fleet_router.follow.documents import Documents
from fleet_router.lengths import INPUTS_MOST, check_input, check_messages, uncertain, upper_bound
from fleet_router.watching import watch
from fleet_wire.endpoints import Endpoints, Split
from tests.fleet_router.admission.made import key_of, parsed
from tests.fleet_router.chat_worker import TEXT, Behave, whole
from tests.fleet_router.fake_worker import REFERENCE, answer
from tests.fleet_router.rig import BOUNDS, Rig, ask, http, run, until

BODIES = msgspec.structs.replace(BOUNDS, body_bytes=4_000_000)
SMALL = RouterConfig(fleet="f", served_name="m", max_input_tokens=100, max_model_len=8192, bounds=BODIES)
KEY = f"authorization: Bearer {key_of('acme')}"
LONG = "word " * 4_000
SOME = "word " * 60
"""Neither surely too long nor surely not."""


def said(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


PATHS: list[Any] = [
    pytest.param("/v1/completions", "prompt", lambda text: {"prompt": text}, id="completion"),
    pytest.param("/v1/chat/completions", "messages", lambda text: {"messages": said(text)}, id="chat"),
    pytest.param(
        "/v1/chat/completions", "messages", lambda text: {"messages": said([{"type": "text", "text": text}])}, id="parts"
    ),
    pytest.param("/v1/messages", "messages", lambda text: {"max_tokens": 5, "messages": said(text)}, id="messages"),
    pytest.param("/v1/responses", "input", lambda text: {"input": text}, id="responses"),
]


def tokenises(tokens: int, status: int = 200) -> Behave:
    """A worker that counts so many, and answers all else with a chat."""

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if "max_tokens" not in body and "max_completion_tokens" not in body:
            answer(writer, status, {"count": tokens, "max_model_len": 8192, "tokens": list(range(tokens))})
            return True
        if "do_remote_decode" in body.get("kv_transfer_params", {}):
            return False
        answer(writer, 200, whole(TEXT))
        return True

    return behave


@pytest.mark.parametrize(("path", "param", "made"), PATHS)
@pytest.mark.parametrize("times", [1, 150])
def test_text_that_is_too_long_whatever_the_tokenizer_reaches_nobody(path: str, param: str, made: Any, times: int):
    """20 kB and 3 MB reached the worker on every path but completions, at a limit of ten tokens."""

    async def go(rig: Rig) -> None:
        status, body = await rig.post({"model": "m", **made(LONG * times)}, path)
        assert (status, rig.decode[0].seen, rig.prefill[0].seen) == (400, [], [])
        message = json.loads(body)["error"]["message"]
        assert message == f"{param} has {len(LONG) * times} bytes: longer than 100 tokens whatever the tokenizer"

    run(go, config=SMALL)


@pytest.mark.parametrize(("path", "param", "made"), PATHS)
@pytest.mark.parametrize("tokens", [100, 101])
def test_between_the_two_a_worker_counts_before_anything_is_computed(path: str, param: str, made: Any, tokens: int):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = tokenises(tokens)
        status, body = await rig.post({"model": "m", **made(SOME)}, path)
        assert status == (200 if tokens == 100 else 400), body
        counted, *answered = rig.decode[0].seen
        assert set(counted) == {"prompt" if param == "prompt" else "messages"}
        assert (len(answered), len(rig.prefill[0].seen)) == ((1, 1) if tokens == 100 else (0, 0))
        if tokens == 101:
            assert json.loads(body)["error"]["message"] == f"{param} has 101 tokens; allowed are 100"

    run(go, config=SMALL)


def test_what_a_template_makes_of_tools_is_counted_too():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = tokenises(101)
        more = {"tools": [{"type": "function", "function": {"name": "f", "description": SOME}}], "temperature": 0}
        status, _ = await rig.post({"model": "m", "messages": said("hi"), **more}, "/v1/chat/completions")
        assert (status, [set(one) for one in rig.decode[0].seen]) == (400, [{"messages", "tools"}])

    run(go, prefill=0, config=SMALL)


DOCUMENTS = [{"title": "t", "text": SOME}]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"documents": DOCUMENTS}, {"documents": DOCUMENTS}),
        ({"chat_template_kwargs": {"documents": DOCUMENTS}}, {"documents": DOCUMENTS}),
        ({"chat_template_kwargs": {"a": 1, "documents": []}, "documents": DOCUMENTS}, {"a": 1, "documents": DOCUMENTS}),
        ({"chat_template_kwargs": {"documents": DOCUMENTS}, "documents": None}, {"documents": DOCUMENTS}),
    ],
    ids=["documents", "arguments", "both", "null"],
)
def test_what_a_template_makes_of_documents_is_counted_too(more: dict[str, Any], told: dict[str, Any]):
    """Templates write them into the prompt (vLLM): whoever may ask with 100 tokens asked with 60,000. /tokenize knows them as
    the template's arguments alone; of the field's and these the engine takes the field's."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = tokenises(101)
        status, _ = await rig.post({"model": "m", "messages": said("hi"), **more}, "/v1/chat/completions")
        assert status == 400
        assert rig.decode[0].seen == [{"messages": said("hi"), "chat_template_kwargs": told}]

    run(go, prefill=0, config=SMALL)


def test_arguments_that_are_none_are_the_engines_to_refuse():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = tokenises(101)
        more = {"chat_template_kwargs": None, "documents": [SOME]}
        status, _ = await rig.post({"model": "m", "messages": said("hi"), **more}, "/v1/chat/completions")
        assert (status, rig.decode[0].seen[0]["chat_template_kwargs"]) == (400, {"documents": [SOME]})

    run(go, prefill=0, config=SMALL)


@pytest.mark.parametrize("status", [200, 404, 500], ids=["no-tokens", "no-such-path", "broken"])
def test_a_worker_that_cannot_count_leaves_it_to_the_prefill_leg_and_the_kv_is_given_back(status: int):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = tokenises(0, status)

        async def prefills(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            usage = {"prompt_tokens": 100 + len(rig.prefill[0].seen), "completion_tokens": 1}
            answer(writer, 200, {"choices": [], "usage": usage, "kv_transfer_params": REFERENCE})
            return True

        rig.prefill[0].behave = prefills
        got, body = await rig.post(ask(prompt=SOME, max_tokens=4))
        assert (got, "prompt has 101 tokens" in json.loads(body)["error"]["message"]) == (400, True)
        assert all("kv_transfer_params" not in one for one in rig.decode[0].seen)
        await until(lambda: rig.prefill[0].released == ["lease-1"])

    run(go, config=SMALL)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_who_does_not_tell_how_long_a_prompt_is_has_failed_no_answer(stream: bool, workers: int):
    """Incident: a lost /tokenize was a decode worker's failure: it took a retry, and with one worker was 503, though
    nothing had been computed."""

    async def go(rig: Rig) -> None:
        async def closes(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if "max_tokens" in body:
                return False
            writer.close()
            return True

        for worker in rig.decode:
            worker.behave = closes
        saved = rig.context.budget.saved
        status, _ = await rig.post(ask(prompt=SOME, max_tokens=4, stream=stream))
        assert (status, rig.context.metrics.retries, rig.context.budget.saved >= saved) == (200, 0, True)
        assert sum("max_tokens" in body for worker in rig.decode for body in worker.seen) == 1
        assert sum(worker.breaker.failures for worker in rig.context.table.workers.values()) <= 1

    run(go, prefill=0, decode=workers, config=SMALL)


@pytest.mark.parametrize("silent", [True, False], ids=["is-silent", "too-late"])
def test_a_worker_that_never_tells_how_long_a_prompt_is(silent: bool):
    """Incident: its client waited as long as a whole answer may take, and was told to ask for fewer tokens."""

    async def go(rig: Rig) -> None:
        over = asyncio.Event()

        async def hangs(body: dict[str, Any], _: asyncio.StreamWriter) -> bool:
            if "max_tokens" not in body:
                await over.wait()
            return False

        for worker in rig.decode:
            worker.behave = hangs
        asked = asyncio.create_task(rig.post(ask(prompt=SOME, max_tokens=4)))
        await until(lambda: any(worker.seen for worker in rig.decode))
        later = rig.context.clock() + SMALL.first_token_deadline_s + 1
        if silent:
            assert watch(rig.context, rig.connections, later) == []
        else:
            rig.router.sweep(later)
        status, body = await asked
        over.set()
        if silent:
            assert status == 200
            assert rig.context.metrics.retries == 0
        else:
            error = json.loads(body)["error"]["message"]
            assert (status, error) == (504, f"no token within {SMALL.first_token_deadline_s} s")

    run(go, prefill=0, decode=2, config=SMALL)


@pytest.mark.parametrize("percent", [0, 50])
def test_whoever_counts_takes_no_turn_and_no_part_of_a_canarys_share(percent: int):
    """Incident: each prompt that had to be counted was two requests for the split: the canary counted, and the old revision
    answered, every time. Under roundRobin one of two workers counted and the other one answered."""

    async def go(rig: Rig) -> None:
        if percent:
            workers = [msgspec.structs.replace(worker.endpoint) for worker in rig.context.table.workers.values()]
            workers[1] = msgspec.structs.replace(workers[1], revision="new")
            splits = (Split(tier="t", revision="new", percent=percent),)
            rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=tuple(workers), splits=splits)))
        for worker in rig.decode:
            worker.behave = tokenises(50)
        for i in range(12):
            assert (await rig.post(ask(prompt=f"{i} {SOME}", max_tokens=4)))[0] == 200
        answered = [sum("max_tokens" in body for body in worker.seen) for worker in rig.decode]
        assert (sum(len(worker.seen) for worker in rig.decode), answered) == (24, [6, 6])

    config = msgspec.structs.replace(SMALL, policy="kvAware" if percent else "roundRobin")
    run(go, prefill=0, decode=2, config=config)


def test_nobody_counts_what_surely_fits_or_what_the_engine_refuses_itself():
    async def go(rig: Rig) -> None:
        await rig.post(ask(prompt="x" * 90))
        rig.apply(rig.prefill, rig.decode, msgspec.structs.replace(SMALL, max_model_len=100))
        await rig.post(ask(prompt="x" * 900))
        rig.apply(rig.prefill, rig.decode, msgspec.structs.replace(SMALL, max_model_len=0))  # an operator of before
        await rig.post(ask(prompt="x" * 900))
        assert [len(body["prompt"]) for body in rig.decode[0].seen] == [90, 900, 900]

    run(go, prefill=0, config=SMALL)


def test_a_tenants_limit_counts_where_the_fleets_would_not():
    async def go(rig: Rig) -> None:
        rig.context.desk.tenants_needed = True
        rig.context.desk.know(parsed(acme={"maxInputTokens": 10}))
        rig.decode[0].behave = tokenises(11)
        got = await rig.raw(http(ask(prompt="word " * 30), KEY, "connection: close"))
        assert got.startswith(b"HTTP/1.1 400 ")
        assert b"prompt has 11 tokens; allowed are 10" in got
        assert (len(rig.decode[0].seen), rig.context.desk.accounts["acme"].counts["refused"]) == (1, 1)

    run(go, prefill=0, config=msgspec.structs.replace(SMALL, max_input_tokens=8192))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("x" * 1600, ""), ("x" * 1601, "input has 1601 bytes"), (["x" * 1600] * 9, ""),
        (["a", "x" * 1601], "input has 1601 bytes"), ([1] * 100, ""), ([1] * 101, "input has 101 tokens"),
        ([[1] * 100] * 9, ""), ([[1], [1] * 101], "input has 101 tokens"),
        ([100_000] * 100, ""), ([], ""), (7, ""), ({"a": "x" * 9_000}, ""),
        (said("x" * 1600), ""), (said("x" * 1601), "input has 1601 bytes"), (said([part("x" * 1601)]), "input has 1601 bytes"),
        ([said("x" * 1600)] * 9, ""), ([said("a"), said("x" * 1601)], "input has 1601 bytes"),
    ],
)  # fmt: skip
def test_each_text_to_embed_has_the_limit_for_itself(given: Any, words: str):
    for separators in ((", ", ": "), (",", ":")):
        raw = json.dumps(given, separators=separators).encode()
        if not words:
            check_input(raw, 100, "input")
            continue
        with pytest.raises(RequestError, match=words):
            check_input(raw, 100, "input")


@pytest.mark.parametrize("one", [b"[1],", b'"a",'], ids=["ids", "texts"])
def test_of_very_many_inputs_none_is_looked_at(one: bytes):
    """It would hold up everybody else."""
    long = b"[" + b"1," * 200 + b"1]"
    with pytest.raises(RequestError):
        check_input(b"[" + one * (INPUTS_MOST // 4) + long + b"]", 100, "input")
    check_input(b"[" + one * (INPUTS_MOST + 1) + long + b"]", 100, "input")


@pytest.mark.parametrize("one", [b"1,", b"{},", b"null,"], ids=["numbers", "objects", "nothing"])
@pytest.mark.parametrize("first", [b'"a",', b"[1],", b"null,"], ids=["text", "ids", "null"])
def test_of_very_many_that_are_no_inputs_none_is_looked_at(first: bytes, one: bytes):
    """Two million of them held the loop up for a third of a second."""
    long = b"[" + b"1," * 200 + b"1]"
    with pytest.raises(RequestError):
        check_input(b"[" + first + one * (INPUTS_MOST // 4) + long + b"]", 100, "input")
    check_input(b"[" + first + one * 2 * INPUTS_MOST + long + b"]", 100, "input")


@pytest.mark.parametrize("text", [b"a, ", rb"a, \" ", rb"a, \\ "], ids=["commas", "quotes", "backslashes"])
def test_what_stands_in_inputs_makes_them_no_more(text: bytes):
    ids = b"[" + b"1," * 200_000 + b"1]"
    with pytest.raises(RequestError, match="input has 200001 tokens"):
        check_input(b'["%b",%b]' % (text * 50_000, ids), 190_000, "input")


def test_embeddings_of_too_much_reach_nobody_and_counting_has_no_limit():
    async def go(rig: Rig) -> None:
        for more in ({"input": LONG}, {"messages": said(LONG)}, {"input": said(LONG)}, {"input": [said("a"), said(LONG)]}):
            assert (await rig.post({"model": "m", **more}, "/v1/embeddings"))[0] == 400
        assert rig.decode[0].seen == []
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            await rig.post({"model": "m", "messages": said(LONG)}, path)  # who wants to know how long it is may ask
        assert len(rig.decode[0].seen) == 2

    run(go, config=SMALL)


@pytest.mark.parametrize(
    ("kind", "status"),
    [('"bytes"', 400), ('"\\u0062ytes"', 400), ("7", 400), ('"bytes_only"', 200), ('"base64"', 200), ("null", 200)],
)
def test_embeddings_that_are_told_of_in_a_header_reach_nobody(kind: str, status: int):
    """Incident: vLLM tells of each input in one header; of 1,000 that was a head of more than 64 KiB, no HTTP to us: each
    such request was a failure of two workers."""

    async def go(rig: Rig) -> None:
        body = f'{{"model":"m","input":"a","encoding_format":{kind}}}'.encode()
        told, got = await rig.post(body, "/v1/embeddings")
        assert (told, len(rig.decode[0].seen)) == (status, status == 200)
        assert status == 200 or json.loads(got)["error"]["param"] == "encoding_format"

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("padding", "most", "told"),
    [
        ('"max_length"', 100, "padding: each input has 8192 tokens with it; allowed are 100"), ('"max_length"', 8192, ""),
        ('"max\\u005flength"', 100, "padding: each input has 8192 tokens with it; allowed are 100"), ("null", 100, ""),
        ('"do_not_pad"', 100, ""), ("7", 100, "padding: Expected `str`, got `int`"),
    ],
)  # fmt: skip
def test_an_input_that_is_filled_up_has_the_limit_as_well(padding: str, most: int, told: str):
    """vLLM fills each of them up to its whole context: whoever may embed 100 tokens had 8,192 computed for a letter."""

    async def go(rig: Rig) -> None:
        status, got = await rig.post(f'{{"model":"m","input":["a"],"padding":{padding}}}'.encode(), "/v1/embeddings")
        assert (status, len(rig.decode[0].seen)) == ((400, 0) if told else (200, 1))
        assert not told or json.loads(got)["error"]["message"] == told

    run(go, prefill=0, config=msgspec.structs.replace(SMALL, max_input_tokens=most))


def test_a_picture_is_not_text():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    raw = json.dumps(said([picture, {"type": "text", "text": "what is it?"}])).encode()
    check_messages(raw, 100, "messages")
    assert uncertain({}, raw, 100, 8192)
    assert not uncertain({}, raw, 100, 100)


@pytest.mark.parametrize(
    ("prompt", "beside", "most"),
    [
        (b'"text"', {}, 6), (b'"text"', {"tools": b"[{}]"}, 10), (b'[{"content":"x"}]', {"temperature": b"0.5"}, 17),
        (b'"text"', {"documents": b"[{}]", "chat_template_kwargs": b"{}", "tools": b"[]"}, 14),
        (b'[{"content":[{"type":"image_url"}]}]', {}, None), (b'[{"content":[{"type":"input_audio"}]}]', {}, None),
    ],
)  # fmt: skip
def test_tokens_at_most(prompt: bytes, beside: dict[str, bytes], most: int | None):
    fields = {name: msgspec.Raw(value) for name, value in beside.items()}
    assert upper_bound(fields, prompt) == most
    assert uncertain(fields, prompt, (most or 100) - 1, 0)
    assert uncertain(fields, prompt, most or 100, 0) is (most is None)

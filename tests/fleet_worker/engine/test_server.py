"""The HTTP surface over a real engine thread: bad bodies are refused, a dead engine says so, nothing hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from fleet_cli.up.bundled import tiny_model
from fleet_worker.config import KvSettings, WorkerConfig
from fleet_worker.engine.assemble import build_core
from fleet_worker.engine.errors import BadRequestError
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.engine.protocol import MAX_BODY_BYTES, MAX_STOP_IDS, NEUTRAL, ChatMessage, text_messages
from fleet_worker.engine.sequence import Defaults
from fleet_worker.engine.server import EngineServer
from fleet_worker.engine.text import Text
from fleet_worker.engine.weights import load_weights

FOLDER = tiny_model()
ARCHITECTURE = read_config(FOLDER)
LLAMA = Llama(ARCHITECTURE, load_weights(FOLDER, ARCHITECTURE), 16)
TEXT = Text(FOLDER)
CONFIG = WorkerConfig(
    fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model="m", served_name="tiny",
    max_model_len=512, kv=KvSettings(cache_bytes=16 * 1024 * 1024),
)  # fmt: skip
Scenario = Callable[[httpx.AsyncClient, EngineLoop], Awaitable[None]]


def serve(scenario: Scenario, broken: Exception | None = None, defaults: Defaults = NEUTRAL) -> list[BaseException]:
    """Run a scenario against one engine; returns what the engine reported as its end. The engine must be idle and whole after."""
    stopped: list[BaseException] = []

    async def main() -> None:
        core, _ = build_core(CONFIG, LLAMA, ARCHITECTURE.eos_ids)
        if broken is not None:
            core.step = lambda: raise_when_asked(core, broken)  # type: ignore[method-assign]
        loop = EngineLoop(core, stopped.append, lambda _: None)
        loop.start()
        server = EngineServer(CONFIG, loop, TEXT, EngineMetrics("tiny"), defaults=defaults)
        transport = httpx.ASGITransport(server.app())
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=30) as client:
                await asyncio.wait_for(scenario(client, loop), 60)
                for _ in range(200):  # what the scenario ended reaches the engine thread with its next step
                    if broken is not None or not core.scheduler.blocks.used:
                        break
                    await asyncio.sleep(0.01)
        finally:
            server.close()
            await asyncio.to_thread(loop.stop)
        if broken is None:
            assert loop.failure is None
            assert core.scheduler.blocks.used == 0
            core.check_integrity()

    asyncio.run(main())
    return stopped


def raise_when_asked(core: Any, error: Exception) -> list[Any]:
    if core.has_work():
        raise error
    core.progressed = False
    return []


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1_000_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def body(**change: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "the router", "max_tokens": 8, "temperature": 0, "return_token_ids": True, **change}


BAD: dict[str, tuple[dict[str, Any], str | None]] = {
    "temperature-text": ({"temperature": "hot"}, "temperature"),
    "temperature-high": ({"temperature": 3}, "temperature"),
    "top-p-zero": ({"top_p": 0}, "top_p"),
    "two-answers": ({"n": 2}, "n"),
    "no-tokens": ({"max_tokens": 0}, "max_tokens"),
    "too-many-tokens": ({"max_tokens": 10**30}, "max_tokens"),
    "min-over-max": ({"min_tokens": 9}, "min_tokens"),
    "stop-empty": ({"stop": [""]}, "stop"),
    "stop-many": ({"stop": ["a"] * 17}, "stop"),
    "stop-long": ({"stop": ["a", "x" * 1_025]}, "stop"),
    "all-banned": ({"stop_token_ids": list(range(1024)), "min_tokens": 1}, "stop_token_ids"),
    "all-banned-later": (
        {"stop_token_ids": list(range(1024)), "kv_transfer_params": {"do_remote_decode": True, "min_tokens": 1, "max_tokens": 9}},
        "stop_token_ids",
    ),
    "stop-token-unknown": ({"stop_token_ids": [99_999], "min_tokens": 1}, "stop_token_ids"),
    "prompt-object": ({"prompt": {}}, "prompt"),
    "prompt-empty": ({"prompt": []}, "prompt"),
    "prompt-unknown-token": ({"prompt": [1024]}, "prompt"),
    "prompt-huge-token": ({"prompt": [2**70]}, "prompt"),
    "prompt-long": ({"prompt": [5] * 600}, "prompt"),
    "kv-text": ({"kv_transfer_params": "yes"}, "kv_transfer_params"),
    "kv-both": ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "kv_transfer_params"),
}


def test_every_bad_field_is_400_with_its_name_and_the_next_request_is_answered():
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        for name, (change, param) in BAD.items():
            answer = await client.post("/v1/completions", json=body(**change))
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert (error["code"], error["param"], error["retryable"]) == ("invalid_request", param, False), (name, error)
        good = await client.post("/v1/completions", json=body())
        assert len(good.json()["choices"][0]["token_ids"]) == 8

    assert serve(scenario) == []


def refused(change: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        answer = await client.post("/v1/completions", json=body(**change), headers=headers)
        assert answer.status_code == 400, answer.text
        found.update(answer.json()["error"])

    serve(scenario)
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 2}, "n is 2; only n=1 is served"),
        ({"model": None}, "model is required"),
        ({"prompt": None}, "prompt is required"),
        ({"prompt": {}}, "prompt must be text or a list of token ids"),
        ({"prompt": ["a", "b"]}, "prompt must be text or a list of token ids"),
        ({"prompt": [1, -2]}, "prompt must be text or a list of token ids"),
        ({"stop": 5}, "stop: Expected `str | array`, got `int`"),
        ({"temperature": "hot"}, "temperature: Expected `float`, got `str`"),
        ({"prompt": [5] * 500, "max_tokens": 30}, "you requested 30 output tokens and your prompt contains 500 input tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_say_what_is_wrong_in_the_users_words(change: dict[str, Any], words: str):
    assert words in refused(change)["message"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "messages[1].content[2].type is 'image_url'; served: 'text'"),
        ({"text": "no type"}, "messages[1].content[2].type is None; served: 'text'"),
        ({"type": "text", "text": 5}, "messages[1].content[2].text must be text"),
        ({"type": "text"}, "messages[1].content[2].text must be text"),
    ],
)
def test_a_content_part_is_named_by_its_path(part: dict[str, Any], words: str):
    said = [{"type": "text", "text": "a"}] * 2
    messages = [ChatMessage("system", "b"), ChatMessage("user", [*said, part])]
    with pytest.raises(BadRequestError) as told:
        text_messages(messages)
    assert (str(told.value), told.value.param) == (words, "messages")
    assert text_messages([messages[0], ChatMessage("user", said)])[1] == {"role": "user", "content": "a\na"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_refusal_does_not_say_back_megabytes(path: str):
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        huge = "x" * 1_000_000
        asked = {"model": huge, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        answer = await client.post(path, json=asked if "chat" in path else {"model": huge, "prompt": "a"})
        assert (answer.status_code, len(answer.content) < 1_000) == (404, True)
        part = {"model": "tiny", "messages": [{"role": "user", "content": [{"type": [huge]}]}]}
        answer = await client.post("/v1/chat/completions", json=part)
        assert (answer.status_code, len(answer.content) < 1_000) == (400, True)

    serve(scenario)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/v1/embeddings", 400, "embeddings are not served: this fleet's engine is torch, which generates text only"),
        ("POST", "/v1/rerank", 404, "POST /v1/rerank: no such route"),
        ("GET", "/v1/completions", 405, "GET /v1/completions: no such route"),
    ],
)
def test_what_the_engine_does_not_have_is_told_in_openais_form(method: str, path: str, status: int, words: str):
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        answer = await client.request(method, path, json={"model": "tiny", "input": "a"}, headers={"x-request-id": "mine"})
        error = answer.json()["error"]
        assert (answer.status_code, error["message"], error["request_id"]) == (status, words, "mine")
        assert (error["type"], error["code"], error["param"], error["retryable"]) == (
            "BadRequestError",
            "invalid_request",
            None,
            False,
        )
        assert (answer.headers.get("allow") == "POST") == (status == 405)

    assert serve(scenario) == []


@pytest.mark.parametrize(
    ("sent", "told"), [("mine", "mine"), ("0123456789abcdef" * 2 + ".mine.7", "mine.7"), ("a" * 200, "a" * 128)]
)
def test_an_error_names_the_request_as_its_client_does(sent: str, told: str):
    assert refused({"n": 2}, {"x-request-id": sent})["request_id"] == told


UNSUPPORTED: list[tuple[str, Any, list[Any]]] = [
    ("logit_bias", {"5": -100}, [{}, None]), ("presence_penalty", 2, [0, 0.0, None]), ("frequency_penalty", 0.1, [0]),
    ("presence_penalty", "x", []), ("repetition_penalty", 1.1, [1, 1.0]), ("min_p", 0.1, [0]), ("logprobs", 0, [None, False]),
    ("logprobs", 5, []), ("logprobs", True, []), ("top_logprobs", 2, [0]), ("echo", True, [False]), ("best_of", 3, [1]),
    ("suffix", "x", ["", None]), ("response_format", {"type": "json_object"}, [{"type": "text"}]),
    ("tools", [{"type": "function"}], [[]]), ("tool_choice", "required", ["none", "auto"]), ("guided_json", {}, [None]),
    ("structured_outputs", {"json": {}}, [None]), ("skip_special_tokens", False, [True]), ("bad_words", ["a"], [[]]),
    ("include_stop_str_in_output", True, [False]), ("truncate_prompt_tokens", 5, [None]), ("prompt_logprobs", 0, [None]),
    ("add_special_tokens", False, [True, None]), ("repetition_detection", {"min_count": 2}, [None]),
    ("logprob_token_ids", [1], [[], None]), ("return_token_offsets", True, [False]), ("watermarking", True, [False, None]),
]  # fmt: skip


def test_fields_that_would_change_the_tokens_are_refused_unless_neutral():
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        plain = (await client.post("/v1/completions", json=body())).json()["choices"][0]
        for name, asked, neutral in UNSUPPORTED:
            answer = await client.post("/v1/completions", json=body(**{name: asked}))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name), (name, asked, answer.text)
            assert error["message"] == f"{name} is not supported by the torch engine"
            for value in neutral:
                answer = await client.post("/v1/completions", json=body(**{name: value}))
                assert answer.json()["choices"][0] == plain, (name, value, answer.text)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 400
        for value, status in ((True, 400), (False, 200), (None, 200)):  # a template brings its own
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "add_special_tokens": value}
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == status

    serve(scenario)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("each", [True, False, None])
@pytest.mark.parametrize("usage", [True, False, None])
def test_usage_is_in_every_chunk_for_who_asks_so(chat: bool, each: bool | None, usage: bool | None):
    """guidellm asks for it with each of its streams, and each was refused; so was a null where vLLM takes one."""

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        options = {"include_usage": usage, "continuous_usage_stats": each}
        asked = body(stream=True, max_tokens=3, ignore_eos=True, stream_options=options)
        path = "/v1/completions"
        if chat:
            path, asked["messages"] = "/v1/chat/completions", [{"role": "user", "content": asked.pop("prompt")}]
        answer = await client.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        told = [(found["prompt_tokens"], found["completion_tokens"]) for one in chunks if (found := one.get("usage"))]
        counts = [0] * chat + [1, 2, 3] if each else []
        prompt = told[0][0] if told else 0
        assert told == ([(prompt, count) for count in [*counts, 3]] if usage else [])
        assert [one["choices"] == [] for one in chunks[-2:]] == [False, bool(usage)]

    serve(scenario)


def test_stop_token_ids_are_bounded():
    """Every step, which is of everybody, looks through them: a body of 4 MB held two million."""

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        for count, status in ((MAX_STOP_IDS, 200), (MAX_STOP_IDS + 1, 400)):
            answer = await client.post("/v1/completions", json=body(stop_token_ids=[1] * count))
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "stop_token_ids"

    serve(scenario)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("top_k", (-1, 0, 1, 10**30), (-2, -5, -(10**30))), ("seed", (-(2**63), -1, 2**63 - 1), (2**63, -(2**63) - 1, 10**30))],
)
def test_numbers_that_mean_nothing_are_refused(name: str, good: tuple[int, ...], bad: tuple[int, ...]):
    """As vLLM does: a top_k of -5 was taken for none, a seed beyond 64 bits drew what another seed draws."""

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        for value in (*good, *bad):
            answer = await client.post("/v1/completions", content=json.dumps(body(**{name: value})).encode())
            assert answer.status_code == (200 if value in good else 400), value
            assert value in good or answer.json()["error"]["param"] == name

    serve(scenario)


def test_null_is_absent():
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        names = [
            "n", "stream", "stream_options", "stop", "seed", "top_p", "top_k", "min_tokens", "ignore_eos", "stop_token_ids",
            "max_completion_tokens", "kv_transfer_params", "user",
        ]  # fmt: skip
        answer = await client.post("/v1/completions", json=body(**dict.fromkeys(names)))
        plain = await client.post("/v1/completions", json=body())
        assert answer.json()["choices"] == plain.json()["choices"]
        assert len((await client.post("/v1/completions", json=body(max_tokens=None))).json()["choices"][0]["token_ids"]) == 16

    serve(scenario)


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ({"max_tokens": 500}, "max_tokens"),
        ({"max_completion_tokens": 500}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ],
)
def test_a_prefill_leg_is_refused_when_its_decode_leg_would_be(limits: dict[str, int], param: str):
    """Else the KV waits for its lease's end, and nobody reads it."""
    error = refused({"prompt": [5] * 100, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, **limits}})
    assert error["param"] == param


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null", b'{"x\xff":1}'],
    ids=["none", "cut", "list", "bytes", "deep", "null", "no-utf8"],
)
def test_a_body_that_is_no_request_is_400(raw: bytes):
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/kv/release"):
            assert (await client.post(path, content=raw)).status_code == 400, path

    serve(scenario)


@pytest.mark.parametrize("value", [b'"\xff"', b"[" * 20_000 + b"]" * 20_000], ids=["no-utf8", "deep"])
@pytest.mark.parametrize("name", [b"lease_id", b"zz"])
def test_a_reference_that_is_no_json_is_400(name: bytes, value: bytes):
    """Incident: bytes that are no UTF-8 were a 500."""

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        given = b'{"do_remote_prefill":true,"%s":%s}' % (name, value)
        answer = await client.post("/v1/completions", content=b'{"model":"tiny","prompt":"x","kv_transfer_params":%s}' % given)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "BadRequestError"

    serve(scenario)


def test_a_200_mb_body_is_413_after_reading_no_more_than_the_bound():
    sent = 0

    async def endless():
        nonlocal sent
        while sent < 200 * 1024 * 1024:
            sent += 65_536
            yield b" " * 65_536

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        answer = await client.post("/v1/completions", content=endless())
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "RequestEntityTooLarge")
        assert sent <= MAX_BODY_BYTES + 2 * 65_536

    serve(scenario)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_engine_that_fails_tells_every_open_request_and_health_turns_red(stream: bool):
    async def scenario(client: httpx.AsyncClient, loop: EngineLoop) -> None:
        assert (await client.get("/health")).status_code == 200
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body(stream=stream)) for _ in range(3)))
        assert [(a.status_code, a.json()["error"]["type"]) for a in answers] == [(503, "EngineStoppedError")] * 3
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json=body())).status_code == 503

    stopped = serve(scenario, broken=RuntimeError("out of luck"))
    assert [str(error) for error in stopped] == ["out of luck"]


def test_a_stop_string_ends_text_tokens_and_usage_at_the_same_place():
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        whole = (await client.post("/v1/completions", json=body(max_tokens=40))).json()["choices"][0]
        stop = whole["text"][10:14]
        for _ in range(5):  # the engine runs ahead of the server by a random number of tokens
            answer = (await client.post("/v1/completions", json=body(max_tokens=40, stop=stop))).json()
            choice = answer["choices"][0]
            assert choice["text"] == whole["text"][: whole["text"].index(stop)]
            assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] < 40
            assert stop in TEXT.decode(choice["token_ids"])
            assert choice["token_ids"] == whole["token_ids"][: len(choice["token_ids"])]

    serve(scenario)


def test_a_client_that_leaves_a_stream_frees_its_blocks():
    async def scenario(client: httpx.AsyncClient, loop: EngineLoop) -> None:
        asked = asyncio.create_task(client.post("/v1/completions", json=body(max_tokens=490, ignore_eos=True, stream=True)))
        await until(lambda: bool(loop.core.sequences))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: not loop.core.sequences)
        assert loop.core.counters.finished["abort"] == 1

    serve(scenario)


def test_a_client_that_leaves_before_the_first_chunk_frees_its_blocks():
    """The response's head cannot be sent any more: the generator of chunks never begins."""

    async def scenario(client: httpx.AsyncClient, loop: EngineLoop) -> None:
        content = json.dumps(body(max_tokens=490, ignore_eos=True, stream=True)).encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": [], "scheme": "http",
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(_: Any) -> None:
            raise OSError("the connection is gone")

        transport = client._transport
        assert isinstance(transport, httpx.ASGITransport)
        with pytest.raises(ClientDisconnect):
            await transport.app(scope, receive, send)
        await until(lambda: not loop.core.sequences)
        assert loop.core.counters.finished["abort"] == 1

    serve(scenario)


def test_more_than_the_inbox_holds_is_refused_as_overload(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fleet_worker.engine.loop.MAX_INBOX", 0)

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        answer = await client.post("/v1/completions", json=body())
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")

    serve(scenario)


def test_stream_and_whole_chat_say_the_same():
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "日本 hello"}], "max_tokens": 12, "temperature": 0}
        whole = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"]["content"]
        lines = (await client.post("/v1/chat/completions", json={**asked, "stream": True})).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert "".join(p["choices"][0]["delta"]["content"] for p in parts) == whole

    serve(scenario)

"""The dialects through the router with the makers' own clients: Anthropic's and OpenAI's SDK, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from fleet_router.config import RouterConfig
from tests.fleet_router.chat_worker import CALLS, TEXT, THOUGHT, says
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, LONG, Rig, run

TURNS: list[Any] = [{"role": "user", "content": LONG}]


def claude(rig: Rig) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(api_key="k", base_url=f"http://127.0.0.1:{rig.port}", max_retries=0)


def gpt(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="k", base_url=f"http://127.0.0.1:{rig.port}/v1", max_retries=0)


@pytest.mark.parametrize("piece", [0, 1, 7])
def test_anthropic_streams_text(piece: int):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT, piece=piece)
        async with claude(rig) as client, client.messages.stream(model="m", max_tokens=8, messages=TURNS) as stream:
            assert [text async for text in stream.text_stream] == ["Hel", "lo."]
            message = await stream.get_final_message()
        assert (message.stop_reason, message.usage.output_tokens, message.usage.input_tokens) == ("end_turn", 4, 4)
        assert message.usage.cache_read_input_tokens == 5
        assert rig.prefill[0].seen[0]["kv_transfer_params"]["do_remote_decode"]  # split as any chat is

    run(go)


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_tools(streamed: bool):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(CALLS, "tool_calls")
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        asked: dict[str, Any] = {
            "model": "m", "max_tokens": 8, "messages": TURNS, "tools": [{"name": "weather", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        }  # fmt: skip
        async with claude(rig) as client:
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked)
        text, call = message.content
        assert (text.text, call.name, call.input, message.stop_reason) == ("Let me see.", "weather", {"city": "Bonn"}, "tool_use")
        sent = rig.decode[0].seen[0]
        assert sent["tools"] == [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
        assert sent["tool_choice"] == "required"

    run(go)


@pytest.mark.parametrize(
    ("pieces", "given"),
    [
        (["null"], {}),
        (["", "nu", "ll"], {}),
        ([" ", "null\n"], {}),
        ([" "], {}),
        ([], {}),
        (["\n", ' {"a":', " null", "}"], {"a": None}),
    ],
)
def test_anthropic_streams_a_call_without_arguments_as_one_of_an_empty_object(pieces: list[str], given: dict[str, Any]):
    """vLLM hands on what its model wrote: null is none to Anthropic's clients, and space alone ends their stream."""

    async def go(rig: Rig) -> None:
        first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "now", "arguments": ""}}
        said = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
        rig.decode[0].behave = says([{"tool_calls": [first]}, *said], "tool_calls")
        async with claude(rig) as client, client.messages.stream(model="m", max_tokens=8, messages=TURNS) as stream:
            (call,) = (await stream.get_final_message()).content
        assert (call.type, call.input) == ("tool_use", given)

    run(go, prefill=0)


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_tool_runner_goes_on_without_the_thread_that_nobody_keeps(streamed: bool):
    """It asks the server to hold the conversation, unless that says in the API's own words that it cannot: any other refusal
    ended each of its runs."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(CALLS, "tool_calls")

        @anthropic.beta_async_tool
        async def weather(city: str) -> str:
            """The weather of a city."""
            rig.decode[0].behave = says(TEXT)
            return f"rain in {city}"

        async with claude(rig) as client:
            runner: Any = client.beta.messages.tool_runner(
                model="m", max_tokens=8, messages=TURNS, tools=[weather], stream=streamed
            )
            message = await runner.until_done()
        assert [block.text for block in message.content] == ["Hello."]
        first, second = rig.decode[0].seen
        assert len(first["messages"]) == 1
        assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "tool"]
        assert second["messages"][2]["content"] == "rain in Bonn"

    run(go, prefill=0)


def test_a_thread_is_refused_by_name_and_none_is_no_thread():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT)
        asked: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": TURNS}
        async with claude(rig) as client:
            for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
                with pytest.raises(anthropic.BadRequestError, match="thread: this router keeps no conversations") as told:
                    await client.beta.messages.create(**asked, thread=thread)
                assert told.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}
            await client.beta.messages.create(**asked, thread=None)
        assert len(rig.decode[0].seen) == 1

    run(go, prefill=0)


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_thoughts_come_in_a_block_of_their_own(streamed: bool):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(THOUGHT)
        async with claude(rig) as client:
            if streamed:
                async with client.messages.stream(model="m", max_tokens=8, messages=TURNS) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(model="m", max_tokens=8, messages=TURNS)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Yes")
        assert message.content[0].signature  # LiteLLM gives no thought back that has none

    run(go)


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("content_filter", None, "refusal"),
    ],
)
def test_anthropic_stop_reasons(finish: str, stop: str | None, reason: str):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT, finish, stop)
        async with claude(rig) as client:
            message = await client.messages.create(model="m", max_tokens=8, messages=TURNS, stop_sequences=["END"])
        assert (message.stop_reason, message.stop_sequence) == (reason, stop)
        assert rig.decode[0].seen[0]["stop"] == ["END"]

    run(go)


def test_anthropic_counts_tokens_with_the_engines_tokenizer():
    async def go(rig: Rig) -> None:
        async def tokenize(body: dict[str, Any], writer: Any) -> bool:
            answer(writer, 200, {"count": len(body["messages"]) + 40, "max_model_len": 100, "tokens": []})
            return True

        rig.decode[0].behave = tokenize
        async with claude(rig) as client:
            counted = await client.messages.count_tokens(model="m", system="s", messages=TURNS)
        assert counted.input_tokens == 42
        assert rig.prefill[0].seen == []

    run(go)


def test_anthropic_errors_are_the_sdks_own():
    async def go(rig: Rig) -> None:
        async with claude(rig) as client:
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                await client.messages.create(model="other", max_tokens=8, messages=TURNS)
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                await client.messages.create(model="m", max_tokens=0, messages=TURNS)

            async def refuses(_: dict[str, Any], writer: Any) -> bool:
                answer(writer, 400, {"error": {"message": "this model takes no images", "type": "BadRequestError"}})
                return True

            rig.decode[0].behave = rig.prefill[0].behave = refuses
            with pytest.raises(anthropic.BadRequestError, match="this model takes no images") as told:
                await client.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": "short"}])
        assert told.value.body["error"]["type"] == "invalid_request_error"

    run(go)


@pytest.mark.parametrize("dialect", ["anthropic", "openai"])
def test_a_stream_that_ends_early_is_an_error_and_no_end(dialect: str):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT, end=False)
        if dialect == "anthropic":
            async with claude(rig) as client:
                with pytest.raises(anthropic.APIStatusError, match="ended early"):
                    async with client.messages.stream(model="m", max_tokens=8, messages=TURNS) as stream:
                        await stream.get_final_message()
        else:
            async with gpt(rig) as other:
                kinds = [e.type async for e in await other.responses.create(model="m", input=LONG, stream=True)]
            assert kinds[-1] == "response.failed"
            assert "response.completed" not in kinds

    run(go)


@pytest.mark.parametrize("piece", [0, 1, 7])
def test_responses_stream_text(piece: int):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT, piece=piece)
        async with gpt(rig) as client, client.responses.stream(model="m", input=LONG, instructions="be kind") as stream:
            numbers = [event.sequence_number async for event in stream]
            response = await stream.get_final_response()
        assert numbers == sorted(set(numbers))
        assert (response.output_text, response.status, response.usage.output_tokens) == ("Hello.", "completed", 4)
        assert rig.decode[0].seen[0]["messages"][0] == {"role": "system", "content": "be kind"}
        assert "kv_transfer_params" in rig.decode[0].seen[0]

    run(go)


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_call_functions_and_take_their_output(streamed: bool):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(CALLS, "tool_calls")
        asked: dict[str, Any] = {
            "model": "m", "max_output_tokens": 30,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": LONG}]},
                {"type": "function_call", "call_id": "c0", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c0", "output": "rain"},
            ],
            "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}],
        }  # fmt: skip
        async with gpt(rig) as client:
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    response = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked)
        message, call = response.output
        assert (message.content[0].text, call.name, json.loads(call.arguments)) == ("Let me see.", "weather", {"city": "Bonn"})
        assert call.call_id == "call_1"
        sent = rig.decode[0].seen[0]
        assert [m["role"] for m in sent["messages"]] == ["user", "assistant", "tool"]
        assert sent["messages"][1]["tool_calls"][0]["id"] == sent["messages"][2]["tool_call_id"] == "c0"
        assert sent["max_completion_tokens"] == 30

    run(go)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(("choice", "status"), [("auto", 200), ("none", 200), ("required", 400)])
def test_it_may_be_left_to_the_model_whether_to_call_without_tools(path: str, choice: str, status: int):
    """`tools: []` was left out and `auto` was not, which vLLM refuses: 400 to what OpenAI answers, and vLLM's own endpoints."""

    async def go(rig: Rig) -> None:
        async def like_vllm(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if body.get("tool_choice", "none") != "none" and not body.get("tools"):
                answer(writer, 400, {"error": {"message": "When using `tool_choice`, `tools` must be set.", "code": 400}})
                return True
            return await says(TEXT)(body, writer)

        rig.decode[0].behave = like_vllm
        asked: dict[str, Any] = {"model": "m", "input": "x", "tools": [], "tool_choice": choice}
        if path == "/v1/messages":
            kind = {"required": "any"}.get(choice, choice)
            asked = {"model": "m", "max_tokens": 9, "messages": TURNS, "tools": [], "tool_choice": {"type": kind}}
        found, body = await rig.post(asked, path)
        assert found == status
        assert status != 200 or path == "/v1/messages" or json.loads(body)["tool_choice"] == choice

    run(go, prefill=0)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("deltas", [TEXT, THOUGHT, CALLS], ids=["text", "thought", "calls"])
def test_a_response_is_the_same_whole_and_streamed(deltas: list[dict[str, Any]], finish: str):
    """Whole, all of its items were incomplete when the limit cut the last one: the calls before it, too."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(deltas, finish)
        found = []
        for streamed in (False, True):
            _, body = await rig.post({"model": "m", "input": "x", "stream": streamed}, "/v1/responses")
            told = json.loads(body) if not streamed else last_response(body)
            found.append([{name: value for name, value in item.items() if name != "id"} for item in told["output"]])
        assert found[0] == found[1]

    run(go, prefill=0)


def last_response(body: bytes) -> dict[str, Any]:
    lines = [line for line in body.decode().split("\n") if line.startswith("data: ")]
    response: dict[str, Any] = json.loads(lines[-1][6:])["response"]
    return response


def test_responses_that_were_cut_by_the_limit_are_incomplete():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT, "length")
        async with gpt(rig) as client:
            response = await client.responses.create(model="m", input=LONG)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    run(go)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"previous_response_id": "resp_1"}, "stores no responses"),
        ({"max_output_tokens": 10**6}, "max_output_tokens is 1000000"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "message", "content": "x"}]}, r"input\[0\].role is required"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_responses_that_cannot_be_served_are_refused_by_name(more: dict[str, Any], words: str):
    async def go(rig: Rig) -> None:
        async with gpt(rig) as client:
            with pytest.raises(openai.BadRequestError, match=words):
                await client.responses.create(**{"model": "m", "input": LONG, **more})
        assert rig.prefill[0].seen == rig.decode[0].seen == []

    run(go)


def test_a_broken_whole_answer_is_asked_for_once_more_from_the_beginning():
    async def go(rig: Rig) -> None:
        async def breaks(_: dict[str, Any], writer: Any) -> bool:
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"choices": [')
            await writer.drain()
            writer.close()
            return True

        rig.decode[0].behave, rig.decode[1].behave = breaks, breaks
        async with gpt(rig) as client:
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model="m", input="short")
            rig.decode[0].behave = rig.decode[1].behave = says(TEXT)
            assert (await client.responses.create(model="m", input="short")).output_text == "Hello."

    run(go, decode=2)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/embeddings"])
def test_what_generates_nothing_goes_to_one_worker_as_it_is(path: str):
    async def go(rig: Rig) -> None:
        status, body = await rig.post({"model": "m", "input": LONG, "priority": 3}, path)
        assert (status, b"hello" in body) == (200, True)
        assert rig.decode[0].seen == [{"model": "m", "input": LONG}]
        assert rig.prefill[0].seen == []
        assert rig.context.metrics.local_prefills == 0
        assert (await rig.post({"model": "other"}, path))[0] == 404
        assert (await rig.post(b"[]", path))[0] == 400

    run(go)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        ("boom", True, "The tool call failed.\nboom"),
        ("boom", False, "boom"),
        ("", True, "The tool call failed."),
        ("", False, ""),
        ([{"type": "text", "text": "a"}], True, "The tool call failed.\na"),
    ],
)
def test_a_model_is_told_that_a_call_failed(content: Any, error: bool, said: str):
    """`is_error` was dropped."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT)
        used = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": error}
        turns: list[Any] = [*TURNS, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        async with claude(rig) as client:
            await client.messages.create(model="m", max_tokens=8, messages=turns)
        assert rig.decode[0].seen[0]["messages"][-1] == {"role": "tool", "tool_call_id": "a", "content": said}

    run(go)


def loops(text: str) -> Any:
    """A worker that does not stop saying this; `%d` in it is another number each time."""

    async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(20_000):
            delta = {"content": text.replace("%d", str(number))}
            event = (
                b"data: " + json.dumps({"id": "c", "created": 1, "choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"
            )
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            if writer.is_closing():
                break
        return True

    return behave


RUNAWAYS: list[Any] = [
    pytest.param("la ", "refusal", "content_filter", "repetition_detected", id="repetition"),
    pytest.param("%d <|im_start|>", "refusal", "content_filter", "control_tokens", id="control-tokens"),
    pytest.param("%d ", "max_tokens", "max_output_tokens", "", id="no-stop"),
]


def watched(words: str) -> RouterConfig:
    return msgspec.structs.replace(CONFIG, runaway=True, max_output_tokens=4096 if words else 300)


@pytest.mark.parametrize(("text", "stop", "_incomplete", "words"), RUNAWAYS)
def test_anthropic_is_told_why_a_stream_was_ended(text: str, stop: str, _incomplete: str, words: str):
    """It read `end_turn` of a loop, and a stop sequence "control_tokens" that nobody had asked for."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = loops(text)
        async with claude(rig) as client, client.messages.stream(model="m", max_tokens=300, messages=TURNS) as stream:
            message = await stream.get_final_message()
        assert (message.stop_reason, message.stop_sequence) == (stop, None)
        assert message.usage.output_tokens > 8  # counted by us: the engine had no time to
        assert message.usage.input_tokens > 100
        told = getattr(message, "stop_details", None)
        assert (told is None) == (not words)
        if told is not None:
            assert (told.type, told.explanation.startswith(words)) == ("refusal", True)

    run(go, prefill=0, config=watched(words))


@pytest.mark.parametrize(("text", "_stop", "incomplete", "words"), RUNAWAYS)
def test_responses_are_incomplete_when_a_stream_was_ended(text: str, _stop: str, incomplete: str, words: str):
    """They said `completed`, and nothing of usage."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = loops(text)
        async with gpt(rig) as client, client.responses.stream(model="m", input=LONG) as stream:
            kinds = [event.type async for event in stream]
            response = (await stream.get_final_response()) if "response.completed" in kinds else None
        assert (response, kinds[-1]) == (None, "response.incomplete")
        status, body = await rig.post({"model": "m", "input": LONG, "stream": True}, "/v1/responses")
        last = json.loads(body.split(b"data: ")[-1].split(b"\n\n")[0])["response"]
        assert (status, last["status"], last["incomplete_details"]["reason"]) == (200, "incomplete", incomplete)
        assert last["incomplete_details"].get("message", "").startswith(words)
        assert last["usage"]["output_tokens"] > 8
        assert last["output"][0]["status"] == "incomplete"

    run(go, prefill=0, config=watched(words))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_filter_of_the_engine_is_no_completed_response(streamed: bool):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT, "content_filter")
        status, body = await rig.post({"model": "m", "input": "x", "stream": streamed}, "/v1/responses")
        last = json.loads(body.split(b"data: ")[-1].split(b"\n\n")[0] if streamed else body)
        found = last["response"] if streamed else last
        assert (status, found["status"], found["incomplete_details"]) == (200, "incomplete", {"reason": "content_filter"})

    run(go)

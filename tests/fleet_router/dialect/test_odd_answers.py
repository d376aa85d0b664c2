"""Answers of workers that are valid and odd, or broken: what a dialect's client is told of them; and what comes back of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_router.dialect.routes import translation_of
from fleet_router.ending import END, framed
from fleet_router.flow import Flow
from tests.fleet_router.chat_worker import CALL, TEXT, THOUGHT, events, says
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import Rig, run, until

ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "short"}]},
    "/v1/responses": {"model": "m", "input": "short"},
}
DEEP = '{"a": ' + "[" * 5_000 + "]" * 5_000 + "}"


def called(arguments: str, finish: str = "tool_calls", stop: str | None = None) -> Any:
    """A whole answer that calls one function."""
    message = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments}}]}
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop}
    return {"created": 5, "choices": [choice], "usage": None}


def answers(said: Any) -> Any:
    """A worker that answers so: an object, or bytes of a body."""

    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if not isinstance(said, bytes):
            answer(writer, 200, said)
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
        return True

    return behave


async def told(rig: Rig, path: str, behave: Any, **more: Any) -> tuple[int, bytes]:
    rig.decode[0].behave = behave
    return await rig.post({**ASKED[path], **more}, path)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"a": 1}', b'"input":{"a": 1}'),
        ('{"n": 123456789012345678901234567890}', b'{"n": 123456789012345678901234567890}'),
        ('{"s": "half a pair \\ud800"}', b'{"s": "half a pair \\ud800"}'),
        ("", b'"input":{}'),
        ("null", b'"input":{}'),
    ],
)
def test_arguments_of_a_whole_call_reach_the_client_as_the_model_wrote_them(arguments: str, kept: bytes):
    """Half of a surrogate pair was an exception in the connection: every worker was asked in turn, and blamed for it."""

    async def go(rig: Rig) -> None:
        status, body = await told(rig, "/v1/messages", answers(called(arguments)))
        assert (status, kept in body, json.loads(body)["stop_reason"]) == (200, True, "tool_use")
        assert len(rig.decode[0].seen) == 1

    run(go, prefill=0)


@pytest.mark.parametrize("arguments", ["[1]", '"text"', '{"a": 1', '{"a": NaN}', "7", DEEP], ids=lambda text: text[:9])
def test_arguments_that_are_no_object_are_an_error_at_once(arguments: str):
    """Anthropic's `input` is an object; a deep one was an exception in the connection."""

    async def go(rig: Rig) -> None:
        status, body = await told(rig, "/v1/messages", answers(called(arguments)))
        assert (status, "arguments for f are not a JSON object" in json.loads(body)["error"]["message"]) == (502, True)
        assert len(rig.decode[0].seen) == 1

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("length", None, ("max_tokens", None)),
        ("stop", "nn", ("stop_sequence", "nn")),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_a_call_that_the_limit_cut_is_an_answer_that_the_limit_cut(finish: str, stop: str | None, reason: tuple[str, str | None]):
    """It was a 502: nothing of the answer, though the client is to ask with a higher limit. The same of one that its own stop
    sequence cut, which no retry helps; a stream of it ended as it should."""

    async def go(rig: Rig) -> None:
        status, body = await told(rig, "/v1/messages", answers(called('{"city": "Bo', finish, stop)))
        message = json.loads(body)
        assert (status, message["stop_reason"], message["stop_sequence"]) == (200, *reason)
        assert [(block["type"], block["name"], block["input"]) for block in message["content"]] == [("tool_use", "f", {})]

    run(go, prefill=0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", None, "tool_use"),
        ("tool_calls", None, "tool_use"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
    ],
)
def test_a_call_of_a_named_tool_is_a_use_of_a_tool(streamed: bool, finish: str, stop: str | None, reason: str):
    """OpenAI and vLLM end the call of a named tool with `stop`; agents run tools where stop_reason is `tool_use`."""

    async def go(rig: Rig) -> None:
        behave = says([{"tool_calls": [CALL]}], finish, stop)
        status, body = await told(rig, "/v1/messages", behave, stream=streamed)
        data = [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: ")]
        said = next(e["delta"] for e in data if e["type"] == "message_delta") if streamed else json.loads(body)
        assert (status, said["stop_reason"], said["stop_sequence"]) == (200, reason, stop)

    run(go, prefill=0)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("said", "streamed"),
    [(b"", False), (b'{"choices": [', False), (b"<html>", False), (b"", True), (b": nothing\n\n", True)],
    ids=["empty", "half", "html", "empty-stream", "comment"],
)
def test_r9_an_answer_that_is_none_is_asked_for_elsewhere(path: str, said: bytes, streamed: bool):
    """It was so in OpenAI's own dialect: of others each client was told 502, and nothing was known against the worker."""

    async def go(rig: Rig) -> None:
        async def broken(_: Any, writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = says([{"content": "whole"}])
            body = framed(said) + END if streamed else said
            framing = b"transfer-encoding: chunked" if streamed else b"content-length: %d" % len(said)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: x/y\r\n%b\r\n\r\n%b" % (framing, body))
            return True

        for worker in rig.decode:
            worker.behave = broken
        status, body = await rig.post({**ASKED[path], "stream": streamed}, path)
        assert (status, b"whole" in body, b"error" in body.replace(b'"error":null', b"")) == (200, True, False)
        assert rig.context.metrics.of("t", "r").errors == 1

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("path", ASKED)
def test_half_an_answer_of_a_worker_that_fell_silent_is_no_part_of_the_next_ones(path: str):
    """Who was asked next answered in full, and its client was told 502: half of the first answer stood before it."""

    async def go(rig: Rig) -> None:
        async def half(_: Any, writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = says([{"content": "whole"}])
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{"choices": [')
            return True

        for worker in rig.decode:
            worker.behave = half
        posted = asyncio.create_task(rig.post(ASKED[path], path))
        await until(lambda: sum(len(worker.seen) for worker in rig.decode) == 1)
        await asyncio.sleep(0.02)
        (connection,) = rig.connections
        assert isinstance(connection.flow, Flow)
        connection.flow.silent()
        status, body = await posted
        assert (status, b"whole" in body) == (200, True)

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize(("determined", "told"), [(True, "done"), (False, "refused")])
@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_ends_before_its_last_event_is_broken(path: str, determined: bool, told: str):
    """A worker whose streams ended early was counted as one that answers, and nobody was asked for the rest."""

    async def go(rig: Rig) -> None:
        async def early(_: Any, writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = says(TEXT)
            return await says(TEXT[:2], end=False)({"stream": True}, writer)

        for worker in rig.decode:
            worker.behave = early
        _, body = await rig.post({**ASKED[path], "stream": True, **({"temperature": 0} if determined else {})}, path)
        deltas = [line for line in body.split(b"\n") if b"_delta" in line or b".delta" in line]
        said = [word for word in (b'"Hel"', b'"lo."') for line in deltas if word in line]
        assert said == [b'"Hel"', b'"lo."'][: 1 + determined]
        assert (b"ended early" in body) is not determined
        assert rig.context.metrics.resumed == {told: 1}
        assert (rig.context.metrics.of("t", "r").errors, rig.context.metrics.streams_broken) == (1, int(not determined))

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_is_no_utf8_is_an_error_at_once(path: str, streamed: bool):
    """It was an exception in the connection, and the request went from worker to worker."""

    async def go(rig: Rig) -> None:
        whole = json.dumps(called("{}")).encode().replace(b'"f"', b'"\xff"')

        async def streams(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for event in events([{"content": "Hel"}, {"content": "X!"}]):
                said = event.replace(b"X!", b"\xff")
                writer.write(b"%x\r\n%b\r\n" % (len(said), said))
            writer.write(b"0\r\n\r\n")
            return True

        status, body = await told(rig, path, streams if streamed else answers(whole), stream=streamed)
        assert (status, b"not a chat completion" in body) == (200 if streamed else 502, True)
        assert len(rig.decode[0].seen) == 1

    run(go, prefill=0)


@pytest.mark.parametrize("path", ASKED)
def test_a_refusal_that_is_no_utf8_is_told_as_far_as_it_can_be_read(path: str):
    async def go(rig: Rig) -> None:
        async def refuses(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            said = b'{"error": {"message": "bad \xff word"}}'
            writer.write(b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
            return True

        status, body = await told(rig, path, refuses)
        assert (status, "bad" in json.loads(body)["error"]["message"]) == (400, True)
        assert len(rig.decode[0].seen) == 1

    run(go, prefill=0)


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_can_be_sent_back_as_it_came(streamed: bool):
    """Nothing is stored, so that clients send `response.output` with the next turn; ours was refused for its reasoning."""

    async def go(rig: Rig) -> None:
        _, body = await told(rig, "/v1/responses", says(THOUGHT), stream=streamed)
        last = json.loads(body.split(b"data: ")[-1].split(b"\n\n")[0] if streamed else body)
        output = last.get("response", last)["output"]
        assert [item["type"] for item in output] == ["reasoning", "message"]
        turns = [{"role": "user", "content": "a"}, *output, {"role": "user", "content": "b"}]
        status, body = await told(rig, "/v1/responses", says(THOUGHT), input=turns)
        assert (status, [(m["role"], m["content"]) for m in rig.decode[0].seen[-1]["messages"]]) == (
            200, [("user", "a"), ("assistant", "Yes"), ("user", "b")],
        )  # fmt: skip

    run(go, prefill=0)


DETAILS: list[tuple[Any, int]] = [({"reasoning_tokens": 3}, 3), ({"reasoning_tokens": None}, 0), (None, 0)]


@pytest.mark.parametrize(("details", "thought"), DETAILS)
@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_of_thoughts_are_told_as_the_engine_counted_them(streamed: bool, details: Any, thought: int):
    """A response always said 0; vLLM with a reasoning parser counts them."""
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": details}
    said = {
        "choices": [{"index": 0, "delta": {"content": "a"}, "message": {"content": "a"}, "finish_reason": "stop"}],
        "usage": usage,
    }
    for path, asked in ASKED.items():
        one = translation_of(path.encode(), json.dumps({**asked, "stream": streamed}).encode(), "r")
        assert one is not None
        raw = json.dumps(said).encode()
        told = one.feed(b"data: %b\n\ndata: [DONE]\n\n" % raw if streamed else raw) + one.end()
        assert (b'"reasoning_tokens":%d' % thought if path == "/v1/responses" else b'"output_tokens":9') in told
        assert (b'"thinking_tokens":3' in told) == (path == "/v1/messages" and thought > 0)


USER = {"role": "user", "content": "a"}
THINKS = {"type": "thinking", "thinking": "Hm.", "signature": ""}
USES = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def thinks(*said: str) -> list[dict[str, Any]]:
    """Items of a response, one each."""
    return [{"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": one}]} for one in said]


def sent_with(path: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that a worker gets."""
    translation = translation_of(path.encode(), json.dumps({**ASKED[path], ITEMS[path]: turns}).encode(), "r")
    assert translation is not None
    messages: list[dict[str, Any]] = json.loads(translation.take_body())["messages"]
    return messages


ITEMS = {"/v1/messages": "messages", "/v1/responses": "input"}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
SAYS = {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize(
    ("path", "turns", "sent"),
    [
        ("/v1/messages", [{"role": "assistant", "content": [THINKS, USES]}], [{"tool_calls": [CALLED], "reasoning": "Hm."}]),
        ("/v1/messages", [{"role": "assistant", "content": [THINKS, {"type": "text", "text": "Yes"}, THINKS]}],
         [{"content": "Yes", "reasoning": "Hm.Hm."}]),
        ("/v1/messages", [{"role": "assistant", "content": [THINKS]}], []),
        ("/v1/responses", [*thinks("Hm."), CALL_ITEM], [{"tool_calls": [CALLED], "reasoning": "Hm."}]),
        ("/v1/responses", [*thinks("H", "m."), SAYS, CALL_ITEM],
         [{"content": "Yes", "tool_calls": [CALLED], "reasoning": "Hm."}]),
        ("/v1/responses", [SAYS, *thinks("Hm."), CALL_ITEM], [{"content": "Yes", "tool_calls": [CALLED], "reasoning": "Hm."}]),
        ("/v1/responses", [*thinks("Hm."), CALL_ITEM, SAYS], [{"tool_calls": [CALLED], "reasoning": "Hm."}, {"content": "Yes"}]),
        ("/v1/responses", thinks("Hm."), []),
        ("/v1/responses", [*thinks(""), SAYS], [{"content": "Yes"}]),
        ("/v1/responses", [{"type": "reasoning", "summary": [], "content": None}, SAYS], [{"content": "Yes"}]),
    ],
)  # fmt: skip
def test_a_model_is_given_its_thoughts_again(path: str, turns: list[dict[str, Any]], sent: list[dict[str, Any]]):
    """They were dropped: a model that thinks between its calls (gpt-oss, Qwen3, GLM) began anew after each. vLLM's own endpoints
    give them to the template, which knows what of it its model is to see."""
    assert sent_with(path, [USER, *turns, USER]) == [USER, *({"role": "assistant", **one} for one in sent), USER]


def test_what_only_informs_is_passed_over():
    """A conversation that began elsewhere was refused for its sealed thoughts, and the whole request's cache_control by name."""

    async def go(rig: Rig) -> None:
        sealed = [{"type": "redacted_thinking", "data": "abc"}, {"type": "text", "text": "a"}]
        turns = [{"role": "assistant", "content": sealed}, {"role": "user", "content": "b"}]
        status, _ = await told(rig, "/v1/messages", says(THOUGHT), messages=turns, cache_control={"type": "ephemeral"})
        said = rig.decode[0].seen[-1]
        assert (status, said["messages"]) == (200, [{"role": "assistant", "content": "a"}, turns[1]])
        assert "cache_control" not in said

    run(go, prefill=0)


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_tool_is_as_strict_as_it_was_asked_for(strict: bool | None):
    """It was dropped, as if any arguments would do: vLLM keeps the model to the schema of a strict one."""
    schema = {"type": "object"}
    tool = {"name": "f", "input_schema": schema, **({} if strict is None else {"strict": strict})}
    one = translation_of(b"/v1/messages", json.dumps({**ASKED["/v1/messages"], "tools": [tool]}).encode(), "r")
    assert one is not None
    sent = json.loads(one.take_body())["tools"][0]["function"]
    assert sent == {"name": "f", "parameters": schema, **({} if strict is None else {"strict": strict})}


BILLED = "x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cch=1f2e3;"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("system", "said"),
    [
        ([BILLED, "You are", "kind"], "You are\nkind"),
        ([f"{BILLED}\nYou are"], "You are"),
        (f"{BILLED}\nYou are", "You are"),
        ([BILLED], None),
        (["You are", "", BILLED], "You are\n"),
        (["of x-anthropic-billing-header"], "of x-anthropic-billing-header"),
    ],
)
def test_prompts_of_claude_code_begin_alike(path: str, system: str | list[str], said: str | None):
    """Its first line differs in each request: none went where the beginning of the one before was cached."""
    parts = system if isinstance(system, str) else [{"type": "text", "text": text} for text in system]
    one = translation_of(path.encode(), json.dumps({**ASKED["/v1/messages"], "system": parts}).encode(), "r")
    assert one is not None
    before = [] if said is None else [{"role": "system", "content": said}]
    assert json.loads(one.take_body())["messages"] == [*before, *ASKED["/v1/messages"]["messages"]]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": SCHEMA}}
ENABLED = {"type": "enabled", "budget_tokens": 1_024}
THOUGHTFUL = ("thinking_token_budget", "reasoning_effort", "response_format")


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        pytest.param({}, (None, None, None), id="silent"),
        pytest.param({"thinking": {"type": "disabled"}}, (None, "none", None), id="disabled"),
        pytest.param({"thinking": ENABLED}, (1_024, None, None), id="enabled"),
        pytest.param({"thinking": {**ENABLED, "display": "omitted"}}, (1_024, None, None), id="not-displayed"),
        pytest.param({"thinking": {"type": "adaptive"}}, (None, None, None), id="adaptive"),
        pytest.param({"output_config": {"effort": "max"}}, (None, "max", None), id="effort"),
        pytest.param(
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, (None, "none", None), id="disabled-wins"
        ),
        pytest.param({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, (None, None, FORM), id="form"),
    ],
)
def test_a_model_is_told_how_to_think(more: dict[str, Any], sent: tuple[Any, ...]):
    """What was disabled was taken, and told nobody: Qwen3 thinks unless it is told not to. The others were refused, each time. As
    vLLM 0.32's own endpoint has it (`_handle_thinking`, `_handle_output_config`)."""

    async def go(rig: Rig) -> None:
        status, _ = await told(rig, "/v1/messages", says(THOUGHT), **{**more, "max_tokens": 2_000})
        assert (status, tuple(rig.decode[0].seen[-1].get(name) for name in THOUGHTFUL)) == (200, sent)

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("more", "rendered"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": ENABLED}, None),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}),
    ],
)
def test_a_prompt_is_counted_as_it_will_be_rendered(more: dict[str, Any], rendered: dict[str, Any] | None):
    """Qwen3's has four tokens more when it is not to think, which a count passed over. /tokenize has no `reasoning_effort`: what
    vLLM's chat gives to the template for it (`build_chat_params`)."""
    one = translation_of(b"/v1/messages/count_tokens", json.dumps({**ASKED["/v1/messages"], **more}).encode(), "r")
    assert one is not None
    assert json.loads(one.take_body()).get("chat_template_kwargs") == rendered


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is to be at least 1024"),
        ({"thinking": {**ENABLED, "budget_tokens": 1_023}}, "thinking.budget_tokens is to be at least 1024"),
        (
            {"thinking": {**ENABLED, "budget_tokens": 2_000}},
            "thinking.budget_tokens is to be less than max_tokens, which is 2000",
        ),
        ({"thinking": {"type": "much"}}, "thinking.type: Invalid enum value 'much'"),
        ({"output_config": {"effort": "some"}}, "output_config.effort: Invalid enum value 'some'"),
        ({"output_config": {"form": 1}}, "output_config"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: Invalid enum value 'xml'"),
    ],
)
def test_a_thought_that_cannot_be_had_is_refused_by_its_name(more: dict[str, Any], words: str):
    async def go(rig: Rig) -> None:
        status, answer = await told(rig, "/v1/messages", says(THOUGHT), **{**more, "max_tokens": 2_000})
        assert (status, rig.decode[0].seen) == (400, [])
        assert words.encode() in answer

    run(go, prefill=0)


SAID: dict[str, Any] = {"type": "text", "text": "The answer is ("}
GOES_ON = (False, True)
ANEW = (None, None)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("turns", "sent"),
    [
        pytest.param([USER, {"role": "assistant", "content": SAID["text"]}], GOES_ON, id="text"),
        pytest.param([USER, {"role": "assistant", "content": [THINKS, SAID]}], GOES_ON, id="thought-and-text"),
        pytest.param([USER, {"role": "assistant", "content": " "}], ANEW, id="blank"),
        pytest.param([USER, {"role": "assistant", "content": []}], ANEW, id="nothing"),
        pytest.param([USER, {"role": "assistant", "content": [SAID, THINKS]}], ANEW, id="text-and-thought"),
        pytest.param([USER, {"role": "assistant", "content": [USES, SAID]}], ANEW, id="a-call-too"),
        pytest.param([USER, {"role": "assistant", "content": [SAID]}, USER], ANEW, id="the-user-answered"),
    ],
)
def test_what_the_assistant_began_is_gone_on_with(path: str, turns: list[dict[str, Any]], sent: tuple[Any, ...]):
    """ "If the final message uses the assistant role, the response content will continue immediately from the content in that
    message" (Anthropic's SDK): it was answered by a new turn, as if what was begun had been said."""
    one = translation_of(path.encode(), json.dumps({**ASKED["/v1/messages"], "messages": turns}).encode(), "r")
    assert one is not None
    body = json.loads(one.take_body())
    before = None if path == "/v1/messages" else True
    expected = (before, None) if sent == ANEW else sent
    assert (body.get("add_generation_prompt"), body.get("continue_final_message")) == expected

"""Messages of a conversation: what the chat template is given of them, and what is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleet_router.tokeniser import Tokeniser, UnreadableError
from fleet_worker.engine.errors import BadRequestError
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.protocol import ChatMessage, text_messages
from fleet_worker.engine.reading import Terms, read_request
from fleet_worker.engine.text import Text
from fleet_worker.engine.tokens import detokenize, tokenize
from tests.fleet_worker.engine.test_server import serve

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(("role", "field"), [("user", "tool_calls"), ("assistant", "function_call"), ("assistant", "audio")])
def test_a_message_that_holds_more_than_text_is_refused(role: str, field: str):
    """It was passed over: a conversation in which tools were called was answered as if they had not been."""
    said = {"role": role, "content": None, field: [CALL]}
    messages = msgspec.convert([{"role": "user", "content": "b"}, said], list[ChatMessage])
    with pytest.raises(BadRequestError, match=rf"^messages\[1\]\.{field} is not supported by the torch engine$"):
        text_messages(messages)
    nothings: tuple[list[Any] | None, ...] = ([], None)
    for nothing in nothings:
        given = msgspec.convert({**said, field: nothing}, ChatMessage)
        assert text_messages([given]) == [{"role": role, "content": ""}]


GUARD = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}|"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("how?", "user:how?|"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "user:a|b|"),
        ("", "user:|"),
        (None, "user:"),
    ],
)
def test_a_template_that_goes_through_parts_is_given_them(tiny: Path, tmp_path: Path, content: Any, said: str):
    """As vLLM does. Llama-Guard-3-1B's was given a text, found no parts in it, and judged conversations without a word in them:
    every one was safe. Routers that tokenise think the same."""
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(GUARD)
    text, row = Text(tmp_path), {"role": "user", "content": content}
    body = msgspec.json.encode({"model": "m", "messages": [row]})
    read = read_request(body, "chat", text, Terms(("m",), 10_000, 10_000))
    assert list(read.tokens) == text.encode(said, add_special=False)
    assert tokenize(body, text, ("m",), 10_000)["tokens"] == list(read.tokens)
    if not isinstance(content, list):
        files = {name: (tmp_path / name).read_text() for name in ("tokenizer.json", "chat_template.jinja")}
        assert Tokeniser(files).render(msgspec.json.encode([row])) == said


QWEN = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% else %}[You are Qwen]{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
ASKED = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        (QWEN, [{"role": "developer", "content": "be brief"}, ASKED], "[be brief]user:q;"),
        (QWEN, [{"role": "system", "content": "a"}, ASKED, {"role": "developer", "content": "b"}], "[a\n\nb]user:q;"),
        (QWEN, [ASKED, {"role": "developer", "content": "b"}, {"role": "system", "content": ""}], "[b]user:q;"),
        (QWEN, [{"role": "system", "content": "a"}, ASKED, {"role": "system", "content": "b"}], "[a]user:q;"),
        ("{% for m in messages %}{{ m.role }}{{ m.role == 'developer' }}{% endfor %}", [{"role": "developer"}], "developerTrue"),
        ("{% for m in messages %}{{ m.role }}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
         [{"role": "developer", "content": "a"}], "systema"),
    ],
    ids=["first", "later", "only-later", "nobody-is-one", "known", "parts"],
)  # fmt: skip
def test_a_developers_message_is_the_systems_where_the_template_does_not_know_it(
    tiny: Path, tmp_path: Path, source: str, messages: list[dict[str, Any]], said: str
):
    """As with vLLM. Qwen2.5's template passes over it and writes its own default instead: the instructions were gone; Mistral's
    refused the request."""
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    text = Text(tmp_path)
    read = read_request(
        msgspec.json.encode({"model": "m", "messages": messages}), "chat", text, Terms(("m",), 10_000, 10_000)
    )  # fmt: skip
    assert list(read.tokens) == text.encode(said, add_special=False)
    files = {name: (tmp_path / name).read_text() for name in ("tokenizer.json", "chat_template.jinja")}
    if any(row["role"] == "developer" for row in messages):
        with pytest.raises(UnreadableError):
            Tokeniser(files).render(msgspec.json.encode(messages))


def test_a_tools_result_is_one_text_for_every_template():
    rows = [{"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert text_messages(msgspec.convert(rows, list[ChatMessage]), in_parts=True) == [{"role": "tool", "content": "a\nb"}]


THINKS = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"reasoning_content": "hm"}, "user:a;assistant:<think>hm</think>b;"),
        ({"reasoning": "hm"}, "user:a;assistant:<think>hm</think>b;"),
        ({"reasoning": "hm", "reasoning_content": "older"}, "user:a;assistant:<think>hm</think>b;"),
        ({"reasoning": None, "reasoning_content": ""}, "user:a;assistant:b;"),
    ],
)
def test_what_was_thought_comes_to_the_template_under_both_of_its_names(
    tiny: Path, tmp_path: Path, more: dict[str, Any], said: str
):
    """As by vLLM. It was left out, also of what routers make of /v1/responses: 200, and an answer to another prompt."""
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    text, rows = Text(tmp_path), [{"role": "user", "content": "a", **more}, {"role": "assistant", "content": "b", **more}]
    body = msgspec.json.encode({"model": "m", "messages": rows})
    assert text.decode(read_request(body, "chat", text, Terms(("m",), 10_000, 10_000)).tokens) == said


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"b": 1, "a": [2]}', {"b": 1, "a": [2]}), ({"b": 1}, {"b": 1}), ("", {}), (None, {}), ("{", {}), ("[1]", {}), ("7", {}),
        ("[" * 100_000, {}),
    ],
    ids=["text", "object", "empty", "none", "no-json", "no-object", "number", "deep"],
)  # fmt: skip
def test_calls_of_tools_come_to_the_template_with_their_arguments_as_objects(arguments: Any, given: dict[str, Any]):
    """As vLLM gives them: a conversation with tools in its past was refused, and results had lost the call they belong to."""
    function = {"name": "f"} if arguments is None else {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
    said = [
        {"role": "user", "content": "b", "name": "ann", "tool_call_id": "nobody's"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
    ]
    assert text_messages(msgspec.convert(said, list[ChatMessage])) == [
        {"role": "user", "content": "b", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "a"},
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({}, "messages[0].tool_calls[0].function is required"),
        ({"function": {}}, "messages[0].tool_calls[0].function.name is required"),
        ({"function": {"name": "f", "arguments": 7}}, "messages[0].tool_calls[0].function.arguments: Expected"),
        ({**CALL, "type": "custom"}, "messages[0].tool_calls[0].type: Invalid enum value 'custom'"),
        (5, "messages[0].tool_calls[0]: Expected `object`"),
    ],
)
def test_a_call_of_a_tool_that_is_none_is_refused_by_its_path(call: Any, words: str):
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        asked = {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]}
        answer = await client.post("/v1/chat/completions", json=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["message"][: len(words)]) == (400, "messages", words)

    serve(scenario)


def test_calls_of_tools_are_refused_by_name_where_the_template_does_not_know_them():
    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}]}
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await client.post(path, json=asked)
            words = "messages[1].tool_calls: the model's chat template does not know calls of tools"
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)

    serve(scenario)


EFFORT = (
    "{{ messages[0].content }}|{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}|"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.mark.parametrize(
    ("effort", "said"), [("high", "a|high|"), ("none", "a|none|<think></think>"), (None, "a||")], ids=["high", "none", "unsaid"]
)
def test_a_reasoning_effort_comes_to_the_template(tiny: Path, tmp_path: Path, effort: str | None, said: str):
    """As by vLLM; routers make one of what /v1/messages and /v1/responses say of thinking. It was passed over: a client that
    wanted no thoughts was given them, with 200, and the count was of another prompt than vLLM's."""
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(EFFORT)
    text, asked = Text(tmp_path), {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    read = read_request(msgspec.json.encode({**asked, "reasoning_effort": effort}), "chat", text, Terms(("m",), 10_000, 10_000))
    assert text.decode(read.tokens) == said
    arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort is not None else None
    counted = tokenize(msgspec.json.encode({**asked, "chat_template_kwargs": arguments}), text, ("m",), 10_000)
    assert counted["tokens"] == list(read.tokens)


def test_detokenize_names_the_special_tokens_of_a_prompt(tiny: Path):
    """As vLLM's. They were left out: who looked at what a conversation becomes found `user: b` for <s>user: b, and no sign of an
    end token in it."""
    from transformers import AutoTokenizer

    text = Text(tiny)
    asked = {"messages": [{"role": "user", "content": "b</s>"}]}
    made = tokenize(msgspec.json.encode(asked), text, (), 100)["tokens"]
    told = detokenize(msgspec.json.encode({"tokens": made}), text, (), 100)
    assert told == {"prompt": AutoTokenizer.from_pretrained(tiny).decode(made)} == {"prompt": "<s>user: b</s>\nassistant: "}


@pytest.mark.parametrize(
    ("field", "served", "refused"),
    [
        ("tools", ([], None), [{"type": "function", "function": {"name": "f", "description": "of a city " * 40}}]),
        ("continue_final_message", (False, None), True),
        ("chat_template", (None,), "{{ messages }}"),
    ],
)
def test_what_no_chat_is_given_is_not_left_out_of_its_count(field: str, served: tuple[Any, ...], refused: Any):
    """/v1/messages/count_tokens said 15 for a request with tools, which are most of what coding agents send, and which the same
    engine refuses a moment later."""

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        for path in ("/v1/chat/completions", "/tokenize"):
            for value in served:
                assert (await client.post(path, json={**asked, field: value})).status_code == 200
            answer = await client.post(path, json={**asked, field: refused})
            error = answer.json()["error"]
            words = f"{field} is not supported by the torch engine"
            assert (answer.status_code, error["message"], error["param"]) == (400, words, field)

    serve(scenario)


@pytest.mark.parametrize(("texts", "content"), [([], ""), (["a"], "a"), (["a", "b c"], "a\nb c"), (["a\n", "", "b"], "a\n\n\nb")])
def test_each_part_of_a_content_has_lines_of_its_own(texts: list[str], content: str):
    """As in vLLM, and as routers join those of other dialects: the last word of one was glued to the first of the next."""
    said = msgspec.convert({"role": "user", "content": [{"type": "text", "text": text} for text in texts]}, ChatMessage)
    assert text_messages([said]) == [{"role": "user", "content": content}]

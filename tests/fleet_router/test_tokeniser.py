"""The router's own tokenizer and chat template: prompts to token ids as engines make them, or left to them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import pytest

from fleet_router.tokeniser import MESSAGES_MOST, Tokeniser, UnreadableError, fetch
from fleet_worker.engine.text import Text
from fleet_worker.tinymodel import make_tiny_model

PROMPT = "The router moves blocks of keys and values between two workers before noon again. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "more",
    [{"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "x" * 9_000}}]}, {"reasoning_content": "x" * 9_000}],
)
def test_a_conversation_with_more_than_text_is_the_engines_to_count(folder: Path, more: dict[str, object]):
    """It was counted without its calls of tools: a few tokens, whatever their arguments were, against the limit of input."""
    files = {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    made, said = Tokeniser(files), {"role": "assistant", "content": "a", "name": None}
    assert made.render(json.dumps([said]).encode())
    with pytest.raises(UnreadableError):
        made.render(json.dumps([{**said, **more}]).encode())


@pytest.mark.parametrize(("role", "readable"), [("system", False), ("user", True)])
def test_claude_codes_first_line_is_the_engines_to_take_out(folder: Path, role: str, readable: bool):
    """vLLM does, of a system's message: none of a gateway's conversations was found, and workers owed us events."""
    files = {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    said = json.dumps([{"role": role, "content": "x-anthropic-billing-header: cch=1f2e3;\nYou are kind."}]).encode()
    made = Tokeniser(files)
    if readable:
        assert "You are kind." in made.render(said)
    else:
        with pytest.raises(UnreadableError):
            made.render(said)


@pytest.mark.parametrize("texts", [[], ["a"], ["a", "b"], ["a", ""]])
def test_content_of_several_parts_is_the_engines_to_put_together(folder: Path, texts: list[str]):
    """vLLM puts a line break between them: its workers owed us events of blocks that they never computed."""
    files = {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    made, parts = Tokeniser(files), [{"type": "text", "text": text} for text in texts]
    if len(texts) > 1:
        with pytest.raises(UnreadableError):
            made.render(json.dumps([{"role": "user", "content": parts}]).encode())
    else:
        plain = json.dumps([{"role": "user", "content": "".join(texts)}]).encode()
        assert made.render(json.dumps([{"role": "user", "content": parts}]).encode()) == made.render(plain)


@pytest.mark.parametrize(
    "template",
    [
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}{{ messages[0].content }}",
    ],
)
def test_a_template_that_engines_render_each_in_their_way_is_left_to_them(folder: Path, template: str):
    """Llama 3.2's says the day, and vLLM knows it: no conversation was ever found, and its workers owed us events."""
    tokenizer, raw = (folder / "tokenizer.json").read_text(), json.dumps([{"role": "user", "content": "<a>"}]).encode()
    made = Tokeniser({"tokenizer.json": tokenizer, "chat_template.jinja": template})
    with pytest.raises(UnreadableError):
        made.render(raw)
    template = "{% if tools %}" + template + "{% endif %}{{ messages[0].content }}"
    assert Tokeniser({"tokenizer.json": tokenizer, "chat_template.jinja": template}).render(raw) == "<a>"


TEMPLATES = [
    "{% if tools is not none %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% if documents is not none %}D{% endif %}{{ bos_token }}{{ eos_token }}{{ sep_token }}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}\n{% endfor %}",
    "{% for m in messages %}\n  {{ m.content | trim }}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}",
    "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{% endfor %}",
    "{% set x = 1 %}{% for m in messages %}{% generation %}\n{% set x = 2 %}{{ m.content ~ x }}"
    "{% endgeneration %}\n{{ x }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_hugging_face_renders_them(folder: Path, tmp_path: Path, template: str):
    """vLLM renders with it. `tools is not none` was true for us where nobody had given any: no conversation was ever found."""
    from transformers.utils.chat_template_utils import render_jinja_template

    made = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(made))
    rows = [{"role": "system", "content": " a "}, {"role": "user", "content": "b < 'é'"}]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = render_jinja_template([rows], chat_template=template, add_generation_prompt=True, **special)[0][0]
    files = {name: (tmp_path / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    assert Tokeniser(files).render(json.dumps(rows).encode()) == theirs
    assert Text(tmp_path).render_chat(rows) == theirs


@pytest.mark.parametrize("template", ["{% no_such_tag %}", "{% for", "{{ " + "(" * 5000])
def test_a_template_that_cannot_be_read_leaves_the_tokenizer(folder: Path, template: str):
    """It left none, and it was fetched again every five seconds."""
    made = Tokeniser({"tokenizer.json": (folder / "tokenizer.json").read_text(), "chat_template.jinja": template})
    assert made.usable
    with pytest.raises(UnreadableError):
        made.render(b'[{"role": "user", "content": "a"}]')


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def refused(made: Tokeniser, messages: bytes) -> str:
    """Why. What pytest has for that costs as much as four refusals: a thousand of them were as dear as the attempt."""
    try:
        return made.render(messages)
    except UnreadableError as error:
        return str(error)


def test_a_template_without_end_stands_the_loop_once_and_shortly(folder: Path):
    """Incident: each conversation stood all streams until the kubelet restarted the router. Short ones are still read."""
    source = "{% if messages | length > 2 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    made = Tokeniser({"tokenizer.json": (folder / "tokenizer.json").read_text(), "chat_template.jinja": source})
    long, short = (json.dumps([{"role": "user", "content": "a"}] * many).encode() for many in (3, 2))
    begun = time.process_time()
    with pytest.raises(UnreadableError, match="it comes to no end"):
        made.render(long)
    once = time.process_time() - begun
    why = Counter(refused(made, long) for _ in range(1_000))
    took = time.process_time() - begun
    assert why == {"the template took too long over no more": 1_000}
    assert took < 2 * once  # a thousand refusals are cheaper than one attempt
    assert made.render(short) == "a"


def test_one_client_does_not_stop_the_counting_of_others(folder: Path):
    """As DeepSeek's template has it: what all `system` messages say is joined at each of them. 40 KB of them cost too much, and
    no conversation of as many bytes was rendered from then on."""
    source = (
        "{% set ns = namespace(said='') %}{% for message in messages %}{% if message['role'] == 'system' %}"
        "{% set ns.said = ns.said + '\n\n' + message['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.said }}"
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}"
        "{% endfor %}"
    )
    made = Tokeniser({"tokenizer.json": (folder / "tokenizer.json").read_text(), "chat_template.jinja": source})
    with pytest.raises(UnreadableError, match="it comes to no end"):
        made.render(json.dumps([{"role": "system", "content": "a" * 90}] * MESSAGES_MOST).encode())
    assert made.render(json.dumps([{"role": "user", "content": "a" * 200_000}]).encode()).endswith("a" * 200_000)


def test_the_longest_conversation_is_within_a_routers_bounds(folder: Path):
    """As Llama 3's template has it, each message of 60 characters."""
    source = (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
        "+ message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    )
    made = Tokeniser({"tokenizer.json": (folder / "tokenizer.json").read_text(), "chat_template.jinja": source})
    assert (
        made.render(json.dumps([{"role": "user", "content": "a b " * 15}] * MESSAGES_MOST).encode()).count("<|eot_id|>")
        == MESSAGES_MOST
    )


def test_the_tokenizer_agrees_with_the_engines(folder: Path):
    files = {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    mine, theirs = Tokeniser(files), Text(folder)
    assert mine.usable
    assert mine.splits
    for sample in ("", "a", PROMPT, "été 東京 \n\n  spaces   and\ttabs"):
        assert [*mine.lead, *mine.encode([sample])[0]] == theirs.encode(sample)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "{}"},
        {"tokenizer.json": "no JSON"},
        {},
    ],
)
def test_what_is_no_tokenizer_is_refused(files: dict[str, str]):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokeniser(files)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
        b"",
    ],
)
def test_an_agent_without_a_tokenizer_is_an_os_error(answer: bytes):
    async def go() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        with pytest.raises(OSError):  # noqa: PT011
            await fetch("127.0.0.1", server.sockets[0].getsockname()[1])
        server.close()

    asyncio.run(go())

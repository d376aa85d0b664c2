"""Workers that make other tokens of a prompt than their model's files do: an option of their engine says so."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet_router.agreeing import CONVERSATIONS, Agreement, agreement
from fleet_router.knowledge import NOT_KNOWN, Knowledge
from fleet_router.tokeniser import Tokeniser
from fleet_wire.endpoints import Endpoint
from fleet_worker.engine.text import Text
from fleet_worker.tinymodel import make_tiny_model
from tests.fleet_router.rig import until
from tests.fleet_router.test_knowledge import agent, counted, endpoint

Tells = Callable[[Text, dict[str, Any]], list[int] | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def truly(text: Text, asked: dict[str, Any]) -> list[int] | None:
    if "prompt" in asked:
        return text.encode(asked["prompt"])
    return text.encode(text.render_chat(asked["messages"]), add_special=False)


def templated(text: Text, asked: dict[str, Any]) -> list[int] | None:
    """vLLM with --chat-template."""
    return truly(text, asked) if "prompt" in asked else text.encode("Chat: " + asked["messages"][-1]["content"])


def late(text: Text, asked: dict[str, Any]) -> list[int] | None:
    """A template that says something else of orders alone."""
    return templated(text, asked) if asked.get("messages") == CONVERSATIONS[-1] else truly(text, asked)


def other(text: Text, asked: dict[str, Any]) -> list[int] | None:
    """vLLM with --tokenizer."""
    return [*(truly(text, asked) or ()), 7]


def mute(_text: Text, _asked: dict[str, Any]) -> list[int] | None:
    return None


async def engine(host: str, folder: Path, tells: Tells) -> asyncio.Server:
    """The one path of a worker that a router asks."""
    text = Text(folder)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        told = tells(text, asked) if head.startswith(b"POST /tokenize ") else None
        body = json.dumps({"error": {}} if told is None else {"count": len(told), "max_model_len": 1, "tokens": told}).encode()
        status = b"404 Not Found" if told is None else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, host, 8000)


@pytest.mark.parametrize(
    ("tells", "found"),
    [
        (truly, Agreement(text=True, chat=True)),
        (templated, Agreement(text=True, chat=False)),
        (late, Agreement(text=True, chat=False)),
        (other, Agreement(text=False, chat=False)),
        (mute, Agreement(text=True, chat=True)),
    ],
)
def test_a_worker_is_asked_what_it_makes_of_a_few_samples(folder: Path, tells: Tells, found: Agreement):
    async def go() -> None:
        files = {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
        server = await engine("127.85.0.1", folder, tells)
        assert await agreement(Tokeniser(files), worker("127.85.0.1")) == found
        server.close()
        assert await agreement(Tokeniser(files), worker("127.85.0.2")) == Agreement(text=True, chat=True)  # nobody is there

    asyncio.run(go())


def worker(host: str) -> Endpoint:
    return msgspec.structs.replace(endpoint(host), http_port=8000)


@pytest.mark.parametrize(("tells", "text", "chat"), [(truly, True, True), (templated, True, False), (other, False, False)])
def test_what_a_worker_makes_other_tokens_of_is_counted_by_nobody_here(folder: Path, tells: Tells, text: bool, chat: bool):
    """With --chat-template the router counted by the model's own template: conversations were refused for lengths that they did
    not have, and their blocks looked for under names that no worker had."""
    host = "127.85.0.3"

    async def go() -> None:
        said = list[str]()
        files, server, knowledge = (
            await agent(host, folder),
            await engine(host, folder, tells),
            Knowledge(time.monotonic, said.append),
        )
        try:
            knowledge.follow([(worker(host), 1)])
            knowledge.tick(time.monotonic() + 60.0)
            await until(lambda: knowledge._fetching is None)
            knowledge.believed.index.join("w", 1, "c")
            assert (await counted(knowledge, {"prompt": "Once upon a time"}) != NOT_KNOWN) is text
            conversation = [{"role": "user", "content": "Why?"}]
            assert (await counted(knowledge, {"messages": conversation}, chat=True) != NOT_KNOWN) is chat
            assert any("makes other tokens" in line for line in said) is not chat
            knowledge.follow([(msgspec.structs.replace(worker("127.85.0.4"), uid="x", compat="d"), 2)])
            knowledge.tick(time.monotonic() + 120.0)
            assert knowledge._renders == {}  # it left, and what it said with it
        finally:
            await asyncio.to_thread(knowledge.stop)
            server.close()
            files.close()

    asyncio.run(go())


def test_workers_that_are_alone_when_they_have_said_what_they_make_have_the_tokenizer_read_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """An update: the last of the old workers left while one of the new ones was asked. The tokenizer went with the old ones, the
    new ones were believed to have it, and no text was counted until the router began anew."""
    host, asked, says = "127.85.0.6", asyncio.Event(), asyncio.Event()

    async def slowly(*_: Any) -> Agreement:
        asked.set()
        await says.wait()
        return Agreement(text=True, chat=True)

    async def go() -> None:
        server, knowledge = await agent(host, folder), Knowledge(time.monotonic, list[str]().append)
        old, new = worker(host), msgspec.structs.replace(worker(host), uid="new", compat="d")
        try:
            knowledge.follow([(old, 1)])
            knowledge.tick(time.monotonic() + 60.0)
            await until(lambda: knowledge._fetching is None)
            monkeypatch.setattr("fleet_router.knowledge.agreement", slowly)
            knowledge.follow([(old, 1), (new, 2)])
            knowledge.tick(time.monotonic() + 120.0)
            await asked.wait()
            knowledge.follow([(new, 2)])
            knowledge.tick(time.monotonic() + 121.0)
            says.set()
            await until(lambda: knowledge._fetching is None)
            knowledge.tick(time.monotonic() + 180.0)
            await until(lambda: knowledge._fetching is None)
            knowledge.believed.index.join("new", 2, "d")
            assert await counted(knowledge, {"prompt": "Once upon a time"}) != NOT_KNOWN
        finally:
            await asyncio.to_thread(knowledge.stop)
            server.close()

    asyncio.run(go())

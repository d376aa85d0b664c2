"""What is remembered of requests that are over holds nothing of their bodies: some hundred are remembered, some thousand
connections stay, and each body may have megabytes."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from fleet_router.config import HttpBounds
from fleet_router.request import parse_alone, parse_body, with_fields
from tests.fleet_router.rig import CONFIG, Rig, answer_of, http, run

TEXT = "and on " * 15_000
REQUESTS = 20
KEPT_MOST_BYTES = len(TEXT) * REQUESTS // 4
"""Connections, records and streams of both sides are a tenth."""
LARGE = msgspec.structs.replace(CONFIG, max_input_tokens=1 << 20, bounds=HttpBounds(body_bytes=4 * len(TEXT)))


def said(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


async def kept_of(rig: Rig, data: bytes, status: int) -> int:
    """Bytes that are kept of so many requests that are over. Each was sent on a connection of its own, which stays."""

    async def ask() -> None:
        reader, writer, _ = await rig.connect()
        writer.write(data)
        assert (await answer_of(reader))[0] == status
        for fake in (*rig.prefill, *rig.decode):
            fake.seen.clear()

    await ask()
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(REQUESTS):
            await ask()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "body", "workers", "status"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": said("http://inside/")}, 1, 400),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "nobody", "content": TEXT}]}, 1, 400),
        ("/v1/responses", {"model": "m", "input": [{"type": "odd", "text": TEXT}]}, 1, 400),
        ("/v1/embeddings", {"model": "nobody's", "input": TEXT}, 1, 404),
        ("/v1/completions", {"model": "m", "prompt": [TEXT, TEXT]}, 1, 400),
        ("/v1/completions", {"model": "m", "prompt": TEXT}, 0, 503),
        ("/v1/completionz", {"model": "m", "prompt": TEXT}, 1, 404),
    ],
    ids=["url", "messages", "responses", "embeddings", "prompts", "no-worker", "path"],
)
def test_nothing_of_a_body_is_kept_of_a_request_that_was_refused(path: str, body: dict[str, Any], workers: int, status: int):
    async def go(rig: Rig) -> None:
        assert await kept_of(rig, http(body, path=path), status) < KEPT_MOST_BYTES

    run(go, prefill=0, decode=workers, config=LARGE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/embeddings", {"input": TEXT}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_nor_of_one_that_was_answered(path: str, body: dict[str, Any]):
    async def go(rig: Rig) -> None:
        assert await kept_of(rig, http({"model": "m", **body}, path=path), 200) < KEPT_MOST_BYTES

    run(go, config=LARGE)


BLANK = b" " * 200_000
ALONE = "alone"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"model":"m","prompt":"hi"' + BLANK + b"}", "prompt"),
        (b'{"model":"m",' + BLANK + b'"messages":[{"role":"user","content":"hi"}]}', "messages"),
        (b'{"model":"m","prompt":"' + b"p" * 100_000 + b'"' + BLANK + b"}", "prompt"),
        (b'{"model":"m","user":"' + BLANK + b'","user":"u","prompt":"hi"}', "prompt"),
        (b'{"model":"m","cache_salt":"' + BLANK + b'","prompt":"hi"}', "prompt"),
        (b'{"model":"m","priority":1,' + BLANK + b'"messages":[{"role":"user","content":"' + b"p" * 9_000 + b'"}]}', "messages"),
        (b'{"model":"m","max_tokens":null,"prompt":"hi"' + BLANK + b"}", "prompt"),
        (b'{"model":"m","input":"hi"' + BLANK + b"}", ALONE),
        (json.dumps({"model": "m", "prompt": TEXT, "tools": ["t" * 90_000]}).encode(), "prompt"),
    ],
    ids=["blanks", "blanks-before", "long", "doubled", "stripped", "stripped-long", "anew", "alone", "tools"],
)
def test_who_waits_is_counted_with_all_that_is_kept_of_it(body: bytes, path: str):
    """Queues have a bound of bytes, and a place in them cost 11 of 200,000. What stands beside a long text is kept twice."""

    def asked(came: bytes) -> Any:
        ask = parse_alone(came, LARGE) if path is ALONE else parse_body(came, path == "messages", LARGE)
        return with_fields(ask, {"max_tokens": msgspec.Raw(b"5")}, b',"max_tokens":5}')

    asked(bytes(bytearray(body)))
    tracemalloc.start()
    try:
        ask = asked(bytes(bytearray(body)))
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 1.5 * ask.size_bytes + 4_000

"""Requests shaped like a real trace, sent with the official OpenAI client, and a ledger of what became of each."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from openai import AsyncOpenAI

TRACE = Path(__file__).parent / "data/mooncake/conversations_200.jsonl"
TRACE_BLOCK_TOKENS = 512
BLOCK_TOKENS = 16
"""A block of the trace becomes one KV block of the tiny model: lengths shrink by 32, what is shared stays shared."""
OUTPUT_SHRINKS_BY = 16
MOST_OUTPUT_TOKENS = 64
FIRST_PLAIN_TOKEN = 8
VOCABULARY = 1_000


@dataclass(frozen=True)
class Request:
    """One line of the trace, scaled down."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class Ledger:
    """What became of every request: its tokens, or the error that it ended with."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    rounds: int = 0


def block_tokens(block: int) -> list[int]:
    """The tokens that stand for one block of the trace: the same for the same id."""
    return random.Random(block).choices(range(FIRST_PLAIN_TOKEN, VOCABULARY), k=BLOCK_TOKENS)


def read_trace() -> list[Request]:
    """The trace's requests in order of time."""
    found = []
    for number, line in enumerate(TRACE.read_text().splitlines()):
        row = json.loads(line)
        prompt = [token for block in row["hash_ids"] for token in block_tokens(block)]
        length = -(-row["input_length"] * BLOCK_TOKENS // TRACE_BLOCK_TOKENS)
        wish = min(MOST_OUTPUT_TOKENS, -(-row["output_length"] // OUTPUT_SHRINKS_BY))
        found.append(Request(number, tuple(prompt[:length]), max(1, wish)))
    return found


async def ask(client: AsyncOpenAI, request: Request) -> list[int]:
    """Tokens of one greedy answer; every other request streams."""
    args = {
        "model": "tiny", "prompt": list(request.prompt), "max_tokens": request.max_tokens, "temperature": 0,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }  # fmt: skip
    if request.number % 2:
        whole = await client.completions.create(**args)
        return list(whole.choices[0].token_ids)
    tokens: list[int] = []
    async for chunk in await client.completions.create(**args, stream=True):
        tokens += chunk.choices[0].token_ids
    return tokens


def first_cause(error: BaseException) -> BaseException:
    """What the client library's own error hides."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


async def send(url: str, requests: Iterable[Request], clients: int, ledger: Ledger) -> None:
    """`clients` users who each send their next request when the last one has ended; retries are off, so every error shows."""
    left = iter(requests)

    async def user(client: AsyncOpenAI) -> None:
        for request in left:
            try:
                found = await ask(client, request)
            except Exception as error:  # the ledger is what the test looks at
                ledger.errors[request.number] = f"{type(error).__name__}: {error} ({first_cause(error)!r})"
                continue
            before = ledger.tokens.setdefault(request.number, found)
            if before != found:
                ledger.errors[request.number] = f"two answers differ: {before} and {found}"

    limits = httpx.Timeout(60)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=limits) as client:
        await asyncio.gather(*(user(client) for _ in range(clients)))
    ledger.rounds += 1


def send_all(url: str, requests: list[Request], clients: int) -> Ledger:
    """All requests once."""
    ledger = Ledger()
    asyncio.run(send(url, requests, clients, ledger))
    return ledger

"""Runs in a pod of the cluster: asks through the router's Service with the OpenAI client until /tmp/stop is there.

Arguments: base URL, number of clients. Prints one JSON object per second; the last line is the ledger: `answered`, and `failed`
with what each failure said. Greedy answers must never change, whoever gives them: a changed one is a failure.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from openai import AsyncOpenAI, OpenAIError

STOP = Path("/tmp/stop")
PROMPTS = [
    f"Prompt {number}: " + "the prefix that all of them share is long enough for a block or two. " * 6 for number in range(12)
]
TIMEOUT_S = 120.0
FAILURES_MOST = 50


class Ledger:
    def __init__(self) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self.expected: dict[int, list[int]] = {}
        self.slowest_s = 0.0

    def line(self, **more: object) -> str:
        slowest = round(self.slowest_s, 2)
        return json.dumps({"answered": self.answered, "failed": self.failed[:FAILURES_MOST], "slowest_s": slowest, **more})


async def ask(client: AsyncOpenAI, number: int, *, stream: bool) -> list[int]:
    args = {
        "model": "tiny", "prompt": PROMPTS[number], "max_tokens": 24, "temperature": 0,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }  # fmt: skip
    if not stream:
        return list((await client.completions.create(**args)).choices[0].token_ids)
    tokens: list[int] = []
    async for chunk in await client.completions.create(**args, stream=True):
        tokens += chunk.choices[0].token_ids
    return tokens


async def one_client(client: AsyncOpenAI, first: int, ledger: Ledger) -> None:
    turn = first
    while not STOP.exists():  # noqa: ASYNC240 - one stat
        number, began = turn % len(PROMPTS), time.monotonic()
        try:
            tokens = await ask(client, number, stream=turn % 2 == 0)
        except OpenAIError as error:
            ledger.failed.append(f"{time.strftime('%X')} after {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}")
            await asyncio.sleep(0.5)
        else:
            ledger.slowest_s = max(ledger.slowest_s, time.monotonic() - began)
            if tokens != ledger.expected.setdefault(number, tokens):
                ledger.failed.append(f"prompt {number}: {tokens} instead of {ledger.expected[number]}")
            ledger.answered += 1
        turn += 1


async def main() -> None:
    ledger = Ledger()
    async with AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        asking = [asyncio.create_task(one_client(client, number, ledger)) for number in range(int(sys.argv[2]))]
        while not all(task.done() for task in asking):
            print(ledger.line(), flush=True)
            await asyncio.wait(asking, timeout=1.0)
        for task in asking:
            task.result()
    print(ledger.line(done=True), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

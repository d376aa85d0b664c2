"""A router whose tiers have models of their own: fake workers `small-0`, `large-0`, ..., each tier with as many as asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from fleet_router.config import AnswerCheck, Cascade, RouterConfig
from tests.fleet_router.chat_worker import Behave, says
from tests.fleet_router.fake_worker import FakeWorker
from tests.fleet_router.rig import CONFIG, Rig, until

SMALL: list[dict[str, Any]] = [{"content": "sma"}, {"content": "ll"}]
LARGE: list[dict[str, Any]] = [{"content": "lar"}, {"content": "ge"}]
CHAT = "/v1/chat/completions"
TALK = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}]}
Test = Callable[["Ladder"], Awaitable[None]]


def config(*tiers: str, check: AnswerCheck | None = None, held_bytes: int = 1 << 20, **more: Any) -> RouterConfig:
    cascade = Cascade(
        tiers=tiers or ("small", "large"), check=check or AnswerCheck(finish_reasons=("length",)), held_bytes=held_bytes
    )
    return msgspec.structs.replace(CONFIG, cascade=cascade, **more)


class Ladder:
    """The rig, and what its tiers were asked."""

    def __init__(self, rig: Rig, tiers: dict[str, list[FakeWorker]]) -> None:
        self.rig, self.tiers = rig, tiers

    def __getitem__(self, tier: str) -> FakeWorker:
        return self.tiers[tier][0]

    def behave(self, tier: str, behave: Behave) -> None:
        for worker in self.tiers.get(tier, ()):
            worker.behave = behave

    @property
    def asked(self) -> dict[str, int]:
        """Requests that each tier's workers saw."""
        return {tier: sum(len(worker.seen) for worker in workers) for tier, workers in self.tiers.items()}

    async def talk(self, path: str = CHAT, headers: tuple[str, ...] = (), **more: Any) -> tuple[int, str, bytes]:
        """(status, tier that the answer names, body as the client takes it)."""
        raw = json.dumps({**(TALK if path.startswith("/v1/chat") else {}), **more}).encode()
        lines = [f"POST {path} HTTP/1.1", "host: h", "connection: close", *headers, f"content-length: {len(raw)}"]
        got = await self.rig.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        head, _, body = got.partition(b"\r\n\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head.decode().split("\r\n"))}
        if fields.get("transfer-encoding") == "chunked":
            body = dechunked(body)
        else:
            assert int(fields["content-length"]) == len(body)
        return int(head.split(b" ")[1]), fields.get("x-fleet-tier", ""), body

    def counted(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        text = self.rig.router.plain(b"/metrics")[2].decode()
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def settled(self) -> bool:
        """Nothing runs, nothing is held, every slot is free."""
        context = self.rig.context
        return self.rig.idle() and context.drafts.bytes == 0 and not context.recorder.running and context.desk.gate.running == 0


def dechunked(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        if int(size, 16) == 0:
            assert rest == b"\r\n", rest
            return out
        out, body = out + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    raise AssertionError("the answer has no end")


def climbing(test: Test, config: RouterConfig, *, per_tier: int = 1, prefill: int = 0) -> None:
    """The test beside a router whose tiers answer with their own names; in the end nothing may run or be held."""

    async def go() -> None:
        assert config.cascade is not None
        tiers = {tier: [await fake(tier) for _ in range(per_tier)] for tier in config.cascade.tiers}
        givers = [await fake(tier) for tier in tiers for _ in range(prefill)]
        workers = [worker for found in tiers.values() for worker in found]
        rig = Rig(givers, workers, config)
        await rig.start()
        ladder = Ladder(rig, tiers)
        for tier, said in (("small", SMALL), ("large", LARGE)):
            ladder.behave(tier, says(said))
        try:
            await test(ladder)
            await until(ladder.settled)
        finally:
            await closed(rig, [*workers, *givers])

    asyncio.run(go())


async def fake(tier: str) -> FakeWorker:
    worker = await FakeWorker().start()
    worker.tier = tier
    return worker


async def closed(rig: Rig, workers: list[FakeWorker]) -> None:
    rig.server.close()
    for writer in rig.writers:
        writer.close()
    for one in rig.context.table.workers.values():
        one.retire()
    for worker in workers:
        await worker.stop()
    await asyncio.sleep(0.02)


def text_of(body: bytes) -> str:
    """What a chat answer says, whole or streamed."""
    if not body.startswith(b"data:"):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    assert body.endswith(b"data: [DONE]\n\n"), body[-200:]
    parts = [json.loads(event[6:]) for event in body.decode().strip().split("\n\n") if event != "data: [DONE]"]
    return "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"])

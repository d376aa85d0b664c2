"""What the agent asks its engine over HTTP: health, metrics, and from the metrics what it still holds."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace

import httpx

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.agent.errors import AdapterError
from fleet_worker.agent.life import Load
from fleet_worker.agent.seed import Seeded, read_seeded
from fleet_worker.config import ENGINE_TOKEN_HEADER

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
LEASES = "fleet:kv_leases_open"
OPEN = "fleet:requests_open"
"""Torch engine only: what came in and is not answered to the end, wherever it is."""
LEAVING = "fleet:engine_leaving"
ENDED = "vllm:request_success_total"
"""By reason; aborted ones are not among them, and leave no KV to be read."""
KV_SHARE = "vllm:kv_cache_usage_perc"
"""0 to 1 for each rank; what the prefix cache could give up is not counted. It grows with each part of a long prefill."""
MADE = "vllm:generation_tokens_total"
MAX_ANSWER_BYTES = 4 * 1024 * 1024
PIECES = 2
"""A whole answer has this many times the time that one piece of it has."""
FRAMING = frozenset({"content-encoding", "content-length", "transfer-encoding"})
NONE: Mapping[str, str] = {}
HEALTH_TIMEOUT_S = 3.0
FIRST_TOKEN_TIMEOUT_S = 300.0
"""The first request may compile kernels: minutes on some engines, and no user should be the one who waits."""
ADAPTER_TIMEOUT_S = 120.0
"""Loading reads files; unloading waits for requests, at most half a minute."""
SEED_LATE_S = 2.0
FIRST_PROMPT = [0, 0, 0, 0]
"""Token 0 exists in every vocabulary; shorter than a KV block, so that nothing of it stays in the prefix cache."""


FIRST_GRAMMAR = {"type": "json_schema", "json_schema": {"name": "first", "schema": {"type": "object"}}}
"""Every compiler of grammars takes it, so that vLLM takes the one that it prefers for this model."""
RANK_HEADER = "X-data-parallel-rank"
FIRST_ASKED: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "0"}]}),
    ("/v1/completions", {"prompt": FIRST_PROMPT}),
)
"""As clients mostly ask (vLLM makes another grammar of a chat with some models), and for models without a chat template."""


class EngineClient:
    """Bounded HTTP calls to the engine of this pod."""

    def __init__(self, base_url: str, token: str = "", *, counts_open: bool = False, compiling: int = 0) -> None:
        """`token`: what the torch engine wants to see before it changes its adapters. `counts_open`: it tells by /load.
        `compiling`: ranks of vLLM, each of which compiles grammars for itself."""
        self._token = token
        self._counts_open, self._compiling = counts_open, compiling
        self._http = httpx.AsyncClient(base_url=base_url, timeout=HEALTH_TIMEOUT_S, trust_env=False)

    async def healthy(self) -> bool:
        """GET /health is 200."""
        try:
            return (await self._asked("GET", "/health", HEALTH_TIMEOUT_S)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def first_token(self, model: str) -> str | None:
        """Generate once, before anybody depends on it. None when that worked, else why it did not."""
        body = {"model": model, "prompt": FIRST_PROMPT, "max_tokens": 2, "temperature": 0}
        try:
            answer = await self._asked("POST", "/v1/completions", FIRST_TOKEN_TIMEOUT_S, body)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if answer.status_code != httpx.codes.OK:
            return f"HTTP {answer.status_code}: {answer.text[:200]}"
        for rank in range(self._compiling):
            await self._first_grammar(model, {RANK_HEADER: str(rank)} if self._compiling > 1 else NONE)
        return None

    async def _first_grammar(self, model: str, headers: Mapping[str, str]) -> None:
        """vLLM 0.32 compiles all grammars by the compiler that its first one asks for (`StructuredOutputManager.grammar_init`).
        Was that its second choice, which few schemas need, each `tool_choice` required is 500 for everybody until it is started
        again. So the first one is ours. One that cannot be had keeps no worker from serving."""
        for path, asked in FIRST_ASKED:
            body = {"model": model, **asked, "max_tokens": 1, "temperature": 0, "response_format": FIRST_GRAMMAR}
            with contextlib.suppress(httpx.HTTPError):
                if (await self._asked("POST", path, FIRST_TOKEN_TIMEOUT_S, body, headers)).status_code == httpx.codes.OK:
                    return

    async def load_adapter(self, name: str, path: str, *, inplace: bool) -> str | None:
        """vLLM's POST /v1/load_lora_adapter; the digest when the engine says one. AdapterError with the engine's words."""
        body = {"lora_name": name, "lora_path": path, **({"load_inplace": True} if inplace else {})}
        answer = await self._adapter_call("/v1/load_lora_adapter", body)
        if answer.status_code != httpx.codes.OK:
            raise AdapterError("BadAdapter", _words(answer))
        digest: str | None = answer.headers.get("x-adapter-digest")
        return digest

    async def unload_adapter(self, name: str) -> None:
        """vLLM's POST /v1/unload_lora_adapter; one that is not there is gone. AdapterError."""
        answer = await self._adapter_call("/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            raise AdapterError("UnloadFailed", _words(answer))

    async def _adapter_call(self, path: str, body: dict[str, object]) -> httpx.Response:
        try:
            return await self._asked("POST", path, ADAPTER_TIMEOUT_S, body, {ENGINE_TOKEN_HEADER: self._token})
        except httpx.HTTPError as error:
            raise AdapterError("EngineSilent", f"{path}: {type(error).__name__}: {error}") from error

    async def seed(self, host: str, port: int, most_share: float, within_s: float) -> Seeded:
        """The torch engine's POST /kv/seed. It ends by itself; what it says is a failed try where it is no answer."""
        body = {"host": host, "port": port, "most_share": most_share, "within_s": within_s}
        try:
            answer = await self._asked("POST", "/kv/seed", within_s + SEED_LATE_S, body, {ENGINE_TOKEN_HEADER: self._token})
        except httpx.HTTPError as error:
            return Seeded(reason="engine", message=f"{type(error).__name__}: {error}")
        if answer.status_code != httpx.codes.OK:
            return Seeded(reason="engine", message=_words(answer))
        return read_seeded(answer.content)

    async def metrics(self) -> str | None:
        """The engine's exposition, None when it does not answer or answers too much."""
        try:
            answer = await self._asked("GET", "/metrics", HEALTH_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == httpx.codes.OK else None

    async def load(self) -> Load:
        """What the engine holds now."""
        text, is_open = await asyncio.gather(self.metrics(), self._open())
        return Load(None, None, None) if text is None else replace(parse_load(text), open=is_open)

    async def _open(self) -> int | None:
        """vLLM's GET /load (--enable-server-load-tracking)."""
        if not self._counts_open:
            return None
        try:
            said = (await self._asked("GET", "/load", HEALTH_TIMEOUT_S)).json()["server_load"]
        except (httpx.HTTPError, *UNREADABLE, KeyError, TypeError):
            return None
        return said if isinstance(said, int) else None

    async def _asked(
        self, method: str, path: str, within_s: float, body: Mapping[str, object] | None = None, headers: Mapping[str, str] = NONE
    ) -> httpx.Response:
        """The whole answer; httpx.HTTPError when it is not here in time, or has no end. httpx's own limits are for each piece of
        one: an engine that drips would keep the agent, and its readiness as it was, for ever."""
        found = bytearray()
        try:
            async with (
                asyncio.timeout(PIECES * within_s),
                self._http.stream(method, path, json=body, headers=headers, timeout=within_s) as answer,
            ):
                async for piece in answer.aiter_bytes():
                    found += piece
                    if len(found) > MAX_ANSWER_BYTES:
                        raise httpx.ReadError(f"{path}: an answer of more than {MAX_ANSWER_BYTES} bytes")
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"{path}: no end of the answer within {PIECES * within_s:g} s") from error
        told = {name: value for name, value in answer.headers.items() if name not in FRAMING}
        return httpx.Response(answer.status_code, headers=told, content=bytes(found))

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()


def parse_load(text: str) -> Load:
    """Sum each gauge over its label sets; a metric that is absent is None. What is open but does not wait, runs: it may be on its
    way to the engine, or its answer on the way to a client that reads slowly."""
    running, waiting, came = (_total(text, name) for name in (RUNNING, WAITING, OPEN))
    if running is not None and waiting is not None and came is not None:
        running = max(running, came - waiting)
    made, shares = _values(text, MADE), _values(text, KV_SHARE)
    moved = (*made, *shares) if made and shares else None
    leaving = bool(_total(text, LEAVING))
    return Load(running, waiting, _total(text, LEASES), _total(text, ENDED), max(shares, default=None), moved, leaving=leaving)


def _total(text: str, name: str) -> int | None:
    values = _values(text, name)
    try:
        return round(sum(values)) if values else None
    except OverflowError:
        return None  # no number: it did not say


def _values(text: str, name: str) -> list[float]:
    """Over all label sets; none when one of them is no number."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)", text, re.MULTILINE)
    try:
        return [float(value) for value in found]
    except ValueError:
        return []


def _words(answer: httpx.Response) -> str:
    """The engine's message, of OpenAI's error shape when it has that."""
    try:
        return str(answer.json()["error"]["message"])[:500]
    except (*UNREADABLE, KeyError, TypeError):
        return f"HTTP {answer.status_code}: {answer.text[:200]}"

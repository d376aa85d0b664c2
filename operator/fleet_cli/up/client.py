"""A small OpenAI client for the proof: completions and chat, streamed or not, against a router or one engine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from fleet_cli.errors import RunError

REQUEST_TIMEOUT_S = 120.0
TIER_HEADER = "x-fleet-tier"


class RefusedError(RunError):
    """An answer that is none; `said` is its body."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    chunks: int
    first_token_s: float
    tier: str = ""
    """Of the worker that answered, where tiers have models of their own."""

    def same_as(self, other: Answer) -> bool:
        """Token for token where both sides report ids, else by text."""
        return self.tokens == other.tokens if self.tokens and other.tokens else self.text == other.text


class Client:
    """One base URL, e.g. http://127.0.0.1:8080. Every failure is a RunError that names the request."""

    def __init__(self, base_url: str, model: str, transport: httpx.AsyncBaseTransport | None = None, *, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else None
        # Never through a proxy of the environment: everything here is on this machine.
        self._http = httpx.AsyncClient(
            base_url=base_url, timeout=REQUEST_TIMEOUT_S, trust_env=False, transport=transport, headers=headers
        )
        self._base_url, self._model = base_url, model

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names that GET /v1/models lists."""
        answer = await self._send("GET", "/v1/models")
        return [entry["id"] for entry in answer.json()["data"]]

    async def metric(self, name: str) -> float:
        """Sum of a metric's samples on GET /metrics; 0 when there is none."""
        text = (await self._send("GET", "/metrics")).text
        samples = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    async def complete(self, prompt: str, max_tokens: int) -> Answer:
        """POST /v1/completions, greedy, not streamed."""
        begun = time.monotonic()
        sent = await self._send("POST", "/v1/completions", self._body(prompt, max_tokens))
        answer = sent.json()
        choice = answer["choices"][0]
        return Answer(
            text=choice["text"],
            tokens=tuple(choice.get("token_ids") or ()),
            prompt_tokens=answer["usage"]["prompt_tokens"],
            chunks=1,
            first_token_s=time.monotonic() - begun,
            tier=sent.headers.get(TIER_HEADER, ""),
        )

    async def chat(self, content: str, max_tokens: int) -> str:
        """POST /v1/chat/completions, greedy, not streamed: the text."""
        body = {**self._body("", max_tokens), "messages": [{"role": "user", "content": content}]}
        del body["prompt"]
        answer = (await self._send("POST", "/v1/chat/completions", body)).json()
        return str(answer["choices"][0]["message"]["content"])

    async def stream(self, prompt: str, max_tokens: int) -> Answer:
        """POST /v1/completions, greedy, streamed to [DONE]."""
        begun, first = time.monotonic(), 0.0
        text, tokens, chunks, used, done, tier = "", list[int](), 0, 0, False, ""
        body = {**self._body(prompt, max_tokens), "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise self._refused("POST /v1/completions (stream)", answer)
                tier = answer.headers.get(TIER_HEADER, "")
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        done = True
                        continue
                    event = json.loads(data)
                    used = (event.get("usage") or {}).get("prompt_tokens", used)
                    for choice in event.get("choices", ()):
                        first = first or time.monotonic() - begun
                        text, chunks = text + choice["text"], chunks + 1
                        tokens += choice.get("token_ids") or ()
        except httpx.HTTPError as error:
            raise RunError(f"POST {self._base_url}/v1/completions (stream): {_cause(error)}") from error
        if not done:
            raise RunError(f"POST {self._base_url}/v1/completions: the stream ended without [DONE]")
        return Answer(text=text, tokens=tuple(tokens), prompt_tokens=used, chunks=chunks, first_token_s=first, tier=tier)

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise RunError(f"{method} {self._base_url}{path}: {_cause(error)}") from error
        if answer.status_code != 200:
            raise self._refused(f"{method} {path}", answer)
        return answer

    def _refused(self, what: str, answer: httpx.Response) -> RefusedError:
        said = answer.text
        return RefusedError(f"{what} at {self._base_url}: HTTP {answer.status_code}: {said[:300].strip()}", said)


def _cause(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__

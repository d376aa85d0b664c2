"""Bounded questions to workers: in time, whatever they do, and in bytes. No answer is None, never a guess."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

import httpx
import msgspec

from fleet_planner.roles import Role
from fleet_wire.unreadable import UNREADABLE

MAX_BYTES = 4 * 1024 * 1024
WORD_MOST = 300
"""Characters of what a worker says that go into a status or a document."""
AGENT_S = 2.0
"""From connection to last byte of an agent's answer."""
ENGINE_S = 20.0
"""The same of an engine: a first transfer between two workers shakes hands."""
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Workers speak plain HTTP. Without this httpx reads every CA of the system, 16 ms in which nothing else runs here, and
each look at a fleet begins with a client."""


JsonBody = dict[str, Any] | list[dict[str, str]]


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as an object; empty when it is none."""
        try:
            found = msgspec.json.decode(self.body)
        except UNREADABLE:
            return {}
        return found if isinstance(found, dict) else {}


class AgentState(msgspec.Struct, frozen=True):
    """What matters here of GET /state."""

    role: Role
    phase: str
    flip_problem: str = ""
    uid: str = ""
    """Of its pod; empty: it does not say."""


class Ask(Protocol):
    """One question."""

    async def __call__(self, url: str, body: JsonBody | None = None, within_s: float = ENGINE_S) -> Answer | None:
        """GET, or POST when there is a body."""
        ...


@asynccontextmanager
async def open_ask() -> AsyncIterator[Ask]:
    """Questions over HTTP; connections are released when the block ends."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, headers={"accept-encoding": "identity"}) as http:

        async def ask(url: str, body: JsonBody | None = None, within_s: float = ENGINE_S) -> Answer | None:
            found = bytearray()
            method = "GET" if body is None else "POST"
            try:
                async with asyncio.timeout(within_s), http.stream(method, url, json=body, timeout=within_s) as answer:
                    async for chunk in answer.aiter_raw():
                        found += chunk
                        if len(found) > MAX_BYTES:
                            return None
                    return Answer(answer.status_code, bytes(found))
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
                return None

        yield ask


def telling_while(
    may_tell: Callable[[], bool], connect: Callable[[], AbstractAsyncContextManager[Ask]] = open_ask
) -> Callable[[], AbstractAsyncContextManager[Ask]]:
    """Questions as `connect` has them; none that tells a worker something is sent once `may_tell` says no: a process that was
    stopped in the middle of a look goes on with it before it hears that it leads no more."""

    @asynccontextmanager
    async def connected() -> AsyncIterator[Ask]:
        async with connect() as ask:

            async def asked(url: str, body: JsonBody | None = None, within_s: float = ENGINE_S) -> Answer | None:
                return await ask(url, body, within_s) if body is None or may_tell() else None

            yield asked

    return connected


def state_of(answer: Answer | None, uid: str = "") -> AgentState | None:
    """An agent's state; None when it is not readable, or that of another pod than `uid`: a node that began anew gives its pods
    other addresses, and for a while the API has those of before."""
    if answer is None or answer.status != httpx.codes.OK:
        return None
    try:
        found = msgspec.json.decode(answer.body, type=AgentState)
    except UNREADABLE:
        return None
    if uid and found.uid not in ("", uid):
        return None
    return AgentState(found.role, found.phase[:WORD_MOST], found.flip_problem[:WORD_MOST], found.uid[:WORD_MOST])

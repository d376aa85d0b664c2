"""A client of raw bytes and a ledger: every request ends with tokens that are proven, or with an error that says so."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from e2e.emulated.chat import flat
from e2e.emulated.tokens import said, word

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ask:
    """One request. `seed` None and `greedy` False: nobody can know its tokens, but they must belong together."""

    prompt: tuple[int, ...]
    max_tokens: int = 24
    stream: bool = True
    greedy: bool = True
    seed: int | None = None
    ids: bool = True
    """The client asks for token ids."""
    chat: bool = False

    @property
    def determined(self) -> bool:
        """A worker can carry on what another one began."""
        return self.greedy or self.seed is not None

    @property
    def kind(self) -> str:
        """For people."""
        drawn = "greedy" if self.greedy else "free" if self.seed is None else "seeded"
        return f"{drawn} {'chat ' * self.chat}{'stream' if self.stream else 'whole'} of {self.max_tokens}"

    def body(self) -> bytes:
        told: dict[str, Any] = {"model": "tiny", "max_tokens": self.max_tokens, "stream": self.stream}
        told |= {"messages": [{"role": "user", "content": self.text()}]} if self.chat else {"prompt": list(self.prompt)}
        told |= {"temperature": 0} if self.greedy else {}
        told |= {"seed": self.seed} if self.seed is not None else {}
        told |= {"return_token_ids": True} if self.ids else {}
        return json.dumps(told).encode()

    def text(self) -> str:
        return " ".join(map(str, self.prompt))

    def right(self, text: str) -> bool:
        """The answer's text is that of the right tokens."""
        prompt = list(self.prompt)
        if self.chat:
            prompt = list(flat([{"role": "user", "content": self.text()}]).encode())
        if self.determined:
            return text == "".join(map(word, said(prompt, self.max_tokens, seed=self.seed or 0)))
        words = text.split()
        first = int(words[0], 16)
        return text == "".join(map(word, [first, *said([*prompt, first], self.max_tokens - 1)]))


@dataclass
class Ledger:
    """What became of all requests."""

    ends: Counter[str] = field(default_factory=Counter)
    """right, error STATUS CODE, event (an error event and no [DONE]), cut (nothing was said), wrong, hung."""
    lost: int = 0
    """Requests whose tokens are determined (greedy or seeded) and that did not end right, whatever they were told."""
    retry_after_s: set[int] = field(default_factory=set)
    """What refusals said."""
    slowest_s: float = 0.0
    odd: list[str] = field(default_factory=list)

    @property
    def all(self) -> int:
        return sum(self.ends.values())

    @property
    def right(self) -> int:
        return self.ends["right"]

    def note(self, end: str, took_s: float, what: str = "") -> None:
        self.ends[end] += 1
        self.slowest_s = max(self.slowest_s, took_s)
        if what and len(self.odd) < 20:
            self.odd.append(f"{end}: {what}")


async def ask(address: str, one: Ask, ledger: Ledger, timeout_s: float = TIMEOUT_S) -> str:
    """Send it, and note how it ended."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            end, what = await _ended(address, one, ledger)
    except TimeoutError:
        end, what = "hung", f"after {timeout_s} s"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        end, what = "cut", repr(error)
    ledger.note(end, time.monotonic() - begun, "" if end == "right" else f"{what[:300]} ({one.kind})")
    ledger.lost += end != "right" and one.determined
    return end


async def _ended(address: str, one: Ask, ledger: Ledger) -> tuple[str, str]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        path, body = "/v1/chat/completions" if one.chat else "/v1/completions", one.body()
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        first, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if not first:
        return "cut", "no answer at all"
    status = int(first.split(b" ")[1])
    if status != 200:
        error = json.loads(rest)["error"]
        assert error["request_id"], "an error without a request id"
        if b"\r\nretry-after: " in (lower := first.lower()):
            ledger.retry_after_s.add(int(lower.split(b"\r\nretry-after: ")[1].split(b"\r\n")[0]))
        return f"error {status} {error['code']}", str(error["message"])
    return streamed(one, rest) if one.stream else whole(one, first, rest)


def whole(one: Ask, head: bytes, rest: bytes) -> tuple[str, str]:
    """An answer in one piece."""
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    if len(rest) < length:
        return "cut", f"{len(rest)} of {length} bytes"
    text = json.loads(rest)["choices"][0]["text"]
    return ("right" if one.right(text) else "wrong"), text


def streamed(one: Ask, rest: bytes) -> tuple[str, str]:
    """A stream: text so far, and whether it says that it is whole."""
    payload, complete = unchunked(rest)
    text, done, broken = "", False, ""
    for line in payload.split(b"\n\n"):
        if line == b"data: [DONE]":
            done = True
        elif line.startswith(b"data: "):
            found = json.loads(line[6:])
            if "error" in found:
                broken = str(found["error"])
            elif found["choices"]:
                choice = found["choices"][0]
                text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    if done and broken:
        return "wrong", f"an error and [DONE]: {broken}"
    if done and complete:
        return ("right" if one.right(text) else "wrong"), text
    return ("event", broken) if broken else ("cut", f"no [DONE] and no error: {rest[-100:]!r}")


def unchunked(data: bytes) -> tuple[bytes, bool]:
    """(contents, ended as it should)."""
    out, at = b"", 0
    while (line := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line], 16)
        if size == 0:
            return out, True
        out += data[line + 2 : line + 2 + size]
        at = line + 2 + size + 2
    return out, False


async def closed_loop(address: str, asks: Sequence[Ask], clients: int, ledger: Ledger) -> None:
    """So many clients, each with its next request when the last one has ended."""
    left = iter(asks)

    async def client() -> None:
        for one in left:
            await ask(address, one, ledger)

    await asyncio.gather(*(client() for _ in range(clients)))

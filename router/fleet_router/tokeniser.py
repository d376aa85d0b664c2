"""The model's tokenizer and chat template in the router: prompts to token ids as the engine makes them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from fleet_router.kvindex.tokenised import cut
from fleet_router.linear import is_linear
from fleet_wire.addedtokens import add_named, named_special
from fleet_wire.address import authority
from fleet_wire.budget import Steps, TooMuchError
from fleet_wire.template import ChatTemplate, NoTemplateError

FETCH_TIMEOUT_S = 30.0
MOST_BYTES = 128 * 1024 * 1024
SAMPLE = "The quick brown fox jumps over 13 lazy dogs.\nIt's (almost) 42 o'clock: été, naïve, 東京. " * 30
INLINE_CHARS = 2_048
"""So much of a text is encoded on the loop, about a millisecond, by a tokenizer that is known to be quick at any."""
QUICK_S = 0.005
"""All streams wait meanwhile. Of a core: what takes longer over a probe, or one conversation, has no place on the loop."""
MESSAGE_S = 50e-6
"""More for each of its messages."""
MESSAGES_MOST = 512
"""Of a conversation that is rendered here, on the loop: 10 to 35 us each by the templates in use."""
STEPS = Steps(each=30_000, per_character=0)
"""All streams wait meanwhile: some 30 ms, and templates in use need ten a message. What costs more is the engine's to count."""
FEW_MESSAGES = 4
"""A conversation of no more that costs too much tells of its template, one of many of itself: DeepSeek's joins the texts of all
`system` messages so far at each, and a client that sends a thousand of them would have put an end to counting for all others."""
PROBES = ("a", "A", "1", " ", "\n", "-", "é", "東", "a ", "aA1-")
PROBE_CHARS = 2_048
PROBE_S = 0.05
"""Of a core, for one of them; tokenizers in use need one or two milliseconds."""
PROBE_TRIES = 4
"""What takes long once may have had a core that others were given as well: what is taken from a virtual machine counts as its
thread's time."""
PROBE_HOPELESS_S = 10 * PROBE_S
"""No core is so slow."""
PANIC = "PanicException"
ROW = ("role", "content")
BILLING = "x-anthropic-billing-header"
"""Begins a line that Claude Code writes before its system prompt, another one in each request. Of what came as /v1/messages it is
taken out here, of what a gateway made a chat of by vLLM, and not by the torch engine."""
CONVERSATION = msgspec.json.encode([
    {"role": "system", "content": "You help."}, {"role": "user", "content": "Where to? " * 60},
    {"role": "assistant", "content": "There. " * 60}, {"role": "user", "content": "Why?"},
])  # fmt: skip
NOT_GIVEN = {"tools": None, "documents": None}
"""Engines give every template these, as Hugging Face's own rendering does: none is not the same as not defined."""


class UnreadableError(ValueError):
    """A prompt that only the engine can turn into tokens; routing then goes by the approximate index."""


class Tokeniser:
    """Built from the files that a worker's agent gives out; ValueError when they are no tokenizer."""

    def __init__(self, files: Mapping[str, str]) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its own threads would take the data path's cores
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_str(files["tokenizer.json"])
        except BaseException as error:
            if not _is_rusts(error):
                raise
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_padding()  # as engines call it: to its own length, and whole
        self._tokenizer.no_truncation()
        settings = _settings(files.get("tokenizer_config.json", "{}"))
        add_named(self._tokenizer, settings)
        self._special = named_special(settings)
        self._template = _template(files.get("chat_template.jinja") or settings.get("chat_template"))
        self._most_bytes = MOST_BYTES
        """Of a conversation: one of so many and of few messages cost too much, so that no other does."""
        bare = self._ids("a", special=False)
        with_special = self._ids("a", special=True)
        self.lead: tuple[int, ...] = tuple(with_special[: len(with_special) - len(bare)]) if bare else ()
        """Special tokens before a completion's prompt."""
        self.usable = with_special == [*self.lead, *bare]
        unit, took_s = self._slowest()
        if took_s > PROBE_S:
            raise ValueError(f"it takes {took_s:.2f} s over {PROBE_CHARS} characters like {unit!r}")
        self.inline_chars = INLINE_CHARS if took_s <= QUICK_S and is_linear(self._tokenizer) else 0
        """So much of a text may be encoded on the loop; whoever finds it slow there sets it to 0."""
        self._clock = time.perf_counter
        """A conversation that took too long by it may have waited for the core: the next one is measured in time of that."""
        self._drop_slow_template()
        self.splits = [i for part in cut(SAMPLE) for i in self._ids(part, special=False)] == self._ids(SAMPLE, special=False)
        """A text's tokens are those of its segments."""

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except BaseException as error:
            raise UnreadableError(f"the tokenizer gave up: {error}") if _is_rusts(error) else error from None

    def _slowest(self) -> tuple[str, float]:
        """What its pattern takes longest over, and how long; the first one that is far too long."""
        found = ("", 0.0)
        for unit in PROBES:
            if (took_s := self._takes_s(unit * (PROBE_CHARS // len(unit)) + "!")) > found[1]:
                found = (unit, took_s)
            if took_s > PROBE_S:
                break
        return found

    def _takes_s(self, text: str) -> float:
        """The least of a few tries, where it was not quick at once."""
        least_s = PROBE_HOPELESS_S
        for _ in range(PROBE_TRIES):
            began = time.thread_time()
            self.encode([text])
            took_s = time.thread_time() - began
            if took_s >= PROBE_HOPELESS_S:
                return took_s
            least_s = min(least_s, took_s)
            if least_s <= QUICK_S:
                break
        return least_s

    def _drop_slow_template(self) -> None:
        """One that is slow over any conversation costs what no message has asked for."""
        took_s = []
        for _ in range(2):  # the first one may pay for what is made once
            began = time.thread_time()
            with contextlib.suppress(UnreadableError):
                self.render(CONVERSATION)
            took_s.append(time.thread_time() - began)
        if min(took_s) > QUICK_S:
            self._template = None
        self._clock = time.perf_counter

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each, without special tokens; releases the GIL, so that a thread may do it beside the loop.
        UnreadableError where it gives up, as on a pattern that takes too many steps."""
        try:
            return [list(found.ids) for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        except BaseException as error:
            raise UnreadableError(f"the tokenizer gave up: {error}") if _is_rusts(error) else error from None

    def render(self, messages: bytes) -> str:
        """A conversation as the model's template has it; UnreadableError when that is not ours to know."""
        if self._template is None:
            raise UnreadableError("no chat template that can be read here")
        if len(messages) >= self._most_bytes:
            raise UnreadableError("the template took too long over no more")
        many = 0
        try:
            found = msgspec.json.decode(messages)
            if (many := len(found)) > MESSAGES_MOST:
                raise UnreadableError(f"more than {MESSAGES_MOST} messages")
            rows = [_row(message, self._template.takes_parts) for message in found]
            given = {**self._special, "messages": rows, "add_generation_prompt": True, **NOT_GIVEN}
            clock = self._clock
            began = clock()
            try:
                return self._template.render(len(messages), **given)
            finally:
                if (took_s := clock() - began) > QUICK_S or clock is not time.perf_counter:
                    self._took(took_s, len(messages), many)
        except UnreadableError:
            raise
        except TooMuchError as error:
            if many <= FEW_MESSAGES:
                self._most_bytes = len(messages)
            raise UnreadableError(str(error)) from error
        except Exception as error:  # a template raises whatever its author liked
            raise UnreadableError(f"{type(error).__name__}: {error}") from error

    def _took(self, took_s: float, size: int, many: int) -> None:
        """On the loop. One that is slow twice in a row, by the clock and by the core's, is the last of its size; of few bytes
        that is the template's fault, however many messages they are."""
        doubted = self._clock is time.thread_time
        slow = took_s > QUICK_S + many * MESSAGE_S
        if slow and doubted and (many <= FEW_MESSAGES or size <= INLINE_CHARS):
            self._most_bytes = size
        self._clock = time.thread_time if slow else time.perf_counter


def _is_rusts(error: BaseException) -> bool:
    """tokenizers raises bare Exception, and panics with what is none."""
    return isinstance(error, Exception) or type(error).__name__ == PANIC


def digest_of(files: Mapping[str, str]) -> bytes:
    """The same for the same files; 16 bytes."""
    found = xxhash.xxh3_128()
    for name, text in sorted(files.items()):
        found.update(f"{name}\0{len(text)}\0".encode())
        found.update(text.encode("utf-8", "surrogatepass"))
    return found.digest()


def _row(message: dict[str, Any], in_parts: bool) -> dict[str, Any]:
    """Calls of tools, their results' ids, reasoning: templates write them as they like, and engines change them before.
    `in_parts`: they give the template lists."""
    if others := [name for name, value in message.items() if name not in ROW and value is not None]:
        raise UnreadableError(f"messages with {others[0]}")
    if message["role"] == "developer":  # engines may make it the system's, and put it at the beginning
        raise UnreadableError("a message of a developer")
    given = message.get("content")
    content = _content(given)
    if message["role"] == "system" and content.startswith(BILLING):
        raise UnreadableError("a line that some engines take out")
    if in_parts and message["role"] != "tool":
        return {"role": message["role"], "content": [] if given in (None, []) else [{"type": "text", "text": content}]}
    return {"role": message["role"], "content": content}


def _content(raw: object) -> str:
    if raw is None or isinstance(raw, str):
        return raw or ""
    if not isinstance(raw, list) or not all(isinstance(part, dict) and part.get("type") == "text" for part in raw):
        raise UnreadableError("content that is not text")
    if len(raw) > 1:  # vLLM puts a line break between them, others nothing
        raise UnreadableError("content of several parts")
    return "".join(str(part.get("text", "")) for part in raw)


def _settings(raw: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(f"tokenizer_config.json is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _template(source: Any) -> ChatTemplate | None:
    try:
        return ChatTemplate(source, STEPS, {"strftime_now": _engines_own}) if isinstance(source, str) else None
    except NoTemplateError:  # with a tag that is its engine's own, say: all but conversations can be read
        return None


def _engines_own(*_: object, **__: object) -> str:
    raise UnreadableError("a template that asks what day it is: its engine's clock says so")


async def fetch(address: str, port: int) -> dict[str, str]:
    """GET /tokenizer of an agent; OSError or ValueError."""
    async with asyncio.timeout(FETCH_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(address, port, limit=1 << 16)
        try:
            writer.write(f"GET /tokenizer HTTP/1.1\r\nhost: {authority(address, port)}\r\nconnection: close\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                raise OSError(f"the agent answered {head.split(b' ', 2)[1].decode('latin-1')}")
            length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            if length > MOST_BYTES:
                raise ValueError(f"a tokenizer of {length} bytes")
            return msgspec.json.decode(await reader.readexactly(length), type=dict[str, str])
        except (IndexError, EOFError, msgspec.DecodeError) as error:
            raise OSError(f"the agent's answer is not understood: {error}") from error
        finally:
            writer.close()

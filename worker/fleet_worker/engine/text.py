"""Text in and out: tokenizer, chat template, incremental detokenisation, stop strings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import xxhash
from tokenizers import Tokenizer

from fleet_wire.addedtokens import add_named, named_special
from fleet_wire.template import MAX_TEMPLATE_BYTES, ChatTemplate, NoTemplateError
from fleet_wire.unreadable import UNREADABLE
from fleet_worker.engine.developer import DEVELOPER, as_system, knows_developers
from fleet_worker.engine.errors import BadRequestError, ModelFilesError
from fleet_worker.engine.files import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, read_bounded
from fleet_worker.engine.today import ASKS, teller

REPLACEMENT = "\ufffd"
PANIC = "PanicException"
"""What tokenizers, which is of Rust, raises beside bare Exception, and is none."""
MAX_PENDING = 8
"""Tokens that are held while the last character may be incomplete: longer ones are bytes that never become one."""
NOT_GIVEN = {"tools": None, "documents": None}
"""Templates are given these, as by Hugging Face's own rendering: many ask whether they are none, and to be undefined is not."""
CALLS = "tool_calls"
"""A template without this name in it writes no calls of tools into a prompt."""
CONTEXT_TOKENS = 16
"""Of the prompt, so many are read with an answer's first ones: more than a word, or the run of bytes that a character may be."""
MAX_BEGUN = 3
"""Bytes of a character that is not complete, and tokens therefore."""


class Text:
    """The model's tokenizer and chat template; safe to call from several threads."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_buffer(read_bounded(path, MAX_TOKENIZER_BYTES))
        except ModelFilesError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelFilesError(f"{path} cannot be read: {error}") from error
        self.tokenizer.no_padding()  # whatever it was trained with: transformers reads a prompt to its own length, and whole
        self.tokenizer.no_truncation()
        settings = _optional_json(folder / "tokenizer_config.json")
        try:
            add_named(self.tokenizer, settings)
        except ValueError as error:
            raise ModelFilesError(f"{folder}/tokenizer_config.json: {error}") from error
        self.special = frozenset(number for number, added in self.tokenizer.get_added_tokens_decoder().items() if added.special)
        """Tokens that `decode` passes over."""
        self._special = named_special(settings)
        self.eos_id: int | None = self.tokenizer.token_to_id(self._special["eos_token"]) if self._special["eos_token"] else None
        """What the tokenizer calls the end: a chat template closes answers with it."""
        source = folder / "chat_template.jinja"
        written = _default(_text_of(source) if source.is_file() else settings.get("chat_template"))
        try:
            self._template = ChatTemplate(written) if isinstance(written, str) else None
        except NoTemplateError as error:
            raise ModelFilesError(str(error)) from error
        self.takes_parts = self._template is not None and self._template.takes_parts
        """The template is given contents as lists of parts."""
        self._knows_developers = isinstance(written, str) and knows_developers(written)
        self._knows_calls = isinstance(written, str) and CALLS in written
        self.asks_the_day = isinstance(written, str) and ASKS in written
        """The template may write what time it is."""
        self.folder, self.digest = folder, text_digest(folder)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`. Other threads go on meanwhile: of this library's calls only those for batches let them.
        BadRequestError where it gives up, as on a pattern that takes too many steps."""
        try:
            return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
        except BaseException as error:
            if not (isinstance(error, Exception) or type(error).__name__ == PANIC):
                raise
            raise BadRequestError(f"the tokenizer gave up: {str(error)[:500]}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def spell(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens by their names: what a model is given."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, said_at: str = "", effort: str | None = None
    ) -> str:
        """The model's own template over `messages`; BadRequestError when the template refuses them. `said_at`: the time that it
        is told (`today.now_said`); empty: it can ask nobody. `effort`: a request's `reasoning_effort`."""
        if self._template is None:
            raise BadRequestError("the model has no chat template: use /v1/completions", "messages")
        if not self._knows_calls and (called := next((n for n, row in enumerate(messages) if CALLS in row), None)) is not None:
            raise BadRequestError(
                f"messages[{called}].{CALLS}: the model's chat template does not know calls of tools", "messages"
            )
        if not self._knows_developers and any(row["role"] == DEVELOPER for row in messages):
            messages = as_system(messages)
        clock = {ASKS: teller(said_at)} if said_at else {}
        try:
            given = {**self._special, "messages": messages, "add_generation_prompt": add_generation_prompt, **NOT_GIVEN, **clock}
            given |= _thinking(effort)
            return self._template.render(_characters(messages), **given)
        except Exception as error:  # a template is a program: it can fail in any way
            raise BadRequestError(f"the chat template refused the messages: {_said(error)}", "messages") from error


def _thinking(effort: str | None) -> dict[str, Any]:
    """What a template is told of it, as by vLLM's chat: of none nothing, which is not the same as that there is to be none."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


TEXT_FILES = {
    "tokenizer.json": MAX_TOKENIZER_BYTES, "tokenizer_config.json": MAX_CONFIG_BYTES, "chat_template.jinja": MAX_TEMPLATE_BYTES,
}  # fmt: skip


def text_digest(folder: Path) -> str:
    """Of the files that make tokens of a request: workers that differ there prefill another prompt than they decode."""
    found = xxhash.xxh3_128()
    for name, most in TEXT_FILES.items():
        raw = read_bounded(folder / name, most) if (folder / name).is_file() else b""
        found.update(f"{name} {len(raw)} ".encode() + raw)
    return found.hexdigest()


def _said(error: Exception) -> str:
    """A template's own words alone; of Python's errors also which one it is."""
    words = str(error)[:500]
    return words if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {words}"


def _characters(messages: list[dict[str, Any]]) -> int:
    """Of all texts in the messages, and some for what else each of them has."""
    texts = sum(len(text) for row in messages for text in row.values() if isinstance(text, str))
    texts += sum(64 + len(part["text"]) for row in messages for part in row.get("content") or () if isinstance(part, dict))
    return texts + sum(64 + len(repr(row[CALLS])) if CALLS in row else 64 for row in messages)


def _default(source: Any) -> Any:
    """Of several templates with names the one for conversations without tools."""
    if not isinstance(source, list):
        return source
    named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict) and isinstance(one.get("name"), str)}
    return named.get("default")


def _text_of(path: Path) -> str:
    try:
        return read_bounded(path, MAX_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class Detokenizer:
    """Text of a growing token list, given out in pieces that never end inside a character or inside a possible stop string.

    Decodes a window of tokens twice (with and without the new ones) and emits the difference: byte-level tokenizers need the
    tokens before to decide about spaces and split characters.
    """

    text: Text
    stop: tuple[str, ...] = ()
    ids: list[int] = field(default_factory=list)
    _from: int = 0
    _read: int = 0
    _held: str = ""
    sent: str = ""

    @classmethod
    def behind(cls, prompt: Sequence[int], text: Text, stop: tuple[str, ...] = ()) -> Detokenizer:
        """Of an answer to this prompt: taken for a text's first word, its own first one would lose its space."""
        context = [token for token in prompt[-CONTEXT_TOKENS:] if token not in text.special]
        context = context[_cut(context, text) :]
        return cls(text, stop, context, _read=len(context))

    def add(self, token: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(text to send now, stop string that was met); without `may_stop` (before min_tokens) stop strings are plain text."""
        if token in self.text.special:  # without it the next one would be a window's first, and lose its space
            return "", None
        self.ids.append(token)
        now = self.text.decode(self.ids[self._from :])
        end = len(self.ids)
        if now.endswith(REPLACEMENT):
            if end - self._read < MAX_PENDING:
                return "", None
            end -= self._begun(now)
            now = self.text.decode(self.ids[self._from : end])
        piece = self._new(now, end)
        self._from, self._read = self._read, end
        return self._emit(piece, may_stop)

    def _new(self, now: str, end: int) -> str:
        """What the tokens from `_read` to `end` add, `now` being the text of all from `_from` to `end`. Tokenizers that fall back
        to bytes read a run of them as a whole: with one that fits no character those before, which were told, are none either."""
        before = self.text.decode(self.ids[self._from : self._read])
        return now[len(before) :] if now.startswith(before) else self.text.decode(self.ids[self._read : end])

    def _begun(self, now: str) -> int:
        """How many of the last tokens may be the begin of one character, `now` being the text of all since `_from`."""
        for count in range(MAX_BEGUN, 0, -1):
            head, tail = self.ids[self._from : -count], self.ids[-count:]
            said = self.text.decode(tail)  # one for all of them, or one for each byte
            if said in (REPLACEMENT, REPLACEMENT * count) and self.text.decode(head) + said == now:
                return count
        return 0

    def finish(self, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(what was held back, stop string that it holds all the same), when the sequence ends."""
        rest = self._new(self.text.decode(self.ids[self._from :]), len(self.ids))
        self._from = self._read = len(self.ids)
        out, met = self._emit(rest, may_stop)
        held, self._held = self._held, ""
        self.sent += held
        return out + held, met

    def _emit(self, piece: str, may_stop: bool) -> tuple[str, str | None]:
        """What ends a text ends in `piece`: in what was held a stop string may lie that came before one was allowed."""
        pending, held, stops = self._held + piece, len(self._held), self.stop
        found = [(pending.find(stop, max(0, held - len(stop) + 1)), number) for number, stop in enumerate(stops)]
        met = [one for one in found if one[0] >= 0] if may_stop else []
        if met:  # several may be met by one token: the text ends where the first of them begins
            at, number = min(met)
            self._held = ""
            self.sent += pending[:at]
            return pending[:at], stops[number]
        keep = max((_overlap(pending, stop) for stop in stops), default=0)
        out, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.sent += out
        return out, None


def _cut(context: Sequence[int], text: Text) -> int:
    """How many of the first tokens are the end of a character whose begin is not there: a tokenizer that falls back to bytes
    reads all of the run behind them, and what an answer adds to it, as none. At the end a character may have begun."""
    if not text.decode(context).startswith(REPLACEMENT):
        return 0
    ways = ((cut, len(context) - begun) for cut in range(MAX_BEGUN + 1) for begun in range(MAX_BEGUN + 1))
    return next((cut for cut, end in ways if cut < end and not text.decode(context[cut:end]).startswith(REPLACEMENT)), 0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

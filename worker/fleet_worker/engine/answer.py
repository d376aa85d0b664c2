"""One request's tokens, collected into text and rendered as vLLM's bodies and chunks."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from fleet_worker.engine import protocol as wire
from fleet_worker.engine.core import Output
from fleet_worker.engine.sequence import Sequence
from fleet_worker.engine.text import Detokenizer, Text


class Answer:
    """Collects one request's tokens into text and renders vLLM's bodies."""

    def __init__(self, asked: wire.Request, sequence: Sequence, text: Text, model: str) -> None:
        self.sequence = sequence
        self.is_chat = isinstance(asked, wire.ChatRequest)
        self.is_told = False
        """A stream of it was handed over to its end."""
        self.wants_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._each_tells = self.wants_usage and bool(asked.stream_options and asked.stream_options.continuous_usage_stats)
        self._asked = asked
        self._detokenizer = Detokenizer.behind(sequence.prompt, text, sequence.sampling.stop)
        self._model = model
        self._created = int(time.time())
        self._id = ("chatcmpl-" if self.is_chat else "cmpl-") + sequence.request_id
        self._piece = ""
        self._new: list[int] = []
        self._ids: list[int] = []  # what this answer holds: the engine thread may be tokens ahead of it
        self._finish: str | None = None
        self._stop: str | int | None = None
        """What ended it, if the request named that: a string, or the id of a token, as vLLM tells; None: the model itself."""
        self._kv: Any = None

    def add(self, output: Output) -> bool:
        """True when the answer is complete."""
        token = output.token
        sequence = self.sequence
        is_end = output.finish == "stop" and token is not None
        self._new = [] if token is None else [token]
        self._ids += self._new
        self._kv = msgspec.to_builtins(output.reference) if output.reference is not None else None
        may_stop = len(self._ids) >= sequence.sampling.min_tokens
        if token is None or is_end:
            self._piece, stop = "", None
        else:
            self._piece, stop = self._detokenizer.add(token, may_stop=may_stop)
        if stop is not None:
            self._finish, self._stop = "stop", stop
            return True
        if output.finish is not None:
            rest, stop = self._detokenizer.finish(may_stop=may_stop)
            self._piece += rest
            self._finish, self._stop = (output.finish, None) if stop is None else ("stop", stop)
            if stop is None and is_end and token in sequence.sampling.stop_token_ids:
                self._stop = token
            return True
        return False

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self) -> dict[str, Any]:
        return wire.usage(len(self.sequence.prompt), len(self._ids), self.sequence.cached_tokens)

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": self._finish,
            "stop_reason": self._stop,
        }
        sent = self._detokenizer.sent
        choice |= {"message": {"role": "assistant", "content": sent}} if self.is_chat else {"text": sent}
        if self._asked.return_token_ids:
            choice["token_ids"] = self._ids
            if not self.is_chat:
                choice["prompt_token_ids"] = list(self.sequence.prompt)
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        body |= {"choices": [choice], "usage": self._usage(), "kv_transfer_params": self._kv}
        if self.is_chat and self._asked.return_token_ids:
            body["prompt_token_ids"] = list(self.sequence.prompt)
        return body

    def opening(self) -> dict[str, Any]:
        """First chat chunk: the role."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        usage = {"usage": self._usage()} if self._each_tells else {}
        return self._head("chat.completion.chunk") | {"choices": [choice], **usage}

    def chunk(self, ended: bool) -> dict[str, Any]:
        """The newest piece."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._finish if ended else None}
        choice |= {"delta": {"content": self._piece}} if self.is_chat else {"text": self._piece}
        if ended:
            choice["stop_reason"] = self._stop
        if self._asked.return_token_ids:
            choice["token_ids"] = self._new
        chunk = self._head("chat.completion.chunk" if self.is_chat else "text_completion") | {"choices": [choice]}
        if self.wants_usage:
            chunk["usage"] = self._usage() if self._each_tells else None
        if ended and self._kv is not None:
            chunk["kv_transfer_params"] = self._kv
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk when stream_options.include_usage was set."""
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion") | {
            "choices": [],
            "usage": self._usage(),
        }

"""Bodies in, bodies out. Only the top level is parsed: every value stays the client's bytes, so that a leg's body is put
together without encoding a prompt again, and unknown fields pass through untouched."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from fleet_router.config import RouterConfig
from fleet_router.errors import RequestError

STRIPPED: Final = frozenset({"kv_transfer_params", "cache_salt", "priority", "request_id", "data_parallel_rank"})
"""Fields that only we may set: a client that could would read other requests' KV or jump the queue."""

LIMITS: Final = ("max_tokens", "max_completion_tokens")
PREFILL_PARAMS: Final = b'{"do_remote_decode":true,"do_remote_prefill":false}'
BYTES_PER_TOKEN: Final = 3.0
"""Rough size of a token in prompt bytes; only thresholds use it, exact checks are the worker's."""
SAFE_BYTES_PER_TOKEN: Final = 16.0
"""No tokenizer makes fewer tokens than this of plain text: above it a prompt is surely too long."""

V = TypeVar("V")
_TOP: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INT: Final = msgspec.json.Decoder(int)
_BOOL: Final = msgspec.json.Decoder(bool)
_STR: Final = msgspec.json.Decoder(str)
_PROMPT: Final = msgspec.json.Decoder(list[int | str | list[int]])
_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_NULL: Final = msgspec.Raw(b"null")
_PREFILLED: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Ask(msgspec.Struct, frozen=True):
    """A parsed request: its fields as raw JSON, and what routing and limits need."""

    fields: dict[str, msgspec.Raw]
    prompt: bytes
    stream: bool
    original: bytes | None
    """The body as it came when nothing had to be stripped."""


def parse_body(body: bytes, chat: bool, config: RouterConfig) -> Ask:
    """Check what the router must know; RequestError names the field."""
    try:
        fields = _TOP.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not a JSON object: {error}", code="invalid_json") from error
    model = _typed(fields, "model", _STR, "")
    if model != config.served_name:
        raise RequestError(404, f"The model `{model}` does not exist.", code="model_not_found", param="model")
    name = "messages" if chat else "prompt"
    if name not in fields:
        raise RequestError(400, f"{name} is required", param=name)
    prompt = bytes(fields[name])
    _check_prompt(prompt, fields[name], chat, name, config)
    for limit in LIMITS:
        asked = _typed(fields, limit, _INT, None) if limit in fields else None
        if asked is not None and not 1 <= asked <= config.max_output_tokens:
            raise RequestError(400, f"{limit} is {asked}; allowed are 1 to {config.max_output_tokens}", param=limit)
    stream = _typed(fields, "stream", _BOOL, None) or False
    if STRIPPED.isdisjoint(fields):
        return Ask(fields, prompt, stream, body)
    for field in STRIPPED & fields.keys():
        del fields[field]
    return Ask(fields, prompt, stream, None)


def _check_prompt(raw: bytes, value: msgspec.Raw, chat: bool, name: str, config: RouterConfig) -> None:
    most = config.max_input_tokens
    if raw.startswith(b'"'):  # a JSON string: the whole body was checked to be valid JSON
        if len(raw) > most * SAFE_BYTES_PER_TOKEN:
            raise RequestError(400, f"{name} has {len(raw)} bytes: longer than {most} tokens whatever the tokenizer", param=name)
        return
    try:
        found = (_MESSAGES if chat else _PROMPT).decode(value)
    except msgspec.DecodeError as error:
        raise RequestError(400, f"{name}: {error}", param=name) from error
    if not found:
        raise RequestError(400, f"{name} is empty", param=name)
    if not chat and isinstance(found[0], int) and len(found) > most:
        raise RequestError(400, f"prompt has {len(found)} tokens; allowed are {most}", param=name)
    if chat:
        for i, message in enumerate(found):
            if not isinstance(message, dict) or "role" not in message:
                raise RequestError(400, f"messages[{i}].role is required", param=name)


def _typed(fields: dict[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[V], default: V | None) -> V | None:
    raw = fields.get(name)
    if raw is None or raw == _NULL:
        return default
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise RequestError(400, f"{name}: {error}", param=name) from error


def join(fields: dict[str, msgspec.Raw] | dict[str, bytes]) -> bytes:
    """Raw values back into one JSON object."""
    return b"{" + b",".join(msgspec.json.encode(key) + b":" + bytes(value) for key, value in fields.items()) + b"}"


def prefill_body(ask: Ask) -> bytes:
    """The prefill leg: one token, not streamed, blocks kept for whoever decodes."""
    fields: dict[str, bytes] = {key: bytes(value) for key, value in ask.fields.items()}
    for name in ("stream", "stream_options", "min_tokens", "max_completion_tokens"):
        fields.pop(name, None)
    fields |= {"max_tokens": b"1", "stream": b"false", "kv_transfer_params": PREFILL_PARAMS}
    return join(fields)


def decode_body(ask: Ask, kv: bytes | None) -> bytes:
    """The decode leg: the client's request, and the reference when the KV comes from elsewhere."""
    if kv is None:
        return ask.original if ask.original is not None else join(ask.fields)
    return join({**{key: bytes(value) for key, value in ask.fields.items()}, "kv_transfer_params": kv})


def reference_of(body: bytes) -> bytes | None:
    """`kv_transfer_params` of a prefill answer, None when it has none."""
    try:
        raw = _PREFILLED.decode(body).get("kv_transfer_params")
    except msgspec.DecodeError:
        return None
    return None if raw is None or bytes(raw) == b"null" else bytes(raw)


def lease_of(reference: bytes) -> str | None:
    """Lease id inside a reference, None for engines without leases of ours."""
    try:
        return _STR.decode(_PREFILLED.decode(reference).get("lease_id", msgspec.Raw(b'""'))) or None
    except msgspec.DecodeError:
        return None

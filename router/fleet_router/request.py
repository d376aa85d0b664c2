"""Bodies in, bodies out. Only the top level is parsed: every value stays the client's bytes, so that a leg's body is put
together without encoding a prompt again, and unknown fields pass through untouched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec

from fleet_router.ask import Ask
from fleet_router.asked import Anything, Leased, Prefilled, SaidBy, Tokenised
from fleet_router.config import RouterConfig
from fleet_router.costly import COSTLY, check_costly
from fleet_router.errors import RequestError
from fleet_router.fields import LARGE_BYTES, fields_of
from fleet_router.lengths import check_input, check_messages, check_text, too_many
from fleet_router.longtext import cut, read
from fleet_router.shapes import Shape, Shapes
from fleet_router.urls import check_urls
from fleet_wire.unreadable import UNREADABLE

MODEL_TOLD: Final = 200
"""Characters of a name that nobody serves, which a refusal says back."""
STRIPPED: Final = frozenset({
    "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "cache_salt", "priority", "request_id", "session_id",
    "data_parallel_rank",
})  # fmt: skip
"""Fields that only we may set: a client that could would read other requests' KV or jump the queue. What is in `vllm_xargs`
reaches vLLM's scheduler as if we had said it, `kv_transfer_params` among it."""

LIMITS: Final[tuple[str, ...]] = ("max_tokens", "max_completion_tokens")
_LIMITED: Final = frozenset({*LIMITS, "min_tokens"})
PREFILL_PARAMS: Final = b'"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false'
_NOT_PREFILLED: Final = frozenset({
    "max_tokens", "stream", "stream_options", "min_tokens", "max_completion_tokens",
    "n", "best_of", "use_beam_search", "prompt_logprobs", "echo",  # more sequences would pin more KV; the answer goes to nobody
})  # fmt: skip
IDS_ASKED: Final = "return_token_ids"
BYTES_PER_TOKEN: Final = 3.0
"""Rough size of a token in prompt bytes; only thresholds use it, exact checks are the worker's."""
MESSAGES_MOST: Final = 65_536
OPTIONS_BYTES_MOST: Final = 1_024
"""Of `stream_options`: a few flags."""
PROMPT_KINDS: Final = "prompt must be text or a list of token ids"

V = TypeVar("V")

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_INT: Final = msgspec.json.Decoder(int)
_BOOL: Final = msgspec.json.Decoder(bool)
_STR: Final = msgspec.json.Decoder(str)
_ONLY: Final = msgspec.json.Decoder(tuple[msgspec.Raw])
_HOLDS_PROMPTS: Final = re.compile(rb"\[\s*[\"\[]")
_IDS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]])
_OPTIONS: Final = msgspec.json.Decoder(dict[str, Any])
"""To the bottom: what is asked for of ours is written into it, and it is encoded again."""
_MESSAGES: Final = msgspec.json.Decoder(list[SaidBy])
_NULL: Final = msgspec.Raw(b"null")
_PROMPT_TOKENS: Final = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})\b')
_OBJECT: Final = msgspec.json.Decoder(Anything)
_NAMED: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""The same, and its names are UTF-8."""


def parse_alone(body: bytes, config: RouterConfig, *, counts: bool = False) -> Ask:
    """A request that a worker answers by itself: only whose model it is and how long matters here. `counts`: it is tokenised and
    no more, of whatever length it is."""
    fields = fields_of(body)
    model = _typed(fields, "model", _STR)
    adapter = "" if model is None else _adapter_of(model, config)
    if not COSTLY.isdisjoint(fields):
        check_costly(fields)
    if not counts:
        _check_embedded(fields, config)
    check_urls(body, "messages")  # last: it is what costs most, 13 ms of 4 MiB of escapes
    return _without_ours(Ask(fields, b"", False, body, True, adapter, counts))


def _check_embedded(fields: dict[str, msgspec.Raw], config: RouterConfig) -> None:
    """Texts, token ids or (vLLM) a conversation. An answer whose head is as long as the batch is a broken one to us; an input
    that is filled up to the engine's context (vLLM) has so many tokens."""
    most = config.max_input_tokens
    if "encoding_format" in fields and _typed(fields, "encoding_format", _STR) == "bytes":
        told = "encoding_format bytes is not served: it tells of each input in one header; float, base64 and bytes_only are"
        raise RequestError(400, told, param="encoding_format")
    if "padding" in fields and _typed(fields, "padding", _STR) == "max_length" and config.max_model_len > most:
        told = f"padding: each input has {config.max_model_len} tokens with it; allowed are {most}"
        raise RequestError(400, told, param="padding")
    if (given := fields.get("input")) is not None:
        check_input(bytes(given), most, "input")
    if (given := fields.get("messages")) is not None and given != _NULL:
        _check_messages(given, "messages")
        check_messages(bytes(given), most, "messages")


def parse_body(body: bytes, chat: bool, config: RouterConfig, begins: int = 0) -> Ask:
    """Check what the router must know; RequestError names the field. `begins`: where the body does in these bytes."""
    if (found := cut(body, chat, begins)) is not None:
        if (shape := _SHAPES.find(found.rest, chat, config)) is not None:
            return _shaped(body, chat, config, begins, shape, found.value(body, shape.place, len(shape.value)))
        if (known := read(body, chat, found)) is not None:
            ask = _checked(body, chat, config, known, begins)
            if ask.original is not None:
                _SHAPES.learn(found.rest, chat, config, ask, known[1])
            return ask
    whole = body[begins:] if begins else body
    fields = fields_of(whole)
    value = fields.get("messages" if chat else "prompt", _NULL)
    return _checked(whole, chat, config, (fields, value, bytes(value)), 0)


_SHAPES: Final = Shapes()


def _shaped(body: bytes, chat: bool, config: RouterConfig, begins: int, shape: Shape, prompt: bytes) -> Ask:
    """A body that differs from one that was in order in its long texts alone: what is to be said of them."""
    if chat:
        check_messages(prompt, config.max_input_tokens, "messages")
        check_urls(prompt, "messages", shape.value)
    else:
        check_text(len(prompt) - 2, config.max_input_tokens, "prompt")
    return Ask(shape.with_prompt(prompt), prompt, shape.stream, body, False, shape.adapter, begins=begins)


def _checked(
    body: bytes, chat: bool, config: RouterConfig, known: tuple[dict[str, msgspec.Raw], msgspec.Raw, bytes], begins: int
) -> Ask:
    """`known`: its fields, and the prompt or conversation without its long texts and with them."""
    name, (fields, short, prompt) = "messages" if chat else "prompt", known
    adapter = "" if fields.get("model") == _quoted(config.served_name) else _other_model(fields, config)
    if prompt == b"null":
        raise RequestError(400, f"{name} is required", param=name)
    original: bytes | None = body
    if chat:
        _check_messages(short, name)
        check_messages(prompt, config.max_input_tokens, name)
        check_urls(prompt, name, bytes(short))
    elif (only := _check_prompt(prompt, config)) is not prompt:
        prompt = only
        fields[name], original = msgspec.Raw(only), None
    if not _LIMITED.isdisjoint(fields):
        _check_limits(fields, config)
        if not chat and _names_limit(fields):
            original = None
    if not COSTLY.isdisjoint(fields):
        check_costly(fields)
    stream = ("stream" in fields and _typed(fields, "stream", _BOOL)) or False
    if "stream_options" in fields:
        _check_stream_options(fields["stream_options"], fields, stream)
    return _without_ours(Ask(fields, prompt, stream, original, False, adapter, begins=begins))


@lru_cache(64)
def _quoted(name: str) -> msgspec.Raw:
    """A name as nearly everybody writes it in JSON."""
    return msgspec.Raw(msgspec.json.encode(name))


def _other_model(fields: dict[str, msgspec.Raw], config: RouterConfig) -> str:
    model = _typed(fields, "model", _STR)
    if model is None:
        raise RequestError(400, "model is required", param="model")
    return _adapter_of(model, config)


def _without_ours(ask: Ask) -> Ask:
    if STRIPPED.isdisjoint(ask.fields):
        return ask
    for field in STRIPPED:
        ask.fields.pop(field, None)
    _let_go_of_body(ask.fields)
    return ask.put_together()


def _let_go_of_body(fields: dict[str, msgspec.Raw]) -> None:
    """Values are parts of the body that they came in. Who waits is counted by them where that goes nowhere, so they must not hold
    it."""
    for name, value in fields.items():
        fields[name] = value.copy()


def _adapter_of(model: str, config: RouterConfig) -> str:
    """The adapter of this name, empty for the model itself; 404 when it is neither, 503 of a router that was told of no fleet
    yet: it cannot know."""
    if model == config.served_name:
        return ""
    if model not in config.adapters:
        if not config.fleet and not config.served_name:
            raise RequestError(503, "this router was told of no fleet yet", code="not_ready")
        raise RequestError(404, f"The model `{model[:MODEL_TOLD]}` does not exist.", code="model_not_found", param="model")
    return model


def with_fields(ask: Ask, added: dict[str, msgspec.Raw], spliced: bytes) -> Ask:
    """With fields of ours; `spliced` is the same as text, with a comma before and the object's end behind it, so that a body that
    goes on as it came is neither put together anew nor copied."""
    fields, original, added_before = ask.fields, ask.original, ask.added
    anew = not fields
    for name, value in added.items():
        anew = anew or name in fields
        fields[name] = value
    if original is None:
        return ask
    if anew:
        _let_go_of_body(fields)
        return Ask(fields, ask.prompt, ask.stream, None, ask.alone, ask.adapter, ask.counts)
    if added_before:
        spliced = added_before[:-1] + spliced
    return Ask(fields, ask.prompt, ask.stream, original, ask.alone, ask.adapter, ask.counts, spliced, ask.begins)


def choices_of(ask: Ask) -> int:
    """Answers that are asked for, 1 when `n` is nothing that we understand: it is the worker's to refuse."""
    return _few(ask.fields.get("n"))


def sequences_of(ask: Ask) -> int:
    """Those that are made for them: of `best_of` the client sees some."""
    return max(choices_of(ask), _few(ask.fields.get("best_of")))


def _few(asked: msgspec.Raw | None) -> int:
    if asked is None:
        return 1
    raw = bytes(asked)
    return max(1, int(raw)) if raw.isdigit() and len(raw) < 6 else 1


def asked_tokens(ask: Ask) -> int:
    """The client's limit of output tokens, 0 when it gave none."""
    most = 0
    for name in LIMITS:
        raw = ask.fields.get(name)
        if raw is not None and raw != _NULL and (asked := _INT.decode(raw)) > most:
            most = asked
    return most


def _check_limits(fields: dict[str, msgspec.Raw], config: RouterConfig) -> None:
    """What a decode worker would refuse after the prompt was prefilled."""
    given: list[int] = []
    most = config.max_output_tokens
    for limit in LIMITS:
        if limit in fields and (asked := _typed(fields, limit, _INT)) is not None:
            if not 1 <= asked <= most:
                raise RequestError(400, f"{limit} is {asked}; allowed are 1 to {most}", param=limit)
            given.append(asked)
    if "min_tokens" not in fields:
        return
    least = _typed(fields, "min_tokens", _INT)
    if least is not None and not 0 <= least <= max(given, default=most):
        raise RequestError(400, f"min_tokens is {least}; allowed are 0 to max_tokens", param="min_tokens")


def _names_limit(fields: dict[str, msgspec.Raw]) -> bool:
    """A completion's limit by chat's name for it, which vLLM passes over there: by its own, where it has none yet."""
    limit = fields.get("max_completion_tokens", _NULL)
    if limit == _NULL or fields.get("max_tokens", _NULL) != _NULL:
        return False
    del fields["max_completion_tokens"]
    fields["max_tokens"] = limit
    _let_go_of_body(fields)
    return True


def _check_stream_options(raw: msgspec.Raw, fields: dict[str, msgspec.Raw], stream: bool) -> None:
    """Short enough that whoever decodes it later, from deeper down, can."""
    if (given := memoryview(raw).nbytes) > OPTIONS_BYTES_MOST:
        told = f"stream_options has {given} bytes; allowed are {OPTIONS_BYTES_MOST}"
        raise RequestError(400, told, param="stream_options")
    options = _typed(fields, "stream_options", _OPTIONS)
    if options is not None and not stream:
        raise RequestError(400, "stream_options is only allowed when stream is true", param="stream_options")
    if options is not None and options.get("include_usage") not in (True, False, None):  # "off": none to engines, true to us
        raise RequestError(400, "stream_options.include_usage must be true or false", param="stream_options")


def _check_prompt(raw: bytes, config: RouterConfig, *, inner: bool = False) -> bytes:
    """The one prompt of a completion: text or token ids, also as the only item of a list."""
    most = config.max_input_tokens
    if raw.startswith(b'"'):  # a JSON string: the body is an object whose texts end where they seem to
        check_text(len(raw) - 2, most, "prompt")
        return raw
    if not raw.startswith(b"["):
        raise RequestError(400, PROMPT_KINDS, param="prompt")
    if _HOLDS_PROMPTS.match(raw) and not inner:
        try:
            (only,) = _ONLY.decode(raw)
        except msgspec.DecodeError as error:
            raise RequestError(400, "prompt holds several prompts; one per request is served", param="prompt") from error
        return _check_prompt(bytes(only), config, inner=True)
    try:
        found = _IDS.decode(raw)
    except msgspec.DecodeError as error:
        raise RequestError(400, PROMPT_KINDS, param="prompt") from error
    if not found:
        raise RequestError(400, "prompt is empty", param="prompt")
    if len(found) > most:
        raise too_many(len(found), most, "prompt")
    return raw


def _check_messages(value: msgspec.Raw, name: str) -> None:
    if memoryview(value).nbytes > LARGE_BYTES and (many := bytes(value).count(b'"role"')) > MESSAGES_MOST:
        raise RequestError(400, f"{name} holds {many} messages; allowed are {MESSAGES_MOST}", param=name)
    try:
        found = _MESSAGES.decode(value)
    except msgspec.DecodeError as error:
        raise RequestError(400, f"{name}: {error}", param=name) from error
    if not found:
        raise RequestError(400, f"{name} is empty", param=name)
    for i, message in enumerate(found):
        if not memoryview(message.role).nbytes:
            raise RequestError(400, f"messages[{i}].role is required", param=name)


def _typed(fields: dict[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[V]) -> V | None:
    raw = fields.get(name)
    if raw is None or raw == _NULL:
        return None
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise RequestError(400, f"{name}: {error}", param=name) from error


def join(fields: Mapping[str, msgspec.Raw], kv: bytes | None = None) -> bytes:
    """Raw values back into one JSON object, `kv` as its last one."""
    pieces = [_key(name) + bytes(value) for name, value in fields.items() if kv is None or name != "kv_transfer_params"]
    if kv is not None:
        pieces.append(b'"kv_transfer_params":' + kv)
    return b"{" + b",".join(pieces) + b"}"


def prefill_body(ask: Ask, *, ids: bool = False) -> bytes:
    """The prefill leg: one token, not streamed, blocks kept for whoever decodes. The decode leg's limits go along, so that the
    prefill worker, which counts tokens, refuses what decode could not serve; engines that do not know them pass over them.
    `ids`: the prompt's are asked for."""
    pieces: list[ReadableBuffer] = [b"{"]
    for name, value in ask.fields.items():
        if name not in _NOT_PREFILLED and not (ids and name == IDS_ASKED):
            pieces += (_key(name), value, b",")
    if ids:
        pieces += (_key(IDS_ASKED), b"true,")
    pieces.append(PREFILL_PARAMS)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if (limit := ask.fields.get(name)) is not None and limit != _NULL:
            pieces += (b",", _key(name), limit)
    pieces.append(b"}}")
    return b"".join(pieces)


@lru_cache(256)
def _key(name: str) -> bytes:
    return msgspec.json.encode(name) + b":"


def decode_body(ask: Ask, kv: bytes | None) -> bytes:
    """The decode leg: the client's request, and the reference when the KV comes from elsewhere."""
    body, added = decode_parts(ask, kv)
    return b"".join((memoryview(body)[:-1], added)) if added else bytes(body)


def decode_parts(ask: Ask, kv: bytes | None) -> tuple[bytes | memoryview, bytes]:
    """The same, so that a long body is copied once or not at all: a JSON object, and what stands in place of its last brace, when
    that is something."""
    body, added = ask.original, ask.added
    if body is None or not ask.fields:
        return (join(ask.fields, kv), b"") if body is None or kv is not None else (body, b"")
    if kv is not None:  # it holds no `kv_transfer_params`, or it would not be what is sent
        added = b'%b,"kv_transfer_params":%b}' % (added[:-1], kv)
    if ask.begins:
        if added and body[-1] != _BRACE:
            body = body.rstrip()
        return memoryview(body)[ask.begins :], added
    return (body.rstrip() if added else body), added


_BRACE: Final = ord("}")
_EMPTY: Final = len(b"{}")
_BODY: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANSWER: Final = msgspec.json.Decoder(Prefilled)


def named(body: bytes | memoryview, model: str, adapter: str) -> bytes | memoryview:
    """What is sent to a worker that serves the model under the name `model`, empty: under the fleet's. A body that is no JSON
    inside a long text goes on as it is, for the worker to refuse."""
    if not model or adapter:
        return body
    try:
        fields = _BODY.decode(body)
    except UNREADABLE:
        return body
    if "model" in fields:
        fields["model"] = _quoted(model)
    return join(fields)


def reference_of(body: bytes, *, ids: bool = False) -> bytes | None:
    """`kv_transfer_params` of a prefill answer, None when it has none. `ids`: with the prompt's, where the answer tells them and
    the reference is none of ours."""
    try:
        answer = _ANSWER.decode(body)
        found = bytes(answer.kv_transfer_params)
        if not found.isascii():
            found.decode()  # what is no UTF-8 would make the decode leg's body none
    except UNREADABLE:
        return None
    told = bytes(answer.prompt_token_ids) if ids else b""
    if told.startswith(b"[") and found.endswith(b"}") and len(found) > _EMPTY and b'"lease_id"' not in found:
        return b'%b,"prompt_token_ids":%b}' % (found[:-1], told)
    return None if answer.kv_transfer_params == _NULL else found


ARGUMENTS: Final = "chat_template_kwargs"
RENDERED: Final[tuple[str, ...]] = (
    "tools", ARGUMENTS, "add_generation_prompt", "continue_final_message", "add_special_tokens",
)  # fmt: skip
"""Fields that change what a prompt is in tokens. Not `model`: an adapter has its model's tokenizer, and its name may be unknown
there."""


def tokenize_body(ask: Ask, *, chat: bool) -> bytes:
    """Asks for the prompt's token ids."""
    fields = {name: ask.fields[name] for name in RENDERED if name in ask.fields}
    if chat and (documents := ask.fields.get("documents", _NULL)) != _NULL:
        fields[ARGUMENTS] = _with_documents(fields.get(ARGUMENTS, _NULL), documents)
    return join({**fields, "messages" if chat else "prompt": msgspec.Raw(ask.prompt)})


def _with_documents(arguments: msgspec.Raw, documents: msgspec.Raw) -> msgspec.Raw:
    """Of /tokenize they are no field (vLLM): it knows them as an argument of the template, which is what they become."""
    given = {} if arguments == _NULL else _BODY.decode(arguments)
    given["documents"] = documents
    return msgspec.Raw(join(given))


_LEASE: Final = msgspec.json.Decoder(Leased)
_TOKENISED: Final = msgspec.json.Decoder(Tokenised)


def tokens_of(body: bytes) -> list[int]:
    """Token ids in a worker's answer to /tokenize; empty when there are none."""
    try:
        return _TOKENISED.decode(body).tokens
    except UNREADABLE:
        return []


def is_object(body: bytes) -> bool:
    """It is a JSON object, whatever is in it."""
    try:
        (_OBJECT if body.isascii() else _NAMED).decode(body)
    except UNREADABLE:
        return False
    return True


def prompt_tokens_of(body: bytes) -> int:
    """How long the prompt was, as a prefill answer says; 0 when it does not."""
    found = _PROMPT_TOKENS.search(body)
    return int(found[1]) if found is not None else 0


def lease_of(reference: bytes) -> str | None:
    """Lease id inside a reference, None for engines without leases of ours."""
    try:
        return _LEASE.decode(reference).lease_id or None
    except UNREADABLE:
        return None

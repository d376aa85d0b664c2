"""The OpenAI dialect of vLLM, in and out: bodies parsed once into typed requests, answers built as plain JSON."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from fleet_wire.kv import KvReference
from fleet_wire.unreadable import UNREADABLE
from fleet_worker.engine.errors import BadRequestError
from fleet_worker.engine.neutral import refuse_unsupported
from fleet_worker.engine.sequence import Defaults, Sampling

MAX_STOPS = 16
MAX_STOP_CHARS = 1_024
"""Of one. What an answer holds back for it is compared anew with each token: a text that repeats itself as a stop string of
500,000 characters does held everybody's streams for seconds."""
MAX_STOP_IDS = 1_024
CODES: Final = {
    "NotFoundError": "model_not_found", "RequestEntityTooLarge": "body_too_large", "ServiceUnavailableError": "overloaded",
    "EngineStoppedError": "engine_stopped", "KvReferenceError": "kv_reference", "KvTransferError": "kv_transfer",
    "BadAdapterError": "bad_adapter", "ForbiddenError": "forbidden",
}  # fmt: skip
"""`code` of an error by its `type`."""
MAX_TOLD = 200
"""Characters of what was given that a refusal says back."""
MAX_BODY_BYTES = 4 * 1024 * 1024
NEUTRAL: Final = Defaults()
Count = Annotated[int, msgspec.Meta(ge=0)]


class KvParams(msgspec.Struct, frozen=True):
    """Either leg's `kv_transfer_params`; which one it is follows from the two flags."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    max_tokens: int | None = None
    """With do_remote_decode: the limits of the request that will decode. What it could not be served is refused here."""
    max_completion_tokens: int | None = None
    min_tokens: int | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI stream_options."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: usage in every chunk, for who asked for usage at all."""


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    min_tokens: Count = 0
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """0 and -1: all tokens."""
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    """Cached KV is found only by requests with the same salt."""


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """POST /v1/completions; unknown fields are ignored, as vLLM does."""

    prompt: str | list[Count]


class CalledFunction(msgspec.Struct, frozen=True):
    """What was called. Arguments are JSON in text, as OpenAI has them, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call in a conversation's past."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """One message; content may be text or OpenAI's list of text parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # what was thought before it: the newer name, and the older one
    reasoning: str | None = None
    reasoning_content: str | None = None
    # what no template of text knows
    function_call: Any = None
    audio: Any = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    reasoning_effort: str | None = None
    """The template's to write."""


Request = CompletionRequest | ChatRequest
T = TypeVar("T", bound=CompletionRequest | ChatRequest)


def parse(body: bytes, kind: type[T]) -> T:
    """Typed request; BadRequestError names the field in `param`. Null is absent, as OpenAI's clients send it."""
    try:
        fields = _TOP.decode(body)
        given = {name: value for name, value in fields.items() if value != _NULL}
        refuse_unsupported(given)
        request = msgspec.json.decode(body if len(given) == len(fields) else msgspec.json.encode(given), type=kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(*_worded(str(error))) from error
    except UNREADABLE as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if request.n != 1:
        raise BadRequestError(f"n is {request.n}; only n=1 is served", "n")
    return request


_TOP: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL: Final = msgspec.Raw(b"null")
_PROMPT: Final = "prompt must be text or a list of token ids"


def _worded(message: str) -> tuple[str, str | None]:
    """(what is wrong, field) of a msgspec message such as "Expected `int`, got `str` - at `$.stop[0]`"."""
    if missing := re.search(r"missing required field `(\w+)`(?: - at `\$\.(([A-Za-z_]+)[^`]*)`)?", message):
        field, where, top = missing.groups()
        return f"{where}.{field} is required" if where else f"{field} is required", top or field
    if found := re.search(r" - at `\$\.(([A-Za-z_]+)[^`]*)`$", message):
        name = found.group(2)
        what = message[: found.start()].replace(" | null", "")
        return _PROMPT if name == "prompt" else f"{found.group(1)}: {what}", name
    return message, None


def check_stops(request: Request) -> list[str]:
    """The strings that end it; BadRequestError."""
    stop = [request.stop] if isinstance(request.stop, str) else (request.stop or [])
    if len(stop) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in stop):
        raise BadRequestError(f"stop takes at most {MAX_STOPS} non-empty strings of at most {MAX_STOP_CHARS} characters", "stop")
    if len(request.stop_token_ids or ()) > MAX_STOP_IDS:  # each step looks through them
        raise BadRequestError(f"stop_token_ids takes at most {MAX_STOP_IDS} ids", "stop_token_ids")
    return stop


def sampling_of(request: Request, room: int, most: int, defaults: Defaults = NEUTRAL) -> Sampling:
    """Sampling parameters; max_tokens defaults to what the model's length leaves (`room`), bounded by `most`."""
    asked = request.max_completion_tokens or request.max_tokens
    default = 16 if isinstance(request, CompletionRequest) else room
    limit = asked if asked is not None else max(1, min(default, room, most))
    if limit > most:
        raise BadRequestError(f"max_tokens is {limit}, at most {most} are served", "max_tokens")
    if request.min_tokens > limit:
        raise BadRequestError(f"min_tokens is {request.min_tokens}, more than max_tokens {limit}", "min_tokens")
    return Sampling(
        temperature=request.temperature if request.temperature is not None else defaults.temperature,
        top_p=request.top_p if request.top_p is not None else defaults.top_p,
        top_k=max(0, request.top_k if request.top_k is not None else defaults.top_k),
        seed=request.seed,
        max_tokens=limit,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop=tuple(check_stops(request)),
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )


def kv_of(request: Request) -> tuple[KvParams, KvReference | None]:
    """(what is asked of the blocks, reference to pull from)."""
    raw = request.kv_transfer_params
    if bytes(raw) == b"":
        return KvParams(), None
    try:
        params = msgspec.json.decode(raw, type=KvParams)
        reference = msgspec.json.decode(raw, type=KvReference) if params.do_remote_prefill else None
    except UNREADABLE as error:
        raise BadRequestError(f"kv_transfer_params: {error}", "kv_transfer_params") from error
    if params.do_remote_decode and params.do_remote_prefill:
        raise BadRequestError(
            "kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other", "kv_transfer_params"
        )
    return params, reference


def decode_leg_of(request: Request, params: KvParams) -> Request:
    """The request as the decode leg will send it."""
    return msgspec.structs.replace(
        request,
        max_tokens=params.max_tokens,
        max_completion_tokens=params.max_completion_tokens,
        min_tokens=params.min_tokens or 0,
    )


def text_messages(messages: list[ChatMessage], *, in_parts: bool = False) -> list[dict[str, Any]]:
    """Messages as templates are given them, with text content; anything but text is refused, nothing is ever fetched. `in_parts`:
    the template goes through a content's parts (fleet_wire.contentparts)."""
    return [_row(message, f"messages[{number}]", in_parts) for number, message in enumerate(messages)]


def _row(message: ChatMessage, where: str, in_parts: bool) -> dict[str, Any]:
    calls = message.tool_calls if message.role != "assistant" else None  # nobody else's are known to any template
    more = {"tool_calls": calls, "function_call": message.function_call, "audio": message.audio}
    if name := next((name for name, said in more.items() if said), None):
        raise BadRequestError(f"{where}.{name} is not supported by the torch engine", "messages")
    content = _parts(message.content, f"{where}.content")
    is_list = in_parts and message.role != "tool"  # a tool's is one text, as vLLM gives it to every template
    row: dict[str, Any] = {
        "role": message.role,
        "content": [{"type": "text", "text": text} for text in content] if is_list else "\n".join(content),
    }
    if message.tool_calls:
        row["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool" and message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    thought = message.reasoning if message.reasoning is not None else message.reasoning_content
    if message.role == "assistant" and thought is not None:  # as by vLLM: templates know one of the names, or none
        row |= {"reasoning": thought, "reasoning_content": thought}
    return row if message.name is None else row | {"name": message.name}


def _call(call: ToolCall) -> dict[str, Any]:
    """With arguments as an object, which templates want. What is none is an empty one, as in vLLM: it lies in the past, and each
    later turn would be refused for it."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except UNREADABLE:
            arguments = None
    function = {"name": call.function.name, "arguments": arguments if isinstance(arguments, dict) else {}}
    return {**({} if call.id is None else {"id": call.id}), "type": call.type, "function": function}


def _parts(content: str | list[dict[str, Any]] | None, where: str) -> list[str]:
    """On lines of their own, as vLLM does it, for a template that takes text."""
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    return [_part(part, f"{where}[{number}]") for number, part in enumerate(content)]


def _part(part: dict[str, Any], where: str) -> str:
    """Text of a content part."""
    if (kind := part.get("type")) != "text":
        raise BadRequestError(f"{where}.type is {repr(kind)[:MAX_TOLD]}; served: 'text'", "messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequestError(f"{where}.text must be text", "messages")
    return text


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI usage object."""
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": output_tokens, "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }  # fmt: skip


def error_body(message: str, kind: str, status: int, param: str | None = None, *, retryable: bool = False) -> dict[str, Any]:
    """vLLM's error shape, with a code in words and `retryable` as the router's errors have them. `request_id` is the server's to
    add."""
    code = CODES.get(kind, "internal_error" if status >= 500 else "invalid_request")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "retryable": retryable}}

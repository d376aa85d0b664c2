"""OpenAI's POST /v1/responses to a chat request (platform.openai.com, Responses API).

Nothing is stored: the conversation comes with every request, what names one that was kept (`previous_response_id`,
`conversation`) and `background` are refused, and answers say `store: false`. Tools are functions; OpenAI's hosted tools are
refused by name. What cannot change an answer is taken and passed over, as vLLM does.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

import msgspec

from fleet_router.dialect.translation import given, parsed
from fleet_router.errors import RequestError

Passed = msgspec.Raw
NOTHING: Final = msgspec.Raw()
T = TypeVar("T")
THOUGHT: Final = "reasoning"
"""Goes back as from vLLM's own endpoint: templates know of which turns their model is to see it, those of a call that was just
answered most of all."""
STATELESS: Final = "this router stores no responses: send the whole conversation in input"
REFERENCE: Final = "item_reference"
KEPT: Final = {
    "previous_response_id": STATELESS, "conversation": STATELESS,
    "prompt": "this router stores no prompts: send instructions and input",
}  # fmt: skip
"""What a request may name that somebody was to have kept."""
INCLUDED: Final = frozenset({
    "reasoning.encrypted_content",
    "web_search_call.results", "web_search_call.action.sources", "file_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "message.input_image.image_url",
})  # fmt: skip
"""What may be asked for beside the answer, of things that are in none: thoughts are told as they are, and no hosted tool runs."""


class Part(msgspec.Struct, frozen=True):
    """A piece of a message."""

    type: Literal["input_text", "output_text", "text", "input_image", "refusal", "reasoning_text"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class Item(msgspec.Struct, frozen=True):
    """An item of the input; which fields it needs follows from its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    """None: a message."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function that the client runs."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, frozen=True):
    """This one and no other."""

    type: Literal["function"]
    name: str


class Format(msgspec.Struct, frozen=True):
    """Of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """`verbosity` is passed over: engines know none."""

    format: Format | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """How much to think, for engines whose model does."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body."""

    model: str
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Literal[0] | None = None
    stream: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: Passed = NOTHING
    prompt_cache_options: Passed = NOTHING
    prompt_cache_retention: Passed = NOTHING
    client_metadata: Passed = NOTHING
    """Codex's, of the program itself."""
    max_tool_calls: Passed = NOTHING
    """Of hosted tools."""
    stream_options: Passed = NOTHING
    """Whether events are padded so that nobody learns from their length; vLLM does not, either."""


def read(body: bytes) -> ResponsesRequest:
    """The request; RequestError 400. An item of the conversation by its id alone is what the AI SDK sends unless it is told
    `store: false`: its user wrote no item, and would look for one in vain."""
    try:
        return parsed(body, ResponsesRequest)
    except RequestError as error:
        where = (error.param or "").removesuffix(".type")
        if not str(error).startswith(f"{where}.type: Invalid enum value '{REFERENCE}'"):
            raise
        told = f"{where}: an {REFERENCE} is not served: {STATELESS} (store: false, in most SDKs)"
        raise RequestError(400, told, param="input") from error


def chat_request(asked: ResponsesRequest) -> dict[str, Any]:
    """The chat request, without stream fields; RequestError 400 for state that nobody keeps."""
    for name, why in KEPT.items():
        if getattr(asked, name) is not None:
            raise RequestError(400, f"{name}: {why}", param=name)
    for included in asked.include or ():
        if included not in INCLUDED:
            raise RequestError(400, f"include: {included} is not served", param="include")
    return given(
        model=asked.model,
        messages=_messages(asked),
        max_completion_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        tools=[_tool(tool) for tool in asked.tools] if asked.tools else None,
        tool_choice=_choice(asked),
        parallel_tool_calls=asked.parallel_tool_calls if asked.tools else None,
        response_format=_format(asked.text.format) if asked.text is not None and asked.text.format is not None else None,
        reasoning_effort=asked.reasoning.effort if asked.reasoning is not None else None,
    )


def _choice(asked: ResponsesRequest) -> Any:
    """Without tools `auto` says nothing, and clients send it with every request; vLLM refuses it there."""
    choice = asked.tool_choice
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice == "auto" and not asked.tools else choice


def _tool(tool: Tool) -> dict[str, Any]:
    function = given(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return {"type": "function", "function": function}


def _format(asked: Format) -> dict[str, Any] | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    if asked.name is None or asked.schema is None:
        raise RequestError(400, "text.format: json_schema needs name and schema", param="text.format")
    schema = given(name=asked.name, schema=asked.schema, description=asked.description, strict=asked.strict)
    return {"type": "json_schema", "json_schema": schema}


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if asked.instructions:
        found.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*found, {"role": "user", "content": asked.input}]
    for number, item in enumerate(asked.input):
        _add(found, item, f"input[{number}]")
    for message in found:
        if THOUGHT in message:
            message[THOUGHT] = "".join(message[THOUGHT])
    rows = [message for message in found if not _is_thought(message)]
    return _begun_by_system(rows) if any(item.role == "developer" for item in asked.input) else rows


def _begun_by_system(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What developers say is the system's, and many templates take one message of it, at the beginning alone: put together there,
    as vLLM does with what it knows for a developer's."""
    told = [row["content"] for row in rows if row["role"] == "system"]
    if not told or not all(isinstance(content, str) for content in told):
        return rows
    others = [row for row in rows if row["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, told))}, *others]


def _is_thought(message: dict[str, Any]) -> bool:
    """Nothing was said or called after it, so far."""
    return message.keys() == {"role", THOUGHT}


def _add(found: list[dict[str, Any]], item: Item, where: str) -> None:
    """One item; what was thought, said and called in one turn belongs to one assistant message."""
    if item.type is None or item.type == "message":
        role = _needed(item.role, f"{where}.role")
        _needed(item.content, f"{where}.content")
        content = _content(item.content or "", where)
        if role == "assistant" and found and _is_thought(found[-1]):
            found[-1]["content"] = content
        else:
            found.append({"role": "system" if role == "developer" else role, "content": content})
    elif item.type == "reasoning" and (thought := _thought(item.content or "")):
        _turn(found).setdefault(THOUGHT, []).append(thought)
    elif item.type == "function_call":
        function = {"name": _needed(item.name, f"{where}.name"), "arguments": _needed(item.arguments, f"{where}.arguments")}
        call = {"id": _needed(item.call_id, f"{where}.call_id"), "type": "function", "function": function}
        _turn(found).setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        _needed(item.output, f"{where}.output")
        answered = _needed(item.call_id, f"{where}.call_id")
        found.append({"role": "tool", "tool_call_id": answered, "content": _content(item.output or "", where)})


def _turn(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's, which has begun or begins."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant"})
    return found[-1]


def _thought(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


def _needed(value: T | None, where: str) -> T:
    if value is None:
        raise RequestError(400, f"{where} is required", param="input")
    return value


def _content(content: str | list[Part], where: str) -> Any:
    """Plain text when there is nothing else: chat templates of text models take no lists."""
    if isinstance(content, str):
        return content
    if all(part.type != "input_image" for part in content):
        return "\n".join(part.text or part.refusal or "" for part in content)
    return [_part(part, where) for part in content]


def _part(part: Part, where: str) -> dict[str, Any]:
    if part.type != "input_image":
        return {"type": "text", "text": part.text or part.refusal or ""}
    url = given(url=_needed(part.image_url, f"{where}.content.image_url"), detail=part.detail)
    return {"type": "image_url", "image_url": url}

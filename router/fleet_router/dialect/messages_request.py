"""Anthropic's POST /v1/messages to a chat request (docs.anthropic.com, Messages API).

Fields that change what comes out and that we cannot honour are refused by name; those that only inform are taken and passed over
(`metadata`, `service_tier`, `speed`, `diagnostics`, `cache_control`: prefixes are cached for everybody here).
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from fleet_router.dialect.translation import given
from fleet_router.errors import RequestError

FAILED: Final = "The tool call failed."
"""A chat's tool message has no field for it; without words the model takes an error's text for a result."""
BILLING: Final = "x-anthropic-billing-header"
"""A line before Claude Code's system prompt with a hash of each request: no two of its prompts would begin alike, no worker would
hold one's beginning. vLLM takes it out, too."""
NO_THREADS: Final = "thread_unsupported_request"
"""What Anthropic's API says of a request whose conversation it cannot keep. Its own clients go on without a thread then; their
tool runner asks for one unless told not to."""
BUDGET_LEAST: Final = 1_024
"""Tokens of thought, as Anthropic has it."""
Passed = msgspec.Raw
NOTHING: Final = msgspec.Raw()


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: Passed = NOTHING
    citations: Passed = NOTHING


class Source(msgspec.Struct, frozen=True):
    """Of an image."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Image(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """An image, for engines whose model sees."""

    source: Source
    cache_control: Passed = NOTHING


class ToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Passed = NOTHING


class ToolResult(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[Text | Image] | None = None
    is_error: bool | None = None
    cache_control: Passed = NOTHING


class Thinking(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Earlier reasoning, which goes back as from vLLM's own endpoint: templates know of which turns their model is to see it,
    those of a call that was just answered most of all."""

    thinking: str = ""
    signature: str | None = None


class RedactedThinking(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """The same, sealed by another provider."""

    data: Passed = NOTHING


class Turn(msgspec.Struct, frozen=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Text | Image | ToolUse | ToolResult | Thinking | RedactedThinking]


class Tool(msgspec.Struct, frozen=True):
    """A tool that the client runs; Anthropic's own tools have another type and no schema."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Passed = NOTHING


class ToolChoice(msgspec.Struct, frozen=True):
    """Which tool is to be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingMode(msgspec.Struct, frozen=True):
    """As vLLM's own endpoint reads it: "disabled" is the effort none, for models that think unless told not to; "enabled" a
    budget; "adaptive" leaves it to the model and `output_config.effort`. Thoughts are always told, whatever `display` says."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Passed = NOTHING


class OutputFormat(msgspec.Struct, frozen=True):
    """The answer's form."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is to be thought, and the answer's form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ClearThinking(msgspec.Struct, frozen=True):
    """Of how many turns the thoughts are to be seen: the model's own template knows that, and has the last word."""

    type: Literal["clear_thinking_20251015"]


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be taken out of the conversation. Claude Code asks with each request that thinks for all thoughts to be kept; to
    clear results of tools or to sum up, as the provider does, is refused: who asks for it counts on it."""

    edits: list[ClearThinking] | None = None


class MessagesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body."""

    model: str
    max_tokens: int
    messages: list[Turn]
    system: str | list[Text] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Passed = NOTHING
    metadata: Passed = NOTHING
    service_tier: Passed = NOTHING
    speed: Passed = NOTHING
    diagnostics: Passed = NOTHING
    """Why the provider's cache did not hold a prompt."""
    thread: dict[str, Any] | None = None
    """A conversation that the provider is to keep, or has kept."""


class CountRequest(msgspec.Struct, frozen=True):
    """The body of /v1/messages/count_tokens; fields that add no tokens are passed over."""

    model: str
    messages: list[Turn]
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None


def count_request(asked: CountRequest) -> dict[str, Any]:
    """The request for /tokenize, which is to render what the chat request would be. It has no `reasoning_effort`: the template is
    given what vLLM's chat gives to it for one."""
    effort = _effort(asked)
    rendered: dict[str, Any] = {"add_generation_prompt": True, **going_on(asked.messages)}
    if effort is not None:
        rendered["chat_template_kwargs"] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    messages = chat_messages(asked.messages, asked.system)
    return given(model=asked.model, messages=messages, tools=chat_tools(asked.tools), **rendered)


def chat_request(asked: MessagesRequest) -> dict[str, Any]:
    """The chat request, without stream fields; RequestError 400 for a conversation that nobody keeps."""
    if asked.thread is not None:
        told = "thread: this router keeps no conversations: send all of it in messages"
        raise RequestError(400, told, param="thread", reason=NO_THREADS)
    choice = asked.tool_choice
    single = choice is not None and choice.disable_parallel_tool_use
    return given(
        model=asked.model,
        messages=chat_messages(asked.messages, asked.system),
        **going_on(asked.messages),
        max_tokens=asked.max_tokens,
        stop=asked.stop_sequences or None,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        tools=chat_tools(asked.tools),
        tool_choice=_choice(choice, bool(asked.tools)) if choice is not None else None,
        parallel_tool_calls=False if single else None,
        thinking_token_budget=_budget(asked.thinking, asked.max_tokens) if asked.thinking is not None else None,
        reasoning_effort=_effort(asked),
        response_format=_form(asked.output_config) if asked.output_config is not None else None,
    )


def _budget(thinking: ThinkingMode, max_tokens: int) -> int | None:
    """Tokens that may be thought, which are a part of the answer's; None: it was not asked for a budget."""
    if thinking.type != "enabled":
        return None
    budget, name = thinking.budget_tokens, "thinking.budget_tokens"
    if budget is None or budget < BUDGET_LEAST:
        raise RequestError(400, f"{name} is to be at least {BUDGET_LEAST}", param=name)
    if budget >= max_tokens:
        raise RequestError(400, f"{name} is to be less than max_tokens, which is {max_tokens}", param=name)
    return budget


def _effort(asked: MessagesRequest | CountRequest) -> str | None:
    if asked.thinking is not None and asked.thinking.type == "disabled":
        return "none"
    return asked.output_config.effort if asked.output_config is not None else None


def _form(config: OutputConfig) -> dict[str, Any] | None:
    if config.format is None:
        return None
    return {"type": config.format.type, "json_schema": {"name": config.format.type, "schema": config.format.schema}}


def chat_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """As functions."""
    if not tools:
        return None
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    return given(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)


def _choice(choice: ToolChoice, tools: bool) -> Any:
    """Without tools `auto` says nothing, and vLLM's chat refuses it there."""
    if choice.type == "tool":
        if not choice.name:
            raise RequestError(400, "tool_choice.name is required", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto" if tools else None, "any": "required", "none": "none"}[choice.type]


def chat_messages(turns: list[Turn], system: str | list[Text] | None) -> list[dict[str, Any]]:
    """System text first, then each turn; results of tools become messages of their own before the rest of their turn."""
    found: list[dict[str, Any]] = []
    if system and (said := _unbilled([Text(system)] if isinstance(system, str) else system)):
        found.append({"role": "system", "content": _joined(said)})
    before = len(found)
    for number, turn in enumerate(turns):
        found += [{"role": turn.role, "content": turn.content}] if isinstance(turn.content, str) else _turn(turn, number)
    if turns and len(found) == before:
        raise RequestError(400, "messages: nothing is said in them", param="messages")
    return found


def going_on(turns: list[Turn]) -> dict[str, bool]:
    """How a conversation is rendered whose last words are the assistant's: its answer goes on with them, as Anthropic says. In
    vLLM's own endpoint a new turn begins behind them, which answers something else."""
    return {"add_generation_prompt": False, "continue_final_message": True} if turns and _is_begun(turns[-1]) else {}


def _is_begun(turn: Turn) -> bool:
    """The assistant has begun to say something. Behind a call nothing is said: its result would come."""
    if turn.role != "assistant" or not turn.content:
        return False
    if isinstance(turn.content, str):
        return bool(turn.content.strip())
    last = turn.content[-1]
    calls = any(isinstance(block, ToolUse) for block in turn.content)
    return isinstance(last, Text) and bool(last.text.strip()) and not calls


def _unbilled(parts: list[Text]) -> list[Text]:
    """Without the line that only its maker reads, and without a part that was no more."""
    rest = [(part, Text(part.text.partition("\n")[2]) if part.text.startswith(BILLING) else part) for part in parts]
    return [left for part, left in rest if left is part or left.text]


def _turn(turn: Turn, number: int) -> list[dict[str, Any]]:
    parts: list[Text | Image] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in turn.content:
        if isinstance(block, Text | Image):
            parts.append(block)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUse):
            arguments = msgspec.json.encode(block.input).decode()
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        elif isinstance(block, ToolResult):
            parts_of_it = [*([Text(FAILED)] if block.is_error else ()), *_parts(block.content)]
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(parts_of_it)})
    if calls and turn.role != "assistant":
        raise RequestError(400, f"messages[{number}]: tool_use belongs to the assistant", param="messages")
    if results and turn.role != "user":
        raise RequestError(400, f"messages[{number}]: tool_result belongs to the user", param="messages")
    if parts or calls:
        said = given(content=_content(parts) if parts else None, reasoning="".join(thoughts) or None, tool_calls=calls or None)
        results.append({"role": turn.role, **said})
    return results


def _parts(content: str | list[Text | Image] | None) -> list[Text | Image]:
    return [Text(content)] if content and isinstance(content, str) else list(content or ())


def _content(parts: list[Text | Image]) -> Any:
    """Plain text when there is nothing else: chat templates of text models take no lists."""
    if all(isinstance(part, Text) for part in parts):
        return _joined([part for part in parts if isinstance(part, Text)])
    return [_part(part) for part in parts]


def _joined(parts: list[Text]) -> str:
    return "\n".join(part.text for part in parts)


def _part(part: Text | Image) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    source = part.source
    url = source.url or "" if source.type == "url" else f"data:{source.media_type or ''};base64,{source.data or ''}"
    return {"type": "image_url", "image_url": {"url": url}}

"""LangChain's ChatOpenAI: `langchain_chat.py URL`; see `serve`."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI
from serve import Asked, serve, wishes


def ask(asked: Asked) -> dict[str, Any]:
    model: Any = ChatOpenAI(
        base_url=f"{sys.argv[1]}/v1", api_key=asked["key"], max_retries=asked.get("retries", 0), timeout=60,
        temperature=asked.get("temperature", 0), stream_usage=True, **wishes(asked, "model", "max_tokens", "seed"),
    )  # fmt: skip
    if "tools" in asked:
        model = model.bind_tools(asked["tools"])
    if not asked.get("stream"):
        return told(model.invoke(asked["messages"]), 1)
    pieces: list[AIMessageChunk] = []
    with closing(model.stream(asked["messages"])) as stream:
        for piece in stream:
            pieces.append(piece)
            if len(pieces) == asked.get("stop_after"):
                return {"stopped": len(pieces)}
    answer = pieces[0]
    for piece in pieces[1:]:
        answer += piece
    return told(answer, len(pieces))


def told(answer: AIMessage, pieces: int) -> dict[str, Any]:
    calls = [{"name": call["name"], "arguments": json.dumps(call["args"])} for call in answer.tool_calls]
    used = answer.usage_metadata
    usage = [used["input_tokens"], used["output_tokens"]] if used else None
    finish = answer.response_metadata.get("finish_reason")
    return {"text": answer.content, "calls": calls, "usage": usage, "finish": finish, "pieces": pieces}


serve(ask)

"""OpenAI's SDK for Python: `openai_python.py URL`; see `serve`."""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI
from serve import Asked, joined, serve, whole, wishes


def ask(asked: Asked) -> dict[str, Any]:
    client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key=asked["key"], max_retries=asked.get("retries", 0), timeout=60)
    given = {**wishes(asked, "model", "messages", "max_tokens", "tools", "seed"), "temperature": asked.get("temperature", 0)}
    if not asked.get("stream"):
        return whole(client.chat.completions.create(**given))
    chunks = []
    with client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == asked.get("stop_after"):
                break
    return {"stopped": len(chunks)} if "stop_after" in asked else joined(chunks)


serve(ask)

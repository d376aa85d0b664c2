"""LiteLLM as a client: `litellm_chat.py URL`; see `serve`."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
import litellm
from serve import Asked, joined, serve, whole, wishes

litellm.telemetry = False
litellm.suppress_debug_info = True


def ask(asked: Asked) -> dict[str, Any]:
    given = {**wishes(asked, "messages", "max_tokens", "tools", "seed"), "temperature": asked.get("temperature", 0)}
    given |= {"model": f"openai/{asked['model']}", "api_base": f"{sys.argv[1]}/v1", "api_key": asked["key"], "timeout": 60}
    given |= {"max_retries": asked.get("retries", 0)}
    if not asked.get("stream"):
        return whole(litellm.completion(**given))
    chunks, stream = [], litellm.completion(**given, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == asked.get("stop_after"):
            stream.completion_stream.close()  # LiteLLM's own wrapper has nothing that closes
            return {"stopped": len(chunks)}
    return joined(chunks)


serve(ask)

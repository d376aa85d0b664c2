"""curl: `curl_chat.py URL`; see `serve`. Its errors are an exit status (22 with --fail-with-body) and the body."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from serve import Asked, joined, serve, whole, wishes


def ask(asked: Asked) -> dict[str, Any]:
    given = {**wishes(asked, "model", "messages", "max_tokens", "tools", "seed"), "temperature": asked.get("temperature", 0)}
    if asked.get("stream"):
        given |= {"stream": True, "stream_options": {"include_usage": True}}
    heads = Path(tempfile.mkdtemp()) / "heads"
    argv = ["curl", "-sSN", "--fail-with-body", "-D", str(heads), "--max-time", "60", "--retry", str(asked.get("retries", 0)),
            "-H", f"authorization: Bearer {asked['key']}", "-H", "content-type: application/json", "-d", "@-",
            f"{sys.argv[1]}/v1/chat/completions"]  # fmt: skip
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as curl:
        assert curl.stdin is not None
        assert curl.stdout is not None
        curl.stdin.write(json.dumps(given))
        curl.stdin.close()
        lines: list[str] = []
        for line in curl.stdout:
            lines.append(line)
            if sum(line.startswith("data: ") for line in lines) == asked.get("stop_after"):
                curl.terminate()
                return {"stopped": asked["stop_after"]}
        return ended("".join(lines), heads.read_text(), curl.wait(), stream=bool(asked.get("stream")))


def ended(body: str, heads: str, status: int, *, stream: bool) -> dict[str, Any]:
    head = heads.strip().split("\n\n")[-1].lower()  # of the last attempt
    events = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    broken = [event for event in events if '"error"' in event]
    if status or broken:
        said = json.loads(broken[0] if broken else body)["error"]
        after = [line.split(": ")[1].strip() for line in head.splitlines() if line.startswith("retry-after: ")]
        return {"error": {"types": [f"exit {status}"], "status": int(head.split()[1]), "retry_after": after[0] if after else None,
                          **{name: said.get(name) for name in ("code", "param", "request_id", "message")}}}  # fmt: skip
    if not stream:
        return whole(last_of(body))
    assert events[-1] == "[DONE]"
    return joined([json.loads(event, object_hook=Lenient) for event in events[:-1]])


def last_of(body: str) -> Any:
    """Its last JSON document: refusals that curl tried again after come before."""
    found, at, decoder = None, 0, json.JSONDecoder(object_hook=Lenient)
    while at < len(body):
        found, at = decoder.raw_decode(body, at)
    return found


class Lenient(SimpleNamespace):
    """A JSON object by its names; what is absent is None."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__(**found)

    def __getattr__(self, name: str) -> None:
        return None


serve(ask)

"""The request that `fleet up` sends by itself, to show that what it invites to paste works."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import httpx

from fleet_api.parse import parse_fleet
from fleet_cli.up import command
from fleet_cli.up.client import Client
from fleet_cli.up.screen import PlainScreen

FLEET = parse_fleet(
    {
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"source": "file:///m"},
            "tiers": [{"name": "a", "accelerator": {"type": "cpu"}}],
            "limits": {"maxInputTokens": 20},
        },
    }
)


class Local:
    """What `_offer` needs of a fleet that runs."""

    router_url, logs = "http://router", Path("/logs")


def offered(monkeypatch, answer: httpx.Response | Exception) -> str:
    def respond(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(url: str, model: str, *, key: str = "") -> Client:
        return Client(url, model, httpx.MockTransport(respond), key=key)

    monkeypatch.setattr(command, "Client", client)
    options = command.UpOptions(file="fleet.yaml", once=False, port=1, state=None, claims={})
    said = io.StringIO()
    asyncio.run(command._Session(options, FLEET, Local(), PlainScreen(said, lambda: 0.0), 0.0)._offer())
    return said.getvalue()


def test_a_first_request_that_fails_ends_no_fleet(monkeypatch):
    """A model that only embeds, or one that a CPU computes for minutes: all was up, and was taken down for one request."""
    refused = httpx.Response(400, json={"error": {"message": "this model does not generate"}})
    for answer, why in ((refused, "HTTP 400: "), (httpx.ReadTimeout("nothing came"), "nothing came")):
        said = offered(monkeypatch, answer)
        assert "the first request failed: POST " in said
        assert why in said
        assert "OpenAI endpoint: http://router/v1   model: tiny" in said
        assert "Ctrl-C stops everything" in said


def test_what_is_to_be_pasted_is_what_was_sent(monkeypatch):
    answer = 'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n'
    said = offered(monkeypatch, httpx.Response(200, content=answer.encode()))
    assert " s: 'x'\n" in said
    assert '"prompt": "The router sends every prompt"' in said

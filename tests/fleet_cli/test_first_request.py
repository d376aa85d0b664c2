"""What `fleet up` asks its fleet by itself: what it invites to paste, and, for the proof, what was counted."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import httpx
import pytest

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import KvStatus
from fleet_cli.up import command
from fleet_cli.up.client import Client
from fleet_cli.up.proof import Check, Ground
from fleet_cli.up.screen import PlainScreen
from fleet_planner.types import KvProof

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


@pytest.mark.parametrize(("interval", "transfers"), [("5s", 1), ("60s", 3)])
def test_a_status_that_comes_too_late_for_the_proof_is_not_waited_for(monkeypatch, interval: str, transfers: int):
    """With telemetry.interval: 60s the proof failed after 30 s, "KV moved: nothing yet", and its last line told of 3."""

    class Counting(Local):
        prefill_url = None

        def raise_if_dead(self) -> None:
            return None

        async def observe(self):
            role = {"desired": 1, "ready": 1, "serving": 1}
            kv = {"transfers": 1, "blocks": 2, "bytes": 3, "failed": 0}
            return [], {"tiers": [{"name": "a", "prefill": role, "decode": role, "kv": kv}]}

        async def counted(self, fleet, telemetry=None):
            assert telemetry is not None, "the operator's own remembers what it read"
            return [KvProof(transfers=3, blocks=6, bytes=9, failed=0, measured_at=1.0)]

    async def prove(ground: Ground, salt: str) -> list[Check]:
        seen.append(await ground.counters())
        return []

    monkeypatch.setattr(command, "prove", prove)
    spec = FLEET.spec.model_copy(update={"telemetry": FLEET.spec.telemetry.model_copy(update={"interval": interval})})
    options = command.UpOptions(file="fleet.yaml", once=True, port=1, state=None, claims={})
    fleet, screen = FLEET.model_copy(update={"spec": spec}), PlainScreen(io.StringIO(), lambda: 0.0)
    seen: list[KvStatus] = []
    assert asyncio.run(command._Session(options, fleet, Counting(), screen, 0.0)._prove()) == 0
    assert seen[0].transfers == transfers

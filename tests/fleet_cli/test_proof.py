"""The proof against an engine that answers by rule: it passes when all is well and fails for each thing that is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace

import httpx
import pytest

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import KvStatus
from fleet_cli.errors import InputError, RunError
from fleet_cli.up import proof
from fleet_cli.up.client import Answer, Client

FLEET = parse_fleet(
    {
        "metadata": {"name": "tiny"},
        "spec": {"model": {"source": "file:///m"}, "tiers": [{"name": "a", "accelerator": {"type": "cpu"}}]},
    }
)


class Engine:
    """Answers like a worker; `wrong` shifts the tokens, `cut` ends a stream early, `status` refuses."""

    def __init__(
        self,
        *,
        wrong=False,
        cut=False,
        status=200,
        moves=True,
        names=("tiny",),
        keeps_short=True,
        tier="",
        longest=99,
        no_chat="",
    ):
        self.wrong, self.cut, self.status, self.moves, self.names = wrong, cut, status, moves, names
        self.kv, self.local, self.keeps_short = KvStatus(), 0, keeps_short
        self.longest, self.no_chat = longest, no_chat
        self.headers = {"x-fleet-tier": tier} if tier else {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.names]})
        if request.url.path == "/metrics":
            text = f"# TYPE x counter\nfleet_router_local_prefill_total {self.local}\nfleet_router_local_prefill_totals 9\n"
            return httpx.Response(200, text=text)
        body = json.loads(request.content)
        self.local += self.keeps_short and len(body.get("prompt", "x" * 99)) < 10
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "no worker"}})
        assert body["temperature"] == 0
        assert body["max_tokens"] <= self.longest
        if self.moves and not ("messages" in body and self.no_chat) and len(str(body.get("messages") or body["prompt"])) > 100:
            self.kv = replace_kv(self.kv, transfers=self.kv.transfers + 1, blocks=self.kv.blocks + 4, bytes=self.kv.bytes + 1000)
        if "messages" in body and self.no_chat:
            return httpx.Response(400, json={"error": {"message": self.no_chat}})
        if "messages" in body:
            return httpx.Response(200, json={"choices": [{"message": {"content": "hi"}}]})
        tokens = [len(body["prompt"]) + n + self.wrong for n in range(body["max_tokens"])]
        usage = {"prompt_tokens": len(body["prompt"].split())}
        if not body.get("stream"):
            answer = {"choices": [{"text": str(tokens), "token_ids": tokens}], "usage": usage}
            return httpx.Response(200, json=answer, headers=self.headers)
        events = [{"choices": [{"text": "x", "token_ids": [token]}]} for token in tokens] + [{"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ([] if self.cut else ["data: [DONE]\n\n"])
        return httpx.Response(200, content="".join(lines).encode(), headers=self.headers)


def replace_kv(kv: KvStatus, **changes) -> KvStatus:
    return kv.model_copy(update=changes)


def run(monkeypatch, router: Engine, alone: Engine, **tiers: Engine):
    engines = {"http://router": router, "http://alone": alone, **{f"http://alone-{name}": one for name, one in tiers.items()}}

    def client(url: str, model: str, *, key: str = "") -> Client:
        return Client(url, model, httpx.MockTransport(engines[url]), key=key)

    monkeypatch.setattr(proof, "Client", client)
    monkeypatch.setattr(proof, "COUNTERS_WAIT_S", 0.0)

    async def counters():
        return router.kv

    async def prefill_url(tier: str) -> str:
        return f"http://alone-{tier}" if tier else "http://alone"

    ground = proof.Ground(fleet=FLEET, router_url="http://router", prefill_url=prefill_url, counters=counters)
    return {check.name: check for check in asyncio.run(proof.prove(ground, "salt"))}


def test_all_is_well(monkeypatch):
    checks = run(monkeypatch, Engine(), Engine(moves=False))
    assert [check.name for check in checks.values() if not check.ok] == []
    assert "3 transfers, 12 blocks, 3.0 kB" in checks["KV hand-off"].detail
    assert "24 chunks" in checks["completion, streamed"].detail


@pytest.mark.parametrize(
    ("limits", "classes", "found"),
    [({}, [], 24), ({"maxOutputTokens": 8}, [], 8), ({}, [("default", 5), ("batch", 2)], 5), ({}, [("default", None)], 24)],
)
def test_no_more_is_asked_for_than_the_fleet_gives(limits, classes, found):
    """A fleet with maxOutputTokens below 24 failed its proof, and below 16 it was ended as soon as it was ready: HTTP 400."""
    spec = {"model": {"source": "file:///m"}, "tiers": [{"name": "a", "accelerator": {"type": "cpu"}}], "limits": limits}
    spec["classes"] = [{"name": name, **({"maxOutputTokens": most} if most else {})} for name, most in classes]
    assert proof.output_tokens(parse_fleet({"metadata": {"name": "tiny"}, "spec": spec}), proof.OUTPUT_TOKENS) == found


@pytest.mark.parametrize(
    ("engine", "limits", "classes", "words"),
    [
        ({}, {}, [], 24),
        ({}, {"maxInputTokens": 20}, [], 5),
        ({}, {}, [("batch", 8), ("default", 40)], 10),
        ({"maxModelLen": 48}, {"maxOutputTokens": 16, "maxInputTokens": 48}, [], 8),
        ({}, {"maxInputTokens": 1}, [], 1),
    ],
)
def test_no_longer_prompt_is_sent_than_the_fleet_takes(engine, limits, classes, words):
    """A fleet of short prompts was ended as soon as it was ready, for HTTP 400 to the one that `fleet up` sends by itself."""
    spec = {"model": {"source": "file:///m"}, "tiers": [{"name": "a", "accelerator": {"type": "cpu"}}], "limits": limits}
    spec |= {"engine": engine, "classes": [{"name": name, "maxInputTokens": most} for name, most in classes]}
    fleet = parse_fleet({"metadata": {"name": "tiny"}, "spec": spec})
    assert len(proof.sample_prompt(fleet, 16).split()) == words
    assert len(proof.long_prompt(fleet, "salt").split()) * proof.WORD_TOKENS <= max(proof.input_tokens(fleet), 36)


def test_the_proof_keeps_to_the_limit(monkeypatch):
    monkeypatch.setattr(proof, "output_tokens", lambda _, most: min(most, 3))
    checks = run(monkeypatch, Engine(longest=3), Engine(longest=3, moves=False))
    assert [check.name for check in checks.values() if not check.ok] == []


@pytest.mark.parametrize(
    "words",
    [
        "the model has no chat template: use /v1/completions",
        "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template",
    ],
    ids=["torch", "vllm"],
)
def test_a_base_model_is_asked_for_completions(monkeypatch, words: str):
    """`fleet up --once` failed for every one, HTTP 400, with a fleet that was in order and none of the checks told."""
    checks = run(monkeypatch, Engine(no_chat=words), Engine(moves=False))
    assert [check.name for check in checks.values() if not check.ok] == []
    assert checks["chat completion"].detail.endswith(" of a completion: the model has no chat template")
    with pytest.raises(RunError, match=r"HTTP 400.*something else"):
        run(monkeypatch, Engine(no_chat="something else"), Engine(moves=False))


def test_an_answer_is_compared_with_the_model_that_gave_it(monkeypatch):
    """Of a cascade `fleet up --once` said that remote prefill gives wrong tokens: it had asked the other tier's model."""
    checks = run(monkeypatch, Engine(tier="small"), Engine(wrong=True, moves=False), small=Engine(moves=False))
    assert [check.name for check in checks.values() if not check.ok] == []


@pytest.mark.parametrize(
    ("router", "failed"),
    [
        (
            Engine(wrong=True),
            ["prefilled remotely = prefilled locally, not streamed", "prefilled remotely = prefilled locally, streamed"],
        ),
        (Engine(moves=False), ["KV hand-off"]),
        (Engine(names=("other",)), ["GET /v1/models"]),
        (Engine(keeps_short=False), ["short prompt stays on the decode worker"]),
    ],
)
def test_each_flaw_is_found(monkeypatch, router, failed):
    checks = run(monkeypatch, router, Engine(moves=False))
    assert [check.name for check in checks.values() if not check.ok] == failed


@pytest.mark.parametrize(
    ("router", "cause"),
    [(Engine(cut=True), r"ended without \[DONE\]"), (Engine(status=503), "HTTP 503: .*no worker")],
)
def test_a_request_that_fails_names_itself(monkeypatch, router, cause):
    with pytest.raises(RunError, match=cause):
        run(monkeypatch, router, Engine(moves=False))


def test_a_router_that_is_not_there_is_named():
    async def ask():
        async with Client("http://127.0.0.1:9", "tiny") as client:
            await client.models()

    with pytest.raises(RunError, match=r"GET http://127.0.0.1:9/v1/models: .*"):
        asyncio.run(ask())


@pytest.mark.parametrize(("uncached", "limit"), [(64, 2048), (0, 256), (500, 1024)])
def test_the_long_prompt_fits(uncached, limit):
    spec = FLEET.spec.model_copy(
        update={
            "limits": FLEET.spec.limits.model_copy(update={"max_input_tokens": limit}),
            "routing": FLEET.spec.routing.model_copy(
                update={"remote_prefill": FLEET.spec.routing.remote_prefill.model_copy(update={"min_uncached_tokens": uncached})}
            ),
        }
    )
    prompt = proof.long_prompt(FLEET.model_copy(update={"spec": spec}), "salt")
    assert prompt.startswith("salt ")
    assert len(prompt.split()) * 4 <= limit + 8


def test_answers_compare_by_tokens_and_else_by_text():
    one = Answer(text="x", tokens=(1, 2), prompt_tokens=1, chunks=1, first_token_s=0.0)
    assert not one.same_as(replace(one, tokens=(1, 3)))
    assert one.same_as(replace(one, tokens=()))
    assert not one.same_as(replace(one, tokens=(), text="y"))


@pytest.mark.parametrize(
    ("remote", "limits", "words"),
    [
        ({}, {}, None),
        ({"minUncachedTokens": 64}, {"maxInputTokens": 64}, None),
        ({"decide": "cost"}, {}, r"^spec\.routing\.remotePrefill\.decide: .*: say threshold for the proof$"),
        ({"minUncachedTokens": 65}, {"maxInputTokens": 64}, r"^spec\.routing\.remotePrefill\.minUncachedTokens: .* 64 tokens, "),
    ],
)
def test_a_fleet_that_hands_nothing_over_is_not_asked_to_prove_it(remote, limits, words):
    """After all the waiting it said "FAILED KV hand-off", as of one whose KV is broken."""
    spec = {"model": {"source": "file:///m"}, "tiers": [{"name": "a", "accelerator": {"type": "cpu"}}], "limits": limits}
    spec |= {"routing": {"policy": "kvAware", "remotePrefill": remote}}
    fleet = parse_fleet({"metadata": {"name": "tiny"}, "spec": spec})
    with pytest.raises(InputError, match=words) if words else contextlib.nullcontext():
        proof.check_provable(fleet)

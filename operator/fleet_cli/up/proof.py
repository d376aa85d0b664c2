"""The proof of `fleet up --once`: real requests, equal tokens, and KV counters of the engines that say what moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fleet_api.v1alpha1 import InferenceFleet, KvStatus
from fleet_cli.errors import InputError
from fleet_cli.up.client import Client, RefusedError
from fleet_cli.up.view import SAMPLE_PROMPT, kv_line

OUTPUT_TOKENS = 24
SHORT_ANSWER = 4
REMOTE_PROMPTS = 3
"""Long prompts that `prove` sends through the router; each must cost one hand-off."""
WORD_TOKENS = 4
"""A word of English is one to four tokens in any tokenizer."""
SHORT_TOKENS = 8
"""Below this a user wants even the shortest prompts prefilled remotely."""
NO_TEMPLATE = "chat template"
LOCAL_PREFILLS = "fleet_router_local_prefill_total"
COUNTERS_WAIT_S = 30.0
"""Counters reach the status after a scrape and a status write: a few telemetry intervals."""
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok    ' if self.ok else 'FAILED'} {self.name}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Ground:
    """What the proof needs to know about the running fleet."""

    fleet: InferenceFleet
    router_url: str
    prefill_url: Callable[[str], Awaitable[str]]
    """The engine of one prefill worker of a tier (empty: of any): what it computes alone is the truth that a hand-off must
    reproduce. Tiers of a cascade have models of their own."""
    counters: Callable[[], Awaitable[KvStatus]]
    key: str = field(default="", repr=False)
    """API key that the router asks for; empty: none."""


def output_tokens(fleet: InferenceFleet, most: int) -> int:
    """How many tokens a request of ours asks for: no more than the fleet gives to its class `default`, else it is refused."""
    own = (one.max_output_tokens for one in fleet.spec.classes if one.name == "default")
    return min(most, fleet.spec.limits.max_output_tokens, *filter(None, own))


def input_tokens(fleet: InferenceFleet) -> int:
    """The longest prompt that a request of ours may have, in tokens."""
    own = (one.max_input_tokens for one in fleet.spec.classes if one.name == "default")
    return min([fleet.spec.max_input_tokens, *filter(None, own)])


def sample_prompt(fleet: InferenceFleet, tokens: int) -> str:
    """As much of SAMPLE_PROMPT as the fleet takes, with `tokens` of an answer behind it."""
    most = min(input_tokens(fleet), fleet.spec.engine.max_model_len - tokens)
    return " ".join(SAMPLE_PROMPT.split()[: max(1, most // WORD_TOKENS)])


def long_prompt(fleet: InferenceFleet, salt: str) -> str:
    """A prompt that no cache holds, long enough to be prefilled remotely and short enough for the model."""
    wanted = fleet.spec.routing.remote_prefill.min_uncached_tokens + 48
    words = max(8, min(wanted, (input_tokens(fleet) - OUTPUT_TOKENS) // WORD_TOKENS))
    sentence = SAMPLE_PROMPT.split()
    return " ".join([salt, *(sentence[index % len(sentence)] for index in range(words))])


def check_provable(fleet: InferenceFleet) -> None:
    """InputError when no prompt of ours would go to a prefill worker: the fleet serves, and the proof could only fail."""
    remote, most = fleet.spec.routing.remote_prefill, input_tokens(fleet)
    if remote.decide == "cost":
        raise InputError(
            "spec.routing.remotePrefill.decide: --once proves that KV moves, and by cost an idle fleet prefills on its decode "
            "workers: say threshold for the proof"
        )
    if remote.min_uncached_tokens > most:
        raise InputError(
            f"spec.routing.remotePrefill.minUncachedTokens: --once proves that KV moves, and no prompt of {most} tokens, the "
            "longest that is served, goes to a prefill worker"
        )


async def prove(ground: Ground, salt: str) -> list[Check]:
    """Everything that --once tries, in order. RunError when a request fails outright."""
    before = await ground.counters()
    async with Client(ground.router_url, ground.fleet.served_name, key=ground.key) as router:
        checks = [await _models(router, ground.fleet.served_name)]
        checks += await _equal_tokens(router, ground, long_prompt(ground.fleet, f"{salt} one"), streamed=False)
        checks += await _equal_tokens(router, ground, long_prompt(ground.fleet, f"{salt} two"), streamed=True)
        tokens = output_tokens(ground.fleet, OUTPUT_TOKENS)
        checks.append(await _chat(router, long_prompt(ground.fleet, f"{salt} three"), tokens))
        if ground.fleet.spec.routing.remote_prefill.min_uncached_tokens >= SHORT_TOKENS:
            checks.append(await _short(router, output_tokens(ground.fleet, SHORT_ANSWER)))
    checks.append(await _moved(ground, before, expected=REMOTE_PROMPTS))
    return checks


async def _models(router: Client, served_name: str) -> Check:
    names = await router.models()
    return Check("GET /v1/models", served_name in names, ", ".join(names) or "empty")


async def _equal_tokens(router: Client, ground: Ground, prompt: str, *, streamed: bool) -> list[Check]:
    tokens = output_tokens(ground.fleet, OUTPUT_TOKENS)
    remote = await (router.stream if streamed else router.complete)(prompt, tokens)
    async with Client(await ground.prefill_url(remote.tier), ground.fleet.served_name) as alone:
        local = await alone.complete(prompt, tokens)
    kind = "streamed" if streamed else "not streamed"
    got = f"{len(remote.tokens)} tokens" if remote.tokens else f"{len(remote.text)} characters"
    many = f"{remote.prompt_tokens} prompt tokens, {got}"
    chunks = f" in {remote.chunks} chunks, first after {remote.first_token_s * 1000:.0f} ms" if streamed else ""
    return [
        Check(f"completion, {kind}", bool(remote.text), f"{many}{chunks}"),
        Check(
            f"prefilled remotely = prefilled locally, {kind}",
            remote.same_as(local),
            f"{got}, greedy, equal" if remote.same_as(local) else f"{remote.tokens} is not {local.tokens}",
        ),
    ]


async def _chat(router: Client, content: str, tokens: int) -> Check:
    """A base model has no template, which each engine says in its own words: it is asked for a completion."""
    try:
        text, note = await router.chat(content, tokens), ""
    except RefusedError as error:
        if NO_TEMPLATE not in error.said:
            raise
        text, note = (await router.complete(content, tokens)).text, " of a completion: the model has no chat template"
    return Check("chat completion", bool(text), f"{len(text)} characters{note}")


async def _short(router: Client, tokens: int) -> Check:
    """A prompt this short is not worth a hand-off."""
    before = await router.metric(LOCAL_PREFILLS)
    answer = await router.complete("Hi", tokens)
    local = await router.metric(LOCAL_PREFILLS) - before
    return Check(
        "short prompt stays on the decode worker", bool(answer.text) and local >= 1, f"{answer.prompt_tokens} prompt tokens"
    )


async def _moved(ground: Ground, before: KvStatus, expected: int) -> Check:
    deadline = time.monotonic() + COUNTERS_WAIT_S
    while True:
        now = await ground.counters()
        moved = now.transfers - before.transfers
        if moved >= expected or time.monotonic() > deadline:
            break
        await asyncio.sleep(POLL_S)
    # vLLM counts transfers and bytes, not blocks.
    blocks = now.blocks > before.blocks or ground.fleet.spec.engine.type != "torch"
    ok = moved >= expected and blocks and now.bytes > before.bytes and now.failed == before.failed
    return Check("KV hand-off", ok, kv_line(now))

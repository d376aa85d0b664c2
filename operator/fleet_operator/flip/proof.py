"""Does a worker really have its new role? Proven by tokens, not by words.

A prefill worker's KV must be decoded by a worker that serves, a decode worker must decode the KV of one that serves; the tokens
must be those that this partner computes alone, and a transfer must be counted. The prompt is new each time and shorter than a KV
block, so that no prefix cache can answer in place of the transfer.

What the partner does not answer convicts nobody. A worker is convicted when every attempt failed: on GPUs two right answers to
one prompt may differ where two tokens are equally likely, a wrong KV cache is wrong for all of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fleet_operator.flip.asking import Answer, Ask
from fleet_operator.telemetry.aggregate import TRANSFERS
from fleet_operator.telemetry.parse import parse_text, total
from fleet_planner.roles import Role

ATTEMPTS = 3
OUTPUT_TOKENS = 8
PROMPT_TOKENS = 15
"""At most; shorter than the KV blocks of every engine's default."""
TOKEN_IDS = range(3, 250)
"""Ids that every vocabulary has, without the first special ones."""
COUNTED_WITHIN = 10
COUNTED_POLL_S = 0.5
"""An engine may show a transfer a moment after it."""
OK = 200
TOO_MANY = 429
UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of both, or neither: nothing can be said yet."""

    proof: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Canary:
    """What is asked. `seed`: another one is another prompt."""

    model: str
    seed: str
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS

    def body(self, attempt: int, **more: Any) -> dict[str, Any]:
        """A greedy completion."""
        chosen = random.Random(f"{self.seed}/{attempt}").choices(TOKEN_IDS, k=self.prompt_tokens)  # noqa: S311 - not a secret
        base = {"model": self.model, "prompt": chosen, "max_tokens": self.output_tokens, "temperature": 0}
        return {**base, "ignore_eos": True, "return_token_ids": True, **more}


Sleep = Callable[[float], Awaitable[None]]


async def prove(ask: Ask, flipped: str, role: Role, partner: str | None, canary: Canary, sleep: Sleep = asyncio.sleep) -> Verdict:
    """Judge the engine at base URL `flipped` in its new `role`, with the help of `partner`, one of the other role that serves."""
    if partner is None:
        given = await _reference(ask, flipped, canary, 0)
        if given is None:
            return Verdict(problem="it gives no KV reference")
        return Verdict(proof="no worker of the other role serves: proven by KV references alone")
    verdict = Verdict()
    for attempt in range(ATTEMPTS):
        verdict = await _once(ask, flipped, role, partner, canary, attempt, sleep)
        if not verdict.problem:
            break
    return verdict


async def _once(ask: Ask, flipped: str, role: Role, partner: str, canary: Canary, attempt: int, sleep: Sleep) -> Verdict:
    giver, taker = (flipped, partner) if role == "prefill" else (partner, flipped)
    expected = _tokens(await ask(f"{partner}/v1/completions", canary.body(attempt)))
    if expected is None:
        return Verdict()
    reference = await _reference(ask, giver, canary, attempt)
    if reference is None:
        return Verdict(problem="it gives no KV reference") if giver == flipped else Verdict()
    before = await _transfers(ask, taker)
    answer = await ask(f"{taker}/v1/completions", canary.body(attempt, kv_transfer_params=reference))
    if before is None or (taker == partner and (answer is None or _is_busy(answer))):
        return Verdict()
    found = _tokens(answer)
    if found is None:
        said = f"HTTP {answer.status}" if answer is not None else "no answer"
        return Verdict(problem=f"{'its KV cannot be decoded' if giver == flipped else 'it cannot decode'}: {said}")
    if found != expected:
        return Verdict(problem=f"other tokens than its partner's: {found} instead of {expected}")
    if not await _counted(ask, taker, before, sleep):
        return Verdict(problem="no KV transfer was counted")
    return Verdict(proof=f"{len(found)} tokens equal a partner's after a KV transfer")


async def _reference(ask: Ask, engine: str, canary: Canary, attempt: int) -> dict[str, Any] | None:
    """The prefill leg."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = await ask(f"{engine}/v1/completions", canary.body(attempt, max_tokens=1, kv_transfer_params=params))
    if answer is None or answer.status != OK:
        return None
    given = answer.json().get("kv_transfer_params")
    return given if isinstance(given, dict) and given.get("do_remote_prefill") and given.get("remote_block_ids") else None


def _is_busy(answer: Answer) -> bool:
    """Refused for want of room; a 503 about KV is not about room."""
    return answer.status == TOO_MANY or (answer.status == UNAVAILABLE and b"Kv" not in answer.body)


def _tokens(answer: Answer | None) -> list[int] | None:
    """Token ids of an answer; None when it has none."""
    if answer is None or answer.status != OK:
        return None
    choices = answer.json().get("choices")
    found = choices[0].get("token_ids") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    return found if isinstance(found, list) and found else None


async def _transfers(ask: Ask, engine: str) -> float | None:
    """Transfers that an engine has counted; one that has none yet may not know the metric."""
    answer = await ask(f"{engine}/metrics")
    if answer is None or answer.status != OK:
        return None
    return total(parse_text(answer.body.decode(errors="replace")), TRANSFERS) or 0.0


async def _counted(ask: Ask, engine: str, before: float, sleep: Sleep) -> bool:
    for look in range(COUNTED_WITHIN):
        if look:
            await sleep(COUNTED_POLL_S)
        if (await _transfers(ask, engine) or 0.0) > before:
            return True
    return False

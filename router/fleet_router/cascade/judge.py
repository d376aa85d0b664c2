"""Is a draft's answer good enough? Pure: what was said in, a reason against it out.

A cascade pays where the small model's good answers can be told from its bad ones (FrugalGPT, arXiv:2305.05176; the mean
log-probability of an answer's tokens as the signal: arXiv:2404.10136). Nothing here needs another model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from fleet_router.config import AnswerCheck
from fleet_wire.unreadable import UNREADABLE

ANY_JSON: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
"""What JSON can be at its top, in JSON Schema's words."""


@dataclass(slots=True)
class Answer:
    """One choice of an answer, whole."""

    text: str = ""
    finish_reason: str = ""
    """Empty: the engine gave none, so it did not come to its end."""
    calls: bool = False
    """It calls tools."""
    logprobs: list[float] = field(default_factory=list)
    """Of its tokens, where the engine told them."""


def objection(answer: Answer, check: AnswerCheck, *, json_kinds: frozenset[str] | None) -> str:
    """Why a larger model should be asked, in one word for counters; empty when the answer is good enough. `json_kinds`: it was to
    be JSON that is one of these at its top; None: anything."""
    if not answer.finish_reason:
        return "unended"
    if answer.finish_reason in check.finish_reasons:
        return f"finish_{answer.finish_reason}"
    if not answer.calls and not answer.text.strip():
        return "empty"
    if json_kinds is not None and not answer.calls and json_kinds.isdisjoint(_kinds(answer.text)):
        return "not_json"
    said = answer.text.casefold()
    if any(phrase.casefold() in said for phrase in check.phrases):
        return "phrase"
    return _doubt(answer, check.least_mean_logprob)


def _doubt(answer: Answer, least: float | None) -> str:
    if least is None:
        return ""
    if not answer.logprobs:
        return "no_logprobs"  # what cannot be judged is not good enough
    return "logprob" if sum(answer.logprobs) / len(answer.logprobs) < least else ""


def _kinds(text: str) -> frozenset[str]:
    """What it is as JSON; empty for what is none."""
    try:
        found = msgspec.json.decode(text.encode())
    except UNREADABLE:
        return frozenset()
    if isinstance(found, bool):
        return frozenset({"boolean"})
    if isinstance(found, int) or (isinstance(found, float) and found.is_integer()):
        return frozenset({"number", "integer"})
    names = {dict: "object", list: "array", str: "string", float: "number"}
    return frozenset({names.get(type(found), "null")})

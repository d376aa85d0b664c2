"""When a draft is good enough."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_router.cascade.judge import ANY_JSON, Answer, objection
from fleet_router.config import AnswerCheck

GOOD = {"text": "Bonn.", "finish_reason": "stop"}


def judged(said: dict[str, Any], *, json_kinds: frozenset[str] | None = None, **check: Any) -> str:
    return objection(Answer(**said), AnswerCheck(**check), json_kinds=json_kinds)


@pytest.mark.parametrize(
    ("said", "check", "expected"),
    [
        (GOOD, {}, ""),
        ({**GOOD, "finish_reason": ""}, {}, "unended"),
        ({**GOOD, "finish_reason": "length"}, {"finish_reasons": ("length",)}, "finish_length"),
        ({**GOOD, "finish_reason": "length"}, {}, ""),
        ({**GOOD, "finish_reason": "content_filter"}, {"finish_reasons": ("length", "content_filter")}, "finish_content_filter"),
        ({**GOOD, "text": " \n"}, {}, "empty"),
        ({"text": "", "finish_reason": "tool_calls", "calls": True}, {}, ""),
        ({**GOOD, "text": "I DON'T know."}, {"phrases": ("i don't know",)}, "phrase"),
        ({**GOOD, "text": "STRASSE"}, {"phrases": ("straße",)}, "phrase"),
        ({**GOOD, "text": "I know."}, {"phrases": ("i don't know",)}, ""),
        ({**GOOD, "logprobs": [-1.0, -2.0]}, {"least_mean_logprob": -1.5}, ""),
        ({**GOOD, "logprobs": [-1.0, -2.2]}, {"least_mean_logprob": -1.5}, "logprob"),
        ({**GOOD, "logprobs": []}, {"least_mean_logprob": -1.5}, "no_logprobs"),
        ({**GOOD, "logprobs": [-9.0]}, {}, ""),
    ],
)
def test_a_draft_is_judged_by_what_it_says(said: dict[str, Any], check: dict[str, Any], expected: str):
    assert judged(said, **check) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', ""),
        ('  {"a": 1}\n', ""),
        ("Here it is: {}", "not_json"),
        ('{"a": 1', "not_json"),
        ("[" * 100_000, "not_json"),
    ],
)
def test_what_was_to_be_json_is(text: str, expected: str):
    assert judged({**GOOD, "text": text}, json_kinds=ANY_JSON) == expected
    assert judged({**GOOD, "text": text}) == ""
    assert judged({"text": text, "finish_reason": "tool_calls", "calls": True}, json_kinds=ANY_JSON) == ""


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('{"a": 1}', {"object"}),
        ("[1]", {"array"}),
        ('"a"', {"string"}),
        ("7", {"number", "integer"}),
        ("7.0", {"number", "integer"}),
        ("7.5", {"number"}),
        ("true", {"boolean"}),
        ("null", {"null"}),
    ],
)
def test_json_is_of_the_kind_that_was_asked_for(text: str, kinds: set[str]):
    for kind in ANY_JSON:
        assert judged({**GOOD, "text": text}, json_kinds=frozenset({kind})) == ("" if kind in kinds else "not_json")
    assert judged({**GOOD, "text": text}, json_kinds=ANY_JSON) == ""

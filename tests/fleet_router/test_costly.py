"""Fields whose price grows with what a client writes (H5): what is over its bound is refused by name and reaches nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_router.config import RouterConfig
from fleet_router.costly import COSTLY
from fleet_router.errors import RequestError
from fleet_router.request import parse_alone, parse_body
from tests.fleet_router.rig import Rig, ask, run

CONFIG = RouterConfig(fleet="f", served_name="m")
SAMPLERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
)  # fmt: skip
INTEGERS = ("top_k", "thinking_token_budget")
GOOD: list[dict[str, Any]] = [
    {"n": 8}, {"n": None}, {"best_of": 8}, {"stop": ["a"] * 64}, {"stop": "x" * 1000}, {"stop": None}, {"bad_words": []},
    {"stop_token_ids": [1] * 1024}, {"allowed_token_ids": None}, {"logprob_token_ids": [1]},
    {"logit_bias": {str(i): 1.5 for i in range(1024)}}, {"logprobs": 20}, {"logprobs": True}, {"top_logprobs": 20},
    {"prompt_logprobs": 0}, {"prompt_embeds": None}, {"tools": [{"a": "b" * 200_000}]}, {"functions": []},
    {"response_format": {"type": "json_object"}}, {"structured_outputs": {}}, {"guided_json": {}}, {"guided_regex": "a" * 60_000},
    {"response_format": {"a": [2**64 - 1, -(2**63), 1e30, {"pattern": "9" * 40}]}}, {"structured_outputs": {"json": 10**19}},
    {"response_format": {"pattern": "1" * 60_000}}, {"response_format": {"pattern": "{" * 60_000 + "{,}{111"}},
    {"response_format": {"pattern": "^.{1,2000}$", "properties": {"pattern": {"pattern": "[0-9]{4}-a", "title": "{9000}"}}}},
    {"structured_outputs": {"json": '{"maxItems": 65536}'}}, {"structured_outputs": {"json": '{"a": 1000'}},
    {"response_format": {"a": {"minItems": 30_000, "maxItems": 30_000, "properties": {"maxItems": {"maximum": 10**9}}}}},
    {"guided_choice": ["a"]}, {"guided_grammar": "x"}, {"chat_template": None}, {"media_io_kwargs": None},
    {"mm_processor_kwargs": None}, {"use_beam_search": False}, {"use_beam_search": None}, {"chat_template_kwargs": None},
    {"chat_template_kwargs": {"enable_thinking": False, "add_generation_prompt": True, "x": {"tokenize": True}}},
    {"stream_interval": 1}, {"stream_interval": None}, {"repetition_detection": None}, {"repetition_detection": {}},
    {"repetition_detection": {"max_pattern_size": 64, "min_pattern_size": None, "min_count": 16}},
    *({name: value} for name in INTEGERS for value in (-1, 0, 40, "40", 40.0, 2**64 - 1, None)),
    *({name: value} for name in SAMPLERS for value in (0, 0.5, -1.25, 1e3, None)),
]  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"n": 9}, {"n": 10**9}, {"n": 10**40}, {"n": "8"}, {"n": [8]}, {"n": 1.5}, {"best_of": 9}, {"stop": ["a"] * 10_000},
    {"stop": ["a" * 9_000]}, {"stop": "a" * 9_000}, {"stop": [1]}, {"stop": {"a": 1}}, {"bad_words": ["a"] * 65},
    {"stop_token_ids": [1] * 1025}, {"stop_token_ids": 7}, {"allowed_token_ids": list(range(2_000))},
    {"logprob_token_ids": [1] * 2_000}, {"logit_bias": {str(i): 1 for i in range(100_000)}}, {"logit_bias": [1]},
    {"logit_bias": {"1": "x"}}, {"logprobs": 21}, {"logprobs": "many"}, {"top_logprobs": 10**9}, {"prompt_logprobs": 21},
    {"logprobs": -1}, {"top_logprobs": -1}, {"prompt_logprobs": -1}, {"n": -1},
    {"prompt_embeds": "AAAA"}, {"tools": [{"a": "b" * 300_000}]}, {"functions": ["b" * 300_000]},
    {"response_format": {"type": "json_schema", "json_schema": {"a": ["b"] * 40_000}}}, {"structured_outputs": "x" * 70_000},
    # a uint256: vLLM 0.32 answers 500 (msgpack has no such integer), and every worker that was asked counted as ill
    {"response_format": {"json_schema": {"schema": {"maximum": 2**256 - 1}}}}, {"response_format": {"enum": [-(2**63) - 1]}},
    {"structured_outputs": {"json": {"const": 2**64}}},
    {"structured_outputs": {"json": json.dumps({"const": 2**64})}},
    # vLLM 0.32 fell back to llguidance for these, and took 20 GB in 50 s: killed for its memory, and so was the next worker
    {"response_format": {"json_schema": {"schema": {"type": "array", "items": {}, "minItems": 2**31}}}},
    {"response_format": {"json_schema": {"schema": {"items": [{"maxItems": 999}] * 99, "minItems": -(10**9)}}}},
    {"structured_outputs": {"json": {"maxItems": 10**6}}}, {"structured_outputs": {"json": json.dumps({"maxItems": 10**6})}},
    # a pattern of 15 bytes held the loop of a vLLM 0.32 up for the square of what it repeats: a{30000} for 40 s
    {"response_format": {"json_schema": {"schema": {"pattern": "(a|b|c){9000}d"}}}},
    {"response_format": {"pattern": "a{1,2049}"}}, {"response_format": {"minItems": 10**400}},
    {"response_format": {"properties": {"a": {"items": [{"pattern": "[ab]{0,500}c{500}"}] * 3}}}},
    {"structured_outputs": {"json": {"patternProperties": {"a{%s}" % ("9" * 5_000): {}}}}},
    {"structured_outputs": {"json": json.dumps({"pattern": "a{3000,}"})}},
    {"guided_json": "x" * 70_000}, {"guided_regex": "(a+)+" * 20_000}, {"guided_choice": ["abc"] * 20_000},
    {"guided_grammar": "x" * 70_000}, {"chat_template": "{{ a }}"}, {"chat_template": ""}, {"media_io_kwargs": {"video": {}}},
    {"mm_processor_kwargs": {}}, {"use_beam_search": True}, {"use_beam_search": 1}, {"chat_template_kwargs": {"tokenize": True}},
    {"chat_template_kwargs": {"chat_template": "{% for i in range(10**9) %}{% endfor %}"}}, {"chat_template_kwargs": [1]},
    {"chat_template_kwargs": {"a": 1, "tokenizer_kwargs": {}}}, {"chat_template_kwargs": {"a": "b" * 70_000}},
    {"stream_interval": 2}, {"stream_interval": 10**9}, {"stream_interval": 0}, {"stream_interval": "8"},
    {"repetition_detection": {"max_pattern_size": 65, "min_count": 2}}, {"repetition_detection": {"min_count": 17}},
    {"repetition_detection": {"max_pattern_size": "1000"}}, {"repetition_detection": {"max_pattern_size": 1e9}},
    {"repetition_detection": [1]},
    # vLLM 0.32 answered 500 to each of these, and whoever was asked counted as ill
    {"repetition_detection": {"max_pattern_size": 0, "min_count": -(2**70)}},
    *({name: value} for name in INTEGERS for value in (2**64, -(2**63) - 1, str(2**70), "1_180591620717411303_424", 10**40, [1])),
    *({name: value} for name in SAMPLERS for value in (10**400, "hot", [1], True, "x" * 70_000)),
]  # fmt: skip


def body(given: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **given}).encode()


@pytest.mark.parametrize("given", GOOD, ids=lambda one: next(iter(one)))
def test_within_its_bound_a_field_goes_on_as_it_came(given: dict[str, Any]):
    assert parse_body(body(given), False, CONFIG).original == body(given)


@pytest.mark.parametrize("given", BAD, ids=lambda one: next(iter(one)))
def test_above_it_the_field_is_named(given: dict[str, Any]):
    (name,) = given
    with pytest.raises(RequestError, match=name) as caught:
        parse_body(body(given), False, CONFIG)
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("ids", "least", "refused"), [(96, 1, False), (97, 1, True), (1_024, 16, True), (1_024, 0, False), (1_024, None, False)]
)
def test_with_min_tokens_vllm_has_room_for_few_ends(ids: int, least: int | None, refused: bool):
    """vLLM 0.32 on a GPU keeps 128 of them beside its model's own, and dies of one more (ValueError in its model runner); so did
    the next worker, to which the request was sent then."""
    given = body({"stop_token_ids": list(range(ids)), "min_tokens": least, "max_tokens": 16})
    if not refused:
        assert parse_body(given, False, CONFIG).original == given
        return
    with pytest.raises(RequestError, match=f"has {ids} items; with min_tokens allowed are 96") as caught:
        parse_body(given, False, CONFIG)
    assert (caught.value.status, caught.value.param) == (400, "stop_token_ids")
    with pytest.raises(RequestError):
        parse_alone(body({"stop_token_ids": list(range(ids)), "min_tokens": "x"}), CONFIG)


NUMBERS = {
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "use_beam_search",
    "stream_interval",
    *SAMPLERS,
    *INTEGERS,
}


@pytest.mark.parametrize("name", sorted(COSTLY - NUMBERS))
def test_however_large_it_is_the_field_is_named(name: str):
    """A regular expression of megabytes was `all but prompt and tools has ... bytes`."""
    with pytest.raises(RequestError) as caught:
        parse_body(body({name: "(a+)+" * 400_000}), False, CONFIG)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_h7_templates_of_clients_run_nowhere():
    """`chat_template` was left out, and `chat_template_kwargs.chat_template` reached the engine (CVE-2025-61620)."""

    async def go(rig: Rig) -> None:
        said = {"messages": [{"role": "user", "content": "x"}]}
        for path in ("/v1/chat/completions", "/tokenize", "/v1/embeddings"):
            for more in ({"chat_template": "{{ a }}"}, {"chat_template_kwargs": {"chat_templat\u0065": "{{ a }}"}}):
                raw = json.dumps({"model": "m", **said, **more}).replace("templat\\\\u0065", "templat\\u0065").encode()
                status, body = await rig.post(raw, path)
                error = json.loads(body)["error"]
                assert (status, error["param"]) == (400, next(iter(more))), error
                assert "is not served" in error["message"]
        assert rig.decode[0].seen == []

    run(go, prefill=0)


def test_every_costly_field_has_both():
    assert {name for one in GOOD for name in one} == COSTLY == {name for one in BAD for name in one}


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/completions", {"prompt": "p", "n": 10**9}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}], "stop": ["a"] * 10_000}, "stop"),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": "p"}], "stop_sequences": ["a"] * 1_000},
            "stop_sequences",
        ),
        ("/v1/responses", {"input": "p", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"a": "b" * 70_000}}}},
         "text.format"),
    ],
)  # fmt: skip
def test_no_dialect_passes_by(path: str, more: dict[str, Any], param: str):
    async def go(rig: Rig) -> None:
        status, answered = await rig.post({"model": "m", **more}, path)
        assert status == 400
        assert param in json.loads(answered)["error"]["message"]
        assert rig.decode[0].seen == rig.prefill[0].seen == []
        assert (await rig.post(ask()))[0] == 200

    run(go, config=RouterConfig(fleet="f", served_name="m"))

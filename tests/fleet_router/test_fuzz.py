"""H5: whatever a client writes, parsers answer with a request or with an error that is one: nothing else comes out, no body that
is no JSON is made, and the loop stands still for less than 50 ms of its own time (of a core that is as fast as ours)."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fleet_router.config import RouterConfig
from fleet_router.dialect.routes import error_body, translation_of
from fleet_router.dialect.translation import CHAT
from fleet_router.errors import RequestError
from fleet_router.request import STRIPPED, decode_body, parse_alone, parse_body, prefill_body
from tests.fleet_router.bombs import BODY_MOST, BOMBS, PATHS, with_bomb

CONFIG = RouterConfig(fleet="f", served_name="m")
STALL_S = 0.05
# What the decoder alone takes for a million numbers where 50 ms are judged: a slower core, or a busy one, gets as much more.
IDS_S = 0.008
FIELDS = [
    "model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stream",
    "stream_options", "n", "best_of", "stop", "stop_sequences", "logit_bias", "logprobs", "top_logprobs", "temperature", "seed",
    "tools", "tool_choice", "response_format", "text", "system", "instructions", "metadata", "guided_regex", "user", "thinking",
    *sorted(STRIPPED),
]  # fmt: skip


def understood(path: bytes, body: bytes) -> tuple[bytes, ...]:
    """What the server does with a body: the bodies of both legs."""
    translation = translation_of(path, body, "r")
    if translation is not None:
        ask = (
            parse_body(translation.take_body(), True, CONFIG)
            if translation.path == CHAT
            else parse_alone(translation.take_body(), CONFIG)
        )
    elif path == b"/v1/embeddings":
        ask = parse_alone(body, CONFIG)
    else:
        ask = parse_body(body, path == CHAT, CONFIG)
    return (decode_body(ask, None),) if ask.alone else (decode_body(ask, None), prefill_body(ask), decode_body(ask, b"{}"))


def answered(path: bytes, body: bytes) -> tuple[RequestError | None, tuple[bytes, ...], bytes, float]:
    """Why it was refused, or else its legs; what the client hears; CPU seconds of it."""
    refused, legs = None, ()
    gc.disable()  # else it may walk here what four thousand other tests left: half a second of nobody's body
    begun = time.thread_time()
    try:
        legs = understood(path, body)
    except RequestError as error:
        refused = error
    finally:
        gc.enable()
    said = error_body(path, refused, "r") if refused is not None else b""
    return refused, legs, said, time.thread_time() - begun


def of_our_core(path: bytes, body: bytes) -> float:
    """The least seconds of three turns, each next to a turn of the decoder alone: what a core like ours takes."""
    turns = []
    for _ in range(3):
        took_s = answered(path, body)[-1]
        begun = time.thread_time()
        msgspec.json.decode(BOMBS["ids"])
        turns.append(took_s / max(1.0, (time.thread_time() - begun) / IDS_S))
    return min(turns)


def judged(path: bytes, body: bytes) -> str:
    """How it ended; AssertionError when it is neither a request nor an error."""
    refused, legs, said, took_s = answered(path, body)
    if took_s >= STALL_S:
        took_s = of_our_core(path, body)
    assert took_s < STALL_S, f"{took_s * 1e3:.0f} ms"
    if refused is None:
        for leg in legs:
            assert not (STRIPPED - {"kv_transfer_params"}) & json.loads(leg, parse_int=str).keys()
        assert "kv_transfer_params" not in json.loads(legs[0], parse_int=str)
        return "request"
    assert refused.status in (400, 404)
    assert msgspec.json.decode(said)["error"]["message"]
    return refused.param or "no field"


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(10**40), 10**40), st.floats(), st.text(max_size=20))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "url", "name", "function", "\ud800"]), inner
        ),
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=5)), VALUES, max_size=4))
@example(changes={"\ud800": 1})
@example(changes={"model": "\ud800"})
@example(changes={"messages": [{"role": "user", "content": "\udfff"}]})
def test_h5_fields_of_every_type(path: bytes, changes: dict[str, Any]):
    judged(path, json.dumps(PATHS[path] | changes).encode())


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=150)
@given(data=st.data())
def test_h5_bytes_that_are_changed_anywhere(path: bytes, data: st.DataObject):
    raw = bytearray(json.dumps({**PATHS[path], "stop": ["a"], "metadata": {"a": "b"}}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    judged(path, bytes(raw))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=100)
@given(raw=st.binary(max_size=200))
def test_h5_any_bytes(path: bytes, raw: bytes):
    judged(path, raw)


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("path", PATHS)
def test_h5_bombs_in_every_field(path: bytes, name: str):
    """Each is the value of one field after the other, and the whole body."""
    judged(path, BOMBS[name])
    for field in (
        FIELDS if len(BOMBS[name]) < 100_000 else ("prompt", "messages", "input", "stop", "logit_bias", "guided_regex", "x")
    ):
        body = with_bomb(path, field, BOMBS[name])
        assert len(body) <= BODY_MOST
        judged(path, body)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions"])
def test_h5_of_two_fields_of_one_name_none_passes_by(path: bytes):
    """However it is spelt: engines take the last one, we must have seen that one."""
    rest = json.dumps(PATHS[path]).encode()
    for twice in (b'"max_tokens":1,"max_tokens":99999', b'"max_tokens":1,"max\\u005ftokens":99999'):
        assert judged(path, rest[:-1] + b"," + twice + b"}") == "max_tokens"
    for name in (b'"kv_transfer_params"', b'"kv\\u005ftransfer_params"', b'"\\u0076llm_xargs"'):
        assert judged(path, rest[:-1] + b"," + name + b":{}," + name + b":{}}") == "request"

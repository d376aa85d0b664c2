"""H5: a body that is no JSON is refused by the name of the field that makes it none, and looking for it holds nobody up."""

from __future__ import annotations

import json
import time

import pytest

from fleet_router.config import RouterConfig
from fleet_router.errors import RequestError
from fleet_router.fields import fields_of
from fleet_router.request import decode_body, parse_body, prefill_body
from fleet_router.unparsed import LOOK_BYTES, guilty_field
from tests.fleet_router.bombs import BODY_MOST, PATHS, with_bomb
from tests.fleet_router.test_fuzz import answered

BAD = {
    "nan": b"NaN", "infinity": b"Infinity", "minus-infinity": b"-Infinity", "surrogate": b'"\\ud800"',
    "surrogate-in-a-list": b'["a","\\udfff"]', "depth": b"[" * 10_000 + b"]" * 10_000,
    "objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "half-utf8": b'"\xc3"', "escape": b'"\\x"', "control": b'"\x01"',
    "word": b"yes", "number": b"01",
}  # fmt: skip


@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("path", PATHS)
def test_h5_what_no_parser_takes_is_refused_by_its_fields_name(path: bytes, value: bytes):
    """It was said which byte, and `param` was null."""
    for field in (list(PATHS[path])[-1], *([] if path.endswith(b"count_tokens") else ["temperature"])):  # it reads no such number
        refused, _, said, _ = answered(path, with_bomb(path, field, value))
        assert refused is not None
        assert refused.status == 400
        assert str(refused.param).startswith(field), (refused.param, refused)
        assert field in json.loads(said)["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_h5_infinity_by_another_name_is_no_number(path: bytes, field: str):
    """An engine that reads JSON as Python does takes 1e400 for infinity."""
    if path == b"/v1/messages/count_tokens":
        return
    refused = answered(path, with_bomb(path, field, b"1e400"))[0]
    assert refused is not None
    assert (refused.status, refused.param) == (400, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"[NaN]", None, id="no object"),
        pytest.param(b'{"a":1', None, id="no end"),
        pytest.param(b'{"a":1,"b":"c', "b", id="a text without an end"),
        pytest.param(b'{"a":NaN', "a", id="no end and a wrong value"),
        pytest.param(b'{"a":1,"b":NaN,"c":Infinity}', "b", id="the first of two"),
        pytest.param(b'{"a":{"x":1,"y":[NaN]},"b":1}', "a", id="inside of a value"),
        pytest.param(b'{"a":{"b":1},"c":"}","d":tru}', "d", id="brackets in texts and values"),
        pytest.param(b'{"a\\"b" : 1 , "\\u0063" : nul }', "c", id="names with escapes"),
        pytest.param(b'{"\\ud800":1}', None, id="a name that is none"),
        pytest.param(b'{"' + b"n" * 100 + b'":NaN}', None, id="a name that is too long to say"),
        pytest.param(b'{"a":1}}', None, id="more behind the end"),
        pytest.param(b'{"a"1}', None, id="no colon"),
        pytest.param(b'{"a":}', "a", id="no value"),
        pytest.param(b'{"p":"' + b"x" * LOOK_BYTES + b'","a":NaN}', None, id="behind what is looked at"),
        pytest.param(b'{"p":"' + b"x" * 9_000 + b'","a":NaN}', "a", id="behind a long text"),
    ],
)
def test_the_field_that_is_to_blame(body: bytes, field: str | None):
    assert guilty_field(body) == field


@pytest.mark.parametrize("piece", [b"[", b'{"a":', b'"', b'\\"', b'"a",', b"1,", b":", b'{"a":1},', b"}"])
def test_looking_for_it_holds_nobody_up(piece: bytes):
    body = b'{"a":' + piece * (BODY_MOST // len(piece))
    took = []
    for _ in range(3):
        begun = time.thread_time()
        guilty_field(body)
        took.append(time.thread_time() - begun)
    assert min(took) < 0.025


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("behind", ["", "x", "x" * 40, "\\n", "\\u0041", "\\ud83d"])
@pytest.mark.parametrize("before", ["", "x" * 40, "\\\\", "\\ud83d\\ude00", "x" * 40_000])
@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00"])
def test_half_of_a_character_is_named(path: bytes, half: str, before: str, behind: str):
    """JavaScript cuts a text where it likes, and writes what is left of an emoji so. Its client was told that its data was
    truncated, which it was not, or of the end of a hex escape."""
    refused = answered(path, with_bomb(path, list(PATHS[path])[-1], f'"{before}{half}{behind}"'.encode()))[0]
    assert refused is not None
    assert refused.status == 400
    assert "is half of a character: a text was cut inside of one" in str(refused)
    assert half in str(refused)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param(b'{"a":"\\ud83d', "truncated", id="the body ends there"),
        pytest.param(b'{"a":"\\ud83d\\', "truncated", id="in the midst of a pair"),
        pytest.param(b'{"a":"\\ud83d\\ude', "truncated", id="in its second half"),
        pytest.param(b'{"a":"\\\\ud83d"', "truncated", id="no escape"),
        pytest.param(b'{"a":"\\ud83d\\ude00\x01"}', "invalid character", id="behind a whole pair"),
        pytest.param(b'{"a":"\\u12x4"}', "escape", id="another escape"),
    ],
)
def test_what_is_wrong_otherwise_is_said_as_it_was(body: bytes, said: str):
    with pytest.raises(RequestError) as found:
        fields_of(body)
    assert said in str(found.value)
    assert "half" not in str(found.value)


TWICE = {
    "prompt": (b'"prompt":"a","prompt":"b"', "b"), "temperature": (b'"temperature":0,"temperature":0.5', 0.5),
    "max_tokens": (b'"max_tokens":9,"max_tokens":2', 2), "n": (b'"n":2,"n":1', 1), "x": (b'"x":1,"x":2', 2),
}  # fmt: skip


@pytest.mark.parametrize("long", ["", "long before ", "long behind "])
@pytest.mark.parametrize("field", TWICE)
def test_h5_of_two_fields_of_one_name_all_read_the_last(field: str, long: str):
    """Python's parser is that of both engines. What it reads of either leg's body is what we have checked."""
    text, wanted = TWICE[field]
    prompt = b'"prompt":"' + long.encode() * 1_000 + b'"'
    pieces = [b'"model":"m"', *([text] if field == "prompt" else [prompt, text])]
    if field == "prompt" and long:
        pieces = [b'"model":"m"', *([prompt, b'"prompt":"b"'] if "before" in long else [b'"prompt":"a"', prompt])]
        wanted = "b" if "before" in long else long * 1_000
    ask = parse_body(b"{" + b",".join(pieces) + b"}", False, RouterConfig(fleet="f", served_name="m"))
    assert json.loads(bytes(ask.fields[field])) == wanted
    assert json.loads(decode_body(ask, None))[field] == wanted
    assert json.loads(decode_body(ask, b"{}"))[field] == wanted
    if field not in ("n", "max_tokens"):
        assert json.loads(prefill_body(ask))[field] == wanted
    assert json.loads(ask.prompt) == json.loads(decode_body(ask, None))["prompt"]


def test_a_repeated_name_never_hides_what_is_refused():
    for twice in (b'"temperature":1,"temperature":1e400', b'"stop":[],"stop":5', b'"prompt":"a","prompt":7'):
        with pytest.raises(RequestError):
            parse_body(b'{"model":"m","prompt":"p",' + twice + b"}", False, RouterConfig(fleet="f", served_name="m"))

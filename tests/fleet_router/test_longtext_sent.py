"""Bodies with long texts and without: treated alike, and nothing of a client's reaches a worker that only we may say."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router import request
from fleet_router.ask import Ask
from fleet_router.config import RouterConfig
from fleet_router.errors import RequestError
from fleet_router.longtext import INSTEAD
from fleet_router.request import STRIPPED, decode_body, named, parse_body, prefill_body, tokenize_body, with_fields

CONFIG = RouterConfig(fleet="f", served_name="m", max_input_tokens=1 << 20)
PIECES = [
    "a" * 2_050, "z" * 1_000, "\\n" * 1_100, '\\"', "\\\\", '\\"prompt\\":\\"', "\\ud83d\\ude00", "é", ",", "]}", "_url",
    "\n", "\0", "\\x", "\\ud800", "\\", '"', '","cache_salt":"theirs', '"},{"role":"user","content":"',
]  # fmt: skip
"""Of texts as JSON has them; the last line is none."""
NAMES = ["user", "n", "max_tokens", "stream", "stop", "prompt", "messages", 'x"prompt', *sorted(STRIPPED)]
VALUES = ["1", "0", "null", "true", '"a"', "[]", '{"include_usage":true}', "NaN", "99999999"]
OURS = {"cache_salt": msgspec.Raw(b'"ours"'), "priority": msgspec.Raw(b"5")}
TOLD = {"kv_transfer_params": {"of": "ours"}, "cache_salt": "ours", "priority": 5}

texts = st.lists(st.sampled_from(PIECES), max_size=5).map(lambda pieces: '"' + "".join(pieces) + '"')


def escaped(name: str) -> str:
    """As nobody writes it, and every parser reads it."""
    return '"' + "".join(f"\\u{ord(one):04x}" for one in name) + '"'


names = st.builds(lambda name, odd: escaped(name) if odd else json.dumps(name), st.sampled_from(NAMES), st.booleans())
values = st.one_of(st.sampled_from(VALUES), texts, st.builds("[{}]".format, texts), st.builds("{{{}:{}}}".format, names, texts))
messages = st.lists(st.builds('{{"role":"user","content":{}}}'.format, values), min_size=1, max_size=3).map(
    lambda found: f"[{','.join(found)}]"
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bool]:
    chat = draw(st.booleans())
    fields = [('"model"', '"m"'), ('"messages"', draw(messages)) if chat else ('"prompt"', draw(st.one_of(texts, values)))]
    fields += draw(st.lists(st.tuples(names, values), max_size=3))
    comma, colon = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]))
    body = "{" + comma.join(name + colon + value for name, value in draw(st.permutations(fields))) + "}"
    return body.encode() + draw(st.sampled_from([b"", b"", b"\n", b"x", b"\xff"])), chat


ASKED = ("prompt", "stream", "original", "alone", "adapter", "counts", "added")


def read(body: bytes, chat: bool) -> Ask | RequestError:
    try:
        return parse_body(body, chat, CONFIG)
    except RequestError as error:
        return error


def told(found: Ask | RequestError) -> object:
    if isinstance(found, Ask):
        return list(found.fields.items()), [getattr(found, name) for name in ASKED]
    return str(found), found.status, found.code, found.param


def parsed(body: bytes) -> Any:
    """As Python's engines do; None: it is no JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


@settings(max_examples=600, deadline=None)
@given(made=bodies())
def test_a_body_is_read_alike_with_its_long_texts_and_around_them(made: tuple[bytes, bool]):
    body, chat = made
    found = read(body, chat)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request, "cut", lambda *_: None)
        whole = read(body, chat)
    if isinstance(whole, Ask) or parsed(body) is not None:
        assert told(found) == told(whole)
    elif isinstance(found, RequestError):
        assert found.status == 400
    if isinstance(found, Ask):
        check_sent(found, body, chat)


def check_sent(ask: Ask, body: bytes, chat: bool) -> None:
    """Whatever leg it is for: it is JSON where the body was, and then nothing in it is said twice or by the client."""
    ask = with_fields(ask, dict(OURS), b',"cache_salt":"ours","priority":5}')
    decode = decode_body(ask, b'{"of":"ours"}')
    for sent in (decode, named(decode, "theirs", ""), prefill_body(ask), tokenize_body(ask, chat=chat)):
        assert INSTEAD not in sent
        said = parsed(sent)
        assert (said is None) is (parsed(body) is None)
        if said is None:
            continue
        given = dict(json.loads(sent, object_pairs_hook=list))
        assert said.keys() == given.keys()
        for name in STRIPPED & said.keys():
            remote = name == "kv_transfer_params" and "do_remote_decode" in said[name]
            assert remote or said[name] == TOLD[name]
    for name, value in ask.fields.items():
        if (said := parsed(decode)) is not None:
            assert said[name] == json.loads(bytes(value))

"""Bodies that are read around their long texts: whatever is read so is what a parser reads, and nothing is hidden in them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.config import RouterConfig
from fleet_router.errors import RequestError
from fleet_router.fields import fields_of
from fleet_router.follow.documents import Documents
from fleet_router.longtext import INSTEAD, LONG_BYTES, around, long_texts
from fleet_router.request import parse_body
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.rig import CONFIG as RIG
from tests.fleet_router.rig import Rig, run

CONFIG = RouterConfig(fleet="f", served_name="m", max_input_tokens=1 << 20)
LONG = ('She said: "Blocks\\keys", and é went\n on. {[,]}: ' + "and on " * 300) * 3
PIECES = [
    '"',
    "\\",
    '\\"',
    "\\\\",
    "prompt",
    '"prompt":',
    '"content":"',
    ",",
    "]",
    "}",
    "{",
    ":",
    "é",
    "\n",
    "x" * 300,
    "\u2028",
    "_url",
]


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": text}], **more}


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": text, **more}


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_a_long_text_is_passed_over(chat: bool, spaced: bool, ascii_only: bool):
    given = (said if chat else asked)(LONG, max_tokens=3, stream=True)
    body = json.dumps(given, separators=(", ", ": ") if spaced else (",", ":"), ensure_ascii=ascii_only).encode()
    found = around(body, chat)
    assert found is not None
    fields, short, prompt = found
    assert fields == fields_of(body)
    assert prompt == bytes(fields["messages" if chat else "prompt"])
    assert INSTEAD in bytes(short)
    assert len(bytes(short)) < 200


def test_several_long_texts_of_a_conversation():
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "and on " * 1_000} for _ in range(5)], "n": 1}
    ).encode()
    found = around(body, True)
    assert found is not None
    assert bytes(found[1]).count(INSTEAD) == 5
    assert found[0] == fields_of(body)


def text() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@settings(max_examples=400, deadline=None)
@given(
    texts=st.lists(text(), min_size=1, max_size=4),
    other=text(),
    chat=st.booleans(),
    ascii_only=st.booleans(),
    indent=st.booleans(),
)
def test_what_is_read_is_what_a_parser_reads(texts: list[str], other: str, chat: bool, ascii_only: bool, indent: bool):
    messages = [{"role": "user", "content": one, one: 1} for one in texts]
    given: dict[str, Any] = {other: other, "prompt": "".join(texts), "model": "m", "messages": messages, "user": texts[-1]}
    body = json.dumps(given, ensure_ascii=ascii_only, indent=1 if indent else None).encode()
    found = around(body, chat)
    if found is not None:
        assert found[0] == fields_of(body)
        assert found[2] == bytes(found[0]["messages" if chat else "prompt"])
    for start, end in long_texts(body):
        assert isinstance(json.loads(body[start - 1 : end + 1]), str)


@settings(max_examples=400, deadline=None)
@given(raw=st.lists(st.sampled_from([*PIECES, '"' + "y" * (LONG_BYTES + 9) + '"', '"prompt":"' + "z" * 3_000, "1"])).map("".join))
def test_of_a_body_that_is_no_json_nothing_is_made_that_it_is_not(raw: str):
    body = ("{" + raw + "}").encode()
    for chat in (True, False):
        found = around(body, chat)
        if found is not None:
            assert found[2] in body
            assert not any(INSTEAD in bytes(value) for value in found[0].values())


@pytest.mark.parametrize(
    "given",
    [
        asked("short"),
        asked("short", suffix=LONG),
        asked(LONG[:100], user=LONG),
        {"model": "m", "metadata": {"prompt": LONG}},
        {"model": "m", "metadata": {"prompt": LONG}, "prompt": "short"},
        {"model": "m", 'a "prompt': LONG, "prompt": "short"},
        {"model": "m", "prompt": [LONG, LONG]},
    ],
    ids=str,
)
def test_texts_elsewhere_are_no_prompt(given: dict[str, Any]):
    body = json.dumps(given).encode()
    assert around(body, False) is None
    assert fields_of(body).keys() == given.keys()


def test_of_two_prompts_the_last_one_counts():
    """As for every parser there is."""
    for first, last in ((LONG, "short"), ("short", LONG), (LONG, "b" * 9_000)):
        body = b'{"model":"m","prompt":%b,"prompt":%b}' % (json.dumps(first).encode(), json.dumps(last).encode())
        assert json.loads(parse_body(body, False, CONFIG).prompt) == last


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_what_clients_may_not_set_is_seen_beside_a_long_text(chat: bool, behind: bool):
    ours = {"kv_transfer_params": {"do_remote_prefill": True}, "cache_salt": "theirs"}
    given = (said if chat else asked)(LONG)
    ask = parse_body(json.dumps({**given, **ours} if behind else {**ours, **given}).encode(), chat, CONFIG)
    assert ask.original is None
    assert not ours.keys() & ask.fields.keys()


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
        [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/" + "a" * 9_000}}],
        [{"type": "text", "text": LONG}, {"a" * 9_000 + "_url": "http://169.254.169.254/"}],
        [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": "http://169.254.169.254/"}],
    ],
    ids=["text-and-url", "long-url", "long-name", "short-url"],
)
def test_a_url_is_refused_beside_a_long_text(content: list[dict[str, Any]]):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})
    for raw in (body, body.replace("image_url", "image\\u005furl"), body.replace("_url", "\\u005furl")):
        with pytest.raises(RequestError, match="URLs are not fetched"):
            parse_body(raw.encode(), True, CONFIG)


def test_a_long_picture_inside_the_request_is_taken():
    content = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9_000}},
        {"type": "text", "text": LONG},
    ]
    parse_body(json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode(), True, CONFIG)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("spoilt", [b"\xff", b"\xed\xa0\x80"])
def test_bytes_that_are_no_utf8_are_refused_inside_a_long_text(chat: bool, spoilt: bytes):
    body = json.dumps((said if chat else asked)("a" * 9_000)).encode().replace(b"aaaa", b"aa" + spoilt, 1)
    with pytest.raises(RequestError, match="not a JSON object") as told:
        parse_body(body, chat, CONFIG)
    assert told.value.code == "invalid_json"


@pytest.mark.parametrize("chat", [True, False])
def test_what_is_wrong_around_a_long_text_is_said_of_the_body_as_it_came(chat: bool):
    body = json.dumps((said if chat else asked)("a" * 9_000)).encode()[:-1] + b', "n": }'
    with pytest.raises(RequestError, match=rf"\(byte {len(body) - 1}\)"):
        parse_body(body, chat, CONFIG)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ud83d\\ud83d\\ude00"])
def test_half_a_character_is_refused_inside_a_long_text(chat: bool, half: str):
    """Python's parser takes it, and engines break at it later, of which workers have the blame."""
    body = json.dumps((said if chat else asked)("a" * 9_000)).replace("aaaa", "aa" + half, 1).encode()
    assert json.loads(body)
    with pytest.raises(RequestError, match="not a JSON object"):
        parse_body(body, chat, CONFIG)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_whole_characters_are_taken_however_they_are_written(chat: bool, ascii_only: bool):
    body = json.dumps((said if chat else asked)("😀 \ud7a3 " * 900), ensure_ascii=ascii_only).encode()
    assert parse_body(body, chat, CONFIG).original == body


SPOILT = [r"\x", "\n", "\0", r"\u12g"]


@pytest.mark.parametrize("spoilt", SPOILT, ids=repr)
def test_a_conversation_that_is_no_json_is_refused_where_its_text_is_counted(spoilt: str):
    """An error of the parser was one of ours: 500."""
    body = json.dumps(said("a" * 9_000)).replace("aaaa", "aa" + spoilt, 1).encode()
    with pytest.raises(RequestError, match="messages: JSON is malformed"):
        parse_body(body, True, msgspec.structs.replace(CONFIG, max_input_tokens=10))


@pytest.mark.parametrize("model", ["", "theirs"], ids=["same-name", "other-name"])
@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("spoilt", SPOILT, ids=repr)
def test_what_is_no_json_inside_a_long_text_is_refused_by_its_worker(spoilt: str, prefill: int, model: str):
    """Also by one that knows the model under another name: it was 500 there."""

    async def go(rig: Rig) -> None:
        rows = tuple(msgspec.structs.replace(one.endpoint, model=model) for one in rig.context.table.workers.values())
        rig.router.apply(Documents(RIG, Endpoints(fleet="f", namespace="n", workers=rows)))
        body = json.dumps(asked("a" * 9_000)).replace("aaaa", "aa" + spoilt, 1).encode()
        assert (await rig.post(body))[0] == 400
        assert sum(len(worker.asked()) for worker in (*rig.prefill, *rig.decode)) == 1
        assert not any(worker.seen for worker in (*rig.prefill, *rig.decode))
        assert (await rig.post(asked("a" * 9_000)))[0] == 200
        assert {one["model"] for worker in (*rig.prefill, *rig.decode) for one in worker.seen} == {model or "m"}

    run(go, prefill=prefill)


def test_roles_and_limits_are_checked_beside_a_long_text():
    with pytest.raises(RequestError, match=r"messages\[1\]\.role is required"):
        parse_body(
            json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}, {"content": LONG}]}).encode(), True, CONFIG
        )
    small = msgspec.structs.replace(CONFIG, max_input_tokens=10)
    for chat, name in ((True, "messages"), (False, "prompt")):
        with pytest.raises(RequestError, match=f"{name} has .* bytes: longer than 10 tokens"):
            parse_body(json.dumps((said if chat else asked)(LONG)).encode(), chat, small)


@pytest.mark.parametrize(
    "raw", ['\\"' * 100_000, "\\\\" * 100_000, '\\\\\\"' * 50_000, '"' * 100_000, "a" * 3_000 + '\\"' * 100_000]
)
def test_a_text_that_is_all_quotes_is_left_to_the_parser_soon(raw: str):
    """Nothing is found, or all of it: never after looking at each quote."""
    body = b'{"model":"m","prompt":"%b","n":1}' % raw.encode()
    counted = Counting(body)
    long_texts(counted)
    assert counted.finds < 100 + len(body) // 1024


class Counting(bytes):
    finds = 0

    def find(self, *given: Any) -> int:
        self.finds += 1
        return super().find(*given)

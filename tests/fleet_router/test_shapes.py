"""Bodies whose rest came before: what is known of it is all that is taken over, and long ones are copied as little as can be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from fleet_router import request
from fleet_router.ask import APART_BYTES
from fleet_router.config import HttpBounds, RouterConfig
from fleet_router.errors import RequestError
from fleet_router.inbound import Inbound
from fleet_router.outbox import Outbox
from fleet_router.request import decode_body, parse_body, with_fields
from fleet_router.shapes import FIELDS_MOST, REST_MOST_BYTES, SHAPES_MOST, Shapes
from tests.fleet_router.rig import CONFIG as RIG
from tests.fleet_router.rig import Rig, answer_of, http, run
from tests.fleet_router.test_longtext_sent import bodies, read, told

CONFIG = RouterConfig(fleet="f", served_name="m", max_input_tokens=1 << 20)
LONG = "and on " * 400
OTHER = "or not " * 500
HEAD = b'POST /v1/completions HTTP/1.1\r\nhost: h\r\nx-note: "prompt":"","content":"\r\n\r\n'
"""Which is read by nobody who reads a body behind it."""


@pytest.fixture(autouse=True)
def shapes() -> Shapes:
    """What other tests asked is known to none of these."""
    request._SHAPES._known.clear()
    return request._SHAPES


def asked(text: Any, **more: Any) -> bytes:
    return json.dumps({"user": "u", "prompt": text, "model": "m", **more}).encode()


def said(text: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


def outcome(body: bytes, chat: bool, config: RouterConfig = CONFIG, begins: int = 0) -> object:
    try:
        return told(parse_body(body, chat, config, begins))
    except RequestError as error:
        return told(error)


def parsed_whole(body: bytes, chat: bool, config: RouterConfig = CONFIG) -> object:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request, "cut", lambda *_: None)
        return outcome(body, chat, config)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2, "max_tokens": 5, "stop": ["a"]}], ids=str)
def test_a_body_whose_rest_is_known_is_read_as_any_other(shapes: Shapes, chat: bool, more: dict[str, Any]):
    make = said if chat else asked
    parse_body(make(LONG, **more), chat, CONFIG)
    ((rest, of_chat, _),) = shapes._known
    assert shapes.find(rest, chat, CONFIG) is not None
    assert shapes.find(rest, not chat, CONFIG) is None
    assert shapes.find(rest, chat, msgspec.structs.replace(CONFIG)) is None
    assert of_chat is chat
    assert outcome(make(OTHER, **more), chat) == parsed_whole(make(OTHER, **more), chat)


@settings(max_examples=300, deadline=None)
@given(made=bodies())
def test_whatever_was_asked_once_is_read_alike_again(made: tuple[bytes, bool]):
    """Behind a head, too."""
    body, chat = made
    first = outcome(body, chat)
    assert outcome(body, chat) == first
    if isinstance(found := read(body, chat), RequestError):
        with pytest.raises(RequestError) as refused:
            parse_body(HEAD + body, chat, CONFIG, len(HEAD))
        assert told(refused.value) == first
        return
    behind = parse_body(HEAD + body, chat, CONFIG, len(HEAD))
    assert (behind.fields, behind.prompt, behind.stream, behind.adapter) == (
        found.fields,
        found.prompt,
        found.stream,
        found.adapter,
    )
    spliced = [with_fields(ask, {"cache_salt": msgspec.Raw(b'"o"')}, b',"cache_salt":"o"}') for ask in (behind, found)]
    for kv in (None, b'{"of":"ours"}'):
        assert decode_body(spliced[0], kv) == decode_body(spliced[1], kv)


@pytest.mark.parametrize("end", [b"", b" \n"])
@pytest.mark.parametrize("chat", [True, False])
def test_fields_are_added_to_a_body_that_stands_behind_its_head(chat: bool, end: bytes):
    body = (said if chat else asked)(LONG) + end
    ask = parse_body(HEAD + body, chat, CONFIG, len(HEAD))
    assert (ask.begins, decode_body(ask, None)) == (len(HEAD), body)
    more = with_fields(ask, {"priority": msgspec.Raw(b"5")}, b',"priority":5}')
    assert json.loads(decode_body(more, b'{"of":1}')) == {**json.loads(body), "priority": 5, "kv_transfer_params": {"of": 1}}


@pytest.mark.parametrize("chat", [True, False])
def test_who_waits_with_a_long_head_is_counted_with_it(chat: bool):
    """The head is kept as long as the body behind it: a queue of such requests would hold more than it may."""
    body, head = (said if chat else asked)(LONG), b"x-note: " + b"v" * 8_000
    ask = parse_body(head + body, chat, CONFIG, len(head))
    assert ask.original is not None
    assert ask.size_bytes == len(head) + parse_body(body, chat, CONFIG).size_bytes
    assert ask.size_bytes > 0.95 * (len(ask.original) + len(ask.prompt))
    more = with_fields(ask.copy(), {"priority": msgspec.Raw(b"5")}, b',"priority":5}')
    assert more.size_bytes == ask.size_bytes + len(more.added)


def test_what_is_added_to_one_is_in_no_other():
    """Nor is anything of its prompt kept."""
    first = parse_body(asked(LONG), False, CONFIG)
    again = parse_body(asked(LONG), False, CONFIG)
    for ask in (first, again):
        with_fields(ask, {"cache_salt": msgspec.Raw(b'"theirs"')}, b',"cache_salt":"theirs"}')
    assert list(parse_body(asked(OTHER), False, CONFIG).fields) == ["user", "prompt", "model"]


def test_nothing_is_kept_of_a_long_text(shapes: Shapes):
    for make, chat in ((said, True), (asked, False)):
        parse_body(make(LONG), chat, CONFIG)
    (one, other) = shapes._known.values()
    kept = [bytes(value) for shape in (one, other) for value in shape.fields.values()] + [one.value, other.value]
    kept += [rest for rest, *_ in shapes._known]
    assert not any(LONG.encode() in value for value in kept)


@pytest.mark.parametrize("chat", [True, False])
def test_limits_of_another_tenant_are_looked_at_again(chat: bool):
    """A tenant's own objects, also where they say the same."""
    make = said if chat else asked
    parse_body(make(LONG, max_tokens=50), chat, CONFIG)
    less = msgspec.structs.replace(CONFIG, max_output_tokens=10)
    with pytest.raises(RequestError, match="max_tokens is 50"):
        parse_body(make(LONG, max_tokens=50), chat, less)


@pytest.mark.parametrize("chat", [True, False])
def test_the_text_itself_is_measured_each_time(chat: bool):
    make, config = said if chat else asked, msgspec.structs.replace(CONFIG, max_input_tokens=200)
    parse_body(make(LONG), chat, config)
    with pytest.raises(RequestError, match="longer than 200 tokens"):
        parse_body(make(OTHER), chat, config)


def test_a_long_url_that_was_taken_makes_no_other_one_harmless():
    parts = [
        [{"type": "image_url", "image_url": {"url": scheme + "A" * 9_000}}] for scheme in ("data:image/png;base64,", "http://")
    ]
    parse_body(said(parts[0]), True, CONFIG)
    with pytest.raises(RequestError, match="URLs are not fetched"):
        parse_body(said(parts[1]), True, CONFIG)


@pytest.mark.parametrize("more", [{"cache_salt": "theirs"}, {"n": 9_999}, {"model": "nobody's"}], ids=str)
def test_what_is_refused_or_taken_out_is_looked_at_each_time(shapes: Shapes, more: dict[str, Any]):
    found = [outcome(asked(LONG, **more), False) for _ in range(2)]
    assert found[0] == found[1] == parsed_whole(asked(LONG, **more), False)
    assert not shapes._known


def test_no_more_than_a_few_are_remembered_and_none_that_are_long(shapes: Shapes):
    for number in range(SHAPES_MOST + 3):
        parse_body(asked(LONG, seed=number), False, CONFIG)
        assert len(shapes._known) <= SHAPES_MOST
    assert len(shapes._known) == 3
    parse_body(asked(LONG, metadata={"about": "x" * REST_MOST_BYTES}), False, CONFIG)
    assert len(shapes._known) == 3


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("more", [0, 1])
def test_nor_any_with_fields_that_nobody_counts(shapes: Shapes, chat: bool, more: int):
    """A field of a letter takes twenty times its bytes."""
    body = (said if chat else asked)(LONG)
    fields = {f"{number:x}": 1 for number in range(FIELDS_MOST + more - len(json.loads(body)))}
    for _ in range(2):
        parse_body((said if chat else asked)(LONG, **fields), chat, CONFIG)
    assert len(shapes._known) == (0 if more else 1)


class Unhashed(bytes):
    def __hash__(self) -> int:
        raise AssertionError("its hash costs more than to know it could save")


def test_a_long_rest_is_neither_looked_for_nor_made_ready_to_be_found(shapes: Shapes):
    """A conversation of many short turns beside a long one: to hash it and copy it for nothing cost a tenth more."""
    ask = parse_body(said(LONG), True, CONFIG)
    (known,) = shapes._known.values()
    for size, looked_for in ((REST_MOST_BYTES, True), (REST_MOST_BYTES + 1, False)):
        long = Unhashed(b"r" * size)
        for look in (
            lambda rest: shapes.find(rest, True, CONFIG),
            lambda rest: shapes.learn(rest, True, CONFIG, ask, msgspec.Raw(known.value)),
        ):
            if looked_for:
                with pytest.raises(AssertionError, match="costs more"):
                    look(long)
            else:
                look(long)
    assert list(shapes._known.values()) == [known]


def test_a_long_body_stays_with_its_head_and_a_short_one_does_not():
    inbound, bounds, none, size = Inbound(), HttpBounds(), frozenset[bytes](), APART_BYTES + 1
    inbound.feed(http(b"first"), bounds, none)
    inbound.requests.popleft()
    for body in (b"y" * size, b"short", b"z" * size):
        found = inbound.again(http(body), bounds, none)
        assert found is not None
        taken, begins = found.take(apart=False)
        assert (taken[begins:], begins > 0, found.body) == (body, len(body) >= size, [])
        found = inbound.again(http(body), bounds, none)
        assert found is not None
        assert found.take(apart=True) == (body, 0)


class Wire:
    def __init__(self) -> None:
        self.got: list[object] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.got.append(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self.got.append(tuple(map(bytes, pieces)))


def test_pieces_are_written_at_once_and_in_order():
    async def go() -> None:
        box, wire = Outbox(), Wire()
        box.write(wire, b"one")  # type: ignore[arg-type]
        box.write(wire, [b"head", memoryview(b"body")[:-1], b"end"])  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert wire.got == [b"one", (b"head", b"bod", b"end")]

    asyncio.run(go())


PATHS = [("/v1/completions", "prompt"), ("/v1/embeddings", "input")]


@pytest.mark.parametrize(("path", "name"), PATHS)
@pytest.mark.parametrize("end", [b"", b"\n \n"], ids=["plain", "spaced"])
@pytest.mark.parametrize("limited", [True, False])
def test_long_bodies_reach_the_worker_as_they_came(path: str, name: str, end: bytes, limited: bool):
    """On one connection, where the second and the later ones have a head that is known. `limited`: with a limit of ours."""

    async def test(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        for number, size in enumerate((9_000, 12_000, 200, 15_000)):
            body = json.dumps({"model": "m", name: f"{number} " + "w" * size, "seed": 1}).encode() + end
            writer.write(http(body, path=path))
            status, _, _ = await answer_of(reader)
            assert status == 200
            sent = rig.decode[0].seen[-1]
            assert sent[name] == f"{number} " + "w" * size
            assert sent.keys() == {"model", name, "seed"} | ({"max_tokens"} if limited and name == "prompt" else set())

    config = msgspec.structs.replace(RIG, max_model_len=1_000_000 if limited else 0)
    run(test, prefill=0, decode=1, config=config)

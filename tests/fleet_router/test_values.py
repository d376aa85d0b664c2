"""Large bodies of many small values (H5): refused before anything is built of them, in every dialect; large texts are not."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fleet_router.config import RouterConfig
from fleet_router.dialect.routes import TRANSLATED, translation_of
from fleet_router.errors import RequestError
from fleet_router.fields import LARGE_BYTES, VALUES_MOST
from fleet_router.request import parse_body
from tests.fleet_router.bombs import PATHS

MANY = VALUES_MOST + 1
CODE = '{"a": [1, 2, {"b": "\\\\"}], "c": []},\n' * 100_000
FIELDS: list[tuple[str, str]] = [
    ("messages", '{"role":"user","content":""}'), ("messages", '{"role":"user","content":[{"type":"text","text":""}]}'),
    ("system", '{"type":"text","text":""}'), ("input", '{"type":"reasoning"}'), ("tools", '{"name":"","input_schema":{}}'),
    ("metadata", "[]"), ("tools", "1"),
]  # fmt: skip


@pytest.mark.parametrize("path", TRANSLATED, ids=bytes.decode)
@pytest.mark.parametrize(("field", "item"), FIELDS)
def test_many_small_values_are_refused_before_they_are_built(path: bytes, field: str, item: str):
    """1.4 million empty lists in the schema of a tool held the loop up for half a second and more."""
    rest = {name: value for name, value in PATHS[path].items() if name != field}
    body = json.dumps(rest).encode()[:-1] + b',"%b":[%b]}' % (field.encode(), b",".join([item.encode()] * MANY))
    with pytest.raises(RequestError, match=f"more than {VALUES_MOST} values") as told:
        translation_of(path, body, "r")
    assert told.value.status == 400


@pytest.mark.parametrize("path", TRANSLATED, ids=bytes.decode)
def test_what_stands_in_a_text_is_no_value(path: bytes):
    field = "input" if path == b"/v1/responses" else "messages"
    said: Any = CODE if field == "input" else [{"role": "user", "content": CODE}]
    body = msgspec.json.encode({**PATHS[path], field: said})
    assert len(body) > 10 * LARGE_BYTES
    assert translation_of(path, body, "r") is not None


def test_pictures_are_looked_for_in_so_many_values_and_no_more():
    raw = b'{"model":"m","messages":[{"role":"user","content":[{"image_url":"data:"},%b]}]}' % b",".join([b"[]"] * MANY)
    with pytest.raises(RequestError, match="messages holds more than") as told:
        parse_body(raw, True, RouterConfig(fleet="f", served_name="m", max_input_tokens=1 << 20))
    assert told.value.param == "messages"


@pytest.mark.parametrize(
    "content", [b"[%b]" % b",".join([b"{}"] * 1_000_000), b"[%b]" % b",".join([b'{"text":""}'] * MANY)], ids=["nothing", "texts"]
)
def test_parts_of_a_message_are_counted_before_they_are_built(content: bytes):
    """A million of them held the loop up for a quarter of a second."""
    raw = b'{"model":"m","messages":[{"role":"user","content":%b}]}' % content
    with pytest.raises(RequestError, match=f"messages holds more than {VALUES_MOST} values") as told:
        parse_body(raw, True, RouterConfig(fleet="f", served_name="m", max_input_tokens=4_096))
    assert (told.value.status, told.value.param) == (400, "messages")

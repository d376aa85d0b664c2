"""The top level of a body: a JSON object in UTF-8 whose values stay the client's bytes. What would make the loop stand still is
refused before anything is built of it."""

from __future__ import annotations

from typing import Final

import msgspec

from fleet_router.asked import MayBeLarge
from fleet_router.errors import RequestError
from fleet_router.unparsed import guilty_field, why
from fleet_wire.unreadable import UNREADABLE

LARGE_BYTES: Final = 262_144
"""Below it no body holds the loop up for long, whatever is in it."""
OTHERS_BYTES_MOST: Final = 262_144
"""Of a large body, all that is neither prompt nor tools: 100,000 small fields cost 40 ms."""
VALUES_MOST: Final = 131_072
"""Of a large text that is built whole, values inside of values among them: twice as many took 100 ms."""
QUOTES_MOST: Final = 262_144
_TOP: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


_LARGE: Final = msgspec.json.Decoder(MayBeLarge)


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    """Fields by name; RequestError 400."""
    try:
        if not body.isascii():
            body.decode()  # also where nobody decodes it here
        if len(body) > LARGE_BYTES:
            _check_large(body)
        return _TOP.decode(body)
    except UNREADABLE as error:
        raise not_an_object(body, error) from error


def not_an_object(body: bytes, error: Exception) -> RequestError:
    """Of a body that cannot be read: which field it is, where that can be told."""
    field = guilty_field(body)
    told = f"the body is not a JSON object: {f'{field}: ' if field else ''}{why(body, error)}"
    return RequestError(400, told, code="invalid_json", param=field)


def _check_large(body: bytes) -> None:
    found = _LARGE.decode(body)
    others = len(body) - sum(memoryview(getattr(found, name)).nbytes for name in MayBeLarge.__struct_fields__)
    if others > OTHERS_BYTES_MOST:
        raise RequestError(400, f"all but prompt and tools has {others} bytes; allowed are {OTHERS_BYTES_MOST}")


def check_values(raw: bytes, name: str = "") -> None:
    """RequestError 400 for a large JSON text of so many values that to build them would hold the loop up. What stands in strings
    is no value: a megabyte of code is one."""
    if len(raw) <= LARGE_BYTES:
        return
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= QUOTES_MOST:
        outside = b"".join(plain.split(b'"')[::2])
        if outside.count(b",") + outside.count(b"[") + outside.count(b"{") <= VALUES_MOST:
            return
    raise RequestError(400, f"{name or 'the body'} holds more than {VALUES_MOST} values: send less at once", param=name or None)

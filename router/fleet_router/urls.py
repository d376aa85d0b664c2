"""Nobody fetches anything for a client: pictures and sound come inside the request, or not at all.

An engine that follows URLs reaches whatever it can reach: metadata of the cloud, files, neighbours. So every `*_url` of a message
must be a data: URL, however its name is spelt in JSON. Nor does anybody load a client's tensors (`*_embeds`), or find a medium by
the name that a client gave it (`uuid`): engines keep media by it for everybody, so that it is another client's picture.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from fleet_router.errors import RequestError
from fleet_router.fields import check_values
from fleet_wire.unreadable import UNREADABLE

MARK: Final = b"_url"
TENSORS: Final = b'_embeds"'
NAMED: Final = b'"uuid"'
"""As JSON has it: inside a text a quote is escaped."""
ESCAPED: Final = re.compile(rb"\\u00[2-7][0-9a-fA-F]")
"""A letter that needs no escape: a name could be hidden by it."""
ALLOWED: Final = "data:"
MEDIA: Final = ("_url", "_embeds", "_image", "_audio", "_video", "_pil")
"""Ends of the types of parts that are no text, and of their fields."""


def check_urls(raw: bytes, param: str, names: bytes | None = None) -> None:
    """RequestError 400 for a URL that somebody would fetch, and the like. `raw`: JSON; a few searches of bytes for nearly every
    request. `names`: the part of it that has all names in it, where that is known."""
    searched = raw if names is None else names
    if (
        searched.find(MARK) < 0
        and searched.find(NAMED) < 0
        and searched.find(TENSORS) < 0
        and (searched.find(b"\\u00") < 0 or ESCAPED.search(searched) is None)
    ):
        return
    check_values(raw, param)
    try:
        _walk(msgspec.json.decode(raw), param)
    except UNREADABLE as error:
        raise RequestError(400, f"{param}: {error}", param=param) from error


def _walk(value: Any, param: str) -> None:
    if isinstance(value, list):
        for one in value:
            _walk(one, param)
    elif isinstance(value, dict):
        _check_part(value, param)
        for name, one in value.items():
            if name.endswith("_url"):
                _check(one, param)
            _walk(one, param)


def _check_part(value: dict[str, Any], param: str) -> None:
    names = (*value, kind) if isinstance(kind := value.get("type"), str) else (*value,)
    if any(name.endswith("_embeds") and value.get(name, name) is not None for name in names):
        raise RequestError(400, f"{param}: tensors of clients are loaded by nobody", param=param)
    if value.get("uuid") is not None and any(name.endswith(MEDIA) for name in names):
        raise RequestError(400, f"{param}: a uuid of a medium is not served: others' media would be found by it", param=param)


def _check(value: Any, param: str) -> None:
    url = value.get("url") if isinstance(value, dict) else value
    if url is not None and not (isinstance(url, str) and url.startswith(ALLOWED)):
        raise RequestError(400, f"{param}: URLs are not fetched, only data: URLs are taken", code="url_not_allowed", param=param)

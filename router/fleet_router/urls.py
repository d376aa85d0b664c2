"""Nobody fetches anything for a client: pictures and sound come inside the request, or not at all.

An engine that follows URLs reaches whatever it can reach: metadata of the cloud, files, neighbours. So every `*_url` of a message
must be a data: URL, however its name is spelt in JSON.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from fleet_router.errors import RequestError
from fleet_router.fields import check_values
from fleet_wire.unreadable import UNREADABLE

MARK: Final = b"_url"
ESCAPED: Final = re.compile(rb"\\u00[2-7][0-9a-fA-F]")
"""A letter that needs no escape: a name could be hidden by it."""
ALLOWED: Final = "data:"


def check_urls(raw: bytes, param: str, names: bytes | None = None) -> None:
    """RequestError 400 for a URL that somebody would fetch. `raw`: JSON; a search of bytes for nearly every request. `names`: the
    part of it that has all names in it, where that is known."""
    searched = raw if names is None else names
    if MARK not in searched and not (b"\\u00" in searched and ESCAPED.search(searched)):
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
        for name, one in value.items():
            if name.endswith("_url"):
                _check(one, param)
            _walk(one, param)


def _check(value: Any, param: str) -> None:
    url = value.get("url") if isinstance(value, dict) else value
    if url is not None and not (isinstance(url, str) and url.startswith(ALLOWED)):
        raise RequestError(400, f"{param}: URLs are not fetched, only data: URLs are taken", code="url_not_allowed", param=param)

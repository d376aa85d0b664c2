"""What a request's head says of its body and its target, where h11 takes more than one meaning."""

from __future__ import annotations

import re
from typing import Any

import h11

WHOLE_URL = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """A server's. A body has one end, whoever reads the head; a target that is a whole URL is its path."""

    def next_event(self) -> Any:
        """As h11's."""
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        check_framing(event)
        found = WHOLE_URL.match(event.target)
        if found is None:
            return event
        rest = event.target[found.end() :]
        target = rest if rest.startswith(b"/") else b"/" + rest
        return h11.Request(method=event.method, headers=event.headers, target=target, http_version=event.http_version)


def check_framing(request: h11.Request) -> None:
    """RemoteProtocolError when it is not said once how long the body is: a proxy before us may have taken the other word, and
    what it takes for a second request would be this one's body, or the other way round (RFC 9112, 6.1: 400 is allowed)."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError("a body with two lengths")

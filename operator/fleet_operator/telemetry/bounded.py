"""A `requests` transport for servers that nobody vouches for: bounded in bytes, and in time whatever the server does.

The timeouts of `requests` only bound the wait for the next byte; a server that sends one now and then would keep a thread for
ever. Here whoever waits may hang up at any moment (`line.py`), and the thread ends with an error.
"""

from __future__ import annotations

import io
import socket
from typing import Any

from requests import PreparedRequest, Response, codes
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from fleet_operator.telemetry.line import Line

CHUNK_BYTES = 65_536


class AnswerTooLarge(Exception):
    """More bytes than allowed."""


class BoundedAdapter(HTTPAdapter):
    """No retries; AnswerTooLarge after `max_bytes`, counted after decompression."""

    def __init__(self, line: Line, max_bytes: int) -> None:
        self._line = line
        self._max_bytes = max_bytes
        super().__init__(max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Connections of these pools report to the line."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _pools(self._line)

    def send(self, request: PreparedRequest, stream: bool = False, *args: Any, **kwargs: Any) -> Response:
        """The whole body is read here: `requests` reads those of redirects without a bound before it looks at them. One of a
        failure is not read at all: nobody asks for its words, and the library's error would spell each of them out."""
        response = super().send(request, True, *args, **kwargs)
        body = bytearray()
        if response.status_code != codes.ok:
            response.raw.close()
            response.raw = io.BytesIO()
            return response
        for chunk in response.raw.stream(CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > self._max_bytes:
                response.raw.close()
                raise AnswerTooLarge
        response.raw = io.BytesIO(bytes(body))
        return response


def _pools(line: Line) -> dict[str, type[HTTPConnectionPool]]:
    class Plain(HTTPConnection):
        def _new_conn(self) -> socket.socket:
            opened = super()._new_conn()
            line.keep(opened)
            return opened

    class Tls(HTTPSConnection):
        def _new_conn(self) -> socket.socket:
            opened = super()._new_conn()
            line.keep(opened)
            return opened

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class TlsPool(HTTPSConnectionPool):
        ConnectionCls = Tls

    return {"http": PlainPool, "https": TlsPool}

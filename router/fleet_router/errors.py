"""What a client is told when it gets no answer: OpenAI's shape, plus our request id and whether trying again may help."""

from __future__ import annotations

import errno
from typing import Final

import msgspec

PHRASES: Final = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 413: "Content Too Large", 414: "URI Too Long", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 501: "Not Implemented", 502: "Bad Gateway",
    503: "Service Unavailable", 504: "Gateway Timeout", 505: "HTTP Version Not Supported", 529: "Overloaded",
}  # fmt: skip
RETRYABLE: Final = {408, 429, 502, 503, 504, 529}
RETRY_AFTER_S: Final = 1


OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Why we could not connect to anybody: no file, no memory, no port is left here. Nothing is known against whom it was for."""
NO_ROOM: Final = "the router has no file or port left for a connection to a worker"


class RequestError(Exception):
    """The request gets this status; `param` names the field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: str = "",
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code or _CODES.get(status, "error")
        self.param = param
        self.headers = headers
        """Header lines for the answer, each with its line break."""
        self.reason = reason
        """Why, for programs, where `code` is a name that clients know."""


def remembered(error: RequestError) -> RequestError:
    """As it may be remembered: with what it says, and without where it was raised. The frames that it came through hold the body
    that it is about, and all that was parsed of it: some hundred refusals that are remembered held a GB."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def leaving() -> RequestError:
    """For whom the router's end does not wait."""
    return RequestError(503, "the router is shutting down", code="shutting_down")


_CODES: Final = {
    400: "invalid_request", 401: "invalid_api_key", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 408: "timeout",
    413: "body_too_large", 414: "url_too_long", 429: "rate_limit_exceeded", 431: "headers_too_large", 501: "not_implemented",
    502: "bad_gateway", 503: "no_worker", 504: "deadline", 505: "http_version", 529: "overloaded",
}  # fmt: skip


def error_json(error: RequestError, request_id: str) -> bytes:
    """The body of an error answer."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    said = {
        "message": str(error), "type": kind, "param": error.param, "code": error.code,
        "request_id": request_id, "retryable": error.status in RETRYABLE,
    }  # fmt: skip
    return msgspec.json.encode({"error": said if error.reason is None else said | {"reason": error.reason}})

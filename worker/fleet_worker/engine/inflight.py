"""How many requests this engine has taken in and not answered to the end: counted where they come in, not by the engine's step,
which may last for seconds, and from the head on, when nothing is parsed or tokenised yet."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

GENERATES = frozenset({"/v1/completions", "/v1/chat/completions"})


class InFlight:
    """An application around another one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.open = 0
        """Requests for tokens whose answer, or stream, has not been handed over whole."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        counts = scope["type"] == "http" and scope["path"] in GENERATES
        self.open += counts
        try:
            await self._app(scope, receive, send)
        finally:
            self.open -= counts

"""How long a hub may say nothing. huggingface_hub bounds that for files; what a repository holds, and Xet's keys, it waits for
without an end. A mirror that stands still, or a firewall that forgot the connection, held a worker for ever, whose model may have
been in its cache, and with it all that waited for its lock.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any, Final

QUIET_S: Final = 30.0
"""Three times what the library allows for a file's head; also for a mirror that asks another one first."""
_ONCE: Final = threading.Lock()


def bound_waits() -> None:
    """Once the library is imported; again is none more."""
    with _ONCE:  # to set it again would close the connections of whoever fetches
        _bound()


@functools.cache
def _bound() -> None:
    from huggingface_hub.utils import _http

    makes, takes = (getattr(_http, name, None) for name in ("default_client_factory", "set_client_factory"))
    if makes is None or takes is None:  # images of vLLM bring a version of their own
        logging.getLogger(__name__).warning("huggingface_hub makes its connections in another way: it may wait for ever")
        return

    def client() -> Any:
        made = makes()
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], _bounded]}
        return made

    takes(client)


def _bounded(request: Any) -> None:
    given = request.extensions.get("timeout") or {}
    least = {name: QUIET_S for name in ("connect", "read", "write", "pool") if given.get(name) is None}
    request.extensions = {**request.extensions, "timeout": {**given, **least}}

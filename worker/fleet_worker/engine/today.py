"""What day it is, for chat templates that ask: `strftime_now`, as Hugging Face's own rendering gives it (the local clock).

One moment for all of a request. The worker that prefills says in its KV reference by which one it rendered (`said_at`), and the
one that decodes goes by that: each by its own clock, a prompt would be two prompts over midnight, or in two time zones.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final

import jinja2

from fleet_worker.engine.errors import BadRequestError

ASKS: Final = "strftime_now"
"""A template without this name in it does not ask."""
MAX_FORMAT: Final = 256
"""Characters: each `%c` of them becomes 24, uncounted."""


def now_said() -> str:
    """This moment, in ISO 8601 without an offset."""
    return datetime.now().astimezone().replace(tzinfo=None).isoformat()


def teller(said_at: str) -> Callable[[str], str]:
    """`strftime_now` at that moment; BadRequestError when it is none."""
    try:
        moment = datetime.fromisoformat(said_at)
    except ValueError as error:
        raise BadRequestError(f"kv_transfer_params.said_at: {str(error)[:200]}", "kv_transfer_params") from error

    def strftime_now(wanted: str) -> str:
        if len(wanted) > MAX_FORMAT:
            raise jinja2.TemplateError(f"strftime_now takes at most {MAX_FORMAT} characters")
        return moment.strftime(wanted)

    return strftime_now

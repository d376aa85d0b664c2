"""What kopf says of its own troubles, in our words: an API server that restarts, or CRDs that are applied while we start, are no
errors of ours, and 40 lines of its stack say nothing to whoever is on call. `shell_kopf` says what ended and when it goes on."""

from __future__ import annotations

import logging
from typing import Final

from kopf._cogs.clients.errors import APIError

REQUESTS: Final = "kopf._cogs.clients.api"
TASKS: Final = ("kopf._core.reactor.orchestration", "kopf._core.reactor.running")
FINDING: Final = "kopf._core.reactor.observation"
STARTS: Final = ("kopf.activities", "kopf._core.engines.activities", "kopf.objects")
"""They say at each start, and for each event, that a handler was called."""


class InOurWords(logging.Filter):
    """Of kopf's loggers. A failure that is not the API server's word keeps its level and its stack: it is a bug."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False: somebody of ours says it."""
        if record.name == REQUESTS:
            if record.levelno >= logging.ERROR:
                record.levelno, record.levelname = logging.WARNING, "WARNING"
                record.msg, record.args = f"fleets cannot be followed at this moment: {record.getMessage()}", ()
            return True
        if record.name in TASKS:
            return not (record.exc_info and isinstance(record.exc_info[1], APIError))
        return not record.getMessage().startswith("Unresolved resources")


OURS: Final = InOurWords()


def in_our_words() -> None:
    """From now on, in this process."""
    for name in (REQUESTS, *TASKS, FINDING):
        logging.getLogger(name).addFilter(OURS)
    for name in STARTS:
        logging.getLogger(name).setLevel(logging.WARNING)

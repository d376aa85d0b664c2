"""What arrives from the network and cannot be used: counted and said, never a reason to end."""

from __future__ import annotations

import logging

LOG = logging.getLogger("fleet.worker.transfer")


class Faults:
    """One counter, used by one thread and read by others. Of many faults only the 1st, 2nd, 4th, 8th... are written down: whoever
    sends rubbish does not fill the disk."""

    def __init__(self) -> None:
        self.total = 0

    def count(self, what: str, error: Exception, *, unexpected: bool = False) -> None:
        """One more; `unexpected` is a bug of ours and comes with its traceback."""
        self.total += 1
        if self.total & (self.total - 1) == 0:
            LOG.warning(
                "%s was dropped (%d so far): %s", what, self.total, str(error)[:300], exc_info=error if unexpected else None
            )

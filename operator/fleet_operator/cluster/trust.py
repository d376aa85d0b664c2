"""The authorities that the API server's certificate may come from, as a file that is replaced while we run.

A cluster that changes its authority puts the new one beside the old one into that file first, then gives API servers certificates
of it. TLS contexts read the file once: whoever runs since before could open no connection any more. So it is looked at before
each request, and what is new in it joins the contexts that are in use. What is no longer in it is trusted until the process ends.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

LOG = logging.getLogger("fleet.operator")


class Trust:
    """Keeps one TLS context supplied; `file` None: it has no file."""

    def __init__(self, context: ssl.SSLContext | None, file: Path | None) -> None:
        self._context = context
        self._file = None if file is None else str(file)
        self._seen = self._stamp()

    def refresh(self) -> None:
        """Take in what is new. A file that is missing or no certificate changes nothing."""
        if self._file is None or self._context is None or (stamp := self._stamp()) == self._seen:
            return
        self._seen = stamp
        try:
            self._context.load_verify_locations(self._file)
        except (OSError, ssl.SSLError) as error:
            LOG.warning("the API server's authorities in %s cannot be read: %s", self._file, error)
        else:
            LOG.info("the API server's authorities in %s were replaced: the new ones are trusted, too", self._file)

    def _stamp(self) -> tuple[int, int, int] | None:
        """Differs when the file was replaced; None when it is not there."""
        try:
            found = os.stat(self._file) if self._file is not None else None  # half of what Path.stat costs
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else None

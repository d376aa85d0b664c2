"""What an engine died of, in its own words. Pure.

The torch engine says it at the end of its stderr. Of vLLM's processes the one that failed says it first, on its stdout; what
comes last is what Python says of memory that was left behind, whatever happened.
"""

from __future__ import annotations

import re
from typing import Final

WORDS_MOST: Final = 500
NOISE: Final = "resource_tracker: There appear to be "
"""Python, of every engine whose processes were killed."""
TRACEBACK: Final = "Traceback (most recent call last):"
_ERROR: Final = re.compile(r"(?:\((?P<who>[^()]+)\) )?ERROR \d\d-\d\d [\d:]{8} \[[^\]]*\] ?(?P<said>.*)")
"""A line of vLLM's log, also of a traceback in it: each line has the prefix."""
_FATAL: Final = re.compile(r"(?:EngineCore|WorkerProc) (?:encountered a fatal error|failed to start)\.")
_KILLED: Final = re.compile(r"\w*Worker\w* ?proc\b.* died unexpectedly\b", re.IGNORECASE)
"""Without an exception: somebody else ended it. vLLM 0.32: v1/engine/core.py, v1/executor/multiproc_executor.py."""


class Fatal:
    """The first fatal error that vLLM's log tells, and its exception: those of other processes follow from it."""

    def __init__(self) -> None:
        self.words = ""
        self._who: str | None = None
        self._waits = True
        """For the exception."""

    def feed(self, line: str) -> None:
        """One more line of its log."""
        if not self._waits or "ERROR" not in line or (found := _ERROR.match(line)) is None:
            return
        who, said = found["who"], found["said"].rstrip()
        if not self.words:
            killed = _KILLED.match(said) is not None
            if killed or _FATAL.match(said):
                self.words, self._who, self._waits = said.rstrip("."), who, not killed
        elif who == self._who and said and not said[0].isspace() and said != TRACEBACK:
            self.words, self._waits = f"{self.words}: {said}"[:WORDS_MOST], False


def pick_cause(lines: list[str]) -> str:
    """Of the last lines of a stderr the last one that starts in column one (a traceback's frames are indented)."""
    for line in reversed(lines):
        if line.strip() and not line[0].isspace() and NOISE not in line:
            return line.strip()[:WORDS_MOST]
    return ""

"""Log lines: text for people, or one JSON object per line. Credentials never leave through them."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Final, Literal

FIELDS: Final = ("fleet", "namespace", "tier", "reason", "error")
"""What callers may give in `extra`, besides the message."""
LINE_MOST: Final = 8192
_SECRETS: Final = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 ***"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+"), "***"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "***"),
    # a token alone, too, and passwords with an @ in them
    (re.compile(r"(?i)([a-z][a-z0-9+.-]{0,15}://)[^/\s]{1,4096}@"), r"\1***@"),
    (re.compile(r"(?i)\b(token|password|secret|api[_-]?key)([\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]{4,}"), r"\1\2***"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL), "***"),
)


def about(namespace: str, fleet: str | None = None, **more: str) -> dict[str, str | None]:
    """`extra` of a line about a fleet or a namespace: without it who asks for the lines of one does not find it."""
    return {"namespace": namespace, "fleet": fleet, **more}


def masked(text: str) -> str:
    """The text without credentials, cut to a bound: first roughly, so that a huge line costs little, then exactly."""
    length, text = len(text), text[: 2 * LINE_MOST]
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text if length <= LINE_MOST else f"{text[:LINE_MOST]}...({length} characters)"


class TextFormatter(logging.Formatter):
    """As a person reads it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """One record, masked."""
        return masked(super().format(record))


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, and FIELDS where they apply."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, masked."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": masked(record.getMessage()),
        }
        for name in FIELDS:
            if (value := record.__dict__.get(name)) is not None:
                line[name] = masked(str(value))
        if record.exc_info:
            line["stack"] = masked(self.formatException(record.exc_info))
            line.setdefault("error", masked(repr(record.exc_info[1])))
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(form: Literal["text", "json"], level: int = logging.INFO) -> None:
    """Everything of this process to standard error in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)

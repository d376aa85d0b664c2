"""Words of the command line that become part of a request."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def named(what: str = "") -> Callable[[str], str]:
    """A type for argparse: text that a URL can hold (a shell hands over any bytes) and, where it is `what`, is not empty."""

    def check(text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not text in UTF-8") from error
        if what and not text:  # all of them, or the latest ones, would be the answer
            raise argparse.ArgumentTypeError(f"'' is not {what}")
        return text

    return check

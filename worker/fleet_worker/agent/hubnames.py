"""Names that a hub gives. huggingface_hub makes paths of them and looks at none: the hash of a file is where its bytes go, the
commit is a folder. Who answers in its place (a mirror, whoever is on the way to one without TLS) wrote wherever this user may,
with bytes of its choice: beside HOME lies what Python runs when an engine starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

WATCHED: Final = "names_are_looked_at"
"""Attribute of a function that is."""


def check_name(name: str | None) -> None:
    """ValueError for one that leads out of the folder that it is for. Mirrors have hashes of their own, also with slashes."""
    if name is not None and (name.startswith("/") or ".." in name.split("/")):
        raise ValueError(f"it gives the name {name[:200]!r}, which leads out of the cache")


def watch_names() -> None:
    """Once the library is imported; again is none more."""
    from huggingface_hub import HfApi, file_download

    # what it knows of a file, from an answer's head or from the list of all: (address, hash, commit, ...)
    _watch(file_download, "_get_metadata_or_catch_error", lambda found: (found[1], found[2]))
    _watch(HfApi, "repo_info", lambda found: (found.sha,))


def _watch(owner: Any, function: str, names: Callable[[Any], tuple[str | None, ...]]) -> None:
    asks = getattr(owner, function, None)
    if asks is None:  # images of vLLM bring a version of their own: one that has it under another name still fetches models
        logging.getLogger(__name__).warning("huggingface_hub has no %s: names that a hub gives are not looked at", function)
        return
    if hasattr(asks, WATCHED):
        return

    @wraps(asks)
    def asks_and_looks(*given: Any, **named: Any) -> Any:
        found = asks(*given, **named)
        for name in names(found):
            check_name(name)
        return found

    setattr(asks_and_looks, WATCHED, True)
    setattr(owner, function, asks_and_looks)

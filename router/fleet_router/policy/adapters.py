"""Which workers can answer under an adapter. Pure.

KV moves only between workers that have the same version of it, so one version is chosen for both legs: the one that most decode
workers have. While an adapter is being replaced the old version goes on until the new one has the majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def version_of(adapter: str, decodes: Iterable[Mapping[str, str]]) -> str:
    """The digest that most of these decode workers have (the smaller one when equal); empty when none has the adapter."""
    found = Counter(digest for adapters in decodes if (digest := adapters.get(adapter)))
    return min(found, key=lambda digest: (-found[digest], digest), default="")

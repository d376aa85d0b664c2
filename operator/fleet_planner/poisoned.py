"""Which side is it? From pairs of workers between which KV fails, and pairs between which it moves, to the workers that fail with
(nearly) everybody while those get along with others. Pure.

One pair that fails alone is nobody's fault that could be named: it may be the way between the two. A worker that fails with
several, and with nearly all that it was tried with, is suspect. It is poisoned when, in turn, nearly all of those moved KV with
somebody else: then they are well. What another suspect says is no evidence for or against anybody. What was not tried counts for
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Pairs = Iterable[tuple[str, str]]
"""(prefill, decode) names."""
PARTNERS_LEAST = 2
"""With fewer it may be the way between two workers. The routers put a prefill worker out as a whole from as many on."""
NEARLY_ALL = 0.8
"""Share of the partners that are known."""


@dataclass(frozen=True, slots=True)
class Found:
    """Workers by name."""

    suspects: frozenset[str] = frozenset()
    """They fail with nearly all of their partners."""
    poisoned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Suspects whose partners are well, with the names of these."""


def find_poisoned(failing: Pairs, moved: Pairs) -> Found:
    """What follows from both. Where one router says that a pair fails and another one that it works, it works."""
    works = set(moved)
    apart, together = _partners(set(failing) - works), _partners(works)
    suspects = frozenset(name for name, others in apart.items() if _fails(len(others), len(together[name])))
    poisoned = {}
    for name in sorted(suspects):
        judged = apart[name] - suspects
        well = sorted(other for other in judged if together[other] - {name})
        if len(well) >= PARTNERS_LEAST and len(well) >= NEARLY_ALL * len(judged):
            poisoned[name] = tuple(well)
    return Found(suspects, poisoned)


def _fails(failing: int, moved: int) -> bool:
    return failing >= PARTNERS_LEAST and failing >= NEARLY_ALL * (failing + moved)


def _partners(pairs: Pairs) -> defaultdict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for prefill, decode in pairs:
        found[prefill].add(decode)
        found[decode].add(prefill)
    return found

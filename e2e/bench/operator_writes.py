"""How many writes the operator sent and how many of them changed anything, by the API server's audit log and by etcd's own count
of each key's versions: nothing that the operator says about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from e2e.kube.kwok import OPERATOR, KwokPlane

ALONE = {
    "configmaps": "configmaps/bench-",
    "serviceaccounts": "serviceaccounts/bench-",
    "roles": "roles/bench-",
    "rolebindings": "rolebindings/bench-",
    "services": "services/specs/bench-",
    "workerpools": "inferencefleet.io/workerpools/bench-",
    "inferencefleets": "inferencefleet.io/inferencefleets/bench-",
}
"""Resources that only the operator writes, and where etcd keeps them: each version of a key is one of its writes."""
NOT_OURS = {"serviceaccounts": "/default", "configmaps": "/kube-root-ca.crt"}


@dataclass(frozen=True, slots=True)
class Writes:
    """What the operator sent in a span of time."""

    sent: Counter[str]
    """Accepted requests by resource, `pods/status` style for subresources."""
    objects: dict[str, int]
    """Different objects written, by resource."""
    refused: Counter[int]
    """Requests by status code that the server did not accept."""

    @property
    def total(self) -> int:
        """All accepted requests."""
        return self.sent.total()


def writes_of(audited: Iterable[dict[str, Any]], user: str = OPERATOR) -> Writes:
    """Of one user."""
    sent: Counter[str] = Counter()
    refused: Counter[int] = Counter()
    names: dict[str, set[tuple[str, str]]] = {}
    for entry in audited:
        if entry["user"]["username"] != user:
            continue
        where, code = entry["objectRef"], entry["responseStatus"].get("code", 0)
        if code >= 300:
            refused[code] += 1
            continue
        subresource = where.get("subresource")
        sent[where["resource"] + (f"/{subresource}" if subresource else "")] += 1
        names.setdefault(where["resource"], set()).add((where.get("namespace", ""), where.get("name", "")))
    return Writes(sent, {resource: len(found) for resource, found in names.items()}, refused)


def changes(plane: KwokPlane, writes: Writes) -> dict[str, int]:
    """How often what the operator wrote really changed, by resource. What others write too (pods, Deployments, budgets, events)
    counts once per object: the operator makes them and has no reason to write them again."""
    found = {}
    for resource, prefix in ALONE.items():
        kept = {key: count for key, count in plane.versions(prefix).items() if not key.endswith(NOT_OURS.get(resource, " "))}
        by_user = len(kept) if resource == "inferencefleets" else 0
        found[resource] = sum(kept.values()) - by_user
    return found | {resource: count for resource, count in writes.objects.items() if resource not in ALONE}

"""Adapters of a fleet: what workers are told to have, what of it the routers may use, and what the status says. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.model import AdapterSpec, HubSource, located
from fleet_api.v1alpha1.status import AdapterStatus
from fleet_planner.types import AdapterSeen, ObservedPod, Verdict
from fleet_planner.wanted import Target

Seen = Mapping[str, Sequence[AdapterSeen]]
"""By pod uid; a worker that has said nothing yet is absent."""
MESSAGE_MOST = 300


def wishes(fleet: InferenceFleet) -> tuple[tuple[str, str], ...]:
    """(name, source as a worker reads it) in order of names: hf://ORG/NAME@REVISION, or a path below the mounted root."""
    model = fleet.spec.model
    root = model.adapter_root or model.source
    return tuple(sorted((adapter.name, _as_told(adapter, root)) for adapter in model.adapters))


def _as_told(adapter: AdapterSpec, root: str) -> str:
    found = located(adapter.source, adapter.revision)
    return (
        f"hf://{found.repository}@{found.revision}" if isinstance(found, HubSource) else adapter.source.removeprefix(f"{root}/")
    )


def usable(wished: Iterable[tuple[str, str]], seen: Iterable[AdapterSeen]) -> tuple[tuple[str, str], ...]:
    """(name, digest) of what a worker can answer for now. A version that another is to replace still counts: its digest keeps it
    apart from the new one."""
    names = {name for name, _ in wished}
    return tuple(sorted((one.name, one.digest) for one in seen if one.name in names and one.digest))


def fitted(targets: Iterable[Target], fleet: InferenceFleet, seen: Seen) -> list[Target]:
    """Targets with the adapters that they can answer for."""
    wished = wishes(fleet)
    if not wished:
        return list(targets)
    return [replace(target, adapters=usable(wished, seen.get(target.uid, ()))) for target in targets]


def adapter_statuses(fleet: InferenceFleet, pods: Sequence[ObservedPod], seen: Seen) -> tuple[AdapterStatus, ...]:
    """Each adapter of the spec, in its order."""
    workers = [pod for pod in pods if not pod.terminating and not pod.member]
    wished = dict(wishes(fleet))
    return tuple(_status(adapter.name, wished[adapter.name], workers, seen) for adapter in fleet.spec.model.adapters)


def _status(name: str, source: str, workers: Sequence[ObservedPod], seen: Seen) -> AdapterStatus:
    reports = [(pod, one) for pod in workers for one in seen.get(pod.uid, ()) if one.name == name]
    loaded = sum(one.state == "Loaded" and one.source in (source, "") for _, one in reports)
    digests = Counter(one.digest for _, one in reports if one.digest)
    failed = [(pod, one) for pod, one in reports if one.state == "Failed" and one.source == source]
    digest = min(digests, key=lambda found: (-digests[found], found), default="")
    if not failed:
        return AdapterStatus(name=name, desired=len(workers), loaded=loaded, digest=digest)
    pod, first = failed[0]
    where = f"{pod.name}{f' and {len(failed) - 1} more' if len(failed) > 1 else ''}"
    message = f"{where}: {first.message}"[:MESSAGE_MOST]
    return AdapterStatus(
        name=name, desired=len(workers), loaded=loaded, digest=digest, reason=first.reason or "Failed", message=message
    )


def adapters_loaded(statuses: Sequence[AdapterStatus]) -> Verdict | None:
    """The condition; None for a fleet without adapters."""
    if not statuses:
        return None
    failed = [f"{one.name} ({one.reason})" for one in statuses if one.reason]
    if failed:
        return "False", "AdapterFailed", f"not loaded everywhere: {', '.join(failed)}"
    missing = [f"{one.name} on {one.loaded} of {one.desired} workers" for one in statuses if one.loaded < one.desired]
    if missing:
        return "False", "Loading", ", ".join(missing)
    if not any(one.desired for one in statuses):
        return "Unknown", "NoWorkers", "there is no worker that could have them"
    return "True", "AllLoaded", f"{len(statuses)} adapters are on every worker"

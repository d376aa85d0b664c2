"""A fleet's series in Prometheus → the same readings that a direct scrape gives. Pure.

One query asks for the raw samples of a window, with their own times: nothing is aggregated on the server, so that a missing or
stale worker is seen as that, and both sources share every rule in `aggregate.py`.

Series are found by the labels that kubernetes_sd with `labelmap`, or a PodMonitor with `podTargetLabels`, gives them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet_operator.names import FLEET
from fleet_operator.telemetry.aggregate import METRICS, Reading
from fleet_operator.telemetry.parse import Sample

WINDOW_S = 60
WINDOW_INTERVALS = 4
"""Latency needs two scrapes, and what has just become stale must still be seen, to be told how old it is."""
POD_LABEL = "pod"
NAMESPACE_LABEL = "namespace"
TARGET_LABELS = ("job", "instance")
"""What tells the targets of one pod apart: a scrape without a filter has one per container port."""
OWN_LABELS = ("class", "decode", "engine", "le", "model_name", "prefill", "revision", "role", "tier", "transport")
"""Of the metrics themselves: what differs in others alone (a replica of Prometheus, a label of the pod) is one series twice."""


def label_name(kubernetes: str) -> str:
    """How service discovery writes a Kubernetes label: everything but letters and digits becomes an underscore."""
    return re.sub(r"[^A-Za-z0-9_]", "_", kubernetes)


def quoted(value: str) -> str:
    """A PromQL string."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def query(namespace: str, fleet: str, interval_s: float) -> str:
    """PromQL for every sample of the fleet that we use: of the last minute, of more when readings are further apart."""
    names = "|".join(sorted(METRICS))
    wanted = f'__name__=~"{names}",{NAMESPACE_LABEL}={quoted(namespace)},{label_name(FLEET)}={quoted(fleet)}'
    return f"{{{wanted}}}[{max(WINDOW_S, math.ceil(WINDOW_INTERVALS * interval_s))}s]"


@dataclass(frozen=True, slots=True)
class TargetSeries:
    """One target's first and last reading in the window; the same one when there was only one scrape."""

    first: Reading
    last: Reading
    newest: float
    """When its last scrape was, of which `last` may not have everything."""


def _ours(labels: Mapping[str, str]) -> dict[str, str]:
    """As the metric has them: Prometheus calls one `exported_` where its target has another one of that name."""
    said = {label: labels[f"exported_{label}"] for label in OWN_LABELS if f"exported_{label}" in labels}
    return {**labels, **said}


@dataclass(slots=True)
class _Target:
    """Its series, while they are read."""

    times: set[float] = field(default_factory=set)
    firsts: list[tuple[float, Sample]] = field(default_factory=list)
    lasts: dict[tuple[str, ...], tuple[float, list[Sample]]] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], points: Mapping[float, float]) -> None:
        """One series; of those that differ in nothing of our own the newest counts, and all that are of one scrape."""
        self.times.update(points)
        first, last = min(points), max(points)
        self.firsts.append((first, Sample(name, labels, points[first])))
        key, sample = (name, *(labels.get(label, "") for label in OWN_LABELS)), Sample(name, labels, points[last])
        at, known = self.lasts.setdefault(key, (last, []))
        if at < last:
            self.lasts[key] = last, [sample]
        elif at == last:
            known.append(sample)

    def read(self) -> TargetSeries:
        """Its first scrape, and what its last two have: of the last one a part may not have come yet."""
        first, since, newest = min(self.times), sorted(self.times)[-2:][0], max(self.times)
        there = [(at, samples) for at, samples in self.lasts.values() if at >= since]
        last = Reading([sample for _, samples in there for sample in samples], min(at for at, _ in there))
        return TargetSeries(Reading([sample for at, sample in self.firsts if at == first], first), last, newest)


def by_pod(result: Iterable[Mapping[str, Any]]) -> dict[str, list[TargetSeries]]:
    """The `result` of a matrix answer: the targets of each pod. ValueError, KeyError, TypeError and the like when it is none.

    A series that none of the target's last two scrapes had has ended: it is not part of the last reading, which is as old as the
    oldest sample in it.
    """
    targets: dict[tuple[str, ...], _Target] = {}
    for series in result:
        labels = {str(name): str(value) for name, value in series["metric"].items()}
        name, pod = labels.pop("__name__"), labels.get(POD_LABEL)
        told = {float(at): float(text) for at, text in series["values"]}
        points = {at: value for at, value in told.items() if math.isfinite(value)}
        if pod is not None and points:
            key = pod, *(labels.get(label, "") for label in TARGET_LABELS)
            targets.setdefault(key, _Target()).add(name, _ours(labels), points)
    found: dict[str, list[TargetSeries]] = {}
    for (pod, *_), target in targets.items():
        found.setdefault(pod, []).append(target.read())
    return found


def of_pod(targets: Iterable[TargetSeries], created_at: float) -> TargetSeries | None:
    """The target that shows most of our metrics (an engine's own port shows fewer than its agent's), of these the newest.

    `created_at` is the pod's: what was measured before is another pod's that had the same name.
    """
    own = [target for target in targets if target.last.read_at >= created_at]
    return max(own, key=lambda target: (len({sample.name for sample in target.last.samples}), target.last.read_at), default=None)

"""A fleet's series in Prometheus → the same readings that a direct scrape gives. Pure.

One query asks for the raw samples of a window, with their own times: nothing is aggregated on the server, so that a missing or
stale worker is seen as that, and both sources share every rule in `aggregate.py`.

Series are found by the labels that kubernetes_sd with `labelmap`, or a PodMonitor with `podTargetLabels`, gives them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    """One target's first and last scrape in the window; the same one when there was only one."""

    first: Reading
    last: Reading


def by_pod(result: Iterable[Mapping[str, Any]]) -> dict[str, list[TargetSeries]]:
    """The `result` of a matrix answer: the targets of each pod. ValueError, KeyError, TypeError and the like when it is none.

    A series that the target's last scrape did not have has ended: it is not part of the last reading.
    """
    targets: dict[tuple[str, ...], dict[float, list[Sample]]] = {}
    for series in result:
        labels = {str(name): str(value) for name, value in series["metric"].items()}
        name, pod = labels.pop("__name__"), labels.get(POD_LABEL)
        if pod is None:
            continue
        scrapes = targets.setdefault((pod, *(labels.get(label, "") for label in TARGET_LABELS)), {})
        for at, text in series["values"]:
            value = float(text)
            if math.isfinite(value):
                scrapes.setdefault(float(at), []).append(Sample(name, labels, value))
    found: dict[str, list[TargetSeries]] = {}
    for (pod, *_), scrapes in targets.items():
        if scrapes:
            first, last = min(scrapes), max(scrapes)
            found.setdefault(pod, []).append(TargetSeries(Reading(scrapes[first], first), Reading(scrapes[last], last)))
    return found


def of_pod(targets: Iterable[TargetSeries], created_at: float) -> TargetSeries | None:
    """The target that shows most of our metrics (an engine's own port shows fewer than its agent's), of these the newest.

    `created_at` is the pod's: what was measured before is another pod's that had the same name.
    """
    own = [target for target in targets if target.last.read_at >= created_at]
    return max(own, key=lambda target: (len({sample.name for sample in target.last.samples}), target.last.read_at), default=None)

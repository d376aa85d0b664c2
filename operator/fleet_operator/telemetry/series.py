"""A fleet's series in Prometheus → the same readings that a direct scrape gives. Pure.

One query asks for the raw samples of the last minute, with their own times: nothing is aggregated on the server, so that a
missing or stale worker is seen as that, and both sources share every rule in `aggregate.py`.

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
POD_LABEL = "pod"
NAMESPACE_LABEL = "namespace"


def label_name(kubernetes: str) -> str:
    """How service discovery writes a Kubernetes label: everything but letters and digits becomes an underscore."""
    return re.sub(r"[^A-Za-z0-9_]", "_", kubernetes)


def quoted(value: str) -> str:
    """A PromQL string."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def query(namespace: str, fleet: str) -> str:
    """PromQL for every sample of the fleet that we use, of the last WINDOW_S."""
    names = "|".join(sorted(METRICS))
    wanted = f'__name__=~"{names}",{NAMESPACE_LABEL}={quoted(namespace)},{label_name(FLEET)}={quoted(fleet)}'
    return f"{{{wanted}}}[{WINDOW_S}s]"


@dataclass(frozen=True, slots=True)
class PodSeries:
    """One pod's first and last scrape in the window; the same one when there was only one."""

    first: Reading
    last: Reading


def by_pod(result: Iterable[Mapping[str, Any]]) -> dict[str, PodSeries]:
    """The `result` of a matrix answer, by pod. ValueError, KeyError or TypeError when it is none.

    A series that the pod's last scrape did not have has ended: it is not part of the last reading.
    """
    points: dict[str, dict[float, list[Sample]]] = {}
    for series in result:
        labels = dict(series["metric"])
        pod, name = labels.get(POD_LABEL), labels.pop("__name__")
        if pod is None:
            continue
        scrapes = points.setdefault(pod, {})
        for at, text in series["values"]:
            value = float(text)
            if math.isfinite(value):
                scrapes.setdefault(float(at), []).append(Sample(name, labels, value))
    found = {}
    for pod, scrapes in points.items():
        if scrapes:
            first, last = min(scrapes), max(scrapes)
            found[pod] = PodSeries(Reading(scrapes[first], first), Reading(scrapes[last], last))
    return found

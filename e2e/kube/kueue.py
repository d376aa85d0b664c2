"""A real Kueue beside a control plane.

    with ControlPlane() as plane, kueue(plane): ...

The visibility API (an aggregated API server) is off: it would need a Service that leads here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from e2e.kube.controlplane import ControlPlane
from e2e.kube.manager import Manager, running
from e2e.kube.service import Service

KUEUE = Manager("kueue", ("--feature-gates=VisibilityOnDemand=false",))


@contextmanager
def kueue(plane: ControlPlane) -> Iterator[Service]:
    """Admits pods while the block runs; TimeoutError."""
    with running(plane, KUEUE) as service:
        yield service

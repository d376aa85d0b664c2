"""Labels, annotations and object names: one place, so that selectors and renderers cannot disagree."""

from __future__ import annotations

from typing import Final

GROUP: Final = "inferencefleet.io"
FLEET: Final = f"{GROUP}/fleet"
TIER: Final = f"{GROUP}/tier"
ROLE: Final = f"{GROUP}/role"
REVISION: Final = f"{GROUP}/revision"
COMPAT: Final = f"{GROUP}/compat"
MEMBER: Final = f"{GROUP}/member"
POOL: Final = f"{GROUP}/pool"
PLANNED: Final = f"{GROUP}/planned"
SIZE: Final = f"{GROUP}/size"
ORDINAL: Final = f"{GROUP}/ordinal"
APPLIED: Final = f"{GROUP}/applied"
"""Hash of what the operator applied last: a difference means that the wish changed."""
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "inferencefleet"
ROUTER_ROLE: Final = "router"


def router_name(fleet: str) -> str:
    """Deployment, Service, ConfigMap and the rest of a fleet's router."""
    return f"{fleet}-router"


def labels(fleet: str, **more: str) -> dict[str, str]:
    """Labels of everything that belongs to a fleet."""
    return {MANAGED_BY: MANAGER, FLEET: fleet, **more}

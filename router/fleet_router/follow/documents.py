"""The two documents of a router, parsed together: a bad one never replaces a good one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet_router import config as router_config
from fleet_router.config import RouterConfig
from fleet_wire import endpoints
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, Endpoints
from fleet_wire.unreadable import UNREADABLE


@dataclass(frozen=True, slots=True)
class Documents:
    """What a router follows."""

    config: RouterConfig
    endpoints: Endpoints


def parse(data: Mapping[str, str | bytes]) -> Documents:
    """Both keys of the ConfigMap; ValueError names the key and the field."""
    for key in (ROUTER_CONFIG_KEY, ENDPOINTS_KEY):
        if key not in data:
            raise ValueError(f"{key} is missing")
    try:
        config = router_config.decode(data[ROUTER_CONFIG_KEY])
    except UNREADABLE as error:
        raise ValueError(f"{ROUTER_CONFIG_KEY}: {error}") from error
    try:
        return Documents(config, endpoints.decode(data[ENDPOINTS_KEY]))
    except UNREADABLE as error:
        raise ValueError(f"{ENDPOINTS_KEY}: {error}") from error

"""What TLS, gossip and several processes add to the router's pod. Secrets come as folders that the kubelet keeps current: nobody
needs the right to read them, and one that is missing keeps new routers from starting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.names import FLEET, ROLE, ROUTER_ROLE
from fleet_operator.render.peerkey import mount_peer_key
from fleet_operator.settings import Platform
from fleet_planner.peerkey import gossips
from fleet_wire.peerkey import PEER_SCOPE_ENV

TLS_MOUNT: Final = "/etc/fleet-tls"
CLIENT_CA_MOUNT: Final = "/etc/fleet-client-ca"
GOSSIP_MOUNT: Final = "/etc/fleet-gossip"
ADMIN_PORT: Final = "admin"
"""Name of the port for probes and scrapes, beside one with TLS or tenants."""
REQUEST_MILLICPU: Final = 250
REQUEST_MI: Final = 256


def admin_port(platform: Platform) -> int:
    """Plain HTTP for probes and scrapes."""
    return platform.router_port + 1


def gossip_port(platform: Platform) -> int:
    """UDP, of the first process."""
    return platform.router_port + 2


def requests(processes: int) -> dict[str, str]:
    """CPU and memory in the API server's own spelling, else every pass would see a difference. No limits: what the prefix index
    holds follows the workers' caches, and a router that is killed ends every stream of the fleet."""
    milli, mi = REQUEST_MILLICPU * processes, REQUEST_MI * processes
    return {
        "cpu": f"{milli}m" if milli % 1000 else f"{milli // 1000}",
        "memory": f"{mi}Mi" if mi % 1024 else f"{mi // 1024}Gi",
    }


def router_pods(fleet: InferenceFleet, live: Mapping[tuple[str, str], Object]) -> list[Object]:
    """`live`: (kind, name) → object."""
    wanted = {FLEET: fleet.metadata.name, ROLE: ROUTER_ROLE}.items()
    return [pod for (kind, _), pod in live.items() if kind == "Pod" and wanted <= pod["metadata"].get("labels", {}).items()]


def routers_of(fleet: InferenceFleet, live: Mapping[tuple[str, str], Object]) -> tuple[str, ...]:
    """Addresses of the router pods, for gossip; empty without it."""
    if fleet.spec.routing.gossip is None and not gossips(fleet):
        return ()
    return tuple(sorted({ip for pod in router_pods(fleet, live) if (ip := (pod.get("status") or {}).get("podIP"))}))


def add_port(fleet: InferenceFleet, platform: Platform, container: Object, spec: Object) -> None:
    """Arguments, ports, mounts and volumes."""
    routing = fleet.spec.routing
    if routing.processes > 1:
        container["command"] += ["--processes", str(routing.processes)]
    if routing.tls is not None:
        container["command"] += ["--tls-cert", f"{TLS_MOUNT}/tls.crt", "--tls-key", f"{TLS_MOUNT}/tls.key"]
        _add_admin_port(platform, container)
        _mount(container, spec, "tls", TLS_MOUNT, routing.tls.secret_ref.name)
        if (ca := routing.tls.client_ca_secret_ref) is not None:
            container["command"] += ["--tls-client-ca", f"{CLIENT_CA_MOUNT}/ca.crt"]
            _mount(container, spec, "client-ca", CLIENT_CA_MOUNT, ca.name, {ca.key: "ca.crt"})
    elif fleet.spec.tenants is not None and platform.router_host is None:
        _add_admin_port(platform, container)
    if routing.gossip is not None:
        key = routing.gossip.key_secret_ref
        container["command"] += ["--gossip-key", f"{GOSSIP_MOUNT}/key", "--gossip-port", str(gossip_port(platform))]
        container["ports"].append({"name": "gossip", "containerPort": gossip_port(platform), "protocol": "UDP"})
        _mount(container, spec, "gossip", GOSSIP_MOUNT, key.name, {key.key: "key"})
    elif platform.router_host is None:  # also for one router: another number of them must not change the template
        mount_peer_key(fleet, container, spec)
        container["env"].append({"name": PEER_SCOPE_ENV, "value": f"{fleet.metadata.namespace}/{fleet.metadata.name}"})
        container["ports"].append({"name": "gossip", "containerPort": gossip_port(platform), "protocol": "UDP"})


def _add_admin_port(platform: Platform, container: Object) -> None:
    """For the kubelet and for whoever scrapes: the other one speaks TLS, or tells nobody without a key of tenants. `fleet up`
    needs none: it scrapes from the router's own host."""
    container["command"] += ["--admin-port", str(admin_port(platform))]
    container["ports"].append({"name": ADMIN_PORT, "containerPort": admin_port(platform), "protocol": "TCP"})
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        container[probe]["httpGet"]["port"] = ADMIN_PORT


def _mount(
    container: Object, spec: Object, name: str, path: str, secret: str, items: Mapping[str, str] | None = None
) -> None:  # fmt: skip
    mount = {"name": name, "mountPath": path, "readOnly": True}
    container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
    source: Object = {"secretName": secret, "defaultMode": 0o444}
    if items is not None:
        source["items"] = [{"key": key, "path": file} for key, file in items.items()]
    spec["volumes"] = [*spec.get("volumes", []), {"name": name, "secret": source}]

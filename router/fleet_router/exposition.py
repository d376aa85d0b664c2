"""Admission's counts as Prometheus text."""

from __future__ import annotations

from collections.abc import Mapping

from fleet_router.admission.labels import Told
from fleet_router.admission.lanes import classes_of
from fleet_router.desk import Desk


def exposition(desk: Desk, now: float) -> str:
    """All series of admission; one of open access has no tenants."""
    gate = desk.gate
    out = ["# TYPE fleet_router_authentication gauge"]
    out += [f'fleet_router_authentication{{mode="{mode}"}} {int(on)}' for mode, on in (
        ("keys", desk.tenants_needed), ("open", not desk.tenants_needed),
    )]  # fmt: skip
    out += ["# TYPE fleet_router_tenants gauge", f"fleet_router_tenants {desk.tenants}"]
    out += ["# TYPE fleet_router_refused_keys_total counter", f"fleet_router_refused_keys_total {desk.refused_keys}"]
    out += ["# TYPE fleet_router_slots gauge"]
    out += [f'fleet_router_slots{{tier="{tier}"}} {slots}' for tier, slots in sorted(desk.slots.items())]
    out += ["# TYPE fleet_router_running gauge", f"fleet_router_running {gate.running}"]
    out += ["# TYPE fleet_router_queue_length gauge"]
    lengths = gate.lengths()
    out += [f'fleet_router_queue_length{{class="{name}"}} {length}' for name, length in lengths.items()]
    out += ["# TYPE fleet_router_queue_bound gauge"]
    known = classes_of(desk.config)
    out += [f'fleet_router_queue_bound{{class="{name}"}} {gate.bound(one, now)}' for name, one in known.items()]
    out += ["# TYPE fleet_router_queue_wait_seconds histogram"]
    for name, waits in desk.waits.items():
        out += waits.lines("fleet_router_queue_wait_seconds", f'class="{name}"')
    out += ["# TYPE fleet_router_request_faults_total counter", f"fleet_router_request_faults_total {desk.faults.count}"]
    out += ["# TYPE fleet_router_runaways_total counter"]
    out += [f'fleet_router_runaways_total{{pattern="{why}"}} {count}' for why, count in desk.runaways.items()]
    return "\n".join([*out, *_tenants(desk.told(), metered=desk.tenants_needed)]) + "\n"


def _tenants(told: Mapping[str, Told], *, metered: bool) -> list[str]:
    """`metered`: tokens are counted, for quotas. Where access is open nobody does it, and what nobody counts is not 0."""
    out = ["# TYPE fleet_router_tenant_requests_total counter"]
    out += [
        f'fleet_router_tenant_requests_total{{tenant="{tenant}",result="{result}"}} {count}'
        for tenant, one in told.items()
        for result, count in one.results.items()
    ]
    if metered:
        out += ["# TYPE fleet_router_tenant_tokens_total counter"]
        out += [
            f'fleet_router_tenant_tokens_total{{tenant="{tenant}",direction="{way}"}} {count}'
            for tenant, one in told.items()
            for way, count in one.tokens.items()
        ]
    out += ["# TYPE fleet_router_tenant_inflight gauge"]
    return out + [f'fleet_router_tenant_inflight{{tenant="{tenant}"}} {one.inflight}' for tenant, one in told.items()]

"""What the agent says of itself to Prometheus. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_worker.agent.life import Life, is_ready
from fleet_worker.config import Role


@dataclass(frozen=True, slots=True)
class Own:
    """What an agent knows; None is not known, and not said."""

    life: Life
    role: Role
    engine_answers: bool
    engine_start_s: float | None
    """Seconds from the engine's last start to its first token."""
    log_dropped: int | None
    transport: str | None
    probe_gbps: float | None
    memlock_bytes: int | None


def exposition(own: Own) -> list[str]:
    """Lines of Prometheus text."""
    life = own.life
    found = [
        *_metric("fleet_agent_engine_up", int(own.engine_answers)),
        *_metric("fleet_agent_ready", int(is_ready(life))),
        *_metric("fleet_agent_draining", int(life.phase == "Draining")),
        *_metric("fleet_agent_flipping", int(life.phase == "FlippingRole")),
        *_metric("fleet_agent_role_epoch", life.epoch, f'{{role="{own.role}"}}'),
        *_metric("fleet_agent_engine_start_seconds", own.engine_start_s),
        *_metric("fleet_agent_log_dropped_total", own.log_dropped, kind="counter"),
        *_metric("fleet_agent_probe_gbps", own.probe_gbps),
        *_metric("fleet_agent_memlock_bytes", own.memlock_bytes),
    ]
    if own.transport is not None:
        found += _metric("fleet_agent_transport_info", 1, f'{{transport="{own.transport}"}}')
    return found


def _metric(name: str, value: float | None, labels: str = "", kind: str = "gauge") -> list[str]:
    return [] if value is None else [f"# TYPE {name} {kind}", f"{name}{labels} {value}"]

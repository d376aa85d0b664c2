"""Bounds and periods of the process runtime."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Everything that the runtime may use, in one place."""

    log_bytes: int = 8 * 1024 * 1024
    """Per container log file; one older file is kept beside it."""
    message_bytes: int = 2_048
    """Termination message; the kubelet's bound for messages taken from logs."""
    restart_base_s: float = 1.0
    """First wait before a restart, doubled each time. The kubelet's 10 s would make a person at a terminal wait."""
    restart_cap_s: float = 60.0
    restart_reset_s: float = 300.0
    """A container that ran this long starts its back-off from the beginning."""
    retry_s: float = 0.5
    """Between attempts to mount a volume or write a status, doubled up to `retry_cap_s`."""
    retry_cap_s: float = 5.0
    heartbeat_s: float = 10.0
    """Node lease renewal: a quarter of the lease's 40 s, as the kubelet's."""
    token_s: int = 3_600
    """Lifetime asked for service account tokens."""
    kill_wait_s: float = 5.0
    """After SIGKILL, before we say that a process cannot be killed."""
    alone: bool = False
    """The runtime's process has no children but containers (`fleet up`): all others that come to it are orphans of theirs."""
    body_bytes: int = 10 * 1024
    """What a probe reads of an answer; the kubelet's bound."""

"""Pure decisions of the runtime: what a row of probe results means, and whether and when a container starts again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fleet_operator.runtime.settings import RuntimeSettings

Verdict = Literal["success", "failure", "undecided"]


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """One probe with the API's defaults filled in; durations in seconds."""

    initial_delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    success_threshold: int = 1
    failure_threshold: int = 3
    grace_s: float | None = None
    """From its verdict to SIGKILL; None: the pod's."""

    @classmethod
    def parse(cls, probe: Mapping[str, Any]) -> ProbeSpec:
        """From a container's readinessProbe, livenessProbe or startupProbe."""
        grace_s = probe.get("terminationGracePeriodSeconds")
        return cls(
            initial_delay_s=float(probe.get("initialDelaySeconds", 0)),
            period_s=float(probe.get("periodSeconds") or 10),
            timeout_s=float(probe.get("timeoutSeconds") or 1),
            success_threshold=int(probe.get("successThreshold") or 1),
            failure_threshold=int(probe.get("failureThreshold") or 3),
            grace_s=None if grace_s is None else float(grace_s),
        )


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """Results in a row; the verdict changes only when a threshold is met."""

    spec: ProbeSpec
    verdict: Verdict = "undecided"
    successes: int = 0
    failures: int = 0

    def after(self, succeeded: bool) -> ProbeRow:
        """The row with one more result."""
        successes = self.successes + 1 if succeeded else 0
        failures = 0 if succeeded else self.failures + 1
        row = replace(self, successes=successes, failures=failures)
        if successes >= self.spec.success_threshold:
            return replace(row, verdict="success")
        if failures >= self.spec.failure_threshold:
            return replace(row, verdict="failure")
        return row


def should_restart(policy: str, exit_code: int) -> bool:
    """Pod restartPolicy: Always (default), OnFailure, Never."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def restart_delay_s(quick_exits: int, settings: RuntimeSettings) -> float:
    """How long to wait before the next start after `quick_exits` runs in a row that did not last: base * 2^(n-1), capped."""
    if quick_exits <= 0:
        return 0.0
    return min(settings.restart_cap_s, settings.restart_base_s * 2.0 ** min(quick_exits - 1, 30))


def quick_exits_after(before: int, ran_s: float, settings: RuntimeSettings) -> int:
    """The count of quick exits after one more run of `ran_s` seconds."""
    return 1 if ran_s >= settings.restart_reset_s else before + 1


def exit_of(returncode: int) -> tuple[int, int | None]:
    """(exitCode, signal) as Kubernetes shows them: a process killed by a signal exits with 128 + signal."""
    return (128 - returncode, -returncode) if returncode < 0 else (returncode, None)

"""What a person sees of a fleet: pods and status as short words. Pure: objects in, text out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_api.v1alpha1 import FleetStatus, KvStatus
from fleet_cli.errors import EXIT_BAD_INPUT, CliError, InputError, RunError
from fleet_operator.pod_words import is_silent, last_words
from fleet_planner.events import SEVERE
from fleet_planner.types import KvProof

ROLE_LABEL = "inferencefleet.io/role"
SAMPLE_PROMPT = (
    "The router sends every prompt to a prefill worker, which computes its keys and values; a decode worker reads these "
    "and returns the next"
)
MAX_RESTARTS = 3
"""A container that died this often by itself will not come up."""


@dataclass(frozen=True, slots=True)
class PodLine:
    """One pod in a few words."""

    name: str
    role: str
    state: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the screen shows, at one moment."""

    pods: tuple[PodLine, ...]
    status: FleetStatus
    stopping: bool = False

    @property
    def ready(self) -> bool:
        """The fleet's own verdict."""
        condition = self.status.condition("Ready")
        return condition is not None and condition.status == "True"

    @property
    def complete(self) -> bool:
        """Ready, and every worker that should serve does."""
        roles = [role for tier in self.status.tiers for role in (tier.prefill, tier.decode)]
        return self.ready and all(role.serving >= role.desired for role in roles)


def snapshot(pods: Sequence[Mapping[str, Any]], status: Mapping[str, Any], *, stopping: bool = False) -> Snapshot:
    """The snapshot of raw pods and a raw fleet status."""
    lines = sorted((_pod_line(pod) for pod in pods), key=lambda line: line.name)
    return Snapshot(pods=tuple(lines), status=FleetStatus.model_validate(dict(status)), stopping=stopping)


def fatal(pods: Sequence[Mapping[str, Any]]) -> CliError | None:
    """Why this fleet will never come up, if a container said so: exit code 2 is the user's input, many restarts are ours."""
    for pod in pods:
        name = pod["metadata"]["name"]
        for status in pod.get("status", {}).get("containerStatuses", ()):
            waiting = status.get("state", {}).get("waiting", {})
            if waiting.get("reason") == "CreateContainerError":
                return RunError(f"{name} cannot start: {waiting.get('message', 'no cause known')}")
            ended = _terminated(status)
            if ended is None:
                continue
            said = str(ended.get("message") or "").strip().splitlines()[-1:]
            message = last_words({"exitCode": ended.get("exitCode"), "message": said[0] if said else ""})
            if ended.get("exitCode") == EXIT_BAD_INPUT:
                return InputError(f"{name}: {message}")
            if status.get("restartCount", 0) >= MAX_RESTARTS:
                return RunError(f"{name} keeps failing: {message}")
    return None


def role_lines(status: FleetStatus) -> list[str]:
    """One line per tier and role."""
    lines = []
    for tier in status.tiers:
        for name, role in (("prefill", tier.prefill), ("decode", tier.decode)):
            lines.append(f"{tier.name}/{name}: {role.serving} serving, {role.ready} ready, {role.desired} desired")
    return lines


def adapter_lines(status: FleetStatus) -> dict[str, str]:
    """By name: that all workers have it, or why one does not. Those that are being loaded are left out."""
    lines = {}
    for one in status.adapters:
        on = f"on {one.loaded} of {one.desired} workers"
        if one.reason:
            lines[one.name] = f"{on}; {one.reason}: {one.message}"
        elif one.loaded >= one.desired > 0:
            lines[one.name] = on
    return lines


def trouble_lines(status: FleetStatus) -> dict[str, str]:
    """By condition and reason: what somebody has to mend, each thing once: Ready often says what another one says. A router
    that is missing is shown as a pod, and is at every start."""
    found: dict[str, str] = {}
    for one in status.conditions:
        words = f"{one.reason}: {one.message}"
        if one.reason in SEVERE and one.reason != "NoRouter" and words not in found.values():
            found[f"{one.type} {one.reason}"] = words
    return found


def kv_total(status: FleetStatus) -> KvStatus:
    """KV counters of all tiers together."""
    known = [tier.kv for tier in status.tiers if tier.kv is not None]
    transports = sorted({kv.transport for kv in known if kv.transport})
    return KvStatus(
        transfers=sum(kv.transfers for kv in known),
        blocks=sum(kv.blocks for kv in known),
        bytes=sum(kv.bytes for kv in known),
        failed=sum(kv.failed for kv in known),
        transport=", ".join(transports) or None,
    )


def kv_at_last(status: FleetStatus, counted: Sequence[KvProof]) -> KvStatus:
    """What moved by the last of both: a status is some seconds old, and an engine that has ended is asked in vain."""
    told = kv_total(status)
    counts = ("transfers", "blocks", "bytes", "failed")
    return told.model_copy(update={name: max(getattr(told, name), sum(getattr(kv, name) for kv in counted)) for name in counts})


def kv_line(kv: KvStatus) -> str:
    """The proof in one line."""
    if kv.transfers == 0:
        return "KV moved: nothing yet (no request needed a remote prefill)"
    by = f" over {kv.transport}" if kv.transport else ""
    failed = f", {kv.failed} failed" if kv.failed else ""
    return f"KV moved: {kv.transfers} transfers, {kv.blocks} blocks, {size(kv.bytes)}{by}{failed} (engine counters)"


def size(count: int) -> str:
    """Bytes for people: 512 B, 5.3 MB."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def curl_line(base_url: str, model: str, *, tokens: int, prompt: str = SAMPLE_PROMPT, keyed: bool = False) -> str:
    """One line to paste into a shell."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens})
    key = " -H 'authorization: Bearer KEY'" if keyed else ""
    return f"curl -s {base_url}/v1/completions{key} -H 'content-type: application/json' -d '{body}'"


def _pod_line(pod: Mapping[str, Any]) -> PodLine:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    state, wrong = _state(pod, statuses), pod.get("status", {}).get("message")
    return PodLine(
        name=pod["metadata"]["name"],
        role=pod["metadata"].get("labels", {}).get(ROLE_LABEL, ""),
        state=f"{state}: {wrong}" if wrong else state,
        restarts=sum(status.get("restartCount", 0) for status in statuses),
    )


def _state(pod: Mapping[str, Any], statuses: Sequence[Mapping[str, Any]]) -> str:
    status = pod.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    if pod["metadata"].get("deletionTimestamp"):
        return "draining"
    if conditions.get("Ready", {}).get("status") == "True":
        return "ready"
    for container in statuses:
        waiting = container.get("state", {}).get("waiting", {}).get("reason")
        if waiting == "CrashLoopBackOff":
            return "restarting"
    if any("running" in container.get("state", {}) for container in statuses):
        if is_silent(statuses, conditions.get("Ready", {})):
            return "not answering"
        return "warming" if all(container.get("started", True) for container in statuses) else "starting"
    if conditions.get("PodScheduled", {}).get("status") == "False":
        return f"unschedulable: {conditions['PodScheduled'].get('message', '')}"
    phase = str(status.get("phase", "Pending")).lower()
    causes = [container.get("state", {}).get("waiting", {}).get("message") for container in statuses]
    cause = next(filter(None, causes), "")  # a volume that cannot be made: the disk is full, a config map is not there
    return f"{phase}: {cause}" if cause else phase


def _terminated(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for key in ("state", "lastState"):
        ended = status.get(key, {}).get("terminated")
        if ended and ended.get("exitCode") not in (0, None):
            found: Mapping[str, Any] = ended
            return found
    return None

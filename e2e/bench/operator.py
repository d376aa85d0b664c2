"""`make bench-operator`: fleets from apply to Ready by the real operator process, against Kubernetes' own Deployments of as many
pods (workers and routers) on a control plane with the same settings, in the same run. SCALE=0.1 runs a tenth. Five rounds, in
turns which of the two comes first (ROUNDS=1 for a quick look); what a minute without news and a restart cost is measured in the
first one.

Nodes and pods are kwok's; everything else is real. Writes are counted in the API server's audit log, pod events by etcd's
versions of the pods' keys, CPU and memory in /proc. CPU per event is measured over two spans: from the first apply until all
fleets were Ready, making every object included, divided by the pod events of that time; and while events of Ready fleets come,
each a whole pass that finds nothing to write. In each span twice: what reconciling took (passes and their writes, by the
operator's own count), and what the whole process used (watches and TLS besides). What the control plane itself uses (API
server, etcd, scheduler, controllers, kwok; without our process) is compared as well: where the machine is what is short, as on
two cores, no operator of these objects is below that ratio, were it to cost nothing.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.bench.cpu import cpu_s
from e2e.bench.operator_load import (
    APPLIED_AT_ONCE,
    DECODE,
    FLEETS,
    PODS_PER_FLEET,
    PREFILL,
    apply_until_ready,
    deployment,
    deployment_is_ready,
    fleet,
    fleet_is_ready,
    namespace_of,
    worker_spec,
)
from e2e.bench.operator_writes import Writes, changes, writes_of
from e2e.bench.table import report
from e2e.kube.controlplane import ROOT
from e2e.kube.kwok import KwokPlane
from e2e.kube.service import Service, free_ports
from fleet_operator.cluster.interface import DEPLOYMENT, FLEET, POD, Object
from fleet_operator.cluster.kube import KubeCluster

SYSTEM = "inferencefleet-system"
NODES = 100
WORKERS = PREFILL + DECODE
IDLE_S = 60.0
QUIET_S, QUIET_SHARE = 3.0, 0.1
"""At rest: less than this share of a core over this long."""
SETTLE_MOST_S = 120.0


@dataclass
class Ours:
    """One round of the operator."""

    ready_s: float
    cpu_s: float
    reconcile_s: float
    """CPU of the passes, of `cpu_s`."""
    pod_events: int
    writes: Writes
    plane_cpu_s: float = 0.0
    writes_per_change: float = 0.0
    ready_event_ms: float = 0.0
    ready_reconcile_ms: float = 0.0
    ready_event_writes: int = 0
    rss_mb: float = 0.0
    errors: list[str] = field(default_factory=list)


@dataclass
class Rest:
    """What is measured once."""

    idle_writes: int
    idle_cpu: float
    restart_s: float = 0.0
    restart_writes: Writes | None = None
    """Of one that found a worker gone: what brings that one back, and of the other fleets nothing."""


@asynccontextmanager
async def plane_of(fleets: int, *, reads: bool = False) -> AsyncIterator[tuple[KwokPlane, KubeCluster]]:
    """A fresh control plane with our CRDs and the namespaces, and a client of its administrator."""
    with KwokPlane(NODES, reads=reads) as plane:
        plane.install_crds()
        names = sorted({namespace_of(number) for number in range(fleets)} | {"bench-warm"})
        wish = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names]
        plane.kubectl("create", "-f", "-", stdin=_list(wish))
        account = f"/api/v1/namespaces/{names[-1]}/serviceaccounts/default"
        plane.wait("service accounts", lambda: plane.exists(account))
        cluster = await KubeCluster.connect(plane.kubeconfig, manager="bench")
        try:
            yield plane, cluster
        finally:
            await cluster.close()


def _list(items: list[Object]) -> str:
    import json

    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


@dataclass(frozen=True)
class Theirs:
    """One round of Kubernetes' own controllers."""

    ready_s: float
    plane_cpu_s: float


async def reference(fleets: int, spec: Object) -> Theirs:
    """From apply to Ready of twice as many Deployments with four of the pods each."""
    async with plane_of(fleets) as (plane, cluster):
        await apply_until_ready(cluster, DEPLOYMENT, [_warm(deployment(0, spec))], deployment_is_ready)
        wishes = [deployment(number, spec) for number in range(2 * fleets)]
        cpu = plane_cpu_s(plane)
        ready_s = await apply_until_ready(cluster, DEPLOYMENT, wishes, deployment_is_ready)
        return Theirs(ready_s, plane_cpu_s(plane) - cpu)


def plane_cpu_s(plane: KwokPlane) -> float:
    """CPU seconds of all its processes so far, the operator's apart."""
    return sum(cpu_s(service.pid) for service in plane.services if service.name != "operator")


def _warm(wish: Object) -> Object:
    """The same in a namespace of its own."""
    return {**wish, "metadata": {**wish["metadata"], "namespace": "bench-warm"}}


async def ours(fleets: int, known: Rest | None) -> tuple[Ours, Rest, Object]:
    """One round, what is measured once (where it is not `known`), and the spec of a worker pod."""
    async with plane_of(fleets) as (plane, cluster):
        plane.kubectl("create", "namespace", SYSTEM)
        plane.kubectl("apply", "-f", str(ROOT / "charts/rbac/operator.yaml"))
        kubeconfig = plane.service_account_kubeconfig(SYSTEM, "inferencefleet-operator")
        operator = start(plane, kubeconfig)
        await apply_until_ready(cluster, FLEET, [_warm(fleet(0))], fleet_is_ready)
        pods = await cluster.list(POD, "bench-warm", {"inferencefleet.io/tier": "gpu"})
        await at_rest(operator, [])
        mark, cpu, events, plane_cpu = plane.audit_size(), cpu_s(operator.pid), pod_events(plane), plane_cpu_s(plane)
        passes_s = operator.reconcile_s()
        ready_s = await apply_until_ready(cluster, FLEET, [fleet(number) for number in range(fleets)], fleet_is_ready)
        spent_s, passes_s = cpu_s(operator.pid) - cpu, operator.reconcile_s() - passes_s
        found = Ours(ready_s, spent_s, passes_s, pod_events(plane) - events, writes_of(()))
        found.plane_cpu_s = plane_cpu_s(plane) - plane_cpu
        await at_rest(operator, found.errors)
        found.writes = writes_of(plane.audited(mark))
        everything = writes_of(plane.audited())  # etcd's counts have no beginning but the object's
        found.writes_per_change = everything.total / sum(changes(plane, everything).values())
        rest = known or await idle(plane, operator)
        await restarts(plane, cluster, operator, found, rest.idle_cpu)
        found.rss_mb = peak_rss_mb(operator.pid)
        if known is None:
            await restart(plane, cluster, operator, kubeconfig, found, rest)
        found.errors += complaints(plane, fleets)
        return found, rest, worker_spec(pods[0])


class Operator(Service):
    """The operator's process, and where it tells of itself."""

    def __init__(self, argv: list[str], log: Path) -> None:
        (self._port,) = free_ports(1)
        super().__init__("operator", [*argv, "--health-port", str(self._port)], log, dict(os.environ))

    def reconcile_s(self) -> float:
        """CPU seconds of its passes so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith("fleet_operator_reconcile_cpu_seconds_total ")).split()[1])


def start(plane: KwokPlane, kubeconfig: Path) -> Operator:
    """The operator under its own rights and no others."""
    argv = [sys.executable, "-m", "fleet_operator", "--kubeconfig", str(kubeconfig)]
    profile = os.environ.get("PROFILE")  # a folder for cProfile's files: figures are then worth nothing
    if profile:
        argv[1:1] = ["-m", "cProfile", "-o", f"{profile}/operator-{time.time():.0f}.prof"]
    operator = Operator(argv, plane.dir / "operator.log")
    plane.services.append(operator)
    return operator


def pod_events(plane: KwokPlane) -> int:
    """Times that the operator's pods were written by anybody: each is one event of its watch."""
    return sum(plane.versions("pods/bench-").values())


def peak_rss_mb(pid: int) -> float:
    """The most memory that the process ever had resident."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


async def at_rest(operator: Service, errors: list[str]) -> float:
    """Wait until the process has nothing to do; the monotonic time when that began. That it never has is an error of the run."""
    deadline = time.monotonic() + SETTLE_MOST_S
    while time.monotonic() < deadline:
        begun, cpu = time.monotonic(), cpu_s(operator.pid)
        for _ in range(6):
            await asyncio.sleep(QUIET_S / 6)
            operator.check()
            if cpu_s(operator.pid) - cpu > QUIET_S * QUIET_SHARE:
                break
        else:
            return begun
    errors.append(f"the operator is still busy after {SETTLE_MOST_S:g} s")
    return time.monotonic()


async def idle(plane: KwokPlane, operator: Service) -> Rest:
    """A minute in which nothing changes."""
    mark, cpu, begun = plane.audit_size(), cpu_s(operator.pid), time.monotonic()
    await asyncio.sleep(IDLE_S)
    spent = (cpu_s(operator.pid) - cpu) / (time.monotonic() - begun)
    return Rest(writes_of(plane.audited(mark)).total, spent)


async def restarts(plane: KwokPlane, cluster: KubeCluster, operator: Operator, into: Ours, idle_cpu: float) -> None:
    """One container of every worker says that it restarted, the first worker of each fleet, then the second: every event is news
    to a fleet that rests, and leads to a pass."""
    pods = await cluster.list(POD, None, {"inferencefleet.io/tier": "gpu"})
    order: dict[tuple[str, str], list[Object]] = {}
    for pod in pods:
        order.setdefault((pod["metadata"]["namespace"], pod["metadata"]["labels"]["inferencefleet.io/fleet"]), []).append(pod)
    gate = asyncio.Semaphore(APPLIED_AT_ONCE)

    async def one(pod: Object) -> None:
        containers = [{**found, "restartCount": 1} for found in pod["status"]["containerStatuses"]]
        async with gate:
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            await cluster.patch_status(POD, namespace, name, {"containerStatuses": containers})

    mark, cpu, begun, events = plane.audit_size(), cpu_s(operator.pid), time.monotonic(), pod_events(plane)
    passes_s = operator.reconcile_s()
    for turn in zip(*order.values(), strict=True):
        await asyncio.gather(*map(one, turn))
    await at_rest(operator, into.errors)
    spent = cpu_s(operator.pid) - cpu - idle_cpu * (time.monotonic() - begun)
    count = pod_events(plane) - events
    into.ready_event_ms = spent * 1e3 / count
    into.ready_reconcile_ms = (operator.reconcile_s() - passes_s) * 1e3 / count
    into.ready_event_writes = writes_of(plane.audited(mark)).total


async def restart(plane: KwokPlane, cluster: KubeCluster, operator: Service, kubeconfig: Path, into: Ours, rest: Rest) -> None:
    """Stop it, delete one worker while nobody looks, start it: until that fleet is whole again and the process is at rest."""
    operator.stop()
    plane.services.remove(operator)
    victim = (await cluster.list(POD, "bench-000", {"inferencefleet.io/tier": "gpu"}))[0]
    await cluster.delete(POD, "bench-000", victim["metadata"]["name"], grace_s=0)
    mark, begun = plane.audit_size(), time.monotonic()
    again = start(plane, kubeconfig)
    while not await _replaced(cluster, victim):
        await asyncio.sleep(0.1)
        again.check()
        if time.monotonic() - begun > SETTLE_MOST_S:
            raise TimeoutError(f"the pod was not replaced: {again.tail(1_000)}")
    rest.restart_s = max(time.monotonic(), await at_rest(again, into.errors)) - begun
    rest.restart_writes = writes_of(plane.audited(mark))
    into.rss_mb = max(into.rss_mb, peak_rss_mb(again.pid))


async def _replaced(cluster: KubeCluster, victim: Object) -> bool:
    found = await cluster.list(
        POD, "bench-000", {"inferencefleet.io/fleet": victim["metadata"]["labels"]["inferencefleet.io/fleet"]}
    )
    ready = [
        pod for pod in found
        if any(c["type"] == "Ready" and c["status"] == "True" for c in (pod.get("status") or {}).get("conditions") or [])
        and "inferencefleet.io/tier" in pod["metadata"]["labels"]
    ]  # fmt: skip
    return len(ready) == WORKERS


def complaints(plane: KwokPlane, fleets: int) -> list[str]:
    """What went wrong: wrong number of pods, tracebacks in the operator's log."""
    count = sum("-gpu-" in key for key in plane.versions("pods/bench-"))
    wanted = WORKERS * (fleets + 1)
    wrong = [] if count == wanted else [f"{count} worker pods, expected {wanted}"]
    log = (plane.dir / "operator.log").read_text(errors="replace")
    return wrong + [f"operator: {line}" for line in log.splitlines() if "Traceback" in line or " ERROR " in line][:5]


def main() -> int:
    """Print the table and the JSON line; 1 when something went wrong."""
    fleets = max(1, round(FLEETS * float(os.environ.get("SCALE", "1"))))
    rounds = max(1, int(os.environ.get("ROUNDS", "5")))
    mine: list[Ours] = []
    rest: Rest | None = None
    theirs: list[Theirs] = []
    spec: Object = {}
    for number in range(rounds):
        if number % 2:
            theirs.append(asyncio.run(reference(fleets, spec)))
        found, rest, spec = asyncio.run(ours(fleets, rest))
        mine.append(found)
        if not number % 2:
            theirs.append(asyncio.run(reference(fleets, spec)))
    figures = summary(fleets, mine, theirs, rest)
    report(("figure", "operator", "goal"), rows(figures), figures)
    if rest is not None and rest.restart_writes is not None:
        print("writes after the restart:", dict(rest.restart_writes.sent), file=sys.stderr)
    for one in mine:
        print("writes:", dict(one.writes.sent), "refused:", dict(one.writes.refused), file=sys.stderr)
        for error in one.errors:
            print(error, file=sys.stderr)
    return 1 if figures["errors"] else 0


def summary(fleets: int, mine: list[Ours], theirs: list[Theirs], rest: Rest) -> dict[str, Any]:
    """The last line; medians over the rounds, the worst for memory."""

    def middle(values: list[float], digits: int = 2) -> float:
        return round(statistics.median(values), digits)

    return {
        "fleets": fleets,
        "pods": PODS_PER_FLEET * fleets,
        "ready_s": middle([one.ready_s for one in mine]),
        "deployments_ready_s": middle([one.ready_s for one in theirs]),
        "vs_deployments": middle([one.ready_s / other.ready_s for one, other in zip(mine, theirs, strict=True)], 3),
        "plane_cpu_s": middle([one.plane_cpu_s for one in mine]),
        "plane_cpu_vs_deployments": middle([a.plane_cpu_s / b.plane_cpu_s for a, b in zip(mine, theirs, strict=True)], 3),
        "rss_mb": round(max(one.rss_mb for one in mine), 1),
        "writes_per_object": middle([one.writes_per_change for one in mine], 4),
        "writes_per_fleet": middle([one.writes.total / fleets for one in mine]),
        "idle_writes_per_min": rest.idle_writes * 60 / IDLE_S,
        "idle_cpu_percent": round(rest.idle_cpu * 100, 2),
        "process_ms_per_event": middle([one.cpu_s * 1e3 / one.pod_events for one in mine], 3),
        "reconcile_ms_per_event": middle([one.reconcile_s * 1e3 / one.pod_events for one in mine], 3),
        "ready_process_ms_per_event": middle([one.ready_event_ms for one in mine], 3),
        "ready_reconcile_ms_per_event": middle([one.ready_reconcile_ms for one in mine], 3),
        "ready_event_writes": middle([float(one.ready_event_writes) for one in mine]),
        "restart_s": round(rest.restart_s, 2),
        "restart_writes": rest.restart_writes.total if rest.restart_writes is not None else None,
        "rounds": len(mine),
        "errors": sum(len(one.errors) for one in mine),
    }


def rows(figures: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """For people."""
    return [
        ("fleets", figures["fleets"], ""),
        ("pods, routers included", figures["pods"], ""),
        ("Deployments Ready s", figures["deployments_ready_s"], ""),
        ("fleets Ready s", figures["ready_s"], f"<= {1.2 * figures['deployments_ready_s']:.0f}"),
        ("÷ Deployments", figures["vs_deployments"], "<= 1.2"),
        ("÷ Deployments, CPU of the control plane without us", figures["plane_cpu_vs_deployments"], ""),
        ("RSS peak MB", figures["rss_mb"], "< 500"),
        ("writes per real change", figures["writes_per_object"], "<= 1"),
        ("writes per fleet", figures["writes_per_fleet"], ""),
        ("writes per minute at rest", figures["idle_writes_per_min"], "0"),
        ("CPU % at rest", figures["idle_cpu_percent"], ""),
        ("reconcile CPU ms per pod event, making included", figures["reconcile_ms_per_event"], "<= 1"),
        ("the same of the whole process", figures["process_ms_per_event"], ""),
        ("reconcile CPU ms per pod event, Ready fleet", figures["ready_reconcile_ms_per_event"], "<= 1"),
        ("the same of the whole process", figures["ready_process_ms_per_event"], ""),
        ("writes for those", figures["ready_event_writes"], "0"),
        ("restart to steady s", figures["restart_s"], "< 30"),
        ("writes after restart", figures["restart_writes"], ""),
        ("errors", figures["errors"], "0"),
    ]


if __name__ == "__main__":
    sys.exit(main())

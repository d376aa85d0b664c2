"""The operator put together: guards around the cluster, health, admission, and the loop while this process leads."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fleet_operator.adapters.follow import AdapterFollower
from fleet_operator.certs.keeper import Keeper, Place
from fleet_operator.cluster.guarded import Guard, GuardedCluster
from fleet_operator.cluster.interface import FLEET
from fleet_operator.cluster.kube import KubeCluster
from fleet_operator.flip.asking import open_ask, telling_while
from fleet_operator.flip.follow import FlipFollower
from fleet_operator.health.meters import Meters
from fleet_operator.health.pulse import Pulse
from fleet_operator.health.server import Readiness, health_app, serving
from fleet_operator.leader.elector import Candidate, Elector
from fleet_operator.leader.fence import Fence
from fleet_operator.options import Options, WebhookOptions
from fleet_operator.reconciler import Reconciler
from fleet_operator.shell_kopf import Wiring, Work, run_in_cluster
from fleet_operator.telemetry.collect import open_telemetry
from fleet_operator.territory import Selection, Territory
from fleet_operator.together import until_first_ends
from fleet_operator.webhook.server import admission_app, admission_server

BIND_HOST = os.environ.get("FLEET_BIND_HOST")
"""Address to listen on, as routers and workers know it; None: all of the pod's."""
BIRTHS = "inferencefleet-lease-births"
"""Field manager that makes empty Leases."""
LOG = logging.getLogger("fleet.operator")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What lives as long as the process."""

    options: Options
    kube: KubeCluster
    fence: Fence
    pulse: Pulse
    meters: Meters
    readiness: Readiness

    def cluster(self, *guards: Guard) -> GuardedCluster:
        """The API with the fence before any other guard, and every write that passes counted."""
        fenced: tuple[Guard, ...] = (self.fence,) if self.options.election is not None else ()
        return GuardedCluster(self.kube, *fenced, *guards, self.meters)


async def run(options: Options) -> None:
    """Until told to stop; ClusterError, LeadershipLostError, OSError (a port is taken)."""
    pulse = Pulse()
    kube = await KubeCluster.connect(options.kubeconfig, trace=pulse.trace())
    parts = _Parts(options, kube, Fence(), pulse, Meters(pulse, of_fleets=options.fleet_metrics), Readiness())
    try:
        async with AsyncExitStack() as stack:
            telemetry = await stack.enter_async_context(open_telemetry())
            elector, territory = _elector(parts), _territory(parts)
            cluster = parts.cluster(territory) if territory is not None else parts.cluster()
            owns = territory.owns if territory is not None else (lambda namespace: True)
            flips, adapters = _followers(parts)
            reconciler = Reconciler(
                cluster, options.platform, telemetry, passes=parts.meters, owns=owns, flips=flips, adapters=adapters
            )
            if territory is not None:
                territory.changed = reconciler.touch_namespace
            _observe(parts, reconciler, elector, territory)
            app = health_app(pulse, parts.meters, parts.readiness)
            await stack.enter_async_context(serving(app, options.health_port, BIND_HOST))
            wiring = Wiring(_lead(elector, territory), _listed(parts), pulse.trace())
            following = run_in_cluster(cluster, reconciler, options.kubeconfig, options.selection.names, wiring)
            background = [pulse.follow(lambda: kube.list(FLEET, _asked(options.selection.names, reconciler)))]
            if options.webhook is not None:
                background.append(_admit(parts, options.webhook))
            await until_first_ends(following, *background)
    finally:
        await kube.close()


def _asked(names: Sequence[str], reconciler: Reconciler) -> str | None:
    """The namespace in which the API server is asked whether it answers: one that we may read; None for all."""
    return next((name for name in names if name not in reconciler.closed), None)


def _followers(parts: _Parts) -> tuple[FlipFollower, AdapterFollower]:
    """What they tell workers is a write like any other."""
    connect = open_ask if parts.options.election is None else telling_while(lambda: parts.fence.open_s > 0)
    return FlipFollower(connect), AdapterFollower(connect)


def _elector(parts: _Parts) -> Elector | None:
    options = parts.options
    if options.election is None:
        return None
    identity = f"{socket.gethostname()}_{uuid.uuid4()}"
    candidate = Candidate(options.namespace, options.lease, identity, options.election)
    return Elector(parts.kube, parts.kube.writer(BIRTHS), candidate, parts.fence)


def _territory(parts: _Parts) -> Territory | None:
    installation = parts.options.installation
    if installation is None:
        return None
    births = GuardedCluster(parts.kube.writer(BIRTHS), *((parts.fence,) if parts.options.election is not None else ()))
    return Territory(parts.cluster(), births, installation, parts.options.selection)


def _observe(parts: _Parts, reconciler: Reconciler, elector: Elector | None, territory: Territory | None) -> None:
    def leading() -> bool:
        return elector is None or elector.leading

    def namespaces() -> tuple[int, int]:
        return (territory.owned, len(territory.foreign)) if territory is not None else (0, 0)

    parts.meters.observe(reconciler, leading, namespaces, lambda: len(reconciler.closed))


def where(selection: Selection) -> str:
    """Which namespaces' fleets are ours to run, in words: one that is applied elsewhere has no status and no other word of it."""
    if selection.names:
        return f"namespaces {', '.join(selection.names)} only"
    if selection.labels:
        return f"namespaces with {','.join(f'{key}={value}' for key, value in selection.labels.items())} only"
    return "all namespaces"


def _listed(parts: _Parts) -> Callable[[], None]:
    def listed() -> None:
        parts.readiness.missing = ""
        LOG.info("caches are complete; fleets are followed in %s", where(parts.options.selection))

    return listed


def _lead(elector: Elector | None, territory: Territory | None) -> Callable[[Work], Awaitable[None]]:
    """Work while leading; the lease is given back only when nothing of ours writes any more."""

    async def work_and_claim(work: Work) -> None:
        if territory is None:
            await work()
        else:
            await until_first_ends(territory.run(), _as_coroutine(work))

    async def lead(work: Work) -> None:
        if elector is None:
            await work_and_claim(work)
            return
        try:
            await elector.win()
            await until_first_ends(elector.keep(), work_and_claim(work))
        finally:
            await asyncio.shield(elector.release())

    return lead


async def _as_coroutine(work: Work) -> None:
    await work()


async def _admit(parts: _Parts, options: WebhookOptions) -> None:
    """Keep certificates and answer the API server, once there is one."""
    place = Place(parts.options.namespace, options.secret, options.configuration, options.names)
    keeper = Keeper(parts.cluster(), place)

    async def answer() -> None:
        await keeper.ready.wait()
        async with admission_server(admission_app(parts.kube), keeper.context, options.port, BIND_HOST) as port:
            LOG.info("answering admission reviews on port %d", port)
            await asyncio.get_running_loop().create_future()

    await until_first_ends(keeper.run(), answer())

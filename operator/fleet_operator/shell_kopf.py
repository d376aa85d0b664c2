"""The kopf shell: kopf follows the fleets, we decide. Its handler is `on.event`, level-based: it only feeds the reconciler's
cache, as the watches of the children do (`follow_children`).

kopf is set up to write nothing itself: no finalizers, no annotations, no events. Its watch begins with a list whose events
carry no type; because a cache must be complete before anything is decided, fleets are listed once more at start. What
watches do not tell comes from `audit`, and when kopf gives up (it does so on an ERROR event other than 410) it is started again:
the process, with all that it knows, lives on. Signals are ours for the same reason: kopf hears none before it has begun and
between two starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import kopf
from aiohttp.connector import Connection
from kopf._cogs.structs.references import Insights
from kubernetes.aio.client.configuration import Configuration

from fleet_operator.audit import audit
from fleet_operator.cluster.account import service_account
from fleet_operator.cluster.interface import FLEET, NODE, Cluster, ClusterError, ForbiddenError, Kind, WatchEvent
from fleet_operator.cluster.kube_http import configuration_from
from fleet_operator.cluster.trust import Trust
from fleet_operator.follow_children import Finder, Patient, closed_to, follow_children, follow_when_open, may_read_nodes, refused
from fleet_operator.health.logs import about
from fleet_operator.kopf_pace import Pace
from fleet_operator.kopf_settings import RECONNECT_S, configure
from fleet_operator.kopf_tasks import NotKopfs, clear_up, watching
from fleet_operator.reconciler import CHILDREN, Reconciler
from fleet_operator.together import until_first_ends

LIST_RETRY_MOST_S = 5.0
RESTART_S, RESTART_MOST_S = 2.0, 15.0
"""Pause before kopf is started again: it lists every fleet then. Twice as long as the last time when it lived no longer than
CALM_S."""
REFUSED_S = 15.0
"""How often it is asked whether fleets may be watched in a namespace again where they might not: one such namespace ends kopf."""
CALM_S = 60.0
LOG = logging.getLogger("fleet.operator")
Work = Callable[[], Awaitable[None]]


async def _at_once(work: Work) -> None:
    await work()


@dataclass(frozen=True, slots=True)
class Wiring:
    """What surrounds the loop."""

    lead: Callable[[Work], Awaitable[None]] = _at_once
    """Runs the work when, and as long as, this process may do it."""
    listed: Callable[[], None] = lambda: None
    """Called when the caches are complete."""
    trace: aiohttp.TraceConfig | None = None
    """Sees the HTTP of kopf's watches."""


def build_registry(
    reconciler: Reconciler, kubeconfig: Path | None, trace: aiohttp.TraceConfig | None = None
) -> kopf.OperatorRegistry:
    """Handlers for changes of fleets."""
    registry, pace = kopf.OperatorRegistry(), Pace()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> Any:
        await pace.login()
        name = None
        if kubeconfig is None:
            account = service_account(os.environ)
            found = kopf.ConnectionInfo(server=account.url, ca_path=account.ca_file, token=account.token())
        else:
            read = await configuration_from(kubeconfig)
            found, name = _as_we_read(read), read.tls_server_name
        return found if trace is None else _session(found, [trace, pace.trace()], name)

    @kopf.on.startup(registry=registry)
    def set_up(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)

    @kopf.on.event(*_address(FLEET), registry=registry, id="follow-fleets")
    async def changed(event: Any, **_: Any) -> None:
        reconciler.feed(FLEET, WatchEvent(event["type"] or "ADDED", event["object"]))

    return registry


def _as_we_read(found: Configuration) -> kopf.ConnectionInfo:
    """kopf's own reading of a kubeconfig knows neither plugins nor token files nor whose a relative path is."""
    scheme, _, token = str(found.api_key.get("BearerToken", "")).partition(" ")
    return kopf.ConnectionInfo(
        server=found.host,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
        scheme=scheme or None,
        token=token or None,
        proxy_url=found.proxy,
    )


class _Connector(aiohttp.TCPConnector):
    """To servers whose certificates are for `name`; kopf cannot say that with a request."""

    def __init__(self, context: ssl.SSLContext, name: str | None) -> None:
        super().__init__(limit=0, ssl=context)
        self._name = name

    async def connect(self, req: aiohttp.ClientRequest, *args: Any, **kwargs: Any) -> Connection:
        """See `BaseConnector.connect`."""
        req.server_hostname = self._name
        return await super().connect(req, *args, **kwargs)


def _session(
    found: kopf.ConnectionInfo, traces: list[aiohttp.TraceConfig], name: str | None = None
) -> kopf.AiohttpSession:  # fmt: skip
    """kopf's own connection, in a session that is traced; `name`: of the server's certificate, when it is not the URL's."""
    context = found.as_ssl_context()
    session = aiohttp.ClientSession(
        connector=_Connector(context, name),
        headers=found.as_http_headers(),
        proxy=found.proxy_url,
        trust_env=found.trust_env,
        trace_configs=[*traces, _trusting(Trust(context, Path(found.ca_path) if found.ca_path else None))],
    )
    return kopf.AiohttpSession(server=found.server, default_namespace=found.default_namespace, aiohttp_session=session)


def _trusting(trust: Trust) -> aiohttp.TraceConfig:
    """kopf tries a watch again for ever, without another login unless it was answered with 401."""
    config = aiohttp.TraceConfig()

    async def begins(*_: Any) -> None:
        trust.refresh()

    config.on_request_start.append(begins)
    return config


def _address(kind: Kind) -> tuple[str, str, str]:
    """(group, version, plural), as kopf wants it."""
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


async def _list_fleets(cluster: Cluster, reconciler: Reconciler, namespaces: Sequence[str]) -> None:
    """All fleets into the cache; waits out an API server that cannot answer yet (a CRD that was just installed, a restart)."""
    delay_s = RECONNECT_S
    while True:
        try:
            for namespace in namespaces or (None,):
                for found in await cluster.list(FLEET, namespace):
                    reconciler.feed(FLEET, WatchEvent("ADDED", found))
        except ClusterError as error:
            if not error.retry or isinstance(error, ForbiddenError):
                raise
            LOG.warning("listing %s: %s; again in %s s", FLEET.plural, error, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(LIST_RETRY_MOST_S, delay_s * 2)
        else:
            reconciler.feed(FLEET, WatchEvent("SYNCED", {}))
            return


def _hear_signals(stop: asyncio.Event) -> None:
    """SIGINT and SIGTERM set `stop` from now on. Only the main thread may listen to them."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _told(stop: asyncio.Event) -> None:
    await stop.wait()


async def _refused(cluster: Cluster, namespaces: Sequence[str], stop: asyncio.Event) -> list[str]:
    """Namespaces whose fleets may not be watched: kopf would end at the first of them, and with it the watches of all others."""
    found = list[str]()

    async def ask() -> None:
        found.extend(await refused(cluster, FLEET, namespaces))

    await until_first_ends(ask(), _told(stop))
    if found:
        LOG.warning("fleets may not be watched in namespaces %s: they are left alone until they may", ", ".join(found))
    return found


async def _until_allowed(cluster: Cluster, namespaces: Sequence[str]) -> None:
    """Until fleets may be watched in one of these namespaces; for ever without any."""
    while True:
        if len(await refused(cluster, FLEET, namespaces)) < len(namespaces):
            return
        await asyncio.sleep(REFUSED_S)


async def _run_kopf(
    registry: kopf.OperatorRegistry, namespaces: Sequence[str], stop: asyncio.Event, over: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """One life of kopf: until it fails, until `stop`, or until the end of `over`."""
    insights, clusterwide = Insights(), not namespaces
    tasks = await kopf.spawn_tasks(
        registry=registry,
        insights=insights,
        standalone=True,
        clusterwide=clusterwide,
        namespaces=tuple(namespaces),
        stop_flag=stop,
    )
    _hear_signals(stop)  # kopf took them
    tasks = [*tasks, asyncio.ensure_future(watching(insights)), asyncio.ensure_future(over())]
    clearing = asyncio.ensure_future(clear_up(tasks))
    try:
        await kopf.run_tasks(tasks, ignored=NotKopfs())
    finally:
        clearing.cancel()


async def _follow_fleets(
    cluster: Cluster,
    namespaces: Sequence[str],
    closed: Collection[str],
    stop: asyncio.Event,
    registry: Callable[[], kopf.OperatorRegistry],
) -> None:
    """kopf, started again when it fails, until somebody tells the process to stop. `closed`: without these at first."""
    pause_s, away = RESTART_S, list(closed)
    while not stop.is_set():
        begun, there = time.monotonic(), [namespace for namespace in namespaces if namespace not in away]
        over = partial(_until_allowed, cluster, away)
        try:
            await (_run_kopf(registry(), there, stop, over) if there or not away else until_first_ends(over(), _told(stop)))
            if not away:
                return
        except Exception as error:
            pause_s = RESTART_S if time.monotonic() - begun > CALM_S else pause_s
            LOG.warning(
                "fleets are not followed at this moment, kopf ended: %s: %s; again in %s s", type(error).__name__, error, pause_s
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()
            pause_s = min(RESTART_MOST_S, pause_s * 2)
        away = await _refused(cluster, namespaces, stop)


async def run_in_cluster(
    cluster: Cluster,
    reconciler: Reconciler,
    kubeconfig: Path | None,
    namespaces: Sequence[str] = (),
    wiring: Wiring = Wiring(),
) -> None:
    """List everything once, then follow until cancelled or told to stop by a signal. No namespaces: all of them. One that may not
    be read is left alone until it may; ForbiddenError when that is each of them."""
    stop, kinds = asyncio.Event(), [FLEET, *CHILDREN]
    _hear_signals(stop)

    async def find_kinds() -> None:
        patient = Patient(cluster)
        reconciler.closed |= await _closed(patient, namespaces)
        if await may_read_nodes(patient):
            kinds.append(NODE)

    async def follow() -> None:
        await until_first_ends(_list_fleets(cluster, reconciler, there), _told(stop))
        registry = partial(build_registry, reconciler, kubeconfig, wiring.trace)
        await _follow_fleets(cluster, namespaces, reconciler.closed, stop, registry)

    async def work() -> None:
        await until_first_ends(reconciler.work(), reconciler.reader.run())

    async def lead() -> None:
        try:
            await reconciler.wait_synced()
            wiring.listed()
            await wiring.lead(work)
        finally:
            stop.set()

    await until_first_ends(find_kinds(), _told(stop))
    if stop.is_set():
        return
    there = [namespace for namespace in namespaces if namespace not in reconciler.closed]
    reconciler.expect(kinds)
    children = follow_children(cluster, reconciler.feed, kinds[1:], tuple(there))
    later = [_follow_later(cluster, reconciler, namespace, there) for namespace in sorted(reconciler.closed)]
    await until_first_ends(follow(), lead(), children, audit(cluster, reconciler, kinds, there), *later)


async def _closed(cluster: Finder, namespaces: Sequence[str]) -> set[str]:
    """Namespaces that may not be read; ForbiddenError when there is no other."""
    found = await closed_to(cluster, [FLEET, *CHILDREN], namespaces)
    for namespace, error in found.items():
        if len(found) == len(namespaces):
            raise error
        words = "its fleets are left alone until it may be: bind the operator's Role there, or do not tell it that namespace"
        LOG.warning(
            "namespace %s may not be read: %s: %s; asked again every %g s",
            namespace,
            error,
            words,
            REFUSED_S,
            extra=about(namespace),
        )
    return set(found)


async def _follow_later(cluster: Cluster, reconciler: Reconciler, namespace: str, there: list[str]) -> None:
    """A namespace that is closed, from when it is not; then it is one of those that are `there`."""

    async def opened() -> None:
        await _list_fleets(cluster, reconciler, [namespace])
        there.append(namespace)
        reconciler.open(namespace)
        LOG.info("namespace %s may be read now: its fleets are followed", namespace, extra=about(namespace))

    while True:
        try:
            await follow_when_open(cluster, reconciler.feed, CHILDREN, namespace, REFUSED_S, opened)
        except ForbiddenError as error:  # closed again before it was open
            LOG.warning("namespace %s may not be read after all: %s", namespace, error, extra=about(namespace))
            await asyncio.sleep(REFUSED_S)

"""The parts of a cluster in one process: store, scheduler, Deployment controller, process runtime, and the operator itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.accelerator import DEFAULT_RESOURCE
from fleet_cli.errors import RunError
from fleet_cli.up.bundled import VLLM_ENV, vllm_program
from fleet_cli.up.view import ROLE_LABEL
from fleet_operator.cluster.interface import FLEET, POD, ClusterError, NotFoundError, Object
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.names import TIER
from fleet_operator.reconciler import Reconciler
from fleet_operator.runtime.deployments import DeploymentController
from fleet_operator.runtime.kubelet import ProcessKubelet
from fleet_operator.runtime.scheduler import MemoryScheduler
from fleet_operator.runtime.settings import RuntimeSettings
from fleet_operator.settings import Platform
from fleet_operator.telemetry.collect import FleetTelemetry, open_telemetry
from fleet_planner.types import KvProof

NODE, RUNTIME = "local", "runtime"
DEVICES = "1024"
"""A machine without a GPU pretends to have plenty: CPU engines stand in for devices."""
LOG_BYTES = 8 * 1024 * 1024
ENGINE_PORT = 8000
COUNTED_S = 2.0
"""Workers on this machine answer in milliseconds, if they do."""
_DEFAULTS = RuntimeSettings()


class LocalFleet:
    """One fleet on this machine; leaving the context kills whatever still runs."""

    def __init__(
        self,
        *,
        manifest: Object,
        state_dir: Path,
        port: int,
        claims: Mapping[str, Path],
        secrets: Sequence[Object] = (),
        settings: RuntimeSettings = _DEFAULTS,
    ) -> None:
        self._manifest = manifest
        self._secrets = secrets
        self._namespace, self._name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        self._port = port
        self.logs = state_dir / "logs"
        self.router_url = f"http://127.0.0.1:{port}"
        self._cluster = MemoryCluster()
        self._user = self._cluster.writer("fleet-up")
        capacity = _capacity(manifest)
        self._kubelet = ProcessKubelet(
            self._cluster, NODE, capacity, state_dir, _environment(), pvc_dirs=claims, settings=settings
        )
        self._scheduler = MemoryScheduler(self._cluster, {NODE: capacity})
        self._deployments = DeploymentController(self._cluster)
        self._tasks: list[asyncio.Task[None]] = []
        self._log: logging.Handler | None = None
        self._telemetry: FleetTelemetry | None = None

    async def __aenter__(self) -> LocalFleet:
        try:
            self._log = _log_to(self.logs / "operator.log")
        except OSError as error:
            raise RunError(f"{self.logs / 'operator.log'}: {error.strerror}") from error
        self._start(RUNTIME, self._kubelet.run())
        self._start("scheduler", self._scheduler.run())
        self._start("deployments", self._deployments.run())
        self._start("operator", self._operate())
        try:
            for one in (*self._secrets, self._manifest):
                await self._user.apply(one)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)  # nobody else will: the block was not entered
            if isinstance(error, ClusterError):
                raise RunError(f"the fleet was refused: {error}") from error
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Last started ends first: the runtime must be the last, for it kills what the others might still start.
        for task in reversed(self._tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._cluster.close()
        if self._log is not None:
            logging.getLogger().removeHandler(self._log)
            with contextlib.suppress(OSError):  # a full disk: what it said last is lost, and no reason to end otherwise
                self._log.close()

    def raise_if_dead(self) -> None:
        """RunError when a part of the control plane ended; none of them ends by itself."""
        for task in self._tasks:
            if task.done():
                cause = None if task.cancelled() else task.exception()
                raise RunError(f"the {task.get_name()} stopped: {_words(cause)}")

    def can_drain(self) -> bool:
        """The runtime, which ends pods, is there."""
        return not any(task.done() for task in self._tasks if task.get_name() == RUNTIME)

    async def observe(self) -> tuple[list[Object], Object]:
        """(pods, status of the fleet) as the store has them now; no status once the fleet is gone."""
        pods = await self._cluster.list(POD, self._namespace)
        try:
            fleet = await self._cluster.get(FLEET, self._namespace, self._name)
        except NotFoundError:
            return pods, {}
        return pods, fleet.get("status") or {}

    async def counted(self, fleet: InferenceFleet, telemetry: FleetTelemetry | None = None) -> list[KvProof]:
        """What the engines count of KV now, by tiers: the status says what they did an interval ago. Empty: nobody answers.
        `telemetry`: who asks, where the operator's own, which remembers what it read, goes on afterwards."""
        asking = telemetry or self._telemetry
        if asking is None:
            return []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COUNTED_S):
                pods = await self._cluster.list(POD, self._namespace)
                tiers = await asking.collect(fleet, pods, [])
                return [tier.kv for tier in tiers.values() if tier.kv is not None]
        return []

    async def prefill_url(self, tier: str) -> str:
        """Base URL of the engine of one prefill worker of this tier; empty: of any."""
        wanted = {ROLE_LABEL: "prefill", **({TIER: tier} if tier else {})}
        for pod in await self._cluster.list(POD, self._namespace, wanted):
            if ip := (pod.get("status") or {}).get("podIP"):
                return f"http://{ip}:{ENGINE_PORT}"
        raise RunError("no prefill worker has an address")

    async def delete(self) -> None:
        """Delete the fleet; its pods drain and go."""
        with contextlib.suppress(NotFoundError):
            await self._user.delete(FLEET, self._namespace, self._name)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _operate(self) -> None:
        """The operator, as in a cluster, but on the store and with the router on the chosen port."""
        platform = Platform(follow="dir", router_host="127.0.0.1", router_port=self._port, counters_s=0.0)
        async with open_telemetry() as telemetry:
            self._telemetry = telemetry
            await Reconciler(self._cluster, platform, telemetry, namespace=self._namespace).run()


def _words(cause: BaseException | None) -> str:
    """A group of tasks says no more than that one of them failed."""
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return "no cause known" if cause is None else str(cause) or repr(cause)


def _capacity(manifest: Object) -> dict[str, str]:
    """Every extended resource that the fleet asks for; nothing behind them is real."""
    found: dict[str, str] = {}
    for tier in manifest["spec"]["tiers"]:
        roles = (tier.get(role, {}).get("accelerator") for role in ("prefill", "decode"))
        for accelerator in (tier["accelerator"], *roles):
            if accelerator is not None and accelerator["type"] != "cpu":
                found[accelerator.get("resource", DEFAULT_RESOURCE)] = DEVICES
        if nic := tier.get("kvTransfer", {}).get("resource"):
            found[nic] = DEVICES
    return found


def _environment() -> dict[str, str]:
    """What pods inherit: the user's environment, with threads that leave room for the other processes of the fleet."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 3)))
    environment.setdefault("UCX_NET_DEVICES", "lo")  # else workers open a port on every network of this machine
    if (vllm := vllm_program()) is not None:
        environment[VLLM_ENV] = vllm
    return environment


def _log_to(path: Path) -> logging.Handler:
    """The operator's log goes to a bounded file: the terminal belongs to the user."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.raiseExceptions = False  # a full disk costs lines of the log, not tracebacks on the user's terminal
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per scrape would bury everything else
    return handler

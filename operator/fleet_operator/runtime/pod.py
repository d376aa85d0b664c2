"""One pod on this node: mount, init containers, containers, status, graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from fleet_operator.cluster.interface import POD, Cluster, ClusterError, ConflictError, NotFoundError, Object
from fleet_operator.runtime.container import Container, timestamp
from fleet_operator.runtime.launch import PodLauncher
from fleet_operator.runtime.settings import RuntimeSettings
from fleet_operator.runtime.status import ContainerView, PodView, pod_status
from fleet_operator.runtime.volumes import MountError, PodVolumes

logger = logging.getLogger(__name__)
_DEFAULT_GRACE_S = 30


class PodRunner:
    """Runs one pod until it is deleted; `run` is one task, `terminate` and `kill` end it."""

    def __init__(
        self, cluster: Cluster, pod: Object, ip: str, volumes: PodVolumes, launcher: PodLauncher, settings: RuntimeSettings
    ) -> None:
        self._cluster = cluster
        self._pod = pod
        self.namespace, self._name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self.uid = pod["metadata"]["uid"]
        self.ip = ip
        self.volumes = volumes
        self._launcher = launcher
        self._settings = settings
        self._started_at = timestamp(time.time())
        self._written: Object = pod.get("status") or {}
        self._dirty = asyncio.Event()
        self._deletion = asyncio.Event()
        self._grace_s = 0.0
        self._sooner: asyncio.TimerHandle | None = None
        self._stale = asyncio.Event()
        """Files could not be written."""
        self._unwritten = ""
        """Why, while it is so: the log cannot be written then, either."""
        self._waiting: dict[str, Any] | None = None
        self._init = [self._container(spec, "OnFailure") for spec in pod["spec"].get("initContainers") or []]
        self._containers = [self._container(spec) for spec in pod["spec"]["containers"]]

    async def run(self) -> None:
        """Run the pod; returns after its deletion was completed. Cancelling kills its processes and leaves the object."""
        writer = asyncio.create_task(self._write_statuses(), name=f"status {self._name}")
        work = asyncio.create_task(self._work(), name=f"pod {self._name}")
        again = asyncio.create_task(self._refresh_again(), name=f"files {self._name}")
        try:
            self._changed()
            await self._deletion.wait()
            await self._stop(self._grace_s)
            await _end(work)
            await _end(writer)
            try:
                await self._write_status()
            except ClusterError as error:  # its last status; that it is gone says more, and must be said
                logger.warning("pod=%s/%s last status not written: %s", self.namespace, self._name, error)
            await self._finish_deletion()
        finally:
            for task in (work, writer, again):
                await _end(task)
            if self._sooner is not None:
                self._sooner.cancel()
            self.volumes.remove()

    def terminate(self, grace_s: float) -> None:
        """The pod was deleted: stop it within `grace_s`. Whoever deletes it again may only shorten that, from then on."""
        if not self._deletion.is_set():
            self._grace_s = grace_s
            self._deletion.set()
        elif grace_s < self._grace_s:
            self._grace_s = grace_s
            if self._sooner is not None:
                self._sooner.cancel()
            self._sooner = asyncio.get_running_loop().call_later(grace_s, self._kill)

    def _kill(self) -> None:
        for container in (*self._init, *self._containers):
            container.kill()

    async def _work(self) -> None:
        try:
            await self._run_containers()
        except Exception as error:
            # One pod's trouble is its own: it shows in its status and log, and the node goes on.
            logger.exception("pod=%s/%s failed", self.namespace, self._name)
            self._waiting = {"reason": "CreateContainerError", "message": f"process runtime: {error!r}"}
            self._changed()

    async def _run_containers(self) -> None:
        await self._mount()
        policy = self._pod["spec"].get("restartPolicy", "Always")
        for container in self._init:
            if await container.run() != 0 and policy == "Never":
                return
        async with asyncio.TaskGroup() as group:
            if self.volumes.has_tokens:
                group.create_task(self._renew_tokens())
            for container in self._containers:
                group.create_task(container.run())

    async def _mount(self) -> None:
        delay_s = self._settings.retry_s
        while True:
            try:
                await self.volumes.mount()
            except (MountError, ClusterError, OSError) as error:
                self._waiting = {"reason": "ContainerCreating", "message": str(error)}
                self._changed()
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, self._settings.retry_cap_s)
            else:
                self._waiting = None
                return

    async def _renew_tokens(self) -> None:
        while True:
            await asyncio.sleep(self._settings.token_s * 0.8)
            await self.refresh()

    async def refresh(self) -> None:
        """Files of its volumes as their sources are now. What cannot be written (a full disk) stays as it was, and is tried
        again."""
        with contextlib.suppress(MountError, ClusterError):
            try:
                await self.volumes.refresh()
                self._tell_unwritten("")
            except OSError as error:
                logger.warning("pod=%s/%s files=%s not refreshed: %s", self.namespace, self._name, error.filename, error.strerror)
                self._tell_unwritten(f"its files are not written: {error.filename}: {error.strerror}")
                self._stale.set()

    def _tell_unwritten(self, why: str) -> None:
        if why != self._unwritten:
            self._unwritten = why
            self._changed()

    async def _refresh_again(self) -> None:
        while True:
            await self._stale.wait()
            await asyncio.sleep(self._settings.retry_cap_s)
            self._stale.clear()
            await self.refresh()

    async def _stop(self, grace_s: float) -> None:
        results = await asyncio.gather(*(c.stop(grace_s) for c in [*self._init, *self._containers]), return_exceptions=True)
        for error in [result for result in results if isinstance(result, Exception)]:
            logger.error("pod=%s/%s stop failed: %r", self.namespace, self._name, error)

    def _container(self, spec: dict[str, Any], policy: str | None = None) -> Container:
        pod_policy = self._pod["spec"].get("restartPolicy", "Always")
        if policy and pod_policy == "Never":
            policy = "Never"
        before = {status["name"]: status for status in self._written.get("containerStatuses") or []}.get(spec["name"], {})
        # a pod that ran under an earlier runtime has lost its processes: this is a restart
        restarts = before.get("restartCount", 0) + 1 if before.get("containerID") else 0
        return Container(
            spec,
            self._launcher,
            self._settings,
            self._changed,
            restart_policy=policy or pod_policy,
            restarts=restarts,
            grace_s=float(self._pod["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)),
        )

    def _changed(self) -> None:
        self._dirty.set()

    async def _write_statuses(self) -> None:
        delay_s = self._settings.retry_s
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._write_status()
                delay_s = self._settings.retry_s
            except NotFoundError:
                return
            except ClusterError as error:
                logger.warning("pod=%s/%s status not written: %s", self.namespace, self._name, error)
                self._dirty.set()
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, self._settings.retry_cap_s)

    async def _write_status(self) -> None:
        status = pod_status(self._view(), self._written, timestamp(time.time()))
        if any(self._written.get(key) != value for key, value in status.items()):
            with contextlib.suppress(NotFoundError):
                await self._cluster.patch_status(POD, self.namespace, self._name, status)
            self._written = status

    def _view(self) -> PodView:
        waiting = self._waiting or ({"reason": "PodInitializing"} if not all(c.view.ended for c in self._init) else None)
        containers = [_held(c.view, waiting) if waiting else c.view for c in self._containers]
        return PodView(self.ip, "127.0.0.1", self._started_at, [c.view for c in self._init], containers, self._unwritten)

    async def _finish_deletion(self) -> None:
        delay_s = self._settings.retry_s
        while True:
            try:
                await self._cluster.delete(POD, self.namespace, self._name, uid=self.uid, grace_s=0)
                return
            except (NotFoundError, ConflictError):
                return
            except ClusterError as error:
                logger.warning("pod=%s/%s not removed yet: %s", self.namespace, self._name, error)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, self._settings.retry_cap_s)


def _held(view: ContainerView, waiting: dict[str, Any]) -> ContainerView:
    return ContainerView(view.name, view.image, {"waiting": waiting}, view.last_state, view.restarts, ready=False, started=False)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel and wait; an error of the task is logged, as nobody else awaits it."""
    task.cancel()
    [result] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(result, Exception):
        logger.error("task=%s failed: %r", task.get_name(), result)

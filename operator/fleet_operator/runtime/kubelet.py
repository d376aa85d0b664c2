"""The process runtime of one node: watches its pods and keeps one `PodRunner` for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from fleet_operator.cluster.interface import CONFIG_MAP, POD, Cluster, Kind, Object, WatchEvent
from fleet_operator.cluster.kinds import SECRET
from fleet_operator.runtime.addresses import Addresses
from fleet_operator.runtime.hosts import Hosts
from fleet_operator.runtime.launch import PodLauncher
from fleet_operator.runtime.leftovers import kill_leftovers, kill_marked, kill_orphans, mark_of
from fleet_operator.runtime.node import NodeHeart
from fleet_operator.runtime.pod import PodRunner
from fleet_operator.runtime.settings import RuntimeSettings
from fleet_operator.runtime.volumes import ApiAccess, PodVolumes, VolumeSources
from fleet_worker import segments
from fleet_worker.config import HOSTS_ENV

logger = logging.getLogger(__name__)
_DEFAULTS = RuntimeSettings()


class ProcessKubelet:
    """Runs the pods bound to `node_name` as local processes until `run` is cancelled, then kills them all."""

    def __init__(
        self,
        cluster: Cluster,
        node_name: str,
        capacity: Mapping[str, str],
        state_dir: Path,
        env: Mapping[str, str],
        *,
        api: ApiAccess | None = None,
        pvc_dirs: Mapping[str, Path] | None = None,
        node_labels: Mapping[str, str] | None = None,
        settings: RuntimeSettings = _DEFAULTS,
    ) -> None:
        self._cluster = cluster
        self._node = node_name
        self._heart = NodeHeart(cluster, node_name, capacity, settings.heartbeat_s, node_labels)
        self.state_dir = state_dir
        self._hosts = Hosts(state_dir)
        self._env = {**env, HOSTS_ENV: str(self._hosts.path)}
        self._api = api
        self._sources = VolumeSources(cluster, dict(pvc_dirs or {}), api, settings.token_s)
        self._settings = settings
        self._addresses = Addresses()
        self._runners: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.ready = asyncio.Event()
        """Set once the node is registered and pods are watched."""

    async def run(self) -> None:
        """Until cancelled. On the way in it kills what an earlier runtime with this state directory left."""
        self.state_dir.mkdir(parents=True, exist_ok=True)
        killed = kill_leftovers(self.state_dir)
        if killed:
            logger.warning("node=%s killed %d processes that an earlier runtime left", self._node, killed)
        try:
            await self._heart.register()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heart.beat())
                group.create_task(self._follow_pods())
                group.create_task(self._follow_files(CONFIG_MAP, "configMap"))
                group.create_task(self._follow_files(SECRET, "secret"))
        finally:
            await self._end()

    def log_path(self, pod: str, container: str) -> Path:
        """Where a container's output is kept."""
        return self.state_dir / "logs" / pod / f"{container}.log"

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        kill_marked(mark_of(self.state_dir))
        kill_orphans(self.state_dir / "pids" if self._settings.alone else None)
        segments.sweep()
        self._addresses.close()
        await self._heart.leave()

    async def _follow_pods(self) -> None:
        async for event in self._cluster.watch(POD):
            if event.type == "SYNCED":
                self.ready.set()
                continue
            self._hosts.see(event)
            if self._is_ours(event):
                self._handle(event)

    def _is_ours(self, event: WatchEvent) -> bool:
        if event.object["metadata"]["uid"] in self._runners:
            return True
        return bool((event.object.get("spec") or {}).get("nodeName") == self._node)

    def _handle(self, event: WatchEvent) -> None:
        metadata = event.object["metadata"]
        runner = self._runners.get(metadata["uid"])
        if event.type == "DELETED":
            if runner is not None:
                runner.terminate(0)
            return
        if runner is None:
            ended = (event.object.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            if ended and "deletionTimestamp" not in metadata:
                return
            runner = self._start(event.object)
        if "deletionTimestamp" in metadata:
            runner.terminate(float(metadata.get("deletionGracePeriodSeconds") or 0))

    def _start(self, pod: Object) -> PodRunner:
        uid = pod["metadata"]["uid"]
        ip = self._addresses.take()
        volumes = PodVolumes(pod, self.state_dir / "pods" / uid, self._sources)
        launcher = PodLauncher(self._cluster, pod, ip, volumes, self.state_dir, self._env, self._settings, self._api)
        runner = PodRunner(self._cluster, pod, ip, volumes, launcher, self._settings)
        self._runners[uid] = runner
        self._tasks[uid] = asyncio.create_task(self._run(runner), name=f"pod {pod['metadata']['name']}")
        return runner

    async def _run(self, runner: PodRunner) -> None:
        try:
            await runner.run()  # /dev/shm is no pod's own here, and guards who would empty it may be among whom it killed
        except Exception:
            logger.exception("pod uid=%s", runner.uid)
        finally:
            self._runners.pop(runner.uid, None)
            self._tasks.pop(runner.uid, None)
            self._addresses.give_back(runner.ip)
            segments.sweep()

    async def _follow_files(self, kind: Kind, source: str) -> None:
        """Keep the files of volumes current whose contents come from objects of a kind."""
        async for event in self._cluster.watch(kind):
            if event.type in ("ADDED", "MODIFIED"):
                await self._refresh(source, event.object["metadata"])

    async def _refresh(self, source: str, metadata: Object) -> None:
        for runner in list(self._runners.values()):
            if metadata["namespace"] == runner.namespace and (source, metadata["name"]) in runner.volumes.files_from:
                await runner.refresh()

"""From a container's specification to a running process: environment, paths, command, log."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fleet_operator.cluster.interface import CONFIG_MAP, Cluster, Kind, NotFoundError, Object
from fleet_operator.cluster.kinds import SECRET
from fleet_operator.runtime.container import LaunchError
from fleet_operator.runtime.leftovers import MARK, mark_of
from fleet_operator.runtime.logs import ContainerLog
from fleet_operator.runtime.paths import command_line, expand, mount_table, translate
from fleet_operator.runtime.probing import Target, named_ports
from fleet_operator.runtime.process import ContainerProcess, start
from fleet_operator.runtime.settings import RuntimeSettings
from fleet_operator.runtime.volumes import SERVICE_ACCOUNT_PATH, ApiAccess, PodVolumes, field_of

_CONFIG_ERROR: Final = "CreateContainerConfigError"
_CREATE_ERROR: Final = "CreateContainerError"


class PodLauncher:
    """Starts the containers of one pod on its address."""

    def __init__(
        self,
        cluster: Cluster,
        pod: Object,
        ip: str,
        volumes: PodVolumes,
        state_dir: Path,
        env: Mapping[str, str],
        settings: RuntimeSettings,
        api: ApiAccess | None,
    ) -> None:
        self._cluster = cluster
        self._pod = pod
        self._ip = ip
        self._volumes = volumes
        self._state_dir = state_dir
        self._env = env
        self._settings = settings
        self._api = api

    async def start(self, container: Mapping[str, Any]) -> ContainerProcess:
        """See `Launcher.start`."""
        name, uid = container["name"], self._pod["metadata"]["uid"]
        mounts = self._mounts(container)
        env = await self.environment(container, mounts)
        argv = command_line(container, env, mounts)
        if not argv:
            raise LaunchError(_CREATE_ERROR, f'container "{name}" has no command, and the process runtime has no images')
        program = shutil.which(argv[0], path=env["PATH"])
        if program is None:
            raise LaunchError(_CREATE_ERROR, f'exec: "{argv[0]}": executable file not found in $PATH')
        try:
            work = self._work_dir(container, mounts)
            log = ContainerLog(self._log_path(name), self._settings.log_bytes)
        except OSError as error:
            raise LaunchError(_CREATE_ERROR, f"{error.filename}: {error.strerror}") from error
        try:
            return start(
                [program, *argv[1:]],
                env,
                work,
                log,
                message_bytes=self._settings.message_bytes,
                mark=mark_of(self._state_dir, uid, name),
                pids=self._state_dir / "pids",
                alone=self._settings.alone,
            )
        except OSError as error:
            log.close()
            at = f" ({error.filename})" if error.filename else ""
            raise LaunchError(_CREATE_ERROR, f'exec: "{argv[0]}": {error.strerror}{at}') from error

    def target(self, container: Mapping[str, Any]) -> Target:
        """See `Launcher.target`."""

        async def run(command: list[str], timeout_s: float) -> int:
            return await self._exec(container, command, timeout_s)

        return Target(self._ip, named_ports(container), run, self._settings.body_bytes)

    async def environment(self, container: Mapping[str, Any], mounts: Mapping[str, Path]) -> dict[str, str]:
        """The runtime's environment, then the container's, with $(NAME) expanded and mount paths translated."""
        metadata = self._pod["metadata"]
        env = {**self._env, "HOSTNAME": metadata["name"], "FLEET_BIND_HOST": self._ip, "FLEET_POD_IP": self._ip}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self._env.get('PATH', os.defpath)}"
        env |= self._api_environment(mounts)
        given: dict[str, str] = {}
        for source in container.get("envFrom") or []:
            given |= await self._all_of(source)
        for item in container.get("env") or []:
            value = await self._value_from(item["valueFrom"]) if "valueFrom" in item else item.get("value", "")
            if value is not None:
                given[item["name"]] = expand(value, given)
        env |= {name: translate(value, mounts) for name, value in given.items()}
        env[MARK] = mark_of(self._state_dir, metadata["uid"], container["name"])
        return env

    def _api_environment(self, mounts: Mapping[str, Path]) -> dict[str, str]:
        """Where the API server is, for a container that mounts its service account."""
        if self._api is None or SERVICE_ACCOUNT_PATH not in mounts:
            return {}
        account = mounts[SERVICE_ACCOUNT_PATH]
        return {
            "FLEET_KUBE_URL": self._api.url,
            "FLEET_KUBE_TOKEN_FILE": str(account / "token"),
            "FLEET_KUBE_CA_FILE": str(account / "ca.crt"),
        }

    async def _value_from(self, source: Mapping[str, Any]) -> str | None:
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            try:
                return field_of(self._pod, path, self._ip)
            except KeyError:
                raise LaunchError(_CONFIG_ERROR, f"the process runtime knows no fieldRef {path}") from None
        if "configMapKeyRef" in source:
            return await self._key(CONFIG_MAP, "configmap", source["configMapKeyRef"])
        if "secretKeyRef" in source:
            return await self._key(SECRET, "secret", source["secretKeyRef"])
        raise LaunchError(_CONFIG_ERROR, f"the process runtime knows no {', '.join(source)}")

    async def _key(self, kind: Kind, what: str, reference: Mapping[str, Any]) -> str | None:
        data = await self._data(kind, what, reference)
        if reference["key"] in data:
            return data[reference["key"]]
        if reference.get("optional"):
            return None
        namespace = self._pod["metadata"]["namespace"]
        raise LaunchError(_CONFIG_ERROR, f"couldn't find key {reference['key']} in {what} {namespace}/{reference['name']}")

    async def _all_of(self, source: Mapping[str, Any]) -> dict[str, str]:
        prefix = source.get("prefix", "")
        if "configMapRef" in source:
            data = await self._data(CONFIG_MAP, "configmap", source["configMapRef"])
        else:
            data = await self._data(SECRET, "secret", source["secretRef"])
        return {prefix + key: value for key, value in data.items()}

    async def _data(self, kind: Kind, what: str, reference: Mapping[str, Any]) -> dict[str, str]:
        try:
            found = await self._cluster.get(kind, self._pod["metadata"]["namespace"], reference["name"])
        except NotFoundError:
            if reference.get("optional"):
                return {}
            raise LaunchError(_CONFIG_ERROR, f'{what} "{reference["name"]}" not found') from None
        data = found.get("data") or {}
        return data if kind == CONFIG_MAP else {key: base64.b64decode(text).decode() for key, text in data.items()}

    def _mounts(self, container: Mapping[str, Any]) -> dict[str, Path]:
        try:
            return mount_table(container, self._volumes.directories)
        except KeyError as error:
            raise LaunchError(_CONFIG_ERROR, f"volume {error} is not defined") from None

    def _work_dir(self, container: Mapping[str, Any], mounts: Mapping[str, Path]) -> Path:
        if container.get("workingDir"):
            return Path(translate(container["workingDir"], mounts))
        work = self._state_dir / "pods" / str(self._pod["metadata"]["uid"]) / "work" / str(container["name"])
        work.mkdir(parents=True, exist_ok=True)
        return work

    def _log_path(self, container: str) -> Path:
        return self._state_dir / "logs" / str(self._pod["metadata"]["name"]) / f"{container}.log"

    async def _exec(self, container: Mapping[str, Any], command: list[str], timeout_s: float) -> int:
        """Run a probe's or hook's command beside the container; 124 when it takes too long."""
        mounts = self._mounts(container)
        env = await self.environment(container, mounts)
        log = ContainerLog(self._log_path(f"{container['name']}.exec"), self._settings.log_bytes)
        argv = [translate(expand(word, env), mounts) for word in command]
        mark = mark_of(self._state_dir, self._pod["metadata"]["uid"], f"{container['name']}.exec")
        env[MARK] = mark
        process = start(
            argv,
            env,
            self._work_dir(container, mounts),
            log,
            message_bytes=self._settings.message_bytes,
            mark=mark,
            pids=self._state_dir / "pids",
            alone=self._settings.alone,
        )
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    return await process.wait()
            return 124
        finally:
            process.close()

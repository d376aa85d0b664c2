"""A pod's volumes as host directories: hostPath, emptyDir, configMap, secret, persistentVolumeClaim, projected."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from fleet_operator.cluster.interface import CONFIG_MAP, Cluster, NotFoundError, Object
from fleet_operator.cluster.kinds import PV, PVC, SECRET

SERVICE_ACCOUNT_PATH: Final = "/var/run/secrets/kubernetes.io/serviceaccount"


class ApiAccess(Protocol):
    """How containers reach the API server; absent when the store is in memory."""

    url: str
    ca_file: Path | None

    async def token(self, namespace: str, service_account: str, audience: str | None, expires_s: int, pod: Object) -> str:
        """A token bound to the pod (TokenRequest)."""
        ...


class MountError(Exception):
    """A volume cannot be made now; the message names it."""


@dataclass(frozen=True, slots=True)
class VolumeSources:
    """Where volumes come from."""

    cluster: Cluster
    pvc_dirs: Mapping[str, Path]
    """Claim name to directory; used before the cluster's PersistentVolumes."""
    api: ApiAccess | None
    token_s: int


class PodVolumes:
    """The volumes of one pod below `root`. `refresh` again makes configMaps, secrets and tokens current."""

    def __init__(self, pod: Object, root: Path, sources: VolumeSources) -> None:
        self._pod = pod
        self._namespace = pod["metadata"]["namespace"]
        self._root = root
        self._sources = sources
        self.directories: dict[str, Path] = {}

    @property
    def files_from(self) -> set[tuple[str, str]]:
        """("configMap" or "secret", name) of each object that files of this pod come from."""
        found = set()
        for volume in self._pod["spec"].get("volumes") or []:
            for part in [volume, *(volume.get("projected", {}).get("sources") or [])]:
                found |= {("configMap", part["configMap"].get("name", ""))} if "configMap" in part else set()
                found |= {("secret", _secret_name(part["secret"]))} if "secret" in part else set()
        return found

    @property
    def has_tokens(self) -> bool:
        """Whether a token must be renewed while the pod runs."""
        volumes = self._pod["spec"].get("volumes") or []
        return any("serviceAccountToken" in part for v in volumes for part in v.get("projected", {}).get("sources") or [])

    async def mount(self) -> None:
        """Make every volume; MountError."""
        for volume in self._pod["spec"].get("volumes") or []:
            self.directories[volume["name"]] = await self._directory(volume)

    async def refresh(self) -> None:
        """Write changed configMap, secret and token files again; MountError."""
        for volume in self._pod["spec"].get("volumes") or []:
            if {"configMap", "secret", "projected"} & volume.keys():
                await self._directory(volume)

    def remove(self) -> None:
        """Delete what belongs to the pod."""
        shutil.rmtree(self._root, ignore_errors=True)

    async def _directory(self, volume: Mapping[str, Any]) -> Path:
        name = str(volume["name"])
        if "hostPath" in volume:
            return _host_path(name, volume["hostPath"])
        if "persistentVolumeClaim" in volume:
            return await self._claim(name, volume["persistentVolumeClaim"]["claimName"])
        files: dict[str, bytes] = {}
        for source in [volume, *(volume.get("projected", {}).get("sources") or [])]:
            files |= await self._files(name, source)
        directory = self._root / name
        directory.mkdir(parents=True, exist_ok=True)
        if "emptyDir" not in volume:
            write_files(directory, files)
        return directory

    async def _files(self, volume: str, source: Mapping[str, Any]) -> dict[str, bytes]:
        if "configMap" in source:
            found = await self._object(volume, source["configMap"], "configmap", source["configMap"].get("name", ""))
            return _selected(source["configMap"], {key: text.encode() for key, text in (found.get("data") or {}).items()})
        if "secret" in source:
            secret = source["secret"]
            found = await self._object(volume, secret, "secret", _secret_name(secret))
            return _selected(secret, {key: base64.b64decode(text) for key, text in (found.get("data") or {}).items()})
        if "serviceAccountToken" in source:
            return await self._token(source["serviceAccountToken"])
        if "downwardAPI" in source:
            items = source["downwardAPI"].get("items") or []
            return {item["path"]: field_of(self._pod, item["fieldRef"]["fieldPath"]).encode() for item in items}
        if {"emptyDir", "projected"} & source.keys():
            return {}
        raise MountError(f'volume "{volume}": the process runtime knows no {", ".join(source.keys() - {"name"})} volumes')

    async def _object(self, volume: str, source: Mapping[str, Any], what: str, name: str) -> Object:
        try:
            return await self._sources.cluster.get(CONFIG_MAP if what == "configmap" else SECRET, self._namespace, name)
        except NotFoundError:
            if source.get("optional"):
                return {}
            raise MountError(f'MountVolume.SetUp failed for volume "{volume}": {what} "{name}" not found') from None

    async def _token(self, source: Mapping[str, Any]) -> dict[str, bytes]:
        api = self._sources.api
        if api is None:
            return {}
        account = self._pod["spec"].get("serviceAccountName") or "default"
        expires_s = int(source.get("expirationSeconds") or self._sources.token_s)
        token = await api.token(self._namespace, account, source.get("audience"), expires_s, self._pod)
        return {source["path"]: token.encode()}

    async def _claim(self, volume: str, claim: str) -> Path:
        if claim in self._sources.pvc_dirs:
            return _existing(volume, self._sources.pvc_dirs[claim])
        try:
            bound = await self._sources.cluster.get(PVC, self._namespace, claim)
            name = bound["spec"].get("volumeName")
            if not name:
                raise MountError(f'volume "{volume}": persistentvolumeclaim "{claim}" is not bound')
            spec = (await self._sources.cluster.get(PV, None, name))["spec"]
        except NotFoundError as error:
            raise MountError(f'volume "{volume}": {error}') from None
        path = (spec.get("hostPath") or spec.get("local") or {}).get("path")
        if not path:
            raise MountError(f'volume "{volume}": persistentvolume "{name}" is neither hostPath nor local')
        return _existing(volume, Path(path))


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Make `directory` hold exactly `files`: each replaced atomically and only when it changed, as readers poll the times.
    OSError names the file."""
    wanted = {directory / name for name in files}
    for name, content in files.items():
        path = directory / name
        if path.exists() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.new")
        try:
            scratch.touch(mode=0o600)
            scratch.write_bytes(content)
            scratch.replace(path)
        except OSError as error:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
    for path in [path for path in directory.rglob("*") if path.is_file() and path not in wanted]:
        path.unlink()


def field_of(pod: Object, path: str, ip: str = "") -> str:
    """A downward API field; KeyError names one that is not supported."""
    metadata, spec = pod["metadata"], pod["spec"]
    for group in ("labels", "annotations"):
        if path.startswith(f"metadata.{group}['") and path.endswith("']"):
            return str((metadata.get(group) or {}).get(path[len(f"metadata.{group}['") : -2], ""))
    known: dict[str, Callable[[], str]] = {
        "metadata.name": lambda: metadata["name"],
        "metadata.namespace": lambda: metadata["namespace"],
        "metadata.uid": lambda: metadata["uid"],
        "spec.nodeName": lambda: spec.get("nodeName", ""),
        "spec.serviceAccountName": lambda: spec.get("serviceAccountName", "default"),
        "status.podIP": lambda: ip,
        "status.podIPs": lambda: ip,
        "status.hostIP": lambda: "127.0.0.1",
    }
    return known[path]()


def _secret_name(secret: Mapping[str, Any]) -> str:
    """Volumes and projected sources have different names for it."""
    return str(secret.get("secretName") or secret.get("name", ""))


def _selected(source: Mapping[str, Any], data: Mapping[str, bytes]) -> dict[str, bytes]:
    items = source.get("items")
    return {item["path"]: data[item["key"]] for item in items if item["key"] in data} if items else dict(data)


def _host_path(volume: str, source: Mapping[str, Any]) -> Path:
    path = Path(source["path"])
    if source.get("type") in ("DirectoryOrCreate",):
        path.mkdir(parents=True, exist_ok=True)
    if source.get("type") == "Directory" and not path.is_dir():
        raise MountError(f'MountVolume.SetUp failed for volume "{volume}": hostPath type check failed: {path} is not a directory')
    return path


def _existing(volume: str, path: Path) -> Path:
    if not path.is_dir():
        raise MountError(f'MountVolume.SetUp failed for volume "{volume}": {path} is not a directory')
    return path

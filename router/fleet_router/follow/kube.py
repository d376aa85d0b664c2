"""Follow one ConfigMap through the Kubernetes API: list, then watch; small enough to need no client library.

Rights that it needs: get, list and watch on that one ConfigMap. The token is read again for every connection, because the
kubelet rotates it. Errors keep the last good documents.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import msgspec

from fleet_router.follow.documents import Documents, parse
from fleet_wire.unreadable import UNREADABLE

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_TIMEOUT_S = 5.0
WATCH_S = 300
SILENCE_S = WATCH_S + 30.0
BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 5.0
MAX_LINE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is and who we are."""

    url: str
    token_file: Path
    ca_file: Path | None


class _Item(msgspec.Struct):
    """A ConfigMap, or what else an event is about; a page of something else in its place is a ValueError."""

    data: dict[str, str] | None = None


class _Version(msgspec.Struct, rename="camel"):
    resource_version: str


class _Page(msgspec.Struct):
    metadata: _Version
    items: tuple[_Item, ...] | None = None


class _Event(msgspec.Struct):
    type: str
    object: _Item


def api_server(env: Mapping[str, str]) -> ApiServer:
    """In-cluster settings, each of which an environment variable overrides; ValueError when there are none."""
    url = env.get("FLEET_KUBE_URL")
    if not url:
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("not in a cluster: neither FLEET_KUBE_URL nor KUBERNETES_SERVICE_HOST is set")
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    ca = env.get("FLEET_KUBE_CA_FILE", str(ACCOUNT / "ca.crt"))
    return ApiServer(url, Path(env.get("FLEET_KUBE_TOKEN_FILE", str(ACCOUNT / "token"))), Path(ca) if ca else None)


async def follow_kube(
    namespace: str, name: str, apply: Callable[[Documents], None], failed: Callable[[str], None], server: ApiServer
) -> None:
    """Call `apply` with every version of the ConfigMap, `failed` with every problem; for ever."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    backoff_s = BACKOFF_FIRST_S
    while True:
        try:
            version = await _list(server, path, name, apply, failed)
            backoff_s = BACKOFF_FIRST_S
            async for event in _watch(server, path, name, version):
                if event.type == "ERROR":
                    break  # 410: list again
                if event.type in ("ADDED", "MODIFIED"):
                    _deliver(event.object, apply, failed)
            await asyncio.sleep(BACKOFF_FIRST_S)  # an API server that ends every watch at once must not be asked in a loop
        except (OSError, EOFError, TimeoutError, *UNREADABLE, asyncio.LimitOverrunError) as error:
            failed(f"{type(error).__name__}: {error}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_MOST_S, backoff_s * 2)


def _deliver(item: _Item, apply: Callable[[Documents], None], failed: Callable[[str], None]) -> None:
    try:
        apply(parse(item.data or {}))
    except ValueError as error:
        failed(str(error))


async def _list(
    server: ApiServer, path: str, name: str, apply: Callable[[Documents], None], failed: Callable[[str], None]
) -> str:
    query = urlencode({"fieldSelector": f"metadata.name={name}"})
    body = b"".join([line async for line in _get(server, f"{path}?{query}")])
    found = msgspec.json.decode(body, type=_Page)
    for item in found.items or ():
        _deliver(item, apply, failed)
    return found.metadata.resource_version


async def _watch(server: ApiServer, path: str, name: str, version: str) -> AsyncIterator[_Event]:
    query = urlencode(
        {"fieldSelector": f"metadata.name={name}", "watch": "true", "resourceVersion": version, "timeoutSeconds": WATCH_S}
    )
    async for line in _get(server, f"{path}?{query}"):
        if line.strip():
            yield msgspec.json.decode(line, type=_Event)


async def _get(server: ApiServer, target: str) -> AsyncIterator[bytes]:
    """Lines of the answer's body; OSError on any status but 200."""
    parts = urlsplit(server.url)
    tls = ssl.create_default_context(cafile=server.ca_file) if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=MAX_LINE_BYTES)
    try:
        token = server.token_file.read_text().strip()
        head = f"GET {target} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {token}\r\naccept: application/json\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode())
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            raw = await reader.readuntil(b"\r\n\r\n")
        status = [*raw.split(b" ", 2), b"nothing"][1]
        if status != b"200":
            raise OSError(f"the API server answered {status.decode()} to {target.split('?', maxsplit=1)[0]}")
        chunked = b"transfer-encoding: chunked" in raw.lower()
        async for line in _chunked_lines(reader) if chunked else _plain_lines(reader):
            yield line
    finally:
        writer.close()


async def _plain_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        async with asyncio.timeout(SILENCE_S):
            line = await reader.readline()
        if not line:
            return
        yield line


async def _chunked_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    pending = b""
    while True:
        async with asyncio.timeout(SILENCE_S):
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            if size > MAX_LINE_BYTES:
                raise ValueError(f"a chunk of {size} bytes")
            data = (await reader.readexactly(size + 2))[:-2]
        if size == 0:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            yield line
        if len(pending) > MAX_LINE_BYTES:
            raise ValueError(f"a line longer than {MAX_LINE_BYTES} bytes")
    if pending:
        yield pending

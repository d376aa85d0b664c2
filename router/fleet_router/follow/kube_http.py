"""GET against an API server, line by line; small enough to need no client library."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 4 * 1024 * 1024
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is and who we are. The token is read again for every connection: the kubelet rotates it."""

    url: str
    token_file: Path
    ca_file: Path | None


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


async def get_lines(server: ApiServer, target: str, silence_s: float, accept: str = JSON) -> AsyncGenerator[bytes, None]:
    """Lines of the answer's body; OSError on any status but 200, TimeoutError after so much silence."""
    parts = urlsplit(server.url)
    tls = ssl.create_default_context(cafile=server.ca_file) if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=MAX_LINE_BYTES)
    try:
        token = server.token_file.read_text().strip()
        head = f"GET {target} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {token}\r\naccept: {accept}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode())
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            raw = await reader.readuntil(b"\r\n\r\n")
        status = [*raw.split(b" ", 2), b"nothing"][1]
        if status != b"200":
            raise OSError(f"the API server answered {status.decode()} to {target.split('?', maxsplit=1)[0]}")
        chunked = b"transfer-encoding: chunked" in raw.lower()
        async for line in (_chunked_lines if chunked else _plain_lines)(reader, silence_s):
            yield line
    finally:
        writer.close()


async def _plain_lines(reader: asyncio.StreamReader, silence_s: float) -> AsyncIterator[bytes]:
    while True:
        async with asyncio.timeout(silence_s):
            line = await reader.readline()
        if not line:
            return
        yield line


async def _chunked_lines(reader: asyncio.StreamReader, silence_s: float) -> AsyncIterator[bytes]:
    pending = b""
    while True:
        async with asyncio.timeout(silence_s):
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

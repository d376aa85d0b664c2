"""HTTP to the API server: raw dicts over the connections of the `kubernetes` package, errors as the named ones.

The generated clients and models stay unloaded (they cost more memory than the operator itself).
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import load_kube_config

from fleet_operator.cluster.account import ServiceAccount, service_account
from fleet_operator.cluster.interface import (
    ClusterError,
    ConflictError,
    CredentialsRefusedError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    Object,
    UnauthorizedError,
    UnavailableError,
)
from fleet_operator.cluster.trust import Trust


class GoneError(UnavailableError):
    """410: the resourceVersion or continue token is too old; list again."""

    reason = "Expired"


@dataclass(frozen=True, slots=True)
class KubeLimits:
    """Bounds of the API client; seconds."""

    request_s: float = 30.0
    """One request with its answer."""
    watch_s: int = 240
    """The server ends a watch after this; we go on from the last version."""
    silence_s: float = 70.0
    """No byte for this long on a watch means a dead connection: the API server sends a bookmark each minute."""
    line_bytes: int = 16 << 20
    """One object of a watch at most; etcd itself refuses values above 1.5 MiB."""
    page: int = 500
    """Objects per page of a list, the API's usual chunk."""
    backoff_base_s: float = 0.2
    backoff_cap_s: float = 10.0
    connections: int = 64
    """For requests. Watches have as many as there are kinds and namespaces to follow."""
    refused_s: float = 60.0
    """401 to everything for so long is no bad moment of the API server any more: our credentials are wrong."""


NO_SUCH_PATH = "404 page not found"
UNAUTHORIZED = 401
_BY_STATUS: Mapping[int, type[ClusterError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    405: InvalidError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
}


def error_of(status: int, body: bytes, retry_after: str | None = None) -> ClusterError:
    """The named error for an answer, with the API server's own message."""
    try:
        answer = json.loads(body)
        message = str(answer.get("message") or answer)
    except (ValueError, AttributeError):
        message = body.decode(errors="replace").strip()[:500]
    if status == 404 and message == NO_SUCH_PATH:  # of a group that it does not serve
        message = f"this cluster's API server has no such kind of object, or its CRD is not applied ({message})"
    # Server-side apply of an unknown field is answered with 500, though trying again never helps.
    refused = status == 500 and message.startswith("failed to create typed patch object")
    kind = InvalidError if refused else _BY_STATUS.get(status, UnavailableError)
    error = kind(message or f"the API server answered {status}")
    if isinstance(error, UnavailableError) and retry_after and retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error


T = TypeVar("T")
_ANYTHING: msgspec.json.Decoder[Object] = msgspec.json.Decoder()


def decoded(decoder: msgspec.json.Decoder[T], answer: bytes) -> T:
    """What an answer says; UnavailableError when it is not what was asked for (a proxy's page)."""
    try:
        return decoder.decode(answer)
    except msgspec.DecodeError as error:
        raise UnavailableError(f"not an answer of an API server: {error}") from error


async def configuration_from(kubeconfig: Path | None, context: str | None = None) -> Configuration:
    """From a kubeconfig file, or from the pod's service account when `kubeconfig` is None; NotInClusterError."""
    configuration = Configuration()
    if kubeconfig is None:
        _use(configuration, service_account(os.environ))
    else:
        await load_kube_config(
            config_file=str(kubeconfig), context=context, client_configuration=configuration, persist_config=False
        )
    return configuration


def _use(configuration: Configuration, account: ServiceAccount) -> None:
    """The client asks the hook before every request: a token that the kubelet renewed is used at once."""

    def read_token(configuration: Configuration) -> None:
        configuration.api_key["BearerToken"] = f"Bearer {account.token()}"

    configuration.host = account.url
    configuration.ssl_ca_cert = str(account.ca_file) if account.ca_file else None
    read_token(configuration)
    configuration.refresh_api_key_hook = read_token


TLS_CLOSE_S = 0.25
"""aiohttp says goodbye on TLS connections after its session is closed; a loop that ends at once leaves their sockets to the
garbage collector (aiohttp documentation, "Graceful Shutdown")."""


_GO_ESCAPES = tuple((letter.encode(), f"\\u{ord(letter):04x}".encode()) for letter in "<>&\u2028\u2029")


def as_go_writes(body: Object | list[Object]) -> bytes:
    """JSON to the letter as Go writes a map: sorted, and some letters escaped. A ControllerRevision's data is kept as it was
    sent, and each patch (garbage collection's `--cascade=orphan`, kubectl's) writes it anew: spelled in another way it counts as
    changed, which the API refuses for ever. Whole numbers must be no floats."""
    written = msgspec.json.encode(body, order="sorted")
    for letter, escape in _GO_ESCAPES:  # outside of texts JSON has none of them
        written = written.replace(letter, escape)
    return written


class _Rest(RESTClientObject):  # type: ignore[misc]
    """TLS, client certificates and proxies as the package configures them. Its `request` is not used: it encodes bodies with the
    standard library's json."""

    pool_manager: aiohttp.ClientSession | None
    watches: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """The pool of connections, made when a loop runs."""
        pool: aiohttp.ClientSession | None = self.pool_manager
        if pool is None:
            pool = self.pool_manager = self._create_pool_manager()
        return pool

    def watching(self) -> aiohttp.ClientSession:
        """The same without a bound: what lasts for ever would keep all others from having a connection."""
        if self.watches is None:
            self.maxsize, bound = 0, self.maxsize
            self.watches = self._create_pool_manager()
            self.maxsize = bound
        return self.watches

    async def close(self) -> None:
        """Both."""
        await super().close()
        if self.watches is not None:
            await self.watches.close()


class KubeHttp:
    """Requests with the credentials of one configuration."""

    def __init__(
        self,
        configuration: Configuration,
        limits: KubeLimits,
        trace: aiohttp.TraceConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        configuration.connection_pool_maxsize = limits.connections
        # else aiohttp looks for proxies and reads a netrc file at every request: a third of what a write costs
        configuration.client_session_kwargs = {"trust_env": False, "trace_configs": [trace] if trace is not None else None}
        self.configuration = configuration
        self._limits = limits
        self._within = aiohttp.ClientTimeout(total=limits.request_s)
        self._clock = clock
        self._refused_at: float | None = None
        """Of the first 401 since an answer to somebody who was known."""
        self._rest = _Rest(configuration)
        name = configuration.tls_server_name
        self._named = {"server_hostname": name} if name else {}
        """A kubeconfig may say whose certificate is shown where it sends us: a tunnel, a gateway."""
        self._trust = Trust(self._rest.ssl_context, Path(configuration.ssl_ca_cert) if configuration.ssl_ca_cert else None)

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int] | None = None,
        body: Object | list[Object] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        decoder: msgspec.json.Decoder[Any] = _ANYTHING,
    ) -> Any:
        """The answer's JSON, as `decoder` reads it; the named errors, never aiohttp's."""
        session, types = self._rest.session(), (content_type, accept)
        async with self._answer(session, method, path, query or {}, body, types, self._within) as answer:
            return decoded(decoder, await answer.read())

    async def lines(self, path: str, query: Mapping[str, str | int]) -> AsyncGenerator[Object, None]:
        """The JSON lines of a watch, until the server ends it or it fails."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._limits.request_s, sock_read=self._limits.silence_s)
        session, types = self._rest.watching(), ("application/json", "application/json")
        async with self._answer(session, "GET", path, query, None, types, timeout) as answer:
            async for line in split_lines(answer.content.iter_any(), self._limits.line_bytes):
                yield msgspec.json.decode(line)

    async def close(self) -> None:
        """Close all connections."""
        await self._rest.close()
        await asyncio.sleep(TLS_CLOSE_S)

    @asynccontextmanager
    async def _answer(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        query: Mapping[str, str | int],
        body: Object | list[Object] | None,
        types: tuple[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        url = f"{self.configuration.host}{path}" + (f"?{_encoded(tuple(query.items()))}" if query else "")
        headers = {"Content-Type": types[0], "Accept": types[1]}
        self._trust.refresh()
        token = await self.configuration.get_api_key_with_prefix("BearerToken")
        if token:
            headers["Authorization"] = token
        try:
            data = None if body is None else as_go_writes(body)
            proxy = {"proxy": self._rest.proxy, "proxy_headers": self._rest.proxy_headers} if self._rest.proxy else {}
            more: dict[str, Any] = {**proxy, **self._named}
            async with session.request(method, url, headers=headers, data=data, timeout=timeout, **more) as answer:
                if answer.status == UNAUTHORIZED:
                    raise self._refused(error_of(UNAUTHORIZED, await answer.read()))
                self._refused_at = None
                if answer.status >= 400:
                    raise error_of(answer.status, await answer.read(), answer.headers.get("Retry-After"))
                yield answer
        except TimeoutError as error:
            raise UnavailableError(f"no answer from the API server at {self.configuration.host} in time") from error
        except (aiohttp.ClientError, OSError, ssl.SSLError, ValueError) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error

    def _refused(self, said: ClusterError) -> ClusterError:
        """What a 401 means: the same credentials may be taken a moment later, or never."""
        now = self._clock()
        self._refused_at = now if self._refused_at is None else self._refused_at
        host, refused_s, most_s = self.configuration.host, now - self._refused_at, self._limits.refused_s
        if refused_s >= most_s:
            return CredentialsRefusedError(f"the API server at {host} has refused our credentials for {refused_s:.0f} s: {said}")
        words = f"the API server at {host} refuses our credentials ({said}); after {most_s:g} s of that they are taken for wrong"
        return UnauthorizedError(words)


@lru_cache(maxsize=64)
def _encoded(query: tuple[tuple[str, str | int], ...]) -> str:
    """Of nearly all requests it is one of a dozen."""
    return urlencode(query)


async def split_lines(chunks: AsyncIterator[bytes], most_bytes: int) -> AsyncIterator[bytes]:
    """Lines without their ends, out of chunks of any size, but not a last one that was cut off; ValueError above `most_bytes`."""
    rest: list[bytes] = []
    held_bytes = 0
    async for chunk in chunks:
        *whole, tail = chunk.split(b"\n")
        for part in whole:
            yield b"".join((*rest, part))
            rest, held_bytes = [], 0
        rest.append(tail)
        held_bytes += len(tail)
        if held_bytes > most_bytes:
            raise ValueError(f"a line of a watch is longer than {most_bytes} bytes")


class Backoff:
    """Growing pauses between attempts, bounded; `reset` after a success."""

    def __init__(self, limits: KubeLimits) -> None:
        self._limits = limits
        self._next_s = limits.backoff_base_s

    def reset(self) -> None:
        """The next pause is the shortest again."""
        self._next_s = self._limits.backoff_base_s

    async def pause(self, error: ClusterError) -> None:
        """Wait as long as the server asked for, else twice as long as the last time."""
        asked_s = error.retry_after_s if isinstance(error, UnavailableError) else None
        await asyncio.sleep(min(self._limits.backoff_cap_s, asked_s or self._next_s))
        self._next_s = min(self._limits.backoff_cap_s, self._next_s * 2)

"""Certificates that change while a router serves: half-written, while it begins, while nothing is left to open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from cryptography import x509

from e2e.certs import Authority
from fleet_router import tls
from fleet_router.process import Router, Settings
from fleet_router.tls import TlsFiles
from tests.fleet_router.rig import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "POLL_S", 0.01)


@contextlib.asynccontextmanager
async def serving(files: TlsFiles) -> AsyncIterator[Router]:
    router = Router(Settings("dir:/none", "127.0.0.1", 0, tls=files))
    assert await router._open()
    yield router
    for port in router._ports:
        await port.close()


@contextlib.asynccontextmanager
async def following(router: Router) -> AsyncIterator[None]:
    """What the router does beside its connections, as far as certificates go."""
    *others, follow = router._tasks()
    for other in others:
        other.close()
    task = asyncio.create_task(follow)
    yield
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def served(router: Router) -> str:
    """Who the router says that it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(*router._ports[0].addresses[0], ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return "new" if b"new" in found else "old"


async def until_the_new_one_is_served(router: Router) -> None:
    for _ in range(200):
        if await served(router) == "new":
            return
        await asyncio.sleep(0.01)
    pytest.fail("the old one is served for ever")


def changed(authority: Authority, files: TlsFiles) -> None:
    cert, key = authority.leaf("next", "new")
    key.rename(files.key)
    cert.rename(files.cert)


def test_certificates_that_change_while_a_router_begins_are_read_again(tmp_path: Path):
    """Those of its first second were taken for those that it serves."""
    authority = Authority(tmp_path, "ca")
    files = TlsFiles(*authority.leaf("first", "old"))

    async def go() -> None:
        async with serving(files) as router:
            changed(authority, files)
            async with following(router):
                await until_the_new_one_is_served(router)

    uvloop.run(go())  # as routers do: of what asyncio has accepted but not yet met, a listener that closes drops one


def test_new_certificates_for_which_nothing_can_be_opened_are_served_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The change was lost, and the old listeners were nobody's: a drain never closed them."""
    authority, said = Authority(tmp_path, "ca"), list[str]()
    files = TlsFiles(*authority.leaf("first", "old"))
    dup = socket.socket.dup
    left = [2]

    def full(one: socket.socket) -> socket.socket:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return dup(one)

    async def go() -> None:
        async with serving(files) as router:
            monkeypatch.setattr(router, "failed", said.append)
            async with following(router):
                monkeypatch.setattr(socket.socket, "dup", full)
                changed(authority, files)
                await until(lambda: left[0] < 0)
                monkeypatch.undo()
                await until(lambda: len(router._ports[0]._servers) == 1)
                assert await served(router) == "new"
            at = router._ports[0].addresses[0]
        with pytest.raises(OSError):  # noqa: PT011
            await asyncio.open_connection(*at)
        assert said == ["tls: new certificates cannot be served: Too many open files"] * 2

    uvloop.run(go())  # as routers do: of what asyncio has accepted but not yet met, a listener that closes drops one


@pytest.mark.parametrize("cut", ["cert", "key"])
def test_half_a_file_changes_nothing_until_it_is_whole(tmp_path: Path, cut: str):
    authority = Authority(tmp_path, "ca")
    files = TlsFiles(*authority.leaf("first", "old"))

    async def go() -> None:
        async with serving(files) as router, following(router):
            new_cert, new_key = authority.leaf("next", "new")
            half, whole = (files.cert, new_cert.read_bytes()) if cut == "cert" else (files.key, new_key.read_bytes())
            other = (files.key, new_key) if cut == "cert" else (files.cert, new_cert)
            other[1].rename(other[0])
            half.write_bytes(whole[: len(whole) // 2])
            errors = router._context.metrics.follow_errors
            await until(lambda: router._context.metrics.follow_errors > errors + 2)
            assert await served(router) == "old"
            half.write_bytes(whole)
            await until_the_new_one_is_served(router)

    uvloop.run(go())  # as routers do: of what asyncio has accepted but not yet met, a listener that closes drops one


def test_metrics_tell_until_when_the_served_certificate_is_good(tmp_path: Path):
    async def run() -> None:
        authority = Authority(tmp_path, "ca")
        files = TlsFiles(*authority.leaf("server", "old"))
        async with serving(files) as router, following(router):
            assert abs(told_end(router) - time.time() - 3600) < 60
            router._certified.expires_at = 1.0
            changed(authority, files)
            await until_the_new_one_is_served(router)
            assert told_end(router) == x509.load_pem_x509_certificate(files.cert.read_bytes()).not_valid_after_utc.timestamp()

    uvloop.run(run())


def test_a_certificate_that_openssl_alone_reads_is_served_without_a_figure(tmp_path: Path):
    files = TlsFiles(*Authority(tmp_path, "ca").leaf("server", "old"))
    files.cert.write_bytes(files.cert.read_bytes().replace(b" CERTIFICATE-", b" TRUSTED CERTIFICATE-"))
    context = tls.context_of(files)
    assert (context.expires_at, list(context.lines())) == (None, [])


def told_end(router: Router) -> float:
    text = router.plain(b"/metrics")[2].decode()
    (line,) = [line for line in text.splitlines() if line.startswith("fleet_router_certificate_expires_timestamp_seconds ")]
    return float(line.split()[1])

"""Certificates that change while a router serves: half-written, while it begins, while nothing is left to open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from e2e.certs import HOUR, Authority
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
            monkeypatch.setattr(router, "failed", lambda problem, about: said.append(problem))
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


@dataclass(frozen=True)
class Bad:
    """Files that are written while good ones are served; None: as it was."""

    cert: bytes | None = None
    key: bytes | None = None
    ca: bytes | None = None


def bad_ones(folder: Path, ca: Authority) -> dict[str, Bad]:
    def leaf(**more: Any) -> tuple[bytes, bytes]:
        cert, key = ca.leaf("next", "new", **more)
        return cert.read_bytes(), key.read_bytes()

    (cert, key), past, ahead = leaf(), leaf(later=-2 * HOUR), leaf(later=2 * HOUR)
    other = Authority(folder, "other")
    chain = cert + other.pem
    return {
        "an empty certificate": Bad(b"", key),
        "an empty key": Bad(cert, b""),
        "half a certificate": Bad(cert[: len(cert) // 2], key),
        "half a key": Bad(cert, key[: len(key) // 2]),
        "half of the second certificate of a chain": Bad(chain[:-200], key),
        "half of the first line of a chain's second certificate": Bad(cert + other.pem[:10], key),
        "a key of another certificate": Bad(None, key),
        "a certificate of another key": Bad(cert, None),
        "an expired certificate": Bad(*past),
        "a certificate of tomorrow": Bad(*ahead),
        "an empty CA": Bad(ca=b""),
        "half a CA": Bad(ca=other.pem[:-100]),
        "half of a second CA": Bad(ca=other.pem + ca.pem[:-100]),
        "half of the first line of a second CA": Bad(ca=other.pem + ca.pem[:10]),
        "no certificate in the CA": Bad(ca=ca.revoked()),
        "a key for a CA": Bad(ca=key),
        "an expired CA": Bad(ca=Authority(folder, "past", -2 * HOUR).pem),
        "a CA of tomorrow": Bad(ca=Authority(folder, "ahead", 2 * HOUR).pem),
    }  # fmt: skip


with tempfile.TemporaryDirectory() as _folder:
    BAD = list(bad_ones(Path(_folder), Authority(Path(_folder), "ca")))


@pytest.mark.parametrize("bad", BAD)
def test_bad_files_never_take_the_place_of_good_ones(tmp_path: Path, bad: str, monkeypatch: pytest.MonkeyPatch):
    """Expired ones, CAs without a certificate and chains cut in a first line were served; and no metric told of any."""
    ca, said = Authority(tmp_path, "ca"), list[str]()
    client = ca.leaf("client")
    files = TlsFiles(*ca.leaf("first", "old"), ca.file)
    found, good = bad_ones(tmp_path, ca)[bad], ca.pem

    async def go() -> None:
        async with serving(files) as router, following(router):
            monkeypatch.setattr(router._journal, "say", lambda event, **fields: said.append(f"{event} {fields}"))
            for file, data in ((files.cert, found.cert), (files.key, found.key), (files.client_ca, found.ca)):
                if file is not None and data is not None:
                    file.write_bytes(data)
            errors = router._context.metrics.follow_errors
            await until(lambda: router._context.metrics.follow_errors > errors + 2)
            assert await served(router) == "old"
            assert b"200 OK" in await asked(router, client)
            assert told(router, "fleet_router_certificate_outdated") == 1
            assert len(said) == 1
            assert "tls: " in said[0]
            ca.file.write_bytes(good)
            changed(ca, files)
            await until_the_new_one_is_served(router)
            await until(lambda: told(router, "fleet_router_certificate_outdated") == 0)
            assert len(said) == 2

    uvloop.run(go())


def test_an_expired_certificate_takes_the_place_of_an_expired_one(tmp_path: Path):
    """Whoever has no better ones is told by the metric until when they were good."""
    ca = Authority(tmp_path, "ca")
    files = TlsFiles(*ca.leaf("first", "old", later=-3 * HOUR))

    async def go() -> None:
        async with serving(files) as router, following(router):
            cert, key = ca.leaf("next", "new", later=-2 * HOUR)
            key.rename(files.key)
            cert.rename(files.cert)
            await until_the_new_one_is_served(router)

    uvloop.run(go())


def test_two_things_that_are_wrong_are_logged_once_each(monkeypatch: pytest.MonkeyPatch):
    """Each was news after the other, every second."""
    router, said = Router(Settings("dir:/none", "127.0.0.1", 0)), list[str]()
    monkeypatch.setattr(router._journal, "say", lambda event, **fields: said.append(fields["problem"]))
    for _ in range(3):
        router.failed("tls: no", "tls")
        router.failed("tenants: no", "tenants")
    assert said == ["tls: no", "tenants: no"]


def test_half_of_a_chain_that_looks_like_a_whole_one_is_waited_for(tmp_path: Path):
    """Certificate and key fit, and the certificate between them and the CA is still being written: no client could tell whose
    they are."""
    authority, served = Authority(tmp_path, "ca"), list[bytes]()
    files = TlsFiles(*authority.leaf("first", "old"))
    cert, key = (file.read_bytes() for file in authority.leaf("next", "new"))

    async def apply(found: tls.Certified) -> None:
        served.append(found.pem.cert)

    async def go() -> None:
        certificates = tls.Certificates(files)
        certificates.begin()
        files.key.write_bytes(key)
        for half in (cert, cert + authority.pem):
            files.cert.write_bytes(half)
            await certificates._look(apply, pytest.fail)
            assert certificates.outdated
        assert not served
        await certificates._look(apply, pytest.fail)
        assert (served, certificates.outdated) == ([cert + authority.pem], False)

    asyncio.run(go())


def test_who_needs_a_certificate_of_the_present_ca_is_let_in_with_no_other(tmp_path: Path):
    servers, first, second = Authority(tmp_path, "servers"), Authority(tmp_path, "first-ca"), Authority(tmp_path, "second-ca")
    ca = tmp_path / "clients.pem"
    ca.write_bytes(first.pem)
    mine, others = first.leaf("mine"), second.leaf("others")

    async def let_in(router: Router) -> list[bool]:
        found = []
        for client in (mine, others, None):
            try:
                found.append(b"200 OK" in await asked(router, client))
            except OSError:
                found.append(False)
        return found

    async def go() -> None:
        async with serving(TlsFiles(*servers.leaf("server", "old"), ca)) as router, following(router):
            assert await let_in(router) == [True, False, False]
            ca.write_bytes(second.pem)
            await until(lambda: router._certificates is not None and router._certificates.current.pem.client_ca == second.pem)
            assert await let_in(router) == [False, True, False]

    uvloop.run(go())


def test_a_ca_whose_texts_python_does_not_read_is_taken_as_openssl_takes_it(tmp_path: Path):
    """The router ended by it (RouterFailed: UnicodeDecodeError), and so did all routers of the fleet at once: an address in it
    that is no UTF-8 is nobody's fault but its maker's."""
    servers, clients = Authority(tmp_path, "servers"), Authority(tmp_path, "clients")
    name, ca = b"http://\xe9.example", tmp_path / "all.pem"
    names = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, bytes([0x30, len(name) + 2, 0x86, len(name)]) + name)
    builder = clients._builder(clients._name, clients._key.public_key()).add_extension(names, critical=False)
    odd = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(clients._key, hashes.SHA256())
    ca.write_bytes(servers.pem)

    async def go() -> None:
        async with serving(TlsFiles(*servers.leaf("server", "old"), ca)) as router, following(router):
            ca.write_bytes(odd.public_bytes(serialization.Encoding.PEM))
            await until(
                lambda: router._certificates is not None and router._certificates.current.pem.client_ca == ca.read_bytes()
            )
            assert b"200 OK" in await asked(router, clients.leaf("mine"))

    uvloop.run(go())


async def asked(router: Router, client: tuple[Path, Path] | None) -> bytes:
    """What a client with a certificate is answered."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if client is not None:
        context.load_cert_chain(*client)
    reader, writer = await asyncio.open_connection(*router._ports[0].addresses[0], ssl=context)
    writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    found = await reader.read()
    writer.close()
    return found


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
            router._certificates.current.expires_at = 1.0
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
    return told(router, "fleet_router_certificate_expires_timestamp_seconds")


def told(router: Router, metric: str) -> float:
    text = router.plain(b"/metrics")[2].decode()
    (line,) = [line for line in text.splitlines() if line.startswith(f"{metric} ")]
    return float(line.split()[1])

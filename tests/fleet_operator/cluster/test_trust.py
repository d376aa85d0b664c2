"""The authorities of a cluster change while the operator runs."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
from aiohttp import web
from kopf._core.intents.causes import Activity

from fleet_operator.certs.issue import Material, carry_out
from fleet_operator.certs.plan import Lifetimes, Work
from fleet_operator.cluster.interface import CONFIG_MAP, UnavailableError
from fleet_operator.cluster.kube import KubeCluster
from fleet_operator.cluster.trust import Trust
from fleet_operator.shell_kopf import _session, build_registry
from tests.fleet_operator.world import World

NAMES = frozenset({"127.0.0.1"})


def material() -> Material:
    return carry_out(Work("everything", ""), None, NAMES, time.time(), Lifetimes())


class Server:
    """An API server with no objects, whose certificate is replaced by a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, 0

    @asynccontextmanager
    async def serving(self, mine: Material) -> AsyncIterator[str]:
        file = self._folder / "serving.pem"
        file.write_bytes(mine.certificate + mine.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port, ssl_context=context, reuse_address=True)
        await site.start()
        self._port = runner.addresses[0][1]
        try:
            yield f"https://127.0.0.1:{self._port}"
        finally:
            await runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []})


def replace(file: Path, content: bytes) -> None:
    """As a kubelet does it: another file under the same name."""
    other = file.with_suffix(".new")
    other.write_bytes(content)
    other.replace(file)


@pytest.mark.parametrize("keeps_old", [True, False])
def test_an_authority_that_was_replaced_on_disk_is_trusted_at_the_next_connection(
    keeps_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Incident: whoever ran since before a change of the cluster's authority could never open a connection again."""
    ca, token, server, first, second = tmp_path / "ca.crt", tmp_path / "token", Server(tmp_path), material(), material()
    ca.write_bytes(first.bundle)
    token.write_text("t")

    async def scenario() -> None:
        async with server.serving(first) as url:
            for name, value in {"URL": url, "TOKEN_FILE": str(token), "CA_FILE": str(ca)}.items():
                monkeypatch.setenv(f"FLEET_KUBE_{name}", value)
            kube = await KubeCluster.connect(None)
            info = kopf.ConnectionInfo(server=url, ca_path=str(ca), token="t")
            watching: aiohttp.ClientSession = _session(info, []).aiohttp_session
            assert await kube.list(CONFIG_MAP, "a") == []
            assert (await watching.get(url)).status == 200
        async with server.serving(second):
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                await kube.list(CONFIG_MAP, "a")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await watching.get(url)
            replace(ca, (first.bundle if keeps_old else b"") + second.bundle)
            assert await kube.list(CONFIG_MAP, "a") == []
            assert (await watching.get(url)).status == 200
        await kube.close()
        await watching.close()

    asyncio.run(scenario())


def test_a_kubeconfig_may_say_whose_certificate_is_shown(tmp_path: Path):
    """`tls-server-name`, for a tunnel or a gateway: kubectl reached such a cluster, and an operator with --kubeconfig did not."""
    mine = carry_out(Work("everything", ""), None, frozenset({"api.example"}), time.time(), Lifetimes())
    ca, server = tmp_path / "ca.crt", Server(tmp_path)
    ca.write_bytes(mine.bundle)

    async def scenario() -> None:
        async with server.serving(mine) as url:
            cluster = {"server": url, "certificate-authority": str(ca), "tls-server-name": "api.example"}
            named = {"clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "u", "user": {"token": "t"}}]}
            contexts = {"contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}], "current-context": "x"}
            (tmp_path / "config").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **named, **contexts}))
            kube = await KubeCluster.connect(tmp_path / "config")
            login = build_registry(World().operator, tmp_path / "config", aiohttp.TraceConfig())
            (handler,) = login._activities.get_handlers(activity=Activity.AUTHENTICATION)
            watching = (await handler.fn()).aiohttp_session
            try:
                assert await kube.list(CONFIG_MAP, "a") == []
                assert (await watching.get(url)).status == 200
            finally:
                await kube.close()
                await watching.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("content", [b"", b"no certificate", None])
def test_a_file_that_is_no_authority_takes_nothing_away(content: bytes | None, tmp_path: Path):
    ca, mine = tmp_path / "ca.crt", material()
    ca.write_bytes(mine.bundle)
    context = ssl.create_default_context(cafile=ca)
    trust, before = Trust(context, ca), context.get_ca_certs()
    if content is None:
        ca.unlink()
    else:
        replace(ca, content)
    trust.refresh()
    assert context.get_ca_certs() == before
    replace(ca, material().bundle)
    trust.refresh()
    assert len(context.get_ca_certs()) == len(before) + 1


def test_without_a_file_there_is_nothing_to_look_at(monkeypatch: pytest.MonkeyPatch):
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Path, "stat", never)
    Trust(ssl.create_default_context(), None).refresh()

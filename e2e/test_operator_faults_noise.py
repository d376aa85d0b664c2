"""S3 at the operator: noise at each of its ports, in plain and inside TLS, and no port that is not documented. Stage one: the
ports that are open are the README's. Stage two: every connection is closed, nothing was executed, and both ports serve."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.kube.service import Service
from e2e.operators import Plane, plane
from e2e.test_admission import install, refuses
from e2e.test_router_faults_http import status
from e2e.test_router_faults_security import noises_of
from tests.listening import ALWAYS, documented, listening

pytestmark = pytest.mark.timeout(300)
HOST, HEALTH, WEBHOOK = "127.103.0.1", 8081, 9443
README = Path(__file__).resolve().parents[1] / "operator/README.md"
CLOSED_S = 15.0
REFUSED = (0, 400, 404, 405, 408, 413, 414, 431)
"""0: closed without an answer in HTTP."""


@pytest.fixture(scope="module")
def served() -> Iterator[Plane]:
    with plane() as made:
        yield made


@contextlib.contextmanager
def listens(served: Plane, account: Path, *flags: str) -> Iterator[Service]:
    """An operator on the ports that it has in its pod, at an address of its own."""
    argv = [sys.executable, "-m", "fleet_operator", "--kubeconfig", str(account), "--health-port", str(HEALTH), *flags]
    service = Service("operator", argv, served.dir / "noise.log", {**os.environ, "FLEET_BIND_HOST": HOST})
    try:
        served.wait("ready", lambda: answers(service, "/readyz"), 60)
        yield service
    finally:
        service.stop()


def answers(service: Service, path: str) -> bool:
    service.check()
    try:
        return httpx.get(f"http://{HOST}:{HEALTH}{path}", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def said_to(port: int, noise: bytes, tls: ssl.SSLContext | None) -> bytes:
    """Everything that the other side says until it closes."""
    got = b""
    with socket.create_connection((HOST, port), timeout=CLOSED_S) as plain, contextlib.ExitStack() as stack:
        opened = stack.enter_context(tls.wrap_socket(plain)) if tls is not None else plain
        with contextlib.suppress(OSError):  # it may be closed at any moment; ssl.SSLError is one, too
            opened.sendall(noise)
            if tls is None:
                opened.shutdown(socket.SHUT_WR)
            else:
                opened.sendall(b"\r\n\r\n")
        with contextlib.suppress(ConnectionResetError, ssl.SSLError):
            while piece := opened.recv(65_536):
                got += piece
    return got


def test_s3_noise_at_every_port_of_the_operator(served: Plane, tmp_path: Path):
    mark, account = tmp_path / "executed", served.account("operator-noise")
    served.kubectl("create", "namespace", "adm")
    install(served, WEBHOOK, "Ignore", HOST)
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    flags = ("--webhook-port", str(WEBHOOK), "--webhook-name", HOST, "--installation", "here")
    with listens(served, account, *flags) as service:
        served.wait("the webhook", lambda: refuses(served), 60)
        assert listening(service.pid) == documented(README)
        for port, tls in ((HEALTH, None), (WEBHOOK, None), (WEBHOOK, anybody)):
            for noise in noises_of(mark):
                assert status(said_to(port, noise, tls)) in REFUSED, (port, tls, noise[:20])
        assert not mark.exists()
        assert answers(service, "/healthz")
        assert refuses(served), "the webhook serves on"
        assert listening(service.pid) == documented(README)


def test_s3_an_operator_without_webhooks_has_one_port(served: Plane):
    with listens(served, served.account("operator-plain")) as service:
        assert listening(service.pid) == documented(README, [ALWAYS])

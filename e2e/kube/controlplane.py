"""etcd, kube-apiserver, controller-manager and scheduler as plain processes on free loopback ports.

    with ControlPlane() as plane:
        plane.kubectl("get", "nodes")

Static tokens, RBAC on, service account keys made for the occasion, etcd without fsync. Everything lives in one temporary
folder and leaves with it. `python -m e2e.kube.controlplane` starts one by hand and prints its kubeconfig.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from e2e.kube.service import Service, free_ports

READY_S = 120
CONTEXT_PREFIX = "inferencefleet-e2e-"
ALLOW_ENV = "FLEET_E2E_ALLOW_CONTEXT"
ROOT = Path(__file__).resolve().parents[2]


class ControlPlane:
    """A context manager; `kubeconfig` is the administrator's."""

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="inferencefleet-kube-"))
        self.context = CONTEXT_PREFIX + self.dir.name.rpartition("-")[2]
        self.kubeconfig = self.dir / "admin.kubeconfig"
        self.services: list[Service] = []
        self._token = secrets.token_hex(16)
        etcd, peer, self.port = free_ports(3)
        self._etcd, self._peer = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca_file = self.dir / "certs" / "apiserver.crt"
        self._bin = Path()

    def __enter__(self) -> ControlPlane:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop every process, last started first, and remove the folder."""
        for service in reversed(self.services):
            service.stop()
        self.services.clear()
        shutil.rmtree(self.dir, ignore_errors=True)

    def kubectl_argv(self) -> list[str]:
        """kubectl as administrator, for a process of one's own."""
        return [str(self._bin / "kubectl"), "--kubeconfig", str(self.kubeconfig)]

    def kubectl(
        self, *args: str, stdin: str | None = None, check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as administrator; CalledProcessError with its words when it fails and `check` is set."""
        done = subprocess.run(
            [str(self._bin / "kubectl"), *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done

    def get(self, path: str) -> Any:
        """GET any API path as administrator; HTTPError."""
        return self._request("GET", path)

    def install_crds(self) -> None:
        """Apply crds/ and wait until the API serves them."""
        self.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        established = ("wait", "--for=condition=Established", "--timeout=5s", "crd", "--all")
        # a CRD without any status yet makes kubectl give up at once
        self.wait("CRDs served", lambda: self.kubectl(*established, check=False).returncode == 0)

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig with a fresh token of an existing service account."""
        token = self.kubectl("create", "token", name, "-n", namespace, "--duration=2h").stdout.strip()
        path = self.dir / f"{namespace}-{name}.kubeconfig"
        self._write_kubeconfig(path, name, token)
        return path

    def wait(self, what: str, check: Callable[[], bool], timeout_s: float = READY_S) -> None:
        """Poll `check` until it is true; RuntimeError when a process ended, TimeoutError when it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not check():
            for service in self.services:
                service.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not happen within {timeout_s:g}s; {self.services[-1].tail(1_000)}")
            time.sleep(0.05)

    def _start(self) -> None:
        self._bin = binaries()
        (self.dir / "sa.key").write_text(service_account_key())
        (self.dir / "tokens.csv").write_text(f'{self._token},admin,admin,"system:masters"\n')
        self._write_kubeconfig(self.kubeconfig, "admin", self._token)
        self._run("etcd", *self._etcd_flags())
        self._run("kube-apiserver", *self._apiserver_flags())
        # Before readyz the others die on RBAC roles that do not exist yet.
        self.wait("readyz of kube-apiserver", self._is_ready)
        self._run("kube-controller-manager", *self._controller_flags())
        self._run("kube-scheduler", f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--secure-port=0")
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.wait("the default service account", lambda: self.exists(account))
        self.wait("the root CA", lambda: self.exists("/api/v1/namespaces/default/configmaps/kube-root-ca.crt"))

    def _run(self, name: str, *flags: str) -> None:
        self.services.append(Service(name, [str(self._bin / name), *flags], self.dir / f"{name}.log"))

    def _etcd_flags(self) -> list[str]:
        return [
            f"--data-dir={self.dir / 'etcd'}",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={self._peer}",
            f"--initial-advertise-peer-urls={self._peer}",
            f"--initial-cluster=default={self._peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        ]

    def _apiserver_flags(self) -> list[str]:
        return [
            f"--etcd-servers={self._etcd}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={self.dir / 'certs'}",
            f"--token-auth-file={self.dir / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.dir / 'sa.key'}",
            f"--service-account-signing-key-file={self.dir / 'sa.key'}",
            "--service-cluster-ip-range=10.0.0.0/16",
        ]

    def _controller_flags(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig}",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self.dir / 'sa.key'}",
            f"--root-ca-file={self.ca_file}",
            "--leader-elect=false",
            "--secure-port=0",
            # Two busy cores: heartbeats may be late, and pods must not turn unready for that.
            "--node-monitor-grace-period=2h",
        ]

    def _write_kubeconfig(self, path: Path, user: str, token: str) -> None:
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": self.context, "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": self.context, "context": {"cluster": self.context, "user": user}}],
            "current-context": self.context,
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config))

    def _is_ready(self) -> bool:
        try:
            return self.ca_file.exists() and self._request("GET", "/readyz") == "ok"
        except OSError:
            return False

    def exists(self, path: str) -> bool:
        """Whether a GET of `path` answers."""
        try:
            self.get(path)
        except urllib.error.HTTPError as error:
            with error:
                return False
        return True

    def _request(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Authorization", f"Bearer {self._token}")
        trust = ssl.create_default_context(cafile=str(self.ca_file))
        with urllib.request.urlopen(request, timeout=10, context=trust) as answer:
            body = answer.read().decode()
        return json.loads(body) if body.startswith("{") else body


def binaries() -> Path:
    """The folder with the control plane's programs; builds them once per machine (minutes)."""
    done = subprocess.run([ROOT / "e2e/kube/get-control-plane"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip().splitlines()[-1])


def service_account_key() -> str:
    """An EC P-256 private key in PEM: SEC 1's ECPrivateKey holds only the number; readers derive the public point."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    number = (secrets.randbelow(order - 1) + 1).to_bytes(32, "big")
    curve = bytes.fromhex("a00a06082a8648ce3d030107")
    body = b"\x02\x01\x01\x04\x20" + number + curve
    text = base64.b64encode(b"\x30" + bytes([len(body)]) + body).decode()
    lines = "\n".join(text[start : start + 64] for start in range(0, len(text), 64))
    return f"-----BEGIN EC PRIVATE KEY-----\n{lines}\n-----END EC PRIVATE KEY-----\n"


def refuse_strangers(kubeconfig: Path) -> None:
    """PermissionError unless `kubeconfig` points at a control plane of this harness, or at the context in ALLOW_ENV.

    Tests create, break and delete; they must never do that in somebody's cluster.
    """
    config = yaml.safe_load(kubeconfig.read_text())
    context = str(config.get("current-context", ""))
    servers = [str(entry["cluster"].get("server", "")) for entry in config.get("clusters") or []]
    ours = context.startswith(CONTEXT_PREFIX) and all(server.startswith("https://127.0.0.1:") for server in servers)
    if not ours and os.environ.get(ALLOW_ENV) != context:
        raise PermissionError(f"{kubeconfig} uses context {context!r}; set {ALLOW_ENV}={context} if tests may use it")


def main() -> None:
    """Run a control plane until SIGINT or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ControlPlane() as plane:
        print(f"export KUBECONFIG={plane.kubeconfig}", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping")


if __name__ == "__main__":
    main()

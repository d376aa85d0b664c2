"""Kubeconfigs of real clusters: keys, credential plugins, no certificate to trust; and what a command that is ended leaves."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.certs import Authority
from fleet_cli.main import main
from tests.fleet_cli.test_explain import answering
from tests.fleet_cli.test_rollout import Api, rolling

RUNNING = {
    "metadata": {"name": "f"},
    "spec": {},
    "status": {"conditions": [{"type": "RollingOut", "status": "True", "reason": "Progressing", "message": "words"}]},
}


@contextlib.contextmanager
def secured(folder: Path) -> Iterator[str]:
    """The kubeconfig of an API server with TLS, with what a client proves itself by inside."""
    certificate, key = Authority(folder, "own-ca").leaf("127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    inside = {
        f"client-{name}-data": base64.b64encode(Path(file).read_bytes()).decode()
        for name, file in (("certificate", certificate), ("key", key))
    }
    with answering(200, RUNNING, tls) as url:
        yield kubeconfig(folder, inside, server=url, **{"insecure-skip-tls-verify": True})


def kubeconfig(folder: Path, user: dict[str, object], **cluster: object) -> str:
    path = folder / "config"
    written = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(written))
    return str(path)


def started(number: signal.Signals, command: list[str], **how: Any) -> subprocess.Popen[str]:
    """A process that heeds this signal, also where whoever runs these tests ignores it: `nohup make test &`."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        return subprocess.Popen(command, text=True, **how)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_follows_a_rollout_leaves_no_key_behind(number: signal.Signals, tmp_path: Path):
    """A `timeout 60 fleet rollout status`, or a terminal that was closed, left the private key of the kubeconfig in /tmp."""
    (scratch := tmp_path / "tmp").mkdir()
    with secured(tmp_path) as path:
        command = [sys.executable, "-m", "fleet_cli.main", "rollout", "status", "f", "--kubeconfig", path]
        environment = {**os.environ, "TMPDIR": str(scratch)}
        with started(number, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
            assert following.stdout is not None
            assert following.stdout.readline() == "Progressing: words\n"
            assert any(scratch.iterdir())
            following.send_signal(number)
            _, said = following.communicate(timeout=60)
    assert (following.returncode, said.splitlines()[-1]) == (130, "fleet: interrupted")
    assert list(scratch.iterdir()) == []


KUBECTL = """#!/bin/sh
case "$*" in
  *get*pods*)
    echo '{{"items": [{{"metadata": {{"name": "r"}}, "spec": {{"containers": []}}, "status": {{"phase": "Running"}}}}]}}' ;;
  *) echo $$ > {folder}/pid; exec sleep 60 ;;
esac
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_explain_that_is_ended_leaves_no_way_to_a_router_open(number: signal.Signals, tmp_path: Path):
    """kubectl port-forward went on for ever."""
    script = tmp_path / "kubectl"
    script.write_text(KUBECTL.format(folder=tmp_path))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "fleet_cli.main", "explain", "--fleet", "f"]
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    with started(number, command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as asking:
        while not (pid := tmp_path / "pid").exists() or not pid.read_text().strip():
            assert asking.poll() is None
            time.sleep(0.05)
        asking.send_signal(number)
        assert asking.wait(60) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_certificate_that_is_not_to_be_verified_is_no_news(tmp_path: Path):
    """With insecure-skip-tls-verify each second of a followed rollout wrote two lines of urllib3's about it, which kubectl never
    does."""
    with secured(tmp_path) as path:
        command = [sys.executable, "-m", "fleet_cli.main", "rollout", "status", "f", "--timeout", "0", "--kubeconfig", path]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert asked.stderr == "fleet: the rollout of fleet f is not over after 0 s (--timeout)\n"


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ({"command": "no-such-plugin"}, "No such file or directory: 'no-such-plugin'"),
        (
            {"command": "sh", "args": ["-c", "echo the session is over: log in >&2; exit 3"]},
            "exec: process returned 3. the session is over: log in",
        ),
        ({"command": "echo", "args": ["{}"]}, "exec: malformed response"),
    ],
    ids=["not-there", "failed", "says-nothing"],
)
def test_a_credential_plugin_that_fails_is_told_and_nobody_is_asked(
    plugin: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its words were a line of Python's logging, and the API server was asked as nobody: that system:anonymous may not get
    fleets was the answer."""
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", **plugin}}
    with Api(rolling("Complete")) as api:
        path = kubeconfig(tmp_path, user, server=f"http://127.0.0.1:{api.server_port}")
        assert main(["rollout", "status", "f", "--kubeconfig", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fleet: no usable kubeconfig {path}: ")
    assert words in said
    assert said.count("\n") == 1
    assert api.asked == []


def test_an_empty_kubeconfig_variable_is_none(tmp_path: Path):
    """kubectl takes `KUBECONFIG=` for one that is not set; of ~/.kube/config it was said that it is no configuration."""
    (home := tmp_path / ".kube").mkdir()
    with Api(rolling("Complete")) as api:
        kubeconfig(home, {}, server=f"http://127.0.0.1:{api.server_port}")
        command = [sys.executable, "-m", "fleet_cli.main", "rollout", "status", "f"]
        environment = {**os.environ, "HOME": str(tmp_path), "KUBECONFIG": ""}
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (asked.stdout, asked.stderr) == ("Complete: words\n", "")


def test_a_server_that_asks_for_patience_is_not_slept_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A 503 with `Retry-After: 600` of what stands before an API server was obeyed, three times, whatever --timeout said."""
    with answering(503, {}, headers={"retry-after": "20"}) as url:
        began = time.monotonic()
        assert main(["rollout", "status", "f", "--timeout", "0", "--kubeconfig", kubeconfig(tmp_path, {}, server=url)]) == 1
    assert time.monotonic() - began < 15
    assert "Service Unavailable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("proxy", "words"),
    [
        ("socks5://u:secret@127.0.0.1:1", "a SOCKS proxy (proxy-url, HTTPS_PROXY) needs the Python package PySocks"),
        ("ftp://127.0.0.1:1", "unsupported scheme ftp"),
    ],
    ids=["socks", "no-proxy"],
)
def test_a_proxy_that_cannot_be_used_is_one_line(
    proxy: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """`ssh -D` and `proxy-url: socks5://...`, which kubectl knows, was a traceback that ended with "No module named 'socks'"."""
    monkeypatch.setitem(sys.modules, "socks", None)  # as if nobody had installed it
    monkeypatch.delitem(sys.modules, "urllib3.contrib.socks", raising=False)
    path = kubeconfig(tmp_path, {}, server="https://127.0.0.1:1", **{"proxy-url": proxy})
    assert main(["rollout", "status", "f", "--kubeconfig", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fleet: no usable kubeconfig {path}: ")
    assert words in said
    assert "secret" not in said
    assert said.count("\n") == 1


def test_a_token_of_a_file_may_end_its_line(tmp_path: Path):
    """`kubectl create token > FILE` writes one that does, and kubectl reads it. Here no header took it, and what answers was told
    to be no API server."""
    (tmp_path / "token").write_text("abc\n")
    heard: list[str] = []
    with Api(rolling("Progressing"), rolling("Complete")) as api:
        handler = api.RequestHandlerClass
        get = handler.do_GET

        def listening(self: Any) -> None:
            heard.append(self.headers["authorization"])
            get(self)

        handler.do_GET = listening
        path = kubeconfig(tmp_path, {"tokenFile": str(tmp_path / "token")}, server=f"http://127.0.0.1:{api.server_port}")
        assert main(["rollout", "status", "f", "--kubeconfig", path]) == 0
    assert heard == ["Bearer abc"] * 2

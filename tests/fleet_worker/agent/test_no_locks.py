"""A model cache on a file system without locks, as Lustre is unless it is mounted with them: flock says ENOSYS there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_worker.agent.filelocks import has_locks
from fleet_worker.agent.hub import LEFT_S
from tests.fleet_worker.agent.test_cut_fetch import FILES, WEIGHTS, Slow, address, begun, parts, slow_hub
from tests.hub import Hub
from tests.xethub import XetHandler

POD = """
import errno, fcntl, os, socket, sys
def has_none(*_): raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
fcntl.flock, socket.gethostname = has_none, lambda: os.environ["POD"]
sys.argv[1:] = ["fetch"]
from fleet_worker.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with slow_hub() as server:
        yield server


def fetch(hub: Hub, cache: Path, pod: str) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": address(hub), "FLEET_MODEL_CACHE": str(cache), "HF_HOME": str(cache), "POD": pod}
    return subprocess.Popen([sys.executable, "-c", POD], env={**env, "FLEET_FETCH": "hf://acme/tiny"})


def ended(fetching: subprocess.Popen[bytes]) -> int:
    try:
        return fetching.wait(30.0)
    finally:
        fetching.kill()
        fetching.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_waits_for_a_pod_that_was_killed_while_it_fetched(hub: Hub, tmp_path: Path, number: signal.Signals):
    """Files stood for locks, ours and the library's, and nobody removes those of a pod that is gone: each later worker waited for
    it, for ever."""
    killed = fetch(hub, tmp_path, "one")
    begun(tmp_path)
    killed.send_signal(number)
    ended(killed)
    for left in parts(tmp_path):
        os.utime(left, (os.stat(left).st_mtime - LEFT_S - 1.0,) * 2)
    Slow.go_on.set()
    assert ended(fetch(hub, tmp_path, "another")) == 0
    assert parts(tmp_path) == []


def test_two_pods_that_fetch_at_once_have_the_model(hub: Hub, tmp_path: Path):
    both = [fetch(hub, tmp_path, pod) for pod in ("one", "another")]
    begun(tmp_path)
    Slow.go_on.set()
    assert [ended(one) for one in both] == [0, 0]
    (weights,) = tmp_path.glob("models--acme--tiny/snapshots/*/model.safetensors")
    assert weights.read_bytes() == WEIGHTS


def test_what_comes_by_xet_is_there(hub: Hub, tmp_path: Path):
    """The library waited for the lock of its store, whose file it had made itself: after the last byte, and for ever."""
    hub.RequestHandlerClass = XetHandler
    assert ended(fetch(hub, tmp_path, "one")) == 0
    assert ended(fetch(hub, tmp_path, "another")) == 0
    assert sorted(hub.sent) == sorted(FILES), "once"


def test_a_folder_that_takes_no_file_is_waited_for_as_before(tmp_path: Path):
    assert has_locks(tmp_path)
    assert has_locks(tmp_path / "where nothing can be made")
    assert os.listdir(tmp_path) == []

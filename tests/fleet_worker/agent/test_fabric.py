"""The probe, run for real on this machine: it proves memory and TCP, and never claims RDMA."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_worker.agent import fabric
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.fabric import Fabric, found, lockable_bytes, probe, probe_environment, problem, told
from fleet_worker.agent.identity import Identity
from fleet_worker.config import KvSettings, WorkerConfig, ucx_transports
from fleet_worker.segments import FOLDER_ENV, make
from fleet_worker.transfer.transport import has_rdma_device

RDMA = KvSettings(transport="rdma", required=True)
no_rdma = pytest.mark.skipif(has_rdma_device(), reason="this machine has an RDMA device")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_what_this_machine_has_is_proven(transport: Any):
    seen = asyncio.run(probe(KvSettings(transport=transport, required=True)))
    assert (seen.transport, seen.error) == (transport, "")
    assert seen.gbps is not None
    assert seen.gbps > 0


@no_rdma
def test_rdma_is_never_claimed_without_a_device():
    fallen = asyncio.run(probe(KvSettings(transport="rdma")))
    assert fallen.transport == "tcp"
    words = problem(KvSettings(transport="rdma"), fallen)
    assert words is not None
    assert words.startswith("kvTransfer asks for rdma, but tcp is in use (no RDMA device is visible, lockable memory is ")
    refused = asyncio.run(probe(RDMA))
    assert (refused.transport, refused.gbps) == (None, None)
    assert "no read succeeded" in refused.error


def test_nothing_of_a_killed_probe_is_left(tmp_path: Path):
    """Also while its other process hangs in NIXL, where it does not see that its stdin ended."""
    (tmp_path / "nixl").mkdir()
    stub = """
import os, sys, time
class nixl_agent:
    def __init__(self, name, config):
        if name == "probe-owner":
            print(os.getpid(), file=open(os.environ["TOLD"], "w"), flush=True)
            time.sleep(60)
    def register_memory(self, *given):
        pass
nixl_agent_config = dict
"""
    (tmp_path / "nixl" / "__init__.py").touch()
    (tmp_path / "nixl" / "_api.py").write_text(stub)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    started = subprocess.Popen(fabric.PROBE, env={**os.environ, "PYTHONPATH": path, "TOLD": str(tmp_path / "pid")})
    try:
        pid = until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text().strip())
    finally:
        started.kill()
        started.wait()
    until(lambda: not is_running(pid))


@pytest.mark.parametrize("ending", ["", "raise SystemExit(1)", "time.sleep(60)"], ids=["ends", "fails", "hangs"])
def test_nothing_that_a_probe_shared_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str):
    """Whatever ends it: UCX may be in the midst of making a segment."""
    share = "import os, pathlib, time; pathlib.Path(os.environ['UCX_POSIX_DIR'], 'ucx_shm_posix_1').write_bytes(b'x');"
    monkeypatch.delenv(FOLDER_ENV, raising=False)
    monkeypatch.setattr(fabric, "make", lambda: make(tmp_path))
    monkeypatch.setattr(fabric, "PROBE", (sys.executable, "-c", share + ending))

    async def run() -> Fabric | None:
        task = asyncio.create_task(probe(KvSettings()))
        if ending.startswith("time"):  # its agent is told to stop
            await asyncio.to_thread(until, lambda: list(tmp_path.glob("*/*")))
            task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    seen = asyncio.run(run())
    assert isinstance(seen, asyncio.CancelledError) or seen == Fabric(error="no read succeeded: ")
    assert list(tmp_path.iterdir()) == []


PROBING = """
import asyncio, sys
from pathlib import Path
from fleet_worker.agent import fabric
from fleet_worker.config import KvSettings
from fleet_worker.segments import make
fabric.make = lambda: make(Path(sys.argv[1]))
fabric.PROBE = (sys.executable, "-c", sys.argv[2])
asyncio.run(fabric.probe(KvSettings()))
"""


def test_a_probe_and_what_it_shared_go_with_an_agent_that_is_killed(tmp_path: Path):
    """Nobody looked after either, until another worker began on this machine; one that hung in NIXL stayed."""
    share = "import os, pathlib, time; pathlib.Path(os.environ['UCX_POSIX_DIR'], str(os.getpid())).touch(); time.sleep(60)"
    env = {name: value for name, value in os.environ.items() if name != FOLDER_ENV}
    agent = subprocess.Popen([sys.executable, "-c", PROBING, str(tmp_path), share], env=env)
    try:
        (file,) = until(lambda: list(tmp_path.glob("*/*")))
    finally:
        agent.kill()
        agent.wait()
    until(lambda: not is_running(file.name))
    until(lambda: not list(tmp_path.iterdir()))


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20
    while not (said := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return said


def test_the_probe_looks_beyond_the_node_when_rdma_is_asked():
    assert "sm" not in probe_environment(RDMA, {})["UCX_TLS"].split(",")
    assert "sm" in probe_environment(KvSettings(transport="shm"), {})["UCX_TLS"].split(",")
    assert probe_environment(RDMA, {"UCX_TLS": "rc,sm,cuda_copy"})["UCX_TLS"] == "rc,cuda_copy"
    assert probe_environment(KvSettings(), {})["UCX_TLS"] == "all"
    assert probe_environment(KvSettings(transport="tcp"), {}, nvidia=True)["UCX_TLS"] == "tcp,self,cuda_copy"
    assert probe_environment(RDMA, {"UCX_TLS": "rc,sm,tcp"}, nvidia=True)["UCX_TLS"] == "rc,tcp,cuda_copy"
    assert probe_environment(KvSettings(), {"UCX_TCP_RX_SEG_SIZE": "8k"})["UCX_TCP_RX_SEG_SIZE"] == "8k", "the pod's own wins"


@pytest.mark.parametrize("out", ["", "{}", "no json", '{"gbps": null}', "[1]"])
def test_a_probe_without_a_figure_found_nothing(out: str):
    assert found(out, "warning\nBroken: it\n") == Fabric(error="no read succeeded: Broken: it")


@pytest.mark.parametrize(
    ("settings", "seen", "wrong"),
    [
        (KvSettings(), Fabric(error="x"), False),
        (RDMA, Fabric("rdma", 100.0), False),
        (RDMA, Fabric("shm", 100.0), False),
        (RDMA, Fabric("tcp", 1.0), True),
        (RDMA, Fabric(error="x"), True),
        (KvSettings(transport="tcp"), Fabric("shm", 1.0), True),
    ],
)
def test_a_problem_is_what_differs_from_the_wish(settings: KvSettings, seen: Fabric, wrong: bool):
    assert (problem(settings, seen) is not None) == wrong


@pytest.mark.parametrize(
    ("asked", "probed", "engine", "word"),
    [
        ("auto", Fabric(), None, None),
        ("auto", Fabric(), "tcp", "tcp"),
        ("rdma", Fabric("rdma", 1.0), None, "rdma"),
        ("rdma", Fabric("rdma", 1.0), "tcp", "tcp"),
        ("rdma", Fabric("rdma", 1.0), "shm", "rdma"),
        ("rdma", Fabric("tcp", 1.0), "shm", "tcp"),
        ("rdma", Fabric("tcp", 1.0), "rdma", "rdma"),
        ("rdma", Fabric(error="x"), None, "none"),
        ("rdma", Fabric(error="x"), "shm", "none"),
        ("shm", Fabric("shm", 1.0), "tcp", "tcp"),
    ],
)
def test_what_is_told(asked: str, probed: Fabric, engine: Any, word: str | None):
    assert told(asked, probed, engine) == word


def test_tcp_is_no_fallback_for_required_rdma_and_never_missing_for_shm():
    assert "tcp" not in str(ucx_transports("rdma", required=True)).split(",")
    assert "tcp" in str(ucx_transports("rdma")).split(",")
    for required in (True, False):  # EFA's: UCX 1.23 counts it neither among rc, nor dc, nor ud
        assert {"rc", "dc", "ud", "srd"} <= set(str(ucx_transports("rdma", required=required)).split(","))
    assert "tcp" in str(ucx_transports("shm", required=True)).split(",")
    assert ucx_transports("tcp", memory="cuda") == "tcp,self,cuda_copy,cuda_ipc,gdr_copy"
    assert ucx_transports("auto", required=True) is None


def test_a_read_of_which_ucx_tells_no_transport_is_a_problem_in_words():
    """Of a UCX whose tables look otherwise: "kvTransfer asks for tcp, but ", and a worker that never served."""
    assert (problem(KvSettings(transport="tcp"), found('{"gbps": 9}', "no table\n")) or "").endswith(
        "but UCX's tables (UCX_PROTO_INFO) do not say by which transport it read"
    )


EFFECTIVE = {"root-with-it": "0000000000004000", "everything": "000001ffffffffff"}
WITHOUT = {"none": "0000000000000000", "all-but-it": "000001ffffffbfff"}
SMALL = 65_536


def limited(monkeypatch: pytest.MonkeyPatch, folder: Path, mask: str | None, soft: int) -> Path:
    """A process with this RLIMIT_MEMLOCK and these capabilities in effect; None: /proc cannot be read."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_MEMLOCK: (soft, resource.RLIM_INFINITY)}[kind])
    if mask is not None:
        (folder / "status").write_text(f"Name:\tpython\nCapPrm:\t{'f' * 16}\nCapEff:\t{mask}\nCapBnd:\t{'f' * 16}\n")
    return folder / "status"


@pytest.mark.parametrize(
    ("mask", "soft", "lockable"),
    [
        *[pytest.param(mask, SMALL, None, id=name) for name, mask in EFFECTIVE.items()],
        *[pytest.param(mask, SMALL, SMALL, id=name) for name, mask in WITHOUT.items()],
        pytest.param(WITHOUT["none"], resource.RLIM_INFINITY, None, id="unlimited"),
        pytest.param(None, SMALL, SMALL, id="no-proc"),
    ],
)
def test_the_memlock_limit_counts_unless_ipc_lock_is_in_effect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mask: str | None, soft: int, lockable: int | None
):
    assert lockable_bytes(limited(monkeypatch, tmp_path, mask, soft)) == lockable


@pytest.mark.parametrize(("mask", "told_of"), [(WITHOUT["none"], True), (EFFECTIVE["everything"], False)])
@pytest.mark.parametrize("transport", ["rdma", "tcp"])
@pytest.mark.parametrize("device", [True, False])
def test_a_small_memlock_limit_is_told_where_rdma_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: bool, transport: Any, mask: str, told_of: bool
):
    """Without a device it is not what is missing: the operator would name the wrong cause (MemlockTooSmall)."""
    monkeypatch.setattr(fabric, "has_rdma_device", lambda: device)
    status = limited(monkeypatch, tmp_path, mask, SMALL)
    monkeypatch.setattr(fabric, "lockable_bytes", lambda: lockable_bytes(status))
    words = problem(KvSettings(transport=transport), Fabric("tcp" if transport == "rdma" else "shm", 1.0)) or ""
    limit = f"lockable memory is {SMALL} bytes and IPC_LOCK is not in effect: set LimitMEMLOCK=infinity"
    assert (limit in words) == (told_of and transport == "rdma")
    config = WorkerConfig(
        fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model="/none", served_name="m",
        kv=KvSettings(transport=transport),
    )  # fmt: skip

    async def go() -> tuple[dict[str, object], str]:
        agent = Agent(config, Identity("p", "u", "127.88.0.1"))
        state, metrics = agent.state(), await agent.metrics()
        await agent._client.close()
        agent._scratch.cleanup()
        return state, metrics

    state, metrics = asyncio.run(go())
    told_of = told_of and transport == "rdma" and device
    assert state["memlock_bytes"] == (SMALL if told_of else None)
    assert (f"fleet_agent_memlock_bytes {SMALL}\n" in metrics) == told_of


@pytest.mark.parametrize("required", [True, False])
def test_a_wrong_transport_keeps_a_worker_from_serving_only_when_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], required: bool
):
    async def tcp(_: KvSettings) -> Fabric:
        return Fabric("tcp", 5.0)

    monkeypatch.setattr(fabric, "probe", tcp)
    settings = KvSettings(transport="rdma", required=required)
    config = WorkerConfig(
        fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model="/none", served_name="m", kv=settings
    )

    async def go() -> tuple[bool, dict[str, object], str]:
        agent = Agent(config, Identity("p", "u", "127.88.0.1"))
        proving = asyncio.create_task(agent._prove_fabric())
        done, _ = await asyncio.wait({proving}, timeout=0.2)
        state, metrics = agent.state(), await agent.metrics()
        agent._stop.set()
        await proving
        await agent._client.close()
        agent._scratch.cleanup()
        return bool(done), state, metrics

    passed, state, metrics = asyncio.run(go())
    assert passed == (not required)
    assert (state["phase"], state["transport"]) == ("Preparing", "tcp")
    assert 'fleet_agent_transport_info{transport="tcp"} 1' in metrics
    assert "fleet_agent_probe_gbps 5.0" in metrics
    assert ("tcp is in use" in str(state["detail"])) == required
    assert "TransportMismatch" in capsys.readouterr().err

"""UCX on nodes with NVIDIA GPUs: what NIXL takes there, also from containers that were given none, and what UCX is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_worker.__main__ import main
from fleet_worker.agent.command import ucx_told
from fleet_worker.agent.errors import ConfigError
from fleet_worker.transfer.transport import has_nvidia_gpu, taken_by_nixl, ucx_environment

AGENT = """
from nixl._api import nixl_agent, nixl_agent_config
nixl_agent("one", nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
print("up")
"""
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
GETS = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}


def on_the_bus(folder: Path, *found: tuple[str, str]) -> Path:
    for number, (vendor, kind) in enumerate(found):
        at = folder / f"0000:0{number}:00.0"
        at.mkdir(parents=True)
        (at / "vendor").write_text(f"{vendor}\n")
        (at / "class").write_text(f"{kind}\n")
    return folder


@pytest.mark.parametrize(
    ("found", "gpu"),
    [
        pytest.param([("0x10de", "0x030200")], True, id="3d"),
        pytest.param([("0x8086", "0x060000"), ("0x10de", "0x030000")], True, id="display"),
        pytest.param([("0x10de", "0x020000")], False, id="nvidia-nic"),
        pytest.param([("0x1002", "0x038000")], False, id="amd"),
        pytest.param([], False, id="empty"),
    ],
)
def test_the_bus_shows_nvidia_gpus(tmp_path: Path, found: list[tuple[str, str]], gpu: bool):
    assert has_nvidia_gpu(on_the_bus(tmp_path, *found)) is gpu
    assert not has_nvidia_gpu(tmp_path / "none")


def test_a_device_that_left_the_bus_is_none(tmp_path: Path):
    (tmp_path / "0000:01:00.0").mkdir()
    assert not has_nvidia_gpu(tmp_path)


@pytest.mark.parametrize(
    ("allowed", "taken"),
    [
        ("tcp,self", "tcp,self,cuda_copy"),
        ("sm,tcp,self", "sm,tcp,self,cuda_copy"),
        ("rc,dc,ud,sm,self", "rc,dc,ud,sm,self,cuda_copy"),
        ("tcp,self,cuda_copy,cuda_ipc,gdr_copy", "tcp,self,cuda_copy,cuda_ipc,gdr_copy"),
        ("tcp,cuda", "tcp,cuda"),
        ("all", "all"),
        ("^tcp", "^tcp"),
    ],
)
def test_an_allow_list_names_cuda_where_nixl_wants_it(allowed: str, taken: str):
    assert (taken_by_nixl(allowed, nvidia=True), taken_by_nixl(allowed, nvidia=False)) == (taken, allowed)


@pytest.mark.parametrize(
    ("transport", "pod", "found"),
    [
        ("auto", {}, {}),
        ("tcp", {}, {"UCX_TLS": "tcp,self,cuda_copy"}),
        ("auto", {"UCX_TLS": "tcp,self"}, {"UCX_TLS": "tcp,self,cuda_copy"}),
        ("tcp", {"UCX_TLS": "tcp,self,cuda_copy"}, {}),
    ],
)
def test_the_pods_own_list_is_kept_but_for_that(transport: str, pod: dict[str, str], found: dict[str, str]):
    assert ucx_environment(transport, False, pod, nvidia=True) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pod", "devices", "told"),
    [
        ({}, ["nvidiactl"], SEGMENTS | GETS),
        ({}, ["kfd"], SEGMENTS),
        ({}, [], SEGMENTS),
        ({"UCX_TLS": "sm,tcp,self"}, [], SEGMENTS),
        ({"UCX_TLS": "rc,dc,ud,sm,self,cuda_copy"}, ["nvidiactl"], GETS),
    ],
)
def test_what_ucx_is_told_without_being_asked(tmp_path: Path, pod: dict[str, str], devices: list[str], told: dict[str, str]):
    for name in devices:
        (tmp_path / name).touch()
    assert ucx_told(pod, tmp_path) == told


def test_a_worker_gives_its_engine_such_a_list(monkeypatch: pytest.MonkeyPatch):
    """vLLM's, too, which knows nothing of ours: it has the agent's environment."""

    def ends(_: object) -> None:
        raise ConfigError("seen")

    monkeypatch.setattr("fleet_worker.transfer.transport.has_nvidia_gpu", lambda: True)
    monkeypatch.setattr("fleet_worker.agent.identity.read_identity", ends)
    monkeypatch.setattr(sys, "argv", ["fleet-worker"])
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main() == ConfigError("seen").exit_code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.environ["UCX_TLS"] == "tcp,self,cuda_copy"


def nixl_with_a_gpu_on_the_bus(bus: Path, allowed: str) -> subprocess.CompletedProcess[str]:
    inside = f"mount --bind {bus} /sys/bus/pci/devices && UCX_TLS={allowed} exec {sys.executable} -c '{AGENT}'"
    return subprocess.run(["unshare", "--mount", "sh", "-c", inside], capture_output=True, text=True, timeout=60, check=False)


def may_mount() -> bool:
    tried = ["unshare", "--mount", "mount", "--bind", "/tmp", "/sys/bus/pci/devices"]
    try:
        return subprocess.run(tried, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not may_mount(), reason="no right to show a PCI bus of our own to NIXL (mount namespaces)")
def test_nixl_itself_on_a_node_with_a_gpu(tmp_path: Path):
    """Seen on an H100: a worker without a GPU, whose tier asks for tcp, shm or rdma, did not come up on a node that has some."""
    bus = on_the_bus(tmp_path, ("0x10de", "0x030200"))
    refused, taken = (
        nixl_with_a_gpu_on_the_bus(bus, allowed) for allowed in ("tcp,self", taken_by_nixl("tcp,self", nvidia=True))
    )
    assert refused.returncode != 0
    assert "NVIDIA GPU(s) are present" in refused.stderr
    assert (taken.returncode, taken.stdout.splitlines()[-1:]) == (0, ["up"]), taken.stderr

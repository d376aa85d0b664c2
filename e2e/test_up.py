"""`fleet up` as a user runs it: real processes, real requests, bad input, Ctrl-C; nothing is left behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.fleet_up import END_S, READY_S, UP, free_port, gone, marked, running
from e2e.shared_memory import ownerless
from fleet_cli.up.bundled import bundled_manifest, tiny_model

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def shared_memory_is_left_as_found() -> Iterator[None]:
    before = ownerless()
    yield
    assert ownerless() - before == set()


@pytest.fixture
def fleet_file(tmp_path: Path):
    """Writes the bundled manifest on a model folder, with changes to its spec."""

    def write(model: Path, **spec) -> str:
        manifest = bundled_manifest(model)
        manifest["spec"].update(spec)
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump(manifest))
        return str(path)

    return write


def finished(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*UP, *args], capture_output=True, text=True, timeout=READY_S + END_S, check=False)


@pytest.mark.smoke
def test_once_proves_that_kv_moved(tmp_path):
    done = finished("--once", "--port", str(free_port()), "--state", str(tmp_path / "state"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    assert re.search(r"ok +prefilled remotely = prefilled locally, streamed: 24 tokens, greedy, equal", done.stdout)
    moved = re.search(r"ok +KV hand-off: KV moved: (\d+) transfers, (\d+) blocks, [\d.]+ [kMG]?B", done.stdout)
    assert moved is not None, done.stdout
    assert int(moved[1]) >= 3
    assert int(moved[2]) >= int(moved[1])
    assert gone(tmp_path / "state")


def test_the_pasted_curl_line_answers_and_ctrl_c_drains(tmp_path):
    state = tmp_path / "state"
    with running("--port", str(free_port()), "--state", str(state)) as fleet:
        curl = fleet.until("curl -s").partition("curl -s")
        answer = subprocess.run("curl -s" + curl[2], shell=True, capture_output=True, text=True, timeout=60, check=True)  # noqa: S602
        assert json.loads(answer.stdout)["choices"][0]["text"]
        assert len(marked(state)) >= 4
        rss_kb = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{fleet.process.pid}/status").read_text())[1])
        fleet.until(r"KV moved: [1-9]")
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.end() == 0, "".join(fleet.lines)
    assert "stopped; KV moved" in fleet.lines[-1]
    assert gone(state)
    assert rss_kb <= 150 * 1024


def test_a_second_ctrl_c_kills(tmp_path):
    state = tmp_path / "state"
    with running("--port", str(free_port()), "--state", str(state)) as fleet:
        fleet.until("pod .*: (starting|warming)")
        fleet.process.send_signal(signal.SIGINT)
        fleet.until("stopping")
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.end(20) in (0, 130), "".join(fleet.lines)
    assert gone(state)


def test_a_reader_that_leaves_stops_the_fleet(tmp_path):
    state = tmp_path / "state"
    with running("--port", str(free_port()), "--state", str(state)) as fleet:
        fleet.until("pod .*: (starting|warming)")
        assert fleet.process.stdout is not None
        fleet.process.stdout.close()
        assert fleet.process.wait(READY_S) == 0
    assert gone(state)


def test_nothing_survives_a_killed_fleet_up(tmp_path):
    state = tmp_path / "state"
    with running("--port", str(free_port()), "--state", str(state)) as fleet:
        fleet.until("pod .*: (starting|warming)")
        fleet.process.kill()
        fleet.end()
    assert gone(state)


def broken_model(folder: Path, flaw: str) -> Path:
    """A copy of the tiny model with one flaw."""
    shutil.copytree(tiny_model(), folder)
    config = folder / "config.json"
    if flaw == "weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[: 64 * 1024])
    elif flaw == "architecture":
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
        )
    elif flaw == "no config":
        config.unlink()
    return folder


@pytest.mark.parametrize(
    ("flaw", "cause"),
    [("weights", r"model\.safetensors"), ("architecture", "MambaForCausalLM"), ("no config", r"config\.json")],
)
def test_a_bad_model_is_named_and_ends_with_2(tmp_path, fleet_file, flaw, cause):
    path = fleet_file(broken_model(tmp_path / "model", flaw))
    done = finished(path, "--once", "--port", str(free_port()), "--state", str(tmp_path / "state"))
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert re.search(cause, line)
    assert gone(tmp_path / "state")


@pytest.mark.smoke
def test_input_that_fails_before_anything_starts(tmp_path, fleet_file):
    port = str(free_port())  # somebody may be using the default one
    missing = finished(fleet_file(tmp_path / "none"), "--port", port)
    assert (missing.returncode, missing.stderr) == (
        2,
        f"fleet: spec.model.source: model path {tmp_path}/none does not exist\n",
    )
    invalid = finished(fleet_file(tmp_path, routing={"replicas": 0}), "--port", port)
    assert (invalid.returncode, invalid.stderr) == (
        2,
        'fleet: The InferenceFleet "tiny" is invalid: spec.routing.replicas: Invalid value: 0: '
        "spec.routing.replicas in body should be greater than or equal to 1\n",
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        held = taken.getsockname()[1]
        busy = finished("--port", str(held))
    assert busy.returncode == 1
    assert busy.stderr == f"fleet: port {held} on 127.0.0.1 is in use: stop what holds it or choose another with --port\n"

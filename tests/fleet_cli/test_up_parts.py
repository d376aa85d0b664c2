"""Preflight, signals, state folder and the bundled fleet."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.validate import validate
from fleet_cli.errors import InputError, RunError
from fleet_cli.up import bundled
from fleet_cli.up.command import as_new
from fleet_cli.up.local import LocalFleet
from fleet_cli.up.preflight import check_engine, check_model, check_port
from fleet_cli.up.state import state_folder
from fleet_cli.up.stops import Stops, until
from fleet_operator.cluster.interface import ConflictError
from fleet_operator.cluster.memory import MemoryCluster


def fleet(source: str):
    return parse_fleet(
        {
            "metadata": {"name": "f"},
            "spec": {"model": {"source": source}, "tiers": [{"name": "a", "accelerator": {"type": "cpu"}}]},
        }
    )


def test_the_bundled_fleet_is_valid_and_small():
    manifest = bundled.bundled_manifest(Path("/cache/model"))
    assert validate(manifest) == []
    tier = parse_fleet(manifest).spec.tiers[0]
    assert tier.initial == (1, 2)
    assert tier.device_request("decode") is None


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("INFERENCEFLEET_CACHE", str(tmp_path / "mine"))
    assert bundled.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("INFERENCEFLEET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundled.cache_folder() == tmp_path / "inferencefleet"


def test_a_model_that_cannot_be_made_names_the_folder(monkeypatch, tmp_path):
    (tmp_path / "models").write_text("a file where a folder belongs")
    monkeypatch.setenv("INFERENCEFLEET_CACHE", str(tmp_path))
    with pytest.raises(RunError, match=f"could not be made in {tmp_path}"):
        bundled.tiny_model()


def test_model_path(tmp_path):
    check_model(fleet(f"file://{tmp_path}"), {})
    check_model(fleet("hf://org/name"), {})
    (tmp_path / "sub").mkdir()
    check_model(fleet("pvc://claim/sub"), {"claim": tmp_path})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"model path .*/none does not exist"):
        check_model(fleet(f"file://{tmp_path}/none"), {})
    with pytest.raises(InputError, match="is not a folder"):
        check_model(fleet(f"file://{tmp_path}/file"), {})
    with pytest.raises(InputError, match="give --pvc claim=DIR"):
        check_model(fleet("pvc://claim/sub"), {})
    with pytest.raises(InputError, match="does not exist"):
        check_model(fleet("pvc://claim/other"), {"claim": tmp_path})


def test_the_path_of_every_adapter(tmp_path):
    """A broken one would be told in a worker's log alone, and clients to try again."""
    (tmp_path / "a").mkdir()

    def with_adapters(*sources: str) -> InferenceFleet:
        adapters = [{"name": f"a{i}", "source": source} for i, source in enumerate(sources)]
        model = {"source": f"file://{tmp_path}", "adapters": adapters}
        tiers = [{"name": "t", "accelerator": {"type": "cpu"}}]
        return InferenceFleet.model_validate({"metadata": {"name": "f"}, "spec": {"model": model, "tiers": tiers}})

    check_model(with_adapters(f"file://{tmp_path}/a", "hf://org/name"), {})
    with pytest.raises(InputError, match=r"^spec\.model\.adapters\[1\]\.source: adapter path .*/b does not exist"):
        check_model(with_adapters(f"file://{tmp_path}/a", f"file://{tmp_path}/b"), {})


def test_the_path_of_every_tiers_model(tmp_path):
    def two(own: dict) -> InferenceFleet:
        tiers = [{"name": name, "accelerator": {"type": "cpu"}} for name in ("a", "b")]
        return InferenceFleet.model_validate(
            {"metadata": {"name": "f"}, "spec": {"model": {"source": f"file://{tmp_path}"}, "tiers": [tiers[0], tiers[1] | own]}}
        )

    check_model(two({}), {})
    check_model(two({"model": {"source": "hf://org/name"}}), {})
    with pytest.raises(InputError, match=r"^spec\.tiers\[1\]\.model\.source: model path .*/none does not exist"):
        check_model(two({"model": {"source": f"file://{tmp_path}/none"}}), {})
    with pytest.raises(InputError, match=r"^spec\.tiers\[1\]\.model\.source: claim c has no folder"):
        check_model(two({"model": {"source": "pvc://c/m"}}), {})
    gone = two({"model": {"source": f"file://{tmp_path}"}})
    tmp_path.rmdir()
    with pytest.raises(InputError, match=r"^spec\.model\.source: model path .* does not exist"):
        check_model(gone, {})


def test_vllm_comes_from_the_environment_the_cache_or_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("INFERENCEFLEET_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("FLEET_VLLM_BIN", raising=False)
    assert bundled.vllm_program() is None
    program = tmp_path / "vllm-0.32.0" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.touch()
    assert bundled.vllm_program() == str(program)
    monkeypatch.setenv("FLEET_VLLM_BIN", "/opt/vllm")
    assert bundled.vllm_program() == "/opt/vllm"


def test_a_fleet_on_vllm_needs_vllm():
    spec = fleet("file:///m").spec
    on_vllm = fleet("file:///m").model_copy(
        update={"spec": spec.model_copy(update={"engine": spec.engine.model_copy(update={"type": "vllm"})})}
    )
    check_engine(on_vllm, "/opt/vllm")
    check_engine(fleet("file:///m"), None)
    with pytest.raises(InputError, match="run `make vllm`"):
        check_engine(on_vllm, None)


def test_a_busy_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} on 127.0.0.1 is in use"):
            check_port(port)
    check_port(port)


def test_one_signal_drains_two_kill():
    async def run():
        stops = Stops()
        stops.install()
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait_for(stops.drain.wait(), 5)
        assert not stops.kill.is_set()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(stops.kill.wait(), 5)

    asyncio.run(run())


def test_until_returns_the_result_or_stops_the_work():
    async def run():
        stop, ended = asyncio.Event(), []

        async def quick():
            return 7

        async def endless():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def broken():
            raise RunError("broken")

        assert await until(stop, quick()) == 7
        with pytest.raises(RunError, match="broken"):
            await until(stop, broken())
        asyncio.get_running_loop().call_soon(stop.set)
        assert await until(stop, endless()) is None
        assert ended == [True]

    asyncio.run(run())


def test_a_fresh_state_folder_goes_unless_its_logs_explain_a_failure():
    with state_folder(None) as folder:
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(InputError), state_folder(None) as folder:
        raise InputError("bad")
    assert not folder.exists()
    with pytest.raises(RunError, match=r"died \(logs: .*/logs\)"), state_folder(None) as folder:
        raise RunError("died")
    assert folder.is_dir()
    folder.rmdir()


def test_a_chosen_state_folder_stays_and_is_for_one(tmp_path):
    chosen = tmp_path / "state"
    with state_folder(chosen), pytest.raises(RunError, match="in use by another fleet up"), state_folder(chosen):
        pass
    assert chosen.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--state"), state_folder(tmp_path / "file"):
        pass


def test_the_command_line_imports_nothing_heavy():
    heavy = {"torch", "transformers", "kubernetes", "kopf", "numpy"}
    code = f"import sys, fleet_cli.main, fleet_cli.up.command; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_store_that_refuses_the_fleet_is_an_error_of_the_command_and_leaves_nothing(tmp_path, monkeypatch):
    async def refuse(self, *_, **__):
        raise ConflictError("the object has been modified")

    monkeypatch.setattr(MemoryCluster, "apply", refuse)

    async def go():
        manifest = as_new(bundled.bundled_manifest(Path("/m")))
        local = LocalFleet(manifest=manifest, state_dir=tmp_path, port=1, claims={})
        with pytest.raises(RunError, match="the fleet was refused: the object has been modified"):
            async with local:
                pass
        assert all(task.done() for task in local._tasks)

    asyncio.run(go())


def test_a_log_that_cannot_be_written_names_its_path(tmp_path):
    (tmp_path / "logs").write_text("a file where a folder belongs")

    async def go():
        local = LocalFleet(manifest=bundled.bundled_manifest(Path("/m")), state_dir=tmp_path, port=1, claims={})
        with pytest.raises(RunError, match=f"{tmp_path}/logs.*File exists"):
            async with local:
                pass

    asyncio.run(go())

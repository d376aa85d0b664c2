"""Preflight, signals, state folder and the bundled fleet."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.validate import validate
from fleet_cli.errors import InputError, RunError
from fleet_cli.main import main
from fleet_cli.up import bundled
from fleet_cli.up.command import UpOptions, _Session, as_new
from fleet_cli.up.local import LocalFleet
from fleet_cli.up.preflight import check_engine, check_memory, check_model, check_port, free_bytes
from fleet_cli.up.screen import PlainScreen
from fleet_cli.up.state import state_folder
from fleet_cli.up.stops import Stops, until
from fleet_operator.cluster.interface import ConflictError
from fleet_operator.cluster.memory import MemoryCluster
from fleet_planner.types import KvProof


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


def taking_a_port() -> socket.socket:
    """One that no outgoing connection of another suite gets once it is free again."""
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("all are taken")


def test_a_busy_port_is_named():
    with taking_a_port() as taken:
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


class Ground:
    """A local fleet of no process; the user's signal comes while its state is read."""

    logs, router_url = Path("/logs"), "http://127.0.0.1:1"

    def __init__(self, number: signal.Signals) -> None:
        self.signal = number
        self.deleted = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    def raise_if_dead(self) -> None:
        return None

    def can_drain(self) -> bool:
        return True

    async def observe(self):
        if not self.deleted:
            signal.raise_signal(self.signal)
        return [], {}

    async def counted(self, fleet):
        return []

    async def delete(self) -> None:
        self.deleted = True


@pytest.mark.parametrize(("once", "code"), [(False, 0), (True, 130)])
def test_a_proof_that_was_interrupted_is_none(once, code):
    """CI that ended `fleet up --once` before its time read exit code 0: nothing had been asked."""
    options = UpOptions(file=None, once=once, port=1, state=None, claims={})
    screen = PlainScreen(io.StringIO(), lambda: 0.0)
    session = _Session(options, fleet("file:///m"), Ground(signal.SIGTERM), screen, 0.0)
    assert asyncio.run(session.run()) == code


def test_what_moved_is_counted_when_it_stops():
    """Transfers of the last five seconds were not told: `fleet up` that ended right after a burst said 5 of 7."""

    class Counting(Ground):
        async def observe(self):
            pods, _ = await super().observe()
            return pods, {"tiers": [status("a", transfers=3), status("b", transfers=2)]}

        async def counted(self, fleet):
            assert not self.deleted
            return [KvProof(transfers=4, blocks=8, bytes=64, failed=0, measured_at=1.0), KvProof(3, 6, 32, 1, 1.0)]

    def status(name, transfers):
        role = {"desired": 1, "ready": 1, "serving": 1}
        kv = {"transfers": transfers, "blocks": 20, "bytes": 9, "failed": 0}
        return {"name": name, "prefill": role, "decode": role, "kv": kv}

    options = UpOptions(file=None, once=False, port=1, state=None, claims={})
    said = io.StringIO()
    session = _Session(options, fleet("file:///m"), Counting(signal.SIGTERM), PlainScreen(said, lambda: 0.0), 0.0)
    assert asyncio.run(session.run()) == 0
    assert "stopped; KV moved: 7 transfers, 40 blocks, 96 B, 1 failed (engine counters)" in said.getvalue()


def test_engines_that_do_not_answer_hold_up_no_end(tmp_path, monkeypatch):
    class Silent:
        async def collect(self, *_):
            await asyncio.Event().wait()

    async def go():
        local = LocalFleet(manifest=as_new(bundled.bundled_manifest(Path("/m"))), state_dir=tmp_path, port=1, claims={})
        assert await local.counted(fleet("file:///m")) == [], "no operator has begun to listen"
        local._telemetry = Silent()
        async with asyncio.timeout(10):
            assert await local.counted(fleet("file:///m")) == []

    monkeypatch.setattr("fleet_cli.up.local.COUNTED_S", 0.0)
    asyncio.run(go())


def test_without_a_runtime_nobody_is_waited_for():
    """A runtime that had failed was waited for, for a minute, before its error was told."""

    class Dead(Ground):
        def raise_if_dead(self) -> None:
            raise RunError("the runtime stopped: of a full disk")

        def can_drain(self) -> bool:
            return False

        async def observe(self):
            return [{"metadata": {"name": "p"}}], {}

    options = UpOptions(file=None, once=True, port=1, state=None, claims={})
    said = io.StringIO()
    session = _Session(options, fleet("file:///m"), Dead(signal.SIGTERM), PlainScreen(said, lambda: 0.0), 0.0)

    async def go():
        async with asyncio.timeout(10):
            await session.run()

    with pytest.raises(RunError, match="the runtime stopped: of a full disk"):
        asyncio.run(go())
    assert "killing what is left" in said.getvalue()


def test_the_runtime_alone_is_who_drains(tmp_path):
    async def go():
        local = LocalFleet(manifest=as_new(bundled.bundled_manifest(Path("/m"))), state_dir=tmp_path, port=1, claims={})
        for name, drains in (("operator", True), ("runtime", False)):
            ended = asyncio.create_task(asyncio.sleep(0), name=name)
            await ended
            local._tasks.append(ended)
            assert local.can_drain() is drains

    asyncio.run(go())


@pytest.mark.parametrize("option", ["--state", "--tenants", "--pvc"])
def test_a_path_that_is_no_text_is_an_option_that_cannot_be_used(option, capsys):
    """The runtime died of it, and said so after a minute."""
    with pytest.raises(SystemExit) as ended:
        main(["up", option, "c=/x\udcff" if option == "--pvc" else "/x\udcff"])
    assert ended.value.code == 2
    assert "is not text in UTF-8" in capsys.readouterr().err


def test_whoever_makes_the_tiny_model_does_not_outlive_its_caller(monkeypatch, tmp_path):
    """SIGTERM left it behind, and what it had begun in the cache."""
    monkeypatch.setenv("INFERENCEFLEET_CACHE", str(tmp_path))
    made: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen):
        def communicate(self, *_, **__):
            made.append(self)
            deadline = time.monotonic() + 60
            while not list((tmp_path / "models").glob(".*")) and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.wait(0.01)
            raise KeyboardInterrupt

    monkeypatch.setattr(bundled.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundled.tiny_model()
    assert made[0].wait(10) != 0
    assert list((tmp_path / "models").iterdir()) == []


def test_a_path_that_cannot_be_looked_at_is_named(tmp_path):
    with pytest.raises(InputError, match=r"^spec\.model\.source: model path .*: File name too long"):
        check_model(fleet(f"file://{tmp_path}/{'a' * 300}"), {})


@pytest.mark.parametrize("option", ["--state", "--tenants", "--pvc"])
def test_a_home_that_nobody_has_is_an_option_that_cannot_be_used(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["up", option, "c=~nobody-here/x" if option == "--pvc" else "~nobody-here/x"])
    assert ended.value.code == 2
    assert f"argument {option}: '~nobody-here/x': there is no such home folder" in capsys.readouterr().err


def test_a_cache_without_a_home_says_what_to_set(monkeypatch):
    """A container's user without a passwd entry and without HOME."""
    for name in ("INFERENCEFLEET_CACHE", "XDG_CACHE_HOME", "FLEET_VLLM_BIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert bundled.vllm_program() is None
    with pytest.raises(RunError, match="set HOME or INFERENCEFLEET_CACHE"):
        bundled.tiny_model()


def test_a_cache_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("INFERENCEFLEET_CACHE", str(tmp_path / ("a" * 300)))
    with pytest.raises(RunError, match=r"the tiny model cannot be read in .*: File name too long"):
        bundled.tiny_model()


GIB = 1024**3


def sized(replicas: int, cache: str, engine: str = "torch", accelerator: str = "cpu"):
    role = {"replicas": replicas, "maxReplicas": max(8, replicas)}
    shape = {"accelerator": {"type": accelerator}, "ratio": {"prefill": 1, "decode": 1}}
    tier = {"name": "a", **shape, "prefill": role, "decode": role}
    spec = {"model": {"source": "hf://a/b"}, "engine": {"type": engine, "cacheSize": cache}, "tiers": [tier]}
    return parse_fleet({"metadata": {"name": "f"}, "spec": spec})


@pytest.mark.parametrize(
    ("asked", "free", "needed"),
    [
        (sized(1, "64Mi"), 2 * GIB, None),
        (sized(1, "1Ti"), 24 * GIB, "2 workers, each with a cache of 1Ti, need 2.2 TB, and this machine has 25.8 GB free"),
        (sized(5, "4Gi"), 16 * GIB, "10 workers, each with a cache of 4Gi, need 45.6 GB"),
        (sized(900, "1Mi"), 24 * GIB, "1800 workers"),
        (sized(1, "1Ti", "vllm"), 24 * GIB, "2 workers"),
        (sized(1, "1Ti", "vllm", "h100"), 24 * GIB, None),
        (sized(1, "1Ti"), None, None),
    ],
    ids=["small", "one-cache", "all-together", "many-workers", "vllm-on-cpu", "in-a-gpu", "nobody-knows"],
)
def test_a_fleet_that_does_not_fit_into_memory_is_not_started(asked: InferenceFleet, free: int | None, needed: str | None):
    """Its workers were killed, with "killed by SIGKILL" for a cause, and so was what else ran on the machine."""
    if needed is None:
        check_memory(asked, free)
        return
    with pytest.raises(InputError, match=f"spec.engine.cacheSize: {needed}"):
        check_memory(asked, free)


@pytest.mark.parametrize(
    ("text", "found"),
    [("MemTotal: 9 kB\nMemAvailable:     7 kB\n", 7168), ("MemTotal: 9 kB\n", None), ("MemAvailable:\n", None), (None, None)],
)
def test_what_a_machine_tells_of_its_memory(text: str | None, found: int | None, tmp_path, monkeypatch):
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("fleet_cli.up.preflight.MEMINFO", path)
    assert free_bytes() == found

"""Which environment an engine process really gets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet_worker.agent import guard, supervise
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.command import EngineCommand
from fleet_worker.agent.identity import Identity
from fleet_worker.agent.supervise import EngineProcess, start_guard, watch_children
from fleet_worker.config import WorkerConfig
from fleet_worker.segments import FOLDER_ENV, PREFIX, Segments, make, sweep

WRITE = "import os, pathlib; pathlib.Path(os.environ['OUT']).write_text(os.environ['KNOB'])"


ENGINE_WITH_A_CHILD = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""
TIDY_CHILD = """
import os, pathlib, time
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.3)
pathlib.Path(os.environ["OUT"]).write_text("tidied")
"""
STUBBORN_CHILD = """
import os, pathlib, time
pathlib.Path(os.environ["OUT"]).write_text(str(os.getpid()))
print("ready", flush=True)
time.sleep(60)
"""


async def stopped(child: str) -> None:
    engine = EngineProcess(EngineCommand((sys.executable, "-c", ENGINE_WITH_A_CHILD, child)))
    watch_children(asyncio.get_running_loop(), engine.reap)
    engine.start()
    for _ in range(1_000):
        if "ready" in engine.last_words():
            break
        await asyncio.sleep(0.01)
    await engine.stop(5.0)


def test_a_child_that_tidies_up_after_its_engine_is_let(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM's last process removes the shared memory of the others."""
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    asyncio.run(stopped(TIDY_CHILD))
    assert (tmp_path / "seen").read_text() == "tidied"


def test_a_child_that_stays_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    monkeypatch.setattr("fleet_worker.agent.supervise.LEFTOVERS_S", 0.2)
    asyncio.run(stopped(STUBBORN_CHILD))
    pid = int((tmp_path / "seen").read_text())
    assert not Path(f"/proc/{pid}").exists(), "stop returned before it was gone"


AGENT = """
import asyncio, sys, time
from fleet_worker.agent.command import EngineCommand
from fleet_worker.agent.supervise import EngineProcess, start_guard, watch_children

async def main():
    engine = EngineProcess(EngineCommand((sys.executable, *sys.argv[1:])))
    watch_children(asyncio.get_running_loop(), engine.reap)
    engine.start()
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_child_that_looks_after_no_parent_ends_with_a_killed_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As vLLM's engine core, and its workers until they are loaded. No container ends here: this agent is not PID 1."""
    os.mkfifo(tmp_path / "seen")
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    argv = [sys.executable, "-c", AGENT, "-c", ENGINE_WITH_A_CHILD, STUBBORN_CHILD]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as agent:
        child = os.pidfd_open(int((tmp_path / "seen").read_text()))
        try:
            agent.kill()
            assert select.select([child], [], [], 10)[0], "the child outlives its agent"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


@pytest.mark.parametrize(("same", "killed"), [(True, True), (False, False)])
def test_a_session_is_killed_by_its_number_and_its_beginning(same: bool, killed: bool):
    """An engine that ended while its agent lives leaves its number to others; killed a day later, that agent's guard ended
    whatever had it then."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeper:
        since = guard.started_at(sleeper.pid)
        try:
            assert since.isdigit()
            assert guard.kill_session(sleeper.pid, since if same else str(int(since) - 1)) is killed
            ended = os.pidfd_open(sleeper.pid)
            assert bool(select.select([ended], [], [], 5 * killed)[0]) is killed
            os.close(ended)
        finally:
            sleeper.kill()
    assert guard.started_at(sleeper.pid) == ""


def test_an_agent_that_is_pid_1_needs_no_guard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert start_guard(Segments()) is None


# UCX writes 4 MB before it unlinks their file: this process gets a signal after the first one, as it might get SIGKILL in between
DIES_AS_UCX_STARTS = f"""
import os, pathlib, resource, signal
pathlib.Path(os.environ["OUT"]).write_text(os.environ.get("{FOLDER_ENV}", "/dev/shm"))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from fleet_worker.transfer.probe import _agent, _memory
_agent("dies", _memory()[1])
"""
HAS_A_SEGMENT = f"""
import os, pathlib, time
folder = os.environ.get("{FOLDER_ENV}", "")
pathlib.Path(folder, "ucx_shm_posix_1").write_bytes(b"x")
pathlib.Path(os.environ["OUT"]).write_text(folder)
time.sleep(60)
"""


def cut_segments(folder: Path) -> set[Path]:
    return {path for path in folder.glob("ucx_shm_posix_*") if path.stat().st_size == 1 << 20}


def test_an_engine_that_dies_while_ucx_starts_leaves_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    before = cut_segments(Path("/dev/shm"))
    code = asyncio.run(ended(EngineCommand((sys.executable, "-c", DIES_AS_UCX_STARTS)), within_s=60))
    left = cut_segments(Path("/dev/shm")) - before
    for path in left:
        path.unlink()
    assert (code, left) == (-signal.SIGXFSZ, set())
    folder = Path((tmp_path / "seen").read_text())
    assert (folder.parent, folder.exists()) == (Path("/dev/shm"), False)


def test_what_an_engine_shared_ends_with_a_killed_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By its guard, whom nobody waits for but who wants the folder's lock."""
    os.mkfifo(tmp_path / "seen")
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", AGENT, "-c", HAS_A_SEGMENT], stderr=subprocess.DEVNULL) as agent:
        try:
            folder = Path((tmp_path / "seen").read_text())
            assert folder.name.startswith(PREFIX)
            held = os.open(folder, os.O_RDONLY)
        finally:
            agent.kill()
    fcntl.flock(held, fcntl.LOCK_EX)
    os.close(held)
    assert not folder.exists()


SHARES_MEMORY = f"""
import os, pathlib, time
from multiprocessing import get_context, resource_tracker, shared_memory
lock = get_context("spawn").Lock()
resource_tracker.unregister(lock._semlock.name, "semaphore")
shared = shared_memory.SharedMemory(create=True, size=1 << 20)
resource_tracker.unregister(shared._name, "shared_memory")  # which is killed as well where memory ends
noted = pathlib.Path(os.environ["{FOLDER_ENV}"], "noted")
while not noted.exists():
    time.sleep(0.01)
pathlib.Path(os.environ["OUT"]).write_text(shared.name + " sem." + lock._semlock.name.strip("/"))
time.sleep(60)
"""


def test_what_python_shares_between_an_engines_processes_ends_with_a_killed_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As vLLM's do: hundreds of MB, which their last process removes unless it is killed with them."""
    os.mkfifo(tmp_path / "seen")
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    monkeypatch.delenv(FOLDER_ENV, raising=False)
    quick = AGENT.replace("async def main", "import fleet_worker.agent.supervise as own\nown.NOTE_LEAST_S = 0.05\nasync def main")
    with subprocess.Popen([sys.executable, "-c", quick, "-c", SHARES_MEMORY], stderr=subprocess.DEVNULL) as agent:
        try:
            files = [Path("/dev/shm", name) for name in (tmp_path / "seen").read_text().split()]
            assert [file.exists() for file in files] == [True, True]
        finally:
            agent.kill()
    end = time.monotonic() + 10
    while any(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.01)
    left = [file for file in files if file.exists()]
    for file in left:
        file.unlink()
    assert left == []


def test_nobody_else_sweeps_where_a_guard_has_yet_to(tmp_path: Path):
    """The agent is dead, some of its engine's processes are not."""
    shared = make(tmp_path)
    guarding = start_guard(shared)
    os.close(shared.lock)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [shared.folder]
    guarding.communicate(timeout=10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", [sys.executable, "/none/such"])
def test_each_start_has_a_folder_of_its_own_and_each_end_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
):
    """Also one that cannot be executed. To be stopped again, as after another engine that did not start, does nothing."""
    made: list[Segments] = []

    def make_there() -> Segments:
        made.append(make(tmp_path))
        return made[-1]

    def there() -> list[Path]:
        return list(tmp_path.iterdir())

    monkeypatch.setattr("fleet_worker.agent.supervise.make", make_there)

    async def run() -> None:
        engine = EngineProcess(EngineCommand((program, "-c", "")))
        watch_children(asyncio.get_running_loop(), engine.reap)
        if program == sys.executable:
            engine.start()
            assert there() == [made[0].folder]
            await engine.stop(10.0)
        else:
            with pytest.raises(FileNotFoundError):
                engine.start()
        assert there() == []
        other = os.dup2(1, made[0].lock)  # a file of somebody else's gets the number of the lock that was given up
        await engine.stop(10.0)
        os.close(other)

    asyncio.run(run())
    assert len(made) == 1


async def stopped_as_it_died() -> int:
    engine = EngineProcess(EngineCommand((sys.executable, "-c", "raise SystemExit(7)")))
    watch_children(asyncio.get_running_loop(), engine.reap)
    pid = engine.start()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it ends while the loop is busy: nobody has heard of it
    await asyncio.wait_for(engine.stop(0.1), 10)
    return engine.exited.result()


def test_an_engine_that_ends_as_it_is_stopped_is_noticed():
    """Popen collects a dead child before it sends a signal: nobody else ever sees it then."""
    assert asyncio.run(stopped_as_it_died()) == 7


async def words_of_one_that_was_heard_late(within_s: float) -> str:
    engine = EngineProcess(EngineCommand((sys.executable, "-c", "raise SystemExit('BadModel: no config.json')")))
    watch_children(asyncio.get_running_loop(), engine.reap)
    may_hear = threading.Event()
    heard, engine.log._heard = engine.log._heard, lambda line: may_hear.wait() and heard(line)
    engine.start()
    await asyncio.wait_for(asyncio.shield(engine.exited), 20)
    later = threading.Timer(within_s, may_hear.set)
    later.start()
    said = engine.last_words()
    later.cancel()
    may_hear.set()
    await engine.stop(1.0)
    return said


@pytest.mark.parametrize(("within_s", "said"), [(0.05, "BadModel: no config.json"), (30.0, "")], ids=["soon", "never"])
def test_the_cause_of_a_death_is_waited_for(monkeypatch: pytest.MonkeyPatch, within_s: float, said: str):
    """Its end was known before the thread that reads its stderr had come to it: the cause was missing, or an earlier line."""
    monkeypatch.setattr(supervise, "WORDS_S", 1.0)
    assert asyncio.run(words_of_one_that_was_heard_late(within_s)) == said


CHATTY = """
import os, pathlib, sys, time
for number in range(4000):
    print("x" * 100, file=sys.stderr)
pathlib.Path(os.environ["OUT"]).write_text("got past")
print("last", file=sys.stderr, flush=True)
"""


def to_its_end(script: str, **written: int) -> EngineProcess:
    """An engine of this Python code, when it has ended with 0. `written`: where its log goes."""

    async def run() -> EngineProcess:
        engine = EngineProcess(EngineCommand((sys.executable, "-c", script)), **written)
        watch_children(asyncio.get_running_loop(), engine.reap)
        engine.start()
        try:
            assert await asyncio.wait_for(engine.exited, 20) == 0
        finally:
            await engine.stop(0.0)
        return engine

    return asyncio.run(run())


@pytest.mark.parametrize("collector", ["full-disk", "does-not-read", "gone"])
def test_a_log_that_cannot_be_written_does_not_hold_up_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: str
):
    """The reader ended with the first OSError, and the engine blocked on its full stderr for ever."""
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    monkeypatch.setattr("fleet_worker.agent.supervise.LOG_S", 0.1)
    reading, writing = os.pipe()
    if collector == "full-disk":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    if collector != "does-not-read":
        os.close(reading)

    engine = to_its_end(CHATTY, log_fd=writing)
    assert (tmp_path / "seen").read_text() == "got past"
    assert engine.last_words() == "last"
    assert engine.log.dropped > 1_000
    if collector == "does-not-read":  # it reads again: what was dropped is told, and the rest comes
        found = b""
        while b"last\n" not in found:
            found += os.read(reading, 65_536)
        assert b"LogDropped: " in found
        os.close(reading)
    engine.log.finish(10)
    os.close(writing)


def test_lines_of_the_engine_that_were_dropped_are_in_the_agents_metrics():
    """Before there is an engine nobody counts, and what nobody counts is not 0."""
    config = WorkerConfig(
        fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model="/none", served_name="m"
    )

    async def go() -> list[str]:
        agent = Agent(config, Identity("p", "u", "127.88.0.1"))
        found = [await agent.metrics()]
        agent._running.process = SimpleNamespace(log_dropped=17, ucx=SimpleNamespace(transport=None))
        found.append(await agent.metrics())
        await agent._client.close()
        agent._scratch.cleanup()
        return found

    before, after = asyncio.run(go())
    assert "fleet_agent_log_dropped_total" not in before
    assert "\nfleet_agent_log_dropped_total 17\n" in after


def test_what_vllm_died_of_is_told_though_its_stderr_ends_with_something_else():
    told = "(EngineCore pid=9) ERROR 11-27 21:03:26 [core.py:1512] "
    engine = to_its_end(f"""
import sys
print({told!r} + "EngineCore encountered a fatal error.", {told!r} + "ValueError: no room", sep="\\n", flush=True)
print("x.py:254: UserWarning: resource_tracker: There appear to be 2 leaked shared_memory objects", file=sys.stderr)
""")
    assert engine.last_words() == "EngineCore encountered a fatal error: ValueError: no room"


def test_an_engine_that_talks_on_its_stdout_is_not_held_up_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM logs to stdout: it was the agent's own, and nobody read it."""
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    monkeypatch.setattr("fleet_worker.agent.supervise.LOG_S", 0.1)
    reading, writing = os.pipe()

    engine = to_its_end(CHATTY.replace("stderr", "stdout"), out_fd=writing)
    assert (tmp_path / "seen").read_text() == "got past"
    assert engine.log_dropped > 1_000
    assert engine.last_words() == ""  # a cause of death is said on stderr
    found = b""
    while b"last\n" not in found:
        found += os.read(reading, 65_536)
    os.close(reading)
    engine.out.finish(10)
    os.close(writing)


async def ended(command: EngineCommand, within_s: float = 10) -> int:
    engine = EngineProcess(command)
    watch_children(asyncio.get_running_loop(), engine.reap)
    engine.start()
    try:
        return await asyncio.wait_for(engine.exited, within_s)
    finally:
        await engine.stop(0.0)


@pytest.mark.parametrize(
    ("mine", "command", "seen"),
    [
        (None, {"defaults": {"KNOB": "default"}}, "default"),
        ("users", {"defaults": {"KNOB": "default"}}, "users"),
        ("users", {"defaults": {"KNOB": "default"}, "env": {"KNOB": "ours"}}, "ours"),
    ],
    ids=["default", "the-users-wins-over-a-default", "what-we-must-set-wins"],
)
def test_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str | None, command: dict[str, dict[str, str]], seen: str
):
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    if mine is not None:
        monkeypatch.setenv("KNOB", mine)
    assert asyncio.run(ended(EngineCommand((sys.executable, "-c", WRITE), **command))) == 0
    assert (tmp_path / "seen").read_text() == seen

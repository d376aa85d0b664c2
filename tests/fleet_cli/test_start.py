"""Before a command runs: nothing is imported that it may not need, and Ctrl-C finds nobody who does not expect it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_cli.errors import RunError
from fleet_cli.interrupts import interruptible
from fleet_cli.main import main
from fleet_cli.up.bundled import cache_folder
from fleet_cli.up.stops import Stops

INTERRUPTED = """
import sys

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "fleet_api":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Pressed())
from fleet_cli.interrupts import interruptible
from fleet_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [["validate"], ["up", "--port", "18999"], ["rollout", "history"], ["crds"]], ids="-".join)
def test_who_presses_ctrl_c_while_a_command_is_imported_sees_one_line(words: list[str], tmp_path: Path):
    """Incident: half a second of imports stood before the first line that expects it, even for --help, and a traceback of
    pydantic was the answer."""
    (tmp_path / "fleet.yaml").write_text("kind: InferenceFleet\napiVersion: inferencefleet.io/v1alpha1\n")
    given = [*words, *([] if words == ["crds"] else ["fleet.yaml"])]
    python = [sys.executable, "-c", INTERRUPTED]
    ended = subprocess.run([*python, *given], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "fleet: interrupted\n")


def test_help_needs_none_of_the_models():
    told = "import fleet_cli.main, sys; print(*sorted({'fleet_api', 'pydantic', 'kubernetes', 'httpx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True).stdout == "\n"


@pytest.mark.parametrize(
    "words",
    [["explain", "\udcff"], ["rollout", "status", "\udcff"], ["rollout", "status", "tiny", "-n", "\udcff"]],
    ids=["request", "fleet", "namespace"],
)
def test_a_name_that_no_url_can_hold_is_an_option_that_cannot_be_used(words: list[str], capsys: pytest.CaptureFixture[str]):
    """Bytes of another encoding, pasted: a traceback of httpx, or that what answers is no API server, without asking it."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "is not text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--state", "--tenants", "--pvc"])
def test_a_path_below_a_folder_that_was_removed_is_an_option_that_cannot_be_used(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A terminal whose folder somebody removed: standard output was said not to take what was written."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    with pytest.raises(SystemExit) as ended:
        main(["up", option, "c=x" if option == "--pvc" else "x"])
    assert ended.value.code == 2
    assert f"argument {option}: 'x': the folder that you are in is gone" in capsys.readouterr().err


def test_a_cache_below_a_folder_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    monkeypatch.setenv("INFERENCEFLEET_CACHE", "cache")
    with pytest.raises(RunError, match="the folder that you are in is gone: give INFERENCEFLEET_CACHE a whole path"):
        cache_folder()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_fleet_starts_interrupts(number):
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, tests begin with a hang-up that is ignored
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_hang_up_that_the_caller_ignores_ends_nothing():
    """`nohup fleet up` ended with its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def run():
            stops = Stops()
            stops.install()
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(stops.drain.wait(), 5)
            await asyncio.sleep(0)
            assert not stops.kill.is_set()

        with interruptible():
            signal.raise_signal(signal.SIGHUP)
            asyncio.run(run())
    finally:
        signal.signal(signal.SIGHUP, before)

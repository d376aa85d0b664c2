"""The engine under everything at once: a pool that is far too small, clients that leave at any point, prefill legs, pulls that
succeed, fail, or go on writing after they failed, leases that end in any way. Whoever is answered has the tokens of a run without
any of that, and every block comes back."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import fleet_worker
from fleet_cli.up.bundled import tiny_model
from fleet_wire.kv import KvReference
from fleet_worker.engine.core import EngineCore, Output
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.engine.sequence import Sequence
from fleet_worker.engine.weights import load_weights
from fleet_worker.transfer.base import FetchResult, KvTransferError
from tests.fleet_worker.engine.test_core import BLOCK, ask, ended, engine, steps

LLAMA = Llama(read_config(tiny_model()), load_weights(tiny_model(), read_config(tiny_model())), BLOCK)
SHARED = tuple(range(5, 5 + 2 * BLOCK))
PROMPTS = [SHARED + tuple(range(100 + at, 100 + at + length)) for at, length in enumerate((0, 1, 15, 16, 17, 40, 70, 100))]
BLOCKS, OUTPUT = 14, 24


def request(name: str, which: int, **more: object) -> Sequence:
    """Every second one is sampled: its seed makes it repeatable."""
    sampled = {"temperature": 0.9} if which % 2 else {}
    return ask(name, PROMPTS[which], max_tokens=OUTPUT, ignore_eos=True, **sampled, **more)


@lru_cache
def alone(which: int) -> list[int]:
    core = engine(LLAMA, blocks=64)
    core.add(request("alone", which))
    return ended(steps(core))["alone"]


@lru_cache
def prefilled() -> tuple[EngineCore, list[KvReference]]:
    """Another engine, which keeps every prompt's KV."""
    core = engine(LLAMA, blocks=128)
    for which, prompt in enumerate(PROMPTS):
        core.add(ask(str(which), prompt, max_tokens=1, keep=True))
    given = {o.sequence.request_id: o.reference for o in steps(core) if o.reference is not None}
    return core, [given[str(which)] for which in range(len(PROMPTS))]


class Storm(RuleBasedStateMachine):
    """One engine; what it was asked, and what became of that."""

    def __init__(self) -> None:
        super().__init__()
        self.core = engine(LLAMA, blocks=BLOCKS, batch=4, waiting=12)
        self.connector = self.core.connector
        self.connector.peer = prefilled()[0]._pool
        self.names = 0
        self.asked: dict[str, int] = {}
        self.kept: set[str] = set()
        self.failed: set[str] = set()
        self.writing: dict[str, list[int]] = {}
        """Pulls that are not over: where they write."""
        self.lingering: set[str] = set()
        self.leased: list[str] = []
        self.answered = 0

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            name = output.sequence.request_id
            if output.error is not None:
                assert name in self.failed, output.error
                del self.asked[name]
            elif output.finish is not None:
                which = self.asked.pop(name)
                assert output.sequence.output == alone(which)[: 1 if name in self.kept else OUTPUT], (name, which)
                self.answered += 1
        for name, _, into in self.connector.fetched:
            self.writing[name] = into
        self.connector.fetched.clear()
        self.leased += self.connector.granted
        self.connector.granted.clear()

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def add(self, name: str, sequence: Sequence, which: int) -> None:
        if len(self.core.scheduler.waiting) < 12:
            self.core.add(sequence)
            self.asked[name] = which

    @rule(which=st.integers(0, len(PROMPTS) - 1), salt=st.sampled_from(["", "", "a"]))
    def ask(self, which: int, salt: str) -> None:
        name = self.name("r")
        sequence = request(name, which)
        sequence.cache_salt = salt
        self.add(name, sequence, which)

    @rule(which=st.integers(0, len(PROMPTS) - 1))
    def ask_for_a_prefill(self, which: int) -> None:
        name = self.name("p")
        self.kept.add(name)
        sampled = {"temperature": 0.9} if which % 2 else {}
        self.add(name, ask(name, PROMPTS[which], max_tokens=1, keep=True, ignore_eos=True, **sampled), which)

    @rule(which=st.integers(0, len(PROMPTS) - 1))
    def ask_for_a_decode(self, which: int) -> None:
        name = self.name("d")
        self.add(name, request(name, which, ref=prefilled()[1][which]), which)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.core.step())

    @rule(at=st.integers(0, 99))
    def leave(self, at: int) -> None:
        if self.asked:
            name = list(self.asked)[at % len(self.asked)]
            del self.asked[name]
            assert self.core.abort(name) is not None

    @rule(at=st.integers(0, 99))
    def meet_a_stop_string(self, at: int) -> None:
        if self.asked:
            name = list(self.asked)[at % len(self.asked)]
            del self.asked[name]
            self.core.finish(name, "stop")

    @rule(at=st.integers(0, 99), how=st.sampled_from(["arrives", "fails", "lingers"]))
    def end_a_pull(self, at: int, how: str) -> None:
        if not self.writing:
            return
        name = list(self.writing)[at % len(self.writing)]
        error = KvTransferError("timeout", "its owner is silent")
        if how == "lingers" and name not in self.lingering:
            self.lingering.add(name)
            self.failed.add(name)
            self.connector.done.append(FetchResult(name, error, lingers=True))
            return
        into = self.writing.pop(name)
        if how != "arrives" or name in self.lingering:
            self.failed.add(name)
            self.core._pool[into] = float("nan")
            self.connector.finish(name, error)
        else:
            self.connector.finish(name)

    @rule(at=st.integers(0, 99), why=st.sampled_from(["read", "released", "expired"]))
    def end_a_lease(self, at: int, why: str) -> None:
        if self.leased:
            self.connector.ended.append((self.leased.pop(at % len(self.leased)), why))

    @invariant()
    def every_block_has_its_owner(self) -> None:
        self.core.check_integrity()

    def teardown(self) -> None:
        for _ in range(200):
            while self.leased:
                self.end_a_lease(0, "expired")
            while self.writing:
                self.end_a_pull(0, "arrives")
            self.take(steps(self.core, 5_000))
            if not (self.asked or self.writing or self.leased):
                break
        assert not self.asked, (self.asked, self.core.scheduler.waiting)
        self.take(steps(self.core, 5_000))
        assert self.core.scheduler.blocks.used == 0
        assert [self.core.sequences, self.core._leased, self.core._lease_ids, self.core._cancelled_pulls] == [{}, {}, {}, {}]
        self.core.check_integrity()


TestStorm = Storm.TestCase
TestStorm.settings = settings(
    max_examples=20, stateful_step_count=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)  # fmt: skip


def clocks_of(source: str) -> list[str]:
    """What of it asks the wall clock, by function."""
    asked = {"time": {"time", "time_ns", "localtime", "gmtime"}, "datetime": {"now", "utcnow", "today"}}
    return [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in asked.get(getattr(node.func.value, "id", getattr(node.func.value, "attr", "")), ())
    ]  # fmt: skip


def test_a_clock_that_jumps_ends_no_lease_no_drain_and_no_timer():
    """A wall clock is set by nine hours (a time zone for UTC, NTP after a pause): it is only told, in an answer's `created`, an
    event's `ts` and to a chat template that asks what day it is; whatever is reckoned with is monotonic. One exception compares
    clocks of two machines: how old a question for hot prefixes is. What a jump does there (it is refused, nothing else) is in
    `transfer/test_trust.py`. The other is how long ago a part of a download was written, which files tell by the wall clock: what
    was left is removed under the cache's lock, where nobody of ours fetches, so that a jump takes nobody's."""
    found = {}
    for part in ("fleet_worker", "fleet_wire"):
        for path in sorted((Path(fleet_worker.__file__).parents[1] / part).rglob("*.py")):
            if clocks := clocks_of(path.read_text("utf-8")):
                found[path.name] = clocks
    assert found == {
        "answer.py": ["time.time"], "hub.py": ["time.time"], "kvevents.py": ["time.time"], "today.py": ["datetime.now"],
        "trust.py": ["time.time_ns"],
    }  # fmt: skip


@pytest.mark.parametrize("source", ["import time\ntime.time()", "datetime.now()", "datetime.datetime.now(UTC)", "time.time_ns()"])
def test_a_wall_clock_is_seen(source: str):
    assert clocks_of(source)

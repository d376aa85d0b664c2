"""The operator tells workers their adapters and hears what they have: nothing is told twice, silence is no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleet_operator.adapters.follow import SETTLED_S, UNSETTLED_S, AdapterFollower, concerned, pause_s, seen_of
from fleet_operator.adapters.memory import AdapterMemory
from fleet_operator.flip.asking import WORD_MOST, Answer, Ask, state_of
from fleet_operator.names import ADAPTERS, REVISION, ROLE, TIER
from fleet_planner.types import AdapterSeen
from tests.fleet_planner.test_adapters import TWO, A, B, fleet, pod

Entry = dict[str, str]


def loaded(name: str, source: str) -> Entry:
    return {"name": name, "source": source, "state": "Loaded", "digest": "d", "reason": "", "message": ""}


class Agents:
    """Workers by address: what their state says; what they are told becomes it."""

    def __init__(self, **states: list[Entry] | None) -> None:
        self.states: dict[str, list[Entry] | None] = dict(states)
        self.told: list[tuple[str, Any]] = []
        self.old: set[str] = set()
        self.uid = ""
        """Of the pod that every one of them says that it is."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Ask]:
        async def ask(url: str, body: Any = None, within_s: float = 0.0) -> Answer | None:
            host, path = url.removeprefix("http://").split(":9000")
            if host not in self.states:
                return None
            if path == "/adapters":
                self.told.append((host, body))
                if host in self.old:
                    return Answer(404, b"no")
                self.states[host] = [loaded(one["name"], one["source"]) for one in body]
            state = self.states[host]
            said = {"phase": "Serving", "uid": self.uid} | ({"adapters": state} if state is not None else {})
            return Answer(200, json.dumps(said).encode())

        yield ask


def look(agents: Agents, known: dict[str, tuple[AdapterSeen, ...]] | None = None, wished: Any = TWO, **pods: str) -> Any:
    made = [pod(name, ip=host) for name, host in pods.items()]
    return asyncio.run(AdapterFollower(agents.connect).follow(wished, made, {}, known or {}))


def test_a_worker_is_told_once_and_then_only_asked():
    agents = Agents(h1=[], h2=[loaded("a", A), loaded("b", B)])
    first = look(agents, p1="h1", p2="h2")
    assert agents.told == [("h1", [{"name": "a", "source": A}, {"name": "b", "source": B}])]
    assert {uid: [one.name for one in seen] for uid, seen in first.items()} == {"u-p1": ["a", "b"], "u-p2": ["a", "b"]}
    assert look(agents, first, p1="h1", p2="h2") == first
    assert len(agents.told) == 1


def test_another_source_and_a_surplus_one_are_told():
    agents = Agents(h1=[loaded("a", "hf://o/a@old"), loaded("b", B)], h2=[loaded("a", A), loaded("b", B), loaded("c", A)])
    look(agents, p1="h1", p2="h2")
    assert [host for host, _ in agents.told] == ["h1", "h2"]


def test_one_that_is_being_unloaded_is_not_told_again():
    agents = Agents(h1=[loaded("a", A), loaded("b", B), {**loaded("c", ""), "state": "Unloading"}])
    look(agents, p1="h1")
    assert agents.told == []


def test_between_the_loss_of_a_stored_template_and_its_return_nobody_is_told_anything_else():
    """The follower looks at the cache, which has no template of these workers for a moment: they may be of another model."""
    told = json.dumps([{"name": "c", "source": "hf://o/c@old"}])
    labels = {ROLE: "decode", TIER: "t", REVISION: "aaaaaaaa"}
    worker = {"metadata": {"name": "p1", "uid": "u-p1", "labels": labels, "annotations": {ADAPTERS: told}}, "spec": {}}
    agents = Agents(h1=[loaded("c", "hf://o/c@old")])
    made = [pod("p1", ip="h1")]
    asyncio.run(AdapterFollower(agents.connect).follow(TWO, made, {("Pod", "p1"): worker}, {}))
    assert agents.told == []


def test_silence_keeps_what_was_known_and_nonsense_too():
    known = {"u-p1": (AdapterSeen("a", A, "Loaded", "d"),)}
    assert look(Agents(), known, p1="h1") == known
    assert look(Agents(h1=[{"name": "a", "state": "Dancing"}]), known, p1="h1") == known
    assert look(Agents(), {}, p1="h1") == {}


@pytest.mark.parametrize(("uid", "told"), [("u-p1", True), ("", True), ("u-p2", False)])
def test_no_pod_is_told_the_adapters_of_another_one_that_had_its_address(uid: str, told: bool):
    """A node that began anew gives its pods other addresses: one of another fleet unloaded what its tenants use."""
    agents, known = Agents(h1=[loaded("theirs", B)]), {"u-p1": (AdapterSeen("a", A, "Loaded", "d"),)}
    agents.uid = uid
    found = look(agents, known, p1="h1")
    assert bool(agents.told) == told
    assert found == known or told


def test_an_agent_from_before_there_were_adapters():
    agents = Agents(h1=None)
    agents.old.add("h1")
    found = look(agents, p1="h1")
    assert [(one.name, one.state, one.reason) for one in found["u-p1"]] == [
        ("a", "Failed", "NotSupported"), ("b", "Failed", "NotSupported"),
    ]  # fmt: skip


def test_only_fleets_with_adapters_are_looked_at():
    plain: dict[str, Any] = {"metadata": {"annotations": {}}}
    assert not concerned(fleet(), [plain], {})
    assert concerned(TWO, [plain], {})
    assert concerned(fleet(), [{"metadata": {"annotations": {ADAPTERS: "[]"}}}], {}), "they were told some"
    assert concerned(fleet(), [plain], {"u": (AdapterSeen("a"),)}), "one is still there"


def test_at_rest_they_are_asked_seldom():
    rest = {"u-p1": (AdapterSeen("a", A, "Loaded", "d"), AdapterSeen("b", B, "Failed"))}
    assert pause_s(TWO, [pod("p1")], {}, rest) == SETTLED_S
    assert pause_s(TWO, [pod("p1"), pod("p2")], {}, rest) == UNSETTLED_S
    assert pause_s(TWO, [pod("p1")], {}, {"u-p1": (AdapterSeen("a", A, "Loading"), AdapterSeen("b", B))}) == UNSETTLED_S


def test_a_change_of_the_spec_is_told_at_once_and_a_look_never_runs_twice():
    agents, memory = Agents(h1=[loaded("a", A), loaded("b", B)]), AdapterMemory()
    live = {
        ("Pod", "p1"): {
            "metadata": {
                "name": "p1-0", "uid": "u-p1", "labels": {ROLE: "decode"}, "annotations": {}, "creationTimestamp": None,
            },
            "spec": {}, "status": {"podIP": "h1", "phase": "Running"},
        }
    }  # fmt: skip
    follower = AdapterFollower(agents.connect)
    assert memory.due(TWO, 100.0)
    assert not memory.due(TWO, 100.0), "one is under way"
    assert asyncio.run(memory.look(follower, TWO, live, lambda: 100.0))
    assert not memory.due(TWO, 101.0)
    other = fleet(adapters=[{"name": "a", "source": "hf://o/a"}])
    assert memory.due(other, 101.0)
    assert asyncio.run(memory.look(follower, other, live, lambda: 101.0))
    assert agents.told == [("h1", [{"name": "a", "source": A}])]


NONSENSE = {
    "not UTF-8": b'{"phase": "\xff", "adapters": [{"name": "\xff"}], "\xff": 1}',
    "deep": b'{"role": ' + b"[" * 100_000,
    "deep where nobody looks": b'{"x": ' + b"[" * 100_000,
    "half a surrogate": b'{"role": "prefill", "phase": "\\ud800", "adapters": [{"name": "\\ud800"}]}',
}


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE)
def test_an_answer_that_is_none_is_no_answer(body: bytes):
    """One worker's agent that answered so ended the operator, and so of every fleet, again at every start."""
    answer = Answer(200, body)
    assert (seen_of(answer), state_of(answer), answer.json()) == (None, None, {})


def test_words_of_workers_are_bounded():
    """A digest of megabytes made the routers' document too large to be written, a message the status."""
    entry = {"name": "a", "source": A, "state": "Failed"} | dict.fromkeys(("digest", "reason", "message"), "x" * 100_000)
    (seen,) = seen_of(Answer(200, json.dumps({"adapters": [entry]}).encode())) or ()
    assert {len(seen.digest), len(seen.reason), len(seen.message)} == {WORD_MOST}
    state = state_of(Answer(200, json.dumps({"role": "prefill", "phase": "x" * 10_000, "flip_problem": "x" * 10_000}).encode()))
    assert state is not None
    assert {len(state.phase), len(state.flip_problem)} == {WORD_MOST}

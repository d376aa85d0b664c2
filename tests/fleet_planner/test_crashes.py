"""Workers that crash while nobody asks anything of them: which revision is to blame, and what becomes of its canary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_planner.crashes import crashing
from fleet_planner.replicas import Replica, replicas_of
from fleet_planner.roles import Role
from tests.fleet_planner.test_reconcile import pod
from tests.fleet_planner.test_rollout_plan import NEW, OLD, World

NOW = 100_000.0
CANARY = {"steps": [25], "interval": "1m"}


def worker(role: Role, crashes: int = 0, **more: Any) -> Replica:
    name = more.pop("name", f"f-t-{role}-{more.get('node', 'n')}")
    return Replica((pod(name, role, 0, **{"crashes": crashes, "ready": crashes == 0, "created_at": NOW, **more}),))


DOWN = worker("decode", 3)
GANG = replicas_of([pod("w-0", "decode", 0, crashes=3, ready=False), pod("w-0-1", "decode", 0, member=1, crashes=2)], (2, 2))


def group(number: int, nodes: str, crashes: int = 0) -> Replica:
    """A worker over these nodes, each named by a letter."""
    own: dict[str, Any] = {"crashes": crashes, "ready": crashes == 0, "created_at": NOW}
    names = [f"w-{number}", *(f"w-{number}-{member}" for member in range(1, len(nodes)))]
    pods = [pod(name, "decode", number, member=at, node=nodes[at], **own) for at, name in enumerate(names)]
    return Replica(tuple(pods), len(nodes))


@pytest.mark.parametrize(
    ("new", "old", "blamed"),
    [
        pytest.param([worker("decode", 3)], [worker("decode")], True, id="again-and-again"),
        pytest.param([worker("decode", 2)], [worker("decode")], False, id="twice-may-be-chance"),
        pytest.param([worker("prefill"), worker("decode", 3)], [], True, id="one-role-is-enough"),
        pytest.param([worker("decode", 3, ready=True)], [], True, id="also-between-two-crashes"),
        pytest.param([worker("decode", 3, leaving="NotReady")], [], False, id="its-node-goes-away"),
        pytest.param([worker("decode", 3, sick="xid 79")], [], False, id="its-device-fails"),
        pytest.param([worker("decode", 3, terminating=True)], [], False, id="it-goes-already"),
        pytest.param([DOWN], [worker("decode", 1)], False, id="the-old-ones-are-down-after-a-crash-as-well"),
        pytest.param([DOWN], [worker("decode", 9, ready=True)], True, id="the-old-ones-crashed-once-and-serve"),
        pytest.param([DOWN], [worker("decode", 1, leaving="NotReady")], True, id="an-old-one-on-a-lost-node-says-nothing"),
        pytest.param([DOWN], [worker("decode", ready=False)], True, id="an-old-one-that-starts-says-nothing"),
        pytest.param([DOWN, worker("decode", node="m")], [], False, id="elsewhere-they-are-well-so-it-may-be-the-node"),
        pytest.param([DOWN, worker("decode", name="w")], [], True, id="of-the-same-node"),
        pytest.param([DOWN, worker("decode", node="m", ready=False)], [], True, id="elsewhere-none-is-well-yet"),
        pytest.param([DOWN, worker("decode", 1, node="m", ready=True)], [], True, id="elsewhere-they-crash-too"),
        pytest.param([DOWN, worker("prefill", node="m")], [], True, id="the-other-role-says-nothing-of-the-node"),
        pytest.param([DOWN, worker("decode", 3, node="m"), worker("decode", node="o")], [], True, id="on-two-nodes"),
        pytest.param([group(0, "ab", 3), group(1, "cd")], [], False, id="a-group-crashes-and-another-is-well-elsewhere"),
        pytest.param([group(0, "ab", 3), group(1, "bc", 3), group(2, "cd")], [], False, id="groups-that-share-one-node-crash"),
        pytest.param([group(0, "ab", 3), group(1, "bc", 3), group(2, "be")], [], True, id="the-shared-node-has-one-that-is-well"),
        pytest.param([group(0, "ab", 3), group(1, "cd", 3), group(2, "ef")], [], True, id="groups-on-other-nodes-crash-too"),
        pytest.param([worker("decode", 3, created_at=NOW - 86_401.0)], [], False, id="three-in-more-than-a-day"),
        pytest.param([worker("decode", 6, created_at=NOW - 2 * 86_400.0)], [], True, id="three-a-day"),
        pytest.param(GANG, [], False, id="of-ages-ago"),
        pytest.param(
            [replace(one, pods=tuple(replace(p, created_at=NOW) for p in one.pods)) for one in GANG], [], True, id="gang"
        ),
    ],
)
def test_who_is_to_blame(new: list[Replica], old: list[Replica], blamed: bool):
    assert (NEW in crashing({NEW: new, OLD: old}, NOW)) == blamed


def test_the_words_name_the_worker_and_its_last_ones():
    words = crashing({NEW: [worker("decode", 3, message="EngineDied: CUDA error"), worker("decode", 4, name="w")]}, NOW)[NEW]
    assert words == "its workers crash: w crashed 4 times"
    words = crashing({NEW: [worker("decode", 3, message="EngineDied: CUDA error")]}, NOW)[NEW]
    assert words == "its workers crash: f-t-decode-n crashed 3 times: EngineDied: CUDA error"


def crash(world: World, times: int) -> None:
    pods = (
        replace(p, ready=False, crashes=times, created_at=world.now, message="BadModel: no tokenizer") if p.revision == NEW else p
        for p in world.observed.pods
    )
    world.observed = replace(world.observed, pods=tuple(pods))


def test_a_canary_whose_workers_crash_goes_back_at_once_without_any_request():
    """Incident: without a request in flight nothing was a breach, and a canary that crashed for ever stayed half an hour."""
    world = World(canary=CANARY)
    world.steps(2)
    assert world.sizes() == ((2, 4), (1, 1))
    crash(world, 2)
    assert world.rolling(world.steps(1))[0] == "Progressing"
    crash(world, 3)
    reason, words = world.rolling(world.steps(1))
    assert reason == "RolledBack"
    assert "was rolled back: its workers crash: " in words
    assert "crashed 3 times: BadModel: no tokenizer; the old revision serves" in words
    world.steps(3)
    assert world.sizes() == ((2, 4), (0, 0))


def test_a_plain_rollout_says_that_its_workers_crash():
    """Nothing was said before `progressDeadline`, then only that nothing moves. It is not rolled back: nobody asked for it."""
    world = World(progressDeadline="10m")
    world.steps(1)
    crash(world, 3)
    reason, words = world.rolling(world.steps(1))
    assert (reason, "its workers crash: " in words) == ("Progressing", True)
    world.now += 600
    crash(world, 3)
    reason, words = world.rolling(world.steps(1))
    assert (reason, "its workers crash: " in words) == ("ProgressDeadlineExceeded", True)

"""A canary gets its share of the requests, conversations stay where their KV is, and one side alone serves everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.config import RouterConfig
from fleet_router.metrics import Metrics
from fleet_router.policy.chosen import Choice
from fleet_router.policy.split import to_canary
from fleet_router.workers import WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints, Role, Split

OLD, NEW = "aaaaaaaa", "bbbbbbbb"
CONFIG = RouterConfig(fleet="f", served_name="m")


def endpoint(uid: str, role: Role, revision: str, state: str = "serving") -> Endpoint:
    return Endpoint(
        name=uid, uid=uid, address="127.0.0.1", http_port=1, agent_port=2, role=role, tier="t", revision=revision, compat="c",
        state=state,  # type: ignore[arg-type]
    )  # fmt: skip


def table(percent: int, *more: Endpoint) -> WorkerTable:
    workers = [endpoint("p-old", "prefill", OLD), endpoint("d-old", "decode", OLD)]
    workers += [endpoint("p-new", "prefill", NEW), endpoint("d-new", "decode", NEW), *more]
    found = WorkerTable()
    found.update(
        Endpoints(fleet="f", namespace="n", workers=tuple(workers), splits=(Split(tier="t", revision=NEW, percent=percent),))
    )
    return found


def sides(workers: WorkerTable, prompts: list[bytes]) -> list[str]:
    chosen = []
    for prompt in prompts:
        found, _ = workers.choose(prompt, CONFIG, 0.0, frozenset())
        assert isinstance(found, Choice)
        assert found.prefill is None or found.prefill[2:] == found.decode[2:]  # both legs on one side, though KV could cross
        chosen.append(found.decode)
    return chosen


@pytest.mark.parametrize("percent", [1, 5, 25, 50, 99])
def test_new_conversations_follow_the_share(percent: int):
    chosen = sides(table(percent), [b"%d " % n * 300 for n in range(1000)])
    assert abs(chosen.count("d-new") - 10 * percent) <= 1


def test_a_conversation_stays_on_its_side():
    workers = table(25)
    prompts = [b"conversation %d " % n * 100 for n in range(40)]
    first = sides(workers, prompts)
    for prompt, side in zip(prompts, first, strict=True):
        _, keys = workers.choose(prompt, CONFIG, 0.0, frozenset())
        workers.routing.index.add(keys, side)
    again = sides(workers, [prompt + b"and more of it " * 20 for prompt in prompts])
    assert again == first


@given(st.integers(1, 99), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=300))
def test_kv_never_starves_nor_floods_the_canary(percent: int, pieces: list[tuple[int, int]]):
    taken = 0
    for seen, (canary, other) in enumerate(pieces):
        taken += to_canary(percent, seen, taken, canary, other)
        due = (seen + 1) * percent / 100
        assert 0.5 * due - 1 <= taken <= 1.5 * due + 2


def test_one_side_alone_gets_everything_and_a_held_worker_nothing():
    workers = table(25)
    document = Endpoints(
        fleet="f",
        namespace="n",
        workers=(endpoint("d-old", "decode", OLD), endpoint("d-new", "decode", NEW, state="held")),
        splits=(Split(tier="t", revision=NEW, percent=25),),
    )
    workers.update(document)
    assert set(sides(workers, [b"x" * 600] * 20)) == {"d-old"}


def test_counts_of_revisions_are_bounded():
    metrics = Metrics()
    for number in range(100):
        metrics.of("t", f"{number:08x}").requests += 1
    text = metrics.exposition([], 0.0, 0)
    assert text.count("fleet_router_revision_requests_total{") == 32
    assert 'fleet_router_revision_requests_total{tier="t",revision="00000063"} 1' in text


def test_what_is_alerted_on_when_it_grows_is_there_before():
    """A series that begins at 1 never grew to Prometheus."""
    text = Metrics().exposition([], 0.0, 0)
    assert 'fleet_router_kv_releases_total{outcome="unreachable"} 0\n' in text
    assert 'fleet_router_hedges_total{event="swallowed"} 0\n' in text
    assert 'fleet_router_resumed_total{outcome="differs"} 0\n' in text


def test_a_role_without_a_worker_is_told_as_none():
    """Its series went away instead: no alert for 0 of them (RUNBOOK.md) could ever fire."""
    text = Metrics().exposition([("d", "decode", "t", 0)], 0.0, 0)
    assert 'fleet_router_endpoints{role="prefill"} 0\n' in text
    assert 'fleet_router_endpoints{role="decode"} 1\n' in text


def test_a_worker_that_changed_its_role_is_another_worker():
    """Also when the router missed the document in between: of one role answers are read, of the other handed on."""
    workers = table(0)
    _, keys = workers.choose(b"prompt " * 100, CONFIG, 0.0, frozenset())
    workers.routing.index.add(keys, "d-old")
    before = workers.workers["d-old"]
    stays = workers.workers["p-old"]
    flipped = (endpoint("p-old", "prefill", OLD), endpoint("d-old", "prefill", OLD), endpoint("d-new", "decode", OLD))
    workers.update(Endpoints(fleet="f", namespace="n", workers=flipped))
    assert workers.workers["p-old"] is stays
    assert workers.workers["d-old"] is not before
    assert workers.workers["d-old"].role == "prefill"
    assert workers.routing.index.depths(keys) == []
    assert {worker.uid for worker in workers.by_role["prefill"]} == {"p-old", "d-old"}

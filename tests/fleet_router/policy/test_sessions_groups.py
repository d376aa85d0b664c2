"""Sessions where a fleet has several tiers or revisions: each stays with one of them, and a canary has its share of them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from fleet_router.ask import Hints
from fleet_router.config import RouterConfig, TierRule
from fleet_router.policy.chosen import Choice
from fleet_router.workers import WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints, Split

CONFIG = RouterConfig(fleet="f", served_name="m", slow_start_s=0.0)
SESSIONS = [f"session {number}".encode() for number in range(400)]
OLD, NEW = "aaaaaaaa", "bbbbbbbb"


def worker(uid: str, tier: str = "t", revision: str = OLD, compat: str = "c", role: str = "decode") -> Endpoint:
    return Endpoint(
        name=uid, uid=uid, address="127.0.0.1", http_port=1, agent_port=2, role=role, tier=tier, revision=revision,  # type: ignore[arg-type]
        compat=f"{tier}-{compat}",
    )  # fmt: skip


def table(*workers: Endpoint, splits: tuple[Split, ...] = (), config: RouterConfig = CONFIG) -> WorkerTable:
    found = WorkerTable()
    found.update(Endpoints(fleet="f", namespace="n", workers=workers, splits=splits), 0.0, config)
    return found


def canary(percent: int, *, compat: str = "c", old: int = 3, new: int = 3, role: str = "decode") -> WorkerTable:
    rows = [worker(f"old-{i}") for i in range(old)] + [worker(f"new-{i}", revision=NEW, compat=compat) for i in range(new)]
    return table(*rows, splits=(Split(tier="t", revision=NEW, percent=percent),))


def where(found: WorkerTable, session: bytes, turn: int = 0, config: RouterConfig = CONFIG) -> str:
    """The decode worker. Every turn has another prompt: nothing but the session tells that they belong together."""
    chosen, keys = found.choose(b"%d " % turn * 300, config, 0.0, frozenset(), hints=Hints(session=session))
    assert isinstance(chosen, Choice)
    found.routing.index.add(keys, chosen.decode)
    return chosen.decode


TWO_TIERS = [worker(f"{tier}-{i}", tier) for tier in ("large", "small") for i in range(3)]
TWO_COMPATS = [worker(f"{compat}-{i}", compat=compat) for compat in ("c1", "c2") for i in range(3)]


@pytest.mark.parametrize("decide", ["threshold", "cost"])
@pytest.mark.parametrize("rows", [TWO_TIERS, TWO_COMPATS], ids=["tiers", "compatibilities"])
def test_a_session_stays_in_its_group_whatever_the_others_cost(rows: list[Endpoint], decide: str):
    """Incident: the group was chosen by cost, request by request: a session went to and fro between two tiers, each time to a
    worker without its KV."""
    config = msgspec.structs.replace(CONFIG, decide=decide)  # type: ignore[arg-type]
    found = table(*rows, config=config)
    first = {session: where(found, session, config=config) for session in SESSIONS}
    spread = Counter(first.values())
    assert len(spread) == 6
    assert max(spread.values()) < 2.2 * len(SESSIONS) / 6
    for turn in range(1, 6):
        for number, one in enumerate(found.workers.values()):  # one tier is slower, then the other
            one.free_at = 40.0 * ((number + turn) % 6)
            one.heat = 1e6 * ((number * turn) % 5)
        again = {session: where(found, session, turn, config) for session in SESSIONS}
        assert again == first


def test_at_its_bound_a_session_goes_to_the_next_worker_of_all_and_comes_back():
    found = table(*TWO_TIERS)
    home = where(found, b"s")
    for _ in range(5):
        found.workers[home].began()
    away = where(found, b"s", 1)
    assert away != home
    for _ in range(5):
        found.workers[home].ended()
    assert where(found, b"s", 2) == home


def test_a_tier_whose_workers_are_all_busier_than_the_bound_of_all_tiers_gets_no_more_sessions():
    found = table(*TWO_TIERS)
    for uid, one in found.workers.items():
        for _ in range(12 * uid.startswith("small")):
            one.began()
    assert {where(found, session)[:5] for session in SESSIONS[:50]} == {"large"}


def test_when_its_worker_leaves_only_its_sessions_move_and_one_that_joins_takes_few():
    found = table(*TWO_TIERS)
    first = {session: where(found, session) for session in SESSIONS}
    rows = [row for row in TWO_TIERS if row.uid != "small-1"]
    less = table(*rows)
    assert all(where(less, session) == home for session, home in first.items() if home != "small-1")
    more = table(*TWO_TIERS, worker("large-3", "large"))
    moved = [home for session, home in first.items() if (now := where(more, session)) != home and now != "large-3"]
    assert moved == []


def test_a_rule_s_tier_is_chosen_before():
    config = msgspec.structs.replace(CONFIG, tier_rules=(TierRule(tier="large", tokens_ge=0),))
    found = table(*TWO_TIERS, config=config)
    assert {where(found, session, config=config)[:5] for session in SESSIONS} == {"large"}


# -- canaries -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["kvAware", "prefixHash"])
@pytest.mark.parametrize("compat", ["c", "other"])
@pytest.mark.parametrize("percent", [0, 5, 25, 50, 90, 100])
def test_a_canary_has_its_share_of_the_sessions_and_each_keeps_its_side(percent: int, compat: str, policy: str):
    """Incident: the share was one of requests alone: a session's requests went to the canary and back."""
    config = msgspec.structs.replace(CONFIG, policy=policy)  # type: ignore[arg-type]
    found = canary(percent, compat=compat)
    first = {session: where(found, session, config=config) for session in SESSIONS}
    taken = sum(home.startswith("new") for home in first.values())
    assert abs(taken / len(SESSIONS) - percent / 100) < 0.05
    for turn in range(1, 4):
        assert {session: where(found, session, turn, config) for session in SESSIONS} == first


def test_a_share_that_grows_takes_sessions_over_and_gives_none_back():
    before = frozenset[bytes]()
    for percent in (5, 25, 50, 100):
        found = canary(percent)
        now = frozenset(session for session in SESSIONS if where(found, session).startswith("new"))
        assert before < now
        before = now


def test_the_next_revision_is_tried_by_other_sessions():
    first, second = canary(10), canary(10)
    rows = [worker(f"old-{i}") for i in range(3)] + [worker(f"new-{i}", revision="cccccccc") for i in range(3)]
    second.update(
        Endpoints(fleet="f", namespace="n", workers=tuple(rows), splits=(Split(tier="t", revision="cccccccc", percent=10),))
    )
    both = [s for s in SESSIONS if where(first, s).startswith("new") and where(second, s).startswith("new")]
    assert len(both) < len(SESSIONS) * 0.04


def test_what_sessions_do_not_bring_comes_from_requests_without_one():
    found = canary(20)
    old = next(session for session in SESSIONS if where(canary(20), session).startswith("old"))
    chosen = []
    for turn in range(400):
        chosen.append(where(found, old if turn % 2 else b"", turn))
    assert abs(sum(home.startswith("new") for home in chosen) - 80) <= 5
    assert not any(home.startswith("new") for home in chosen[1::2])


def test_few_sessions_do_not_leave_a_canary_without_any():
    """It would wait for its requests for ever. One session goes over, and stays there."""
    found = canary(5)
    few = [session for session in SESSIONS if where(canary(5), session).startswith("old")][:4]
    homes = [{session: where(found, session, turn)[:3] for session in few} for turn in range(500)]
    assert set(homes[0].values()) == {"old"}
    assert sorted(homes[-1].values()) == ["new", "old", "old", "old"]
    changes = sum(a != b for a, b in pairwise(homes))
    assert changes == 1


def test_a_canary_at_its_bound_lends_its_sessions_to_the_others_and_the_other_way_round():
    for side, other in (("new", "old"), ("old", "new")):
        found = canary(50, old=1, new=1)
        session = next(session for session in SESSIONS if where(found, session).startswith(side))
        for _ in range(9):
            found.workers[f"{side}-0"].began()
        assert where(found, session, 1).startswith(other)
        for _ in range(9):
            found.workers[f"{side}-0"].ended()
        assert where(found, session, 2).startswith(side)


def test_one_side_alone_serves_everybody_and_whoever_only_asks_changes_nothing():
    found = canary(5, new=0)
    assert {where(found, session)[:3] for session in SESSIONS} == {"old"}
    found = canary(5)
    (share,) = found.shares.values()
    for _ in range(600):
        found.would_choose(b"x", CONFIG, 0.0, frozenset(), 0, "", Hints(session=SESSIONS[0]))
    assert (share.seen, share.taken, share.taken_at, share.edge) == (0, 0, 0, 0.0)
    assert found.shares == {Split(tier="t", revision=NEW, percent=5): share}

"""What others say, and what it changes here: load, queues, quotas, prefixes. Routers without sockets, on a clock of our own."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.admission.bucket import SECOND_NS
from fleet_router.admission.quota import Account
from fleet_router.admission.tenants import Tenant
from fleet_router.gossip.merge import ROW_S
from fleet_router.gossip.message import Load, Message, name_of
from fleet_router.gossip.share import Share
from fleet_router.kvindex.pieces import key_chain
from fleet_router.policy.candidate import Candidate, prefill_done, prefill_sent
from fleet_router.policy.routing import Routing
from fleet_router.policy.side import WHOLE
from fleet_router.policy.terms import CostAsk

TENANT = Tenant(name="acme", requests_per_second=10.0, requests_burst=10, tokens_per_minute=6_000, concurrency=4)


class One:
    """A router: workers, a tenant, and its part in gossip."""

    def __init__(self, number: int, workers: int = 3) -> None:
        self.routing = Routing()
        self.workers = {f"w{i}": Candidate(f"w{i}", "decode", ("t", "c"), 0) for i in range(workers)}
        self.routing.update(list(self.workers.values()), 0.0, 0.0)
        self.account = Account("acme")
        self.account.follow(TENANT, 0)
        self.share = Share(number, 0.0)
        self.share.follow(self.workers, {"acme": self.account}, self.routing, 0.0)


def exchange(routers: list[One], now: float) -> None:
    """Everything that anybody says arrives."""
    for one in routers:
        for message in one.share.speak(now, 0):
            for other in routers:
                other.share.hear(message, now)


def met(count: int, workers: int = 3) -> list[One]:
    routers = [One(i + 1, workers) for i in range(count)]
    exchange(routers, 0.0)
    return routers


@pytest.mark.parametrize("workers", [3, WHOLE + 1])
def test_the_load_of_others_counts_in_every_level_and_goes_again(workers: int):
    a, b, c = met(3, workers)
    for _ in range(5):
        a.workers["w0"].began()
    b.workers["w0"].began()
    exchange([a, b, c], 0.1)
    for one, own in ((a, 5), (b, 1), (c, 0)):
        worker = one.workers["w0"]
        assert (worker.inflight, worker.own, worker.others) == (6, own, 6 - own)
        side = one.routing.groups["t", "c"].decode
        assert (side.inflight, side.reaches(6), side.reaches(7)) == (6, True, False)
        assert not side.large or side.levels[6] == {"w0": worker}
    a.share.tick(ROW_S + 0.2)
    assert (a.workers["w0"].inflight, a.workers["w0"].own) == (5, 5)  # nobody repeats it: it is over
    for _ in range(5):
        a.workers["w0"].ended()
    side = a.routing.groups["t", "c"].decode
    assert (side.inflight, side.reaches(1), side.levels) == (0, False, [a.workers])


def test_a_decode_worker_that_is_idle_again_is_known_to_be_so_at_once():
    """Nobody was told: a worker that never had a prefill and whose last answer ended was busy for others for 3 s."""
    a, b = met(2)
    a.workers["w0"].began()
    exchange([a, b], 0.1)
    assert b.workers["w0"].others == 1
    a.workers["w0"].ended()
    exchange([a, b], 0.12)
    assert b.workers["w0"].others == 0
    assert (len(a.share.speak(0.14, 0)), len(a.share.speak(1.2, 0)[0].loads)) == (
        0,
        1,
    )  # and whoever did not hear it hears it later
    a.share.follow({}, {}, a.routing, 1.3)
    assert a.share.speak(2.4, 0)[0].loads == ()


def test_one_datagram_that_says_what_nobody_can_have_sent_keeps_no_worker_from_prompts_for_long():
    """A counter of 2^63: the worker got no prompt for half an hour."""
    a = One(1)
    a.share.hear(Message(1, 2, 1, 0, 0, (Load(name_of("w0"), 0, 0, 2**63, 2**63),)), 0.0)
    for step in range(400):
        now = step * 0.5
        a.share.tick(now)
        a.routing.tick(now, 0.0)
        offer = a.routing.decide(CostAsk(500.0, step * 2**50, now, 1.25, 64, True), [])
        assert offer is not None
        if offer.decode.uid == "w0":
            break
        prefill_done(prefill_sent(offer.decode, 500.0, now), now + 0.06, learn=True)
    else:
        pytest.fail("it got none in 200 s")


def test_a_worker_that_joins_or_leaves_has_what_others_have_there():
    a, b = met(2)
    b.workers["w0"].began()
    exchange([a, b], 0.1)
    old = a.workers["w0"]
    fresh = Candidate("w0", "decode", ("t", "c"), 0)
    a.workers["w0"] = fresh
    a.routing.update(list(a.workers.values()), 0.2, 0.0)
    a.share.follow(a.workers, {"acme": a.account}, a.routing, 0.2)
    assert (old.inflight, fresh.inflight, fresh.own) == (0, 1, 0)
    assert a.routing.groups["t", "c"].decode.inflight == 1


def test_prefills_of_others_wait_in_the_queue_and_leave_it():
    a, b = met(2)
    sent = prefill_sent(b.workers["w0"], 10_000, 0.1)
    exchange([a, b], 0.1)
    waits_s = a.workers["w0"].free_at - 0.1
    assert abs(waits_s - 1.0) < 0.01  # 10,000 tokens at the prior of 10,000 a second
    assert a.workers["w0"].others_pending == 1
    prefill_done(sent, 0.5, learn=False)
    exchange([a, b], 0.5)
    assert (a.workers["w0"].free_at, a.workers["w0"].others_pending) == (0.5, 0)


def test_a_router_goes_where_another_one_has_not_just_gone():
    """The same cold prompt three times at three routers, told between: three workers. Untold: all at the one of the ring."""

    def chosen(*, told: bool) -> set[str]:
        routers, found = met(3), set()
        for step, one in enumerate(routers):
            offer = one.routing.decide(CostAsk(20_000, 99, step * 0.01, 1.25, 0, True), [])
            assert offer is not None
            prefill_sent(offer.decode, offer.missing, step * 0.01)
            offer.decode.began()
            found.add(offer.decode.uid)
            if told:
                exchange(routers, step * 0.01)
        return found

    assert len(chosen(told=False)) == 1
    assert len(chosen(told=True)) == 3


def test_a_prefix_that_another_router_sent_is_known():
    a, b = met(2)
    exchange([a, b], 1.0)  # from here on news are kept: somebody hears them
    keys = key_chain(b"a prompt that is long enough " * 100)
    b.routing.index.add(keys, "w2")
    assert a.routing.index.depths(keys) == []
    exchange([a, b], 1.1)
    assert a.routing.index.depths(keys) == [(len(keys), a.workers["w2"].bit)]
    assert a.routing.index.news == {}  # what is heard is not told again


def test_a_router_alone_keeps_no_news():
    one = One(1)
    assert [len(one.share.speak(now, 0)) for now in (0.0, 0.5, 1.0)] == [1, 0, 1]
    one.routing.index.add(key_chain(b"x" * 1000), "w0")
    assert one.routing.index.news is None


def test_concurrency_holds_over_all_routers():
    a, b = met(2)
    for _ in range(4):
        assert a.account.charge(1, 0) is None
    exchange([a, b], 0.1)
    over = b.account.charge(1, SECOND_NS)
    assert over is not None
    assert (over.reason, b.account.elsewhere) == ("concurrency", 4)
    a.account.settle(1, "answered", (1, 1), SECOND_NS)
    exchange([a, b], 1.1)
    assert b.account.charge(1, SECOND_NS) is None


@given(st.integers(2, 5), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_quotas_hold_over_all_routers_within_the_stated_bound(count: int, pressure: int):
    """Requests: a rate of 10/s and a burst of 10. Every router is asked more than that, in rounds of 20 ms: what all of them let
    through in T seconds is at most 10·T + 10 + (N - 1) · min(10, what one round brings a router)."""
    routers = met(count)
    for one in routers:
        one.account.concurrency = None
    through = 0
    for step in range(150):
        now = step * 0.02
        for one, _ in itertools.product(routers, range(pressure)):
            if one.account.charge(1, int(now * 1e9)) is None:
                through += 1
                one.account.settle(1, "answered", (1, 0), int(now * 1e9))
        exchange(routers, now)
    assert through <= 10 * 3 + 10 + (count - 1) * min(10, pressure)
    assert through >= 10 * 3 - count


@pytest.mark.parametrize("known", [True, False], ids=["made anew", "known after the others spoke"])
def test_a_tenant_that_becomes_known_later_has_what_it_runs_elsewhere(known: bool):
    """Its requests at other routers counted only once one of them came or went: with long streams its concurrency was twice."""
    a, b = met(2)
    for _ in range(4):
        assert b.account.charge(1, 0) is None
    if not known:
        a.share.follow(a.workers, {}, a.routing, 0.1)
    exchange([a, b], 0.2)
    a.account = Account("acme")
    a.account.follow(TENANT, 0)
    a.share.follow(a.workers, {"acme": a.account}, a.routing, 0.3)
    exchange([a, b], 0.4)
    assert a.account.elsewhere == 4
    assert a.account.charge(1, 0) is not None
    a.share.tick(ROW_S + 0.5)
    assert a.account.elsewhere == 0


def test_without_gossip_a_quota_is_each_routers_own():
    a, b = met(2)
    taken = [one.account.charge(1, 0) for one in (a, b) for _ in range(4)]
    assert taken == [None] * 8


def test_a_refund_at_one_router_is_one_at_all():
    a, b = met(2)
    for _ in range(4):
        a.account.charge(1_000, 0)
    exchange([a, b], 0.1)
    assert b.account.tokens is not None
    used = b.account.tokens.left(int(0.1e9))
    for _ in range(4):
        a.account.settle(1_000, "failed", (0, 0), int(0.1e9))
    exchange([a, b], 0.1)
    assert (used, b.account.tokens.left(int(0.1e9))) == (2_000, 6_000)


def test_a_round_looks_at_those_tenants_alone_that_have_changed():
    """With ten thousand of them, none of which asked for anything, a round took 12 ms, for which each stream stood, and a third
    of a core."""
    a, b = met(2)
    accounts = {name: Account(name) for name in ("acme", "other", "third")}
    for account in accounts.values():
        account.follow(TENANT, 0)

    def looked_at() -> set[int]:
        return {row.tenant for row in a.share._uses()}

    a.share.follow(a.workers, accounts, a.routing, 0.1)
    assert looked_at() == set(map(name_of, accounts))
    assert looked_at() == set()
    for deed in (
        lambda: accounts["other"].charge(1, 0),
        lambda: accounts["other"].settle(1, "answered", (1, 1), 0),
        lambda: accounts["other"].follow(msgspec.structs.replace(TENANT, requests_per_second=None), 0),
    ):
        deed()
        assert (looked_at(), looked_at()) == ({name_of("other")}, set())
    assert accounts["third"].charge(1, 0) is None
    a.share.follow(a.workers, accounts, a.routing, 0.2)
    exchange([a, b], 0.3)
    b.share.follow(b.workers, {"third": Account("third")}, b.routing, 0.4)
    assert b.share._accounts[name_of("third")].elsewhere == 1

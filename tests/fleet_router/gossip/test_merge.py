"""What others say is added up, whatever is lost, repeated or late on the way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.gossip.link import INTERVAL_S
from fleet_router.gossip.merge import FORGET_S, MOST_PEERS, ROW_S, SETTLE_MS, Peers, TenantUse, WorkerLoad
from fleet_router.gossip.message import DATAGRAM_BYTES, Hint, Load, Message, Refused, Use, parse_keys, seal
from fleet_router.gossip.report import MOST_DATAGRAMS, REFRESH_S, Report, hint_of

US, A, B = 1, 2, 3
KEY = parse_keys(b"k" * 32)[0]


def said(sender: int, number: int, *rows: Load | Use | Hint, age_ms: int = 0) -> Message:
    return Message(
        1, sender, number, 0, age_ms,
        tuple(r for r in rows if isinstance(r, Load)), tuple(r for r in rows if isinstance(r, Use)),
        tuple(r for r in rows if isinstance(r, Hint)),
    )  # fmt: skip


def test_loads_of_all_others_are_summed_and_our_own_words_are_not_heard():
    peers = Peers(US)
    peers.take(said(A, 1, Load(7, 3, 1, 5, 500)), 0.0)
    peers.take(said(B, 1, Load(7, 4, 0, 2, 200)), 0.0)
    peers.take(said(US, 1, Load(7, 100, 100, 100, 100)), 0.0)
    workers, _ = peers.changes()
    assert workers == {7: WorkerLoad(7, 1, 7, 700)}
    assert peers.load(7) == (7, 1)
    assert peers.changes() == ({}, {})
    peers.take(said(A, 2, Load(7, 1, 0, 6, 510)), 0.1)
    assert peers.changes()[0] == {7: WorkerLoad(5, 0, 1, 10)}


def test_an_older_message_or_the_same_again_is_nothing():
    peers = Peers(US)
    hint = Hint(7, (1, 2))
    assert peers.take(said(A, 5, Load(7, 3, 0, 1, 10), hint), 0.0) == (hint,)
    for number in (5, 4):
        assert peers.take(said(A, number, Load(7, 9, 9, 9, 90), hint), 0.1) == ()
    assert peers.changes()[0] == {7: WorkerLoad(3, 0, 1, 10)}


def test_a_router_that_died_leaves_nothing_in_flight_and_its_use_stays_used():
    peers = Peers(US)
    peers.take(said(A, 1, Load(7, 3, 2, 5, 500), Use(9, 2, 4, 400)), 0.0)
    peers.changes()
    peers.expire(ROW_S)
    assert peers.changes() == ({}, {})
    peers.expire(ROW_S + 0.1)
    assert peers.changes() == ({7: WorkerLoad(0, 0, 0, 0)}, {9: TenantUse(0, 0, 0)})
    assert (peers.load(7), len(peers)) == ((0, 0), 1)
    peers.expire(FORGET_S + 0.1)
    assert len(peers) == 0


def test_who_comes_back_after_a_cut_is_not_charged_for_the_time_between():
    peers = Peers(US)
    peers.take(said(A, 1, Use(9, 2, 4, 400)), 0.0)
    peers.expire(ROW_S + 0.1)
    peers.changes()
    peers.take(said(A, 2, Use(9, 1, 1_000, 100_000)), 60.0)
    assert peers.changes()[1] == {9: TenantUse(1, 0, 0)}
    peers.take(said(A, 3, Use(9, 1, 1_001, 100_010)), 60.1)
    assert peers.changes()[1] == {9: TenantUse(1, 1, 10)}


def test_nor_for_all_that_it_ever_used_where_a_row_was_older_than_its_last_word():
    """A cut of 90 s: the row was forgotten and its sender was not, so that the row was taken for a new one's."""
    peers = Peers(US)
    peers.take(said(A, 1, Load(7, 1, 0, 50, 5_000), Use(9, 2, 4, 400)), 0.0)
    peers.take(said(A, 2), 0.9)
    peers.expire(FORGET_S + 0.5)
    peers.changes()
    peers.take(said(A, 3, Load(7, 1, 0, 900, 90_000), Use(9, 1, 1_000, 100_000)), FORGET_S + 0.6)
    assert peers.changes() == ({7: WorkerLoad(1, 0, 0, 0)}, {9: TenantUse(1, 0, 0)})
    peers.take(said(A, 4), 2 * FORGET_S + 0.7)
    peers.expire(2 * FORGET_S + 0.7)
    assert not any(peer.loads.rows or peer.uses.rows for peer in peers._peers.values())  # what it says no more is not kept


@pytest.mark.parametrize(("age_ms", "first"), [(100, 400), (60_000, 0)])
def test_a_router_that_was_there_before_us_has_a_past_that_is_not_ours(age_ms: int, first: int):
    peers = Peers(US)
    peers.take(said(A, 70, Use(9, 0, 4, 400), age_ms=age_ms), 0.0)
    assert peers.changes()[1].get(9, TenantUse()) == TenantUse(0, 4 if first else 0, first)
    later_s = SETTLE_MS / 1000 + 1.0
    peers.take(said(A, 90, Use(8, 0, 1, 30), age_ms=age_ms + SETTLE_MS + 1_000), later_s)  # a tenant that it had never seen
    assert peers.changes()[1] == {8: TenantUse(0, 1, 30)}


@pytest.mark.parametrize("step_s", [0.3, 1.28])
def test_where_not_all_fits_into_a_round_it_is_every_workers_and_every_tenants_turn(step_s: float):
    """Of a thousand workers that were all busy, the last ones of the table were never told of, nor was any tenant: each router
    took those for idle, and gave every tenant its whole quota."""
    report, told, now = Report(A, 0.0), dict[tuple[str, int], float](), 0.0
    for turn in range(1, 12):
        now = turn * step_s
        loads = [Load(worker, turn, 0, turn, turn) for worker in range(1_000)]
        uses = [Use(tenant, 1, turn, turn) for tenant in range(50)]
        for message in report.next(loads, uses, (), now, 0):
            told |= {("worker", row.worker): now for row in message.loads}
            told |= {("tenant", row.tenant): now for row in message.uses}
    assert len(told) == 1_050
    assert now - min(told.values()) < ROW_S


def test_all_of_a_past_comes_before_it_is_taken_for_news():
    """Ten thousand tenants of one that is heard each 750 ms: what came late was charged as if it had just been used."""
    report, heard = Report(A, -3600.0), Peers(US)
    uses = [Use(name, 0, 5, 50) for name in range(10_000)]
    for step in range(30):
        for message in report.next([], uses, [], step * 0.75, 0):
            heard.take(message, step * 0.75)
        assert all(found == TenantUse(0, 0, 0) for found in heard.changes()[1].values())
    (peer,) = heard._peers.values()
    assert len(peer.uses.rows) == 10_000


def test_what_is_given_back_is_given_back_here():
    peers = Peers(US)
    peers.take(said(A, 1, Use(9, 1, 1, 400)), 0.0)
    peers.changes()
    peers.take(said(A, 2, Use(9, 0, 0, 0)), 0.1)
    assert peers.changes()[1] == {9: TenantUse(0, -1, -400)}


@pytest.mark.parametrize("known", [True, False])
def test_a_number_that_nobody_can_have_come_to_makes_no_deaf_ear(known: bool):
    """All that this sender said then was older than it, for a minute and a half."""
    peers = Peers(US)
    if known:
        peers.take(said(A, 1, Load(7, 1, 0, 1, 10)), 0.0)
    with pytest.raises(Refused) as refused:
        peers.take(said(A, 2**63, Load(7, 9, 0, 1, 10), age_ms=2**63 if known else 60_000), 0.0)
    assert refused.value.reason == "number"
    peers.take(said(A, 2, Load(7, 3, 0, 2, 20)), 0.1)
    assert peers.load(7) == (3, 0)
    # the most that it says in an hour that we did not hear of
    peers.take(said(A, 2 + 3600 * MOST_DATAGRAMS * round(1 / INTERVAL_S), Load(7, 4, 0, 2, 20)), 3600.0)
    assert peers.load(7) == (4, 0)
    late = Peers(US)
    late.take(said(A, 3600 * MOST_DATAGRAMS * round(1 / INTERVAL_S), Load(7, 4, 0, 2, 20), age_ms=3_600_000), 0.0)
    assert late.load(7) == (4, 0)


def test_senders_are_bounded():
    peers = Peers(US)
    for sender in range(MOST_PEERS):
        peers.take(said(sender + 10, 1), 0.0)
    with pytest.raises(Refused):
        peers.take(said(10_000, 1), 0.0)
    assert len(peers) == MOST_PEERS


class Wire:
    """Loses, delays and reorders what is said to `peers`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.peers, self.late, self.total = rng, Peers(US), list[Message](), WorkerLoad()

    def carry(self, message: Message, now: float) -> None:
        if self.rng.random() < 0.67:
            self.arrive(message, now)
        elif self.rng.random() < 0.5:
            self.late.append(message)
        if self.late and self.rng.random() < 0.3:
            self.arrive(self.late.pop(self.rng.randrange(len(self.late))), now)

    def arrive(self, message: Message, now: float) -> None:
        self.peers.take(message, now)
        found = self.peers.changes()[0].get(7, WorkerLoad())
        self.total.prefills += found.prefills
        self.total.tokens += found.tokens


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_with_every_third_datagram_lost_or_late_all_agree_in_the_end(seed: int):
    """Three senders change a row at random; after one refresh that arrives the sums are right."""
    rng = random.Random(seed)
    wire = Wire(rng)
    reports = {sender: Report(sender, 0.0) for sender in (A, B, 4)}
    rows = {sender: [0, 0, 0, 0] for sender in reports}
    for step in range(60):
        for sender, report in reports.items():
            if rng.random() < 0.5:
                prefills, tokens = rows[sender][2:]
                rows[sender] = [rng.randrange(5), rng.randrange(3), prefills + 1, tokens + rng.randrange(100)]
            for message in report.next([Load(7, *rows[sender])], [], [], step * 0.05, 0):
                wire.carry(message, step * 0.05)
    end = 60 * 0.05 + REFRESH_S
    for sender, report in reports.items():
        for message in report.next([Load(7, *rows[sender])], [], [], end, 0):
            wire.arrive(message, end)
    inflight, pending, prefills, tokens = (sum(row[i] for row in rows.values()) for i in range(4))
    assert wire.peers.load(7) == (inflight, pending)
    assert (wire.total.prefills, wire.total.tokens) == (prefills, tokens)


def test_a_round_says_what_changed_and_everything_once_a_second():
    report = Report(A, 0.0)
    row, other = Load(7, 1, 0, 1, 10), Load(8, 0, 0, 0, 0)
    assert [m.loads for m in report.next([row, other], [], [], 0.0, 0)] == [(row,)]  # who was never used is not told of
    assert report.next([row, other], [], [], 0.5, 0) == []
    assert [m.loads for m in report.next([Load(7, 0, 0, 1, 10)], [], [], 0.6, 0)] == [(Load(7, 0, 0, 1, 10),)]
    assert [m.loads for m in report.next([Load(7, 0, 0, 1, 10)], [], [], 1.7, 0)] == [(Load(7, 0, 0, 1, 10),)]
    alive = Report(B, 0.0)
    assert [len(alive.next([], [], [], now, 0)) for now in (0.0, 0.5, 1.0)] == [1, 0, 1]


def test_the_same_prefix_is_not_told_again_at_once():
    report = Report(A, 0.0)
    hint = hint_of(7, list(range(500)))
    assert len(hint.keys) == 120
    assert [m.hints for m in report.next([], [], [hint], 0.0, 0)] == [(hint,)]
    assert report.next([], [], [hint], 0.5, 0) == []
    assert [m.hints for m in report.next([], [], [hint], 6.0, 0)] == [(hint,)]


def test_however_much_there_is_to_say_datagrams_are_bounded_and_nothing_that_matters_is_lost():
    big = 2**63
    loads = [Load(big + i, 99_999, 99_999, big, big) for i in range(1_024)]
    uses = [Use(big + i, 99_999, 2**61, 2**61) for i in range(100)]
    hints = [Hint(big + i, tuple(range(big, big + 120))) for i in range(300)]
    report, heard = Report(A, 0.0), Peers(US)
    for step in range(4):
        messages = report.next(loads, uses, hints, step * 0.02, 2**62)
        assert len(messages) <= MOST_DATAGRAMS
        for message in messages:
            assert len(seal(message, KEY)) <= DATAGRAM_BYTES
            heard.take(message, step * 0.02)
    workers, tenants = heard.changes()
    assert (len(workers), len(tenants)) == (1_024, 100)


def test_where_not_all_fit_into_a_round_it_is_every_tenants_turn():
    """Forty processes hear a round each 200 ms, of ten thousand tenants 840 at a time: those behind the first four thousand were
    never spoken of, and had their quota at each process."""
    report, heard, round_s = Report(A, 0.0), Peers(US), 0.2
    uses, told = [Use(name, 1, 5, 50) for name in range(10_000)], dict.fromkeys(range(10_001), 0.0)
    for step in range(60):
        now = step * round_s
        if step == 30:
            uses = [Use(10_000, 1, 1, 1), *uses[1:], Use(0, 2, 6, 60)]
        for message in report.next([], uses, [], now, 0):
            heard.take(message, now)
            for row in message.uses:
                assert now - told[row.tenant] < ROW_S or row.tenant == 10_000
                told[row.tenant] = now
        if step >= 12:
            assert min(list(told.values())[:10_000]) > now - ROW_S
        heard.expire(now)
        if step == 30:
            assert told[10_000] == now
    assert [heard.use(name) for name in (0, 1, 9_999, 10_000)] == [2, 1, 1, 1]
    assert heard.changes()[1][0].requests == 6
    report.forget(set(), {1})
    assert (list(report._uses), report._later) == ([1], {})


def test_what_is_kept_of_others_has_a_bound_whatever_one_of_them_says(monkeypatch: pytest.MonkeyPatch):
    """Who has the key may be wrong: names that it makes up are not kept for ever, and of workers at rest nothing is."""
    monkeypatch.setattr("fleet_router.gossip.merge.MOST_KNOWN", 50)
    peers = Peers(US)
    for number in range(1, 20):
        named = range(10 * number, 10 * number + 10)
        peers.take(said(A, number, *(Load(name, 1, 0, 1, 10) for name in named), *(Use(name, 1, 1, 10) for name in named)), 0.0)
    (peer,) = peers._peers.values()
    assert (len(peer.loads.rows), len(peer.uses.rows)) == (50, 50)
    workers, tenants = peers.changes()
    assert (len(workers), len(tenants)) == (50, 50)
    peers.expire(ROW_S + 0.1)
    assert [len(found) for found in peers.changes()] == [50, 50]
    assert not peers._loads
    assert not peers._uses


def test_of_the_hints_that_were_told_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fleet_router.gossip.report.MOST_HINTS_KNOWN", 20)
    talks = Report(A, 0.0)
    for number in range(100):
        talks.next([], [], [hint_of(1, [number])], number / 100, 0)
    assert list(talks._hints) == [(1, number) for number in range(80, 100)]

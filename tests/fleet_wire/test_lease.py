"""KV leases: no double end, no leak, no read after expiry, whatever is lost, repeated or late."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet_wire.lease import Lease, LeaseTable

LEASE_S = 10.0


def table() -> LeaseTable:
    return LeaseTable(epoch="e1", duration_s=LEASE_S)


def test_a_confirmed_lease_ends_as_read_and_cannot_be_confirmed_again():
    leases = table()
    lease = leases.grant("r", [1, 2], now=0.0)
    assert isinstance(leases.confirm(lease.lease_id, "e1", lease.generation, 1.0), Lease)
    assert leases.confirm(lease.lease_id, "e1", lease.generation, 1.0) == "unknown"
    assert leases.release(lease.lease_id) is None


@pytest.mark.parametrize(
    ("epoch", "generation", "now", "why"),
    [("e0", 1, 1.0, "epoch"), ("e1", 2, 1.0, "generation"), ("e1", 1, LEASE_S, "expired")],
    ids=["restarted-owner", "reused-blocks", "too-late"],
)
def test_a_reader_is_refused(epoch: str, generation: int, now: float, why: str):
    leases = table()
    lease = leases.grant("r", [1], now=0.0)
    assert leases.renew(lease.lease_id, epoch, generation, now) == why
    assert leases.confirm(lease.lease_id, epoch, generation, now) == why
    assert len(leases) == 1  # a refusal frees nothing: the deadline does
    assert leases.expire(LEASE_S) == [lease], "nor does it renew anything"


def test_renewal_moves_the_deadline_and_expiry_never_trusts_a_stale_heap_entry():
    leases = table()
    early, late = leases.grant("a", [1], 0.0), leases.grant("b", [2], 0.0)
    assert leases.renew(late.lease_id, "e1", late.generation, 9.0) is None
    assert [lease.owner for lease in leases.expire(10.0)] == [early.owner]
    assert leases.expire(18.9) == []
    assert [lease.owner for lease in leases.expire(19.0)] == ["b"]


def test_vllm_50789_an_unexpired_first_entry_does_not_hide_expired_ones():
    leases = table()
    first = leases.grant("first", [1], 0.0)
    others = [leases.grant(f"o{i}", [i], 0.5) for i in range(5)]
    leases.renew(first.lease_id, "e1", first.generation, 9.0)
    assert {lease.owner for lease in leases.expire(10.5)} == {lease.owner for lease in others}


def test_capacity_is_a_bound():
    leases = LeaseTable("e1", LEASE_S, capacity=1)
    leases.grant("a", [1], 0.0)
    with pytest.raises(OverflowError, match="1 leases are open"):
        leases.grant("b", [2], 0.0)


class Leases(RuleBasedStateMachine):
    """Every lease ends exactly once; a confirmation is only ever given inside the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = table()
        self.now = 0.0
        self.deadlines: dict[str, float] = {}
        self.known: list[Lease] = []
        self.ended: list[str] = []

    @rule(step=st.floats(0.0, 6.0))
    def time_passes(self, step: float) -> None:
        self.now += step

    @rule(blocks=st.lists(st.integers(0, 50), max_size=3))
    def grant(self, blocks: list[int]) -> None:
        lease = self.leases.grant(f"r{len(self.known)}", blocks, self.now)
        self.known.append(lease)
        self.deadlines[lease.lease_id] = self.now + LEASE_S

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 10_000), wrong=st.booleans())
    def renew(self, pick: int, wrong: bool) -> None:
        lease = self.known[pick % len(self.known)]
        generation = lease.generation + wrong
        open_and_in_time = self.now < self.deadlines.get(lease.lease_id, -1.0)
        refused = self.leases.renew(lease.lease_id, "e1", generation, self.now)
        assert (refused is None) == (open_and_in_time and not wrong)
        if refused is None:
            self.deadlines[lease.lease_id] = self.now + LEASE_S

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 10_000))
    def confirm(self, pick: int) -> None:
        lease = self.known[pick % len(self.known)]
        in_time = self.now < self.deadlines.get(lease.lease_id, -1.0)
        found = self.leases.confirm(lease.lease_id, "e1", lease.generation, self.now)
        assert isinstance(found, Lease) == in_time
        if in_time:
            self.end(lease.lease_id)

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 10_000))
    def release(self, pick: int) -> None:
        lease = self.known[pick % len(self.known)]
        is_open = lease.lease_id in self.deadlines
        assert (self.leases.release(lease.lease_id) is lease) == is_open
        if is_open:
            self.end(lease.lease_id)

    @rule()
    def expire(self) -> None:
        for lease in self.leases.expire(self.now):
            assert self.deadlines[lease.lease_id] <= self.now
            self.end(lease.lease_id)
        assert all(deadline > self.now for deadline in self.deadlines.values())

    def end(self, lease_id: str) -> None:
        del self.deadlines[lease_id]
        self.ended.append(lease_id)

    @invariant()
    def nothing_ends_twice_or_leaks(self) -> None:
        assert len(self.ended) == len(set(self.ended))
        assert len(self.leases) == len(self.deadlines)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

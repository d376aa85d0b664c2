"""The block allocator as a state machine: no block is ever lost, counted twice, or evicted while somebody owns it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet_worker.engine.blocks import BlockAllocator

TOTAL = 6


class Allocator(RuleBasedStateMachine):
    """Owners take, share, name and free blocks in any order; a plain list of holdings is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(TOTAL)
        self.held: list[list[int]] = []
        self.known: dict[bytes, int] = {}

    @rule(count=st.integers(0, TOTAL + 1))
    def allocate(self, count: int) -> None:
        available = self.blocks.available
        taken = self.blocks.allocate(count)
        assert (taken is None) == (count > available)
        if taken is None:
            assert self.blocks.available == available
            return
        assert not set(taken) & {b for holding in self.held for b in holding}
        self.held.append(taken)

    @rule(which=st.integers(0, 9), name=st.integers(0, 4))
    def name(self, which: int, name: int) -> None:
        if self.held and (holding := self.held[which % len(self.held)]):
            self.blocks.register(holding[0], bytes([name]), None, (name,))

    @rule(names=st.lists(st.integers(0, 4), max_size=3, unique=True))
    def share(self, names: list[int]) -> None:
        found = self.blocks.find(bytes([n]) for n in names)
        self.blocks.share(found)
        self.held.append(found)

    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        if self.held:
            self.blocks.forget(self.held[which % len(self.held)])

    @rule(which=st.integers(0, 9))
    def free(self, which: int) -> None:
        if self.held:
            self.blocks.free(self.held.pop(which % len(self.held)))

    @invariant()
    def every_block_is_counted_once(self) -> None:
        self.blocks.check_integrity()
        owned = [b for holding in self.held for b in holding]
        assert [self.blocks.owners(b) for b in range(TOTAL)] == [owned.count(b) for b in range(TOTAL)]
        assert self.blocks.used == len(set(owned))

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        for event in self.blocks.take_events():
            assert (event.name in self.known) != event.stored
            if event.stored:
                self.known[event.name] = 1
            else:
                del self.known[event.name]
        assert {n for i in range(5) if self.blocks.find([n := bytes([i])])} == self.known.keys()


Allocator.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocator = Allocator.TestCase


def test_the_least_recently_used_block_is_evicted_first_and_a_tail_before_its_head():
    blocks = BlockAllocator(3)
    sequence = blocks.allocate(3)
    assert sequence is not None
    for i, block in enumerate(sequence):
        blocks.register(block, bytes([i]), None, ())
    blocks.free(sequence)
    blocks.allocate(1)
    assert [bool(blocks.find([bytes([i])])) for i in range(3)] == [True, True, False]


def test_freeing_twice_is_an_error():
    blocks = BlockAllocator(1)
    taken = blocks.allocate(1)
    assert taken is not None
    blocks.free(taken)
    with pytest.raises(ValueError, match="freed without an owner"):
        blocks.free(taken)


@pytest.mark.parametrize("state", ["_cached", "_free"])
def test_the_check_sees_a_block_in_two_states(state: str):
    blocks = BlockAllocator(2)
    (used,) = blocks.allocate(1) or ()
    blocks.register(used, b"name", None, (1,))
    blocks.check_integrity()
    if state == "_cached":
        blocks._cached[used] = None
    else:
        blocks._free.append(used)
    with pytest.raises(AssertionError, match="two states"):
        blocks.check_integrity()

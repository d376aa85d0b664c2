"""Who computes what: places in the batch, tokens per step, whose turn it is and who gives way."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_wire import blocks as hashing
from fleet_wire.blocks import chain, root_hash
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.scheduler import Scheduler, Work
from fleet_worker.engine.sequence import Sampling, Sequence

BLOCK = 4


def scheduler(blocks: int = 64, batch: int = 8, step_tokens: int = 16) -> Scheduler:
    return Scheduler(BlockAllocator(blocks), BLOCK, root_hash("m", BLOCK), batch, step_tokens)


def sequence(name: str, tokens: int, output: int = 100) -> Sequence:
    """Its prompt shares nothing with another's."""
    prompt = tuple(1000 * ord(name[0]) + at for at in range(tokens))
    return Sequence(name, prompt, Sampling(max_tokens=output), 0, 0.0)


def step(made: Scheduler) -> list[tuple[str, int, int]]:
    """One step as (name, start, count); whoever is complete gets its next token."""
    work = made.step()
    made.advance(work)
    for item in work:
        if item.samples:
            item.sequence.output.append(len(item.sequence.output))
    return [(item.sequence.request_id, item.start, item.count) for item in work]


def test_a_batch_has_so_many_places_and_no_more():
    made = scheduler(batch=2)
    for name in "abcd":
        made.add(sequence(name, 3))
    assert [name for name, _, _ in step(made)] == ["a", "b"]
    assert [name for name, _, _ in step(made)] == ["a", "b"]
    made.pulling["p"] = sequence("p", 3)  # a pull has a place
    done = made.running[0]
    made.remove(done)
    made.release(done)
    assert [name for name, _, _ in step(made)] == ["b"]
    del made.pulling["p"]
    assert [name for name, _, _ in step(made)] == ["b", "c"]


def test_a_step_computes_so_many_tokens_oldest_prompt_first_and_the_next_step_goes_on():
    made = scheduler(step_tokens=16)
    for name, tokens in (("a", 20), ("b", 5), ("c", 30)):
        made.add(sequence(name, tokens))
    assert step(made) == [("a", 0, 16)]
    assert step(made) == [("a", 16, 4), ("b", 0, 5), ("c", 0, 7)]
    assert step(made) == [("a", 20, 1), ("b", 5, 1), ("c", 7, 14)]
    assert step(made) == [("a", 21, 1), ("b", 6, 1), ("c", 21, 9)]
    assert step(made) == [("a", 22, 1), ("b", 7, 1), ("c", 30, 1)]


def test_decode_rows_come_before_an_older_prompt():
    made = scheduler(step_tokens=8)
    made.add(sequence("a", 40))
    made.add(sequence("b", 2))
    step(made)
    made.running.append(made.waiting.popleft())
    made.running[-1].stage = "running"
    made.running[-1].computed = 1  # it decodes
    assert step(made) == [("b", 1, 1), ("a", 8, 7)]


@pytest.mark.parametrize("rows", ["bc", "bcd"])
def test_decode_rows_may_leave_a_prompt_nothing_of_a_step(rows: str):
    made = scheduler(step_tokens=2)
    made.add(sequence("a", 40))
    step(made)
    for name in rows:
        one = sequence(name, 2)
        one.stage, one.computed = "running", 1
        made.running.append(one)
    assert step(made) == [(name, 1, 1) for name in rows]


def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed_again():
    """Its last token yields the next one: with nothing to compute it would be in the batch for ever."""
    made = scheduler()
    made.add(sequence("a", 2 * BLOCK))
    step(made)
    made.add(sequence("a again", 2 * BLOCK))
    assert step(made) == [("a", 8, 1), ("a again", 4, 4)]


def test_whoever_waits_is_not_passed_by_one_that_would_fit():
    made = scheduler(blocks=6)
    for name, tokens in (("a", 12), ("b", 16), ("c", 4)):
        made.add(sequence(name, tokens))
    assert [name for name, _, _ in step(made)] == ["a"]
    assert [waiting.request_id for waiting in made.waiting] == ["b", "c"]


def test_the_youngest_gives_way_and_is_the_first_to_come_back():
    made = scheduler(blocks=6, step_tokens=64)
    for name in "abc":
        made.add(sequence(name, 7))  # 2 blocks each
    made.add(sequence("d", 4))
    assert [name for name, _, _ in step(made)] == ["a", "b", "c"]
    assert [name for name, _, _ in step(made)] == ["a", "b", "c"]  # the last places of their blocks
    assert [name for name, _, _ in step(made)] == ["a", "b"]
    assert (made.preemptions, [waiting.request_id for waiting in made.waiting]) == (1, ["c", "d"])
    preempted = made.waiting[0]
    assert (preempted.table, preempted.computed, len(preempted.output)) == ([], 0, 2)
    for running in list(made.running):
        made.remove(running)
        made.release(running)
    assert [name for name, _, _ in step(made)] == ["c", "d"]


def test_who_needs_a_block_and_is_the_youngest_gives_way_itself():
    made = scheduler(blocks=4, step_tokens=64)
    made.add(sequence("a", 5))  # 2 blocks with room for three more
    made.add(sequence("b", 8))  # 2 full ones
    assert [name for name, _, _ in step(made)] == ["a", "b"]
    assert [name for name, _, _ in step(made)] == ["a"]
    assert [waiting.request_id for waiting in made.waiting] == ["b"]


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    blocks=st.integers(16, 40),
    batch=st.integers(1, 6),
    step_tokens=st.integers(1, 32),
)
def test_every_request_ends_inside_the_bounds(prompts: list[int], blocks: int, batch: int, step_tokens: int):
    made, ended = scheduler(blocks, batch, step_tokens), set[str]()
    names = [f"{chr(97 + at)}" for at in range(len(prompts))]
    for name, tokens in zip(names, prompts, strict=True):
        made.add(sequence(name, tokens, output=8))
    for _ in range(3_000):
        decoding = sum(running.todo == 1 for running in made.running)
        work: list[Work] = made.step()
        assert sum(item.count for item in work) <= max(step_tokens, decoding)
        assert len(made.running) <= batch
        made.advance(work)
        for item in work:
            if item.samples:
                item.sequence.output.append(1)
                if len(item.sequence.output) >= 8:
                    made.remove(item.sequence)
                    made.release(item.sequence)
                    ended.add(item.sequence.request_id)
        made.blocks.check_integrity()
        if len(ended) == len(prompts):
            break
    assert ended == set(names)
    assert made.blocks.used == 0


class Hashed:
    """xxhash, counting."""

    def __init__(self, real: ModuleType) -> None:
        self.xxh3_128_digest, self.count = self._digest, 0
        self._real = real

    def _digest(self, raw: bytes) -> bytes:
        self.count += 1
        return self._real.xxh3_128_digest(raw)


def test_a_prompt_that_waits_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    """Incident: a prompt of 100,000 tokens that waited for blocks was hashed anew at each step, 3.4 ms of everybody's time, and
    once more while it was computed."""
    made = scheduler(blocks=12)
    made.add(sequence("a", 9))
    step(made)
    waits = sequence("b", 44, output=2)
    made.add(waits)
    counted = Hashed(hashing.xxhash)
    monkeypatch.setattr(hashing, "xxhash", counted)
    for _ in range(3):
        assert [name for name, _, _ in step(made)] == ["a"]
    assert 11 <= counted.count <= 12  # and one block of the other's
    other = made.running[0]
    made.remove(other)
    made.release(other)
    while len(waits.output) < 2:
        step(made)
    assert counted.count <= 12
    monkeypatch.undo()
    assert waits.names == list(chain(made.root, waits.tokens(0, 44), BLOCK))


def test_what_gives_way_keeps_the_names_of_its_blocks_and_finds_them():
    """Its tokens do not change; what it made since is hashed on from there."""
    made = scheduler(blocks=6)
    for name in "ab":
        made.add(sequence(name, 7))
    while not made.preemptions:
        step(made)
    victim = made.waiting[0]
    known = list(chain(made.root, victim.tokens(0, victim.length), BLOCK))
    assert victim.names == known[: len(victim.names)]
    first = made.running[0]
    made.remove(first)
    made.release(first)
    step(made)
    assert victim.stage == "running"
    assert victim.names[: len(known)] == known
    assert victim.registered <= len(victim.names)
    found = (victim.cached_tokens, made.prefix_queries, made.prefix_hits)
    assert found == (0, 14, 0), "what it finds of its own is no hit, and no tokens that a client is told were cached"

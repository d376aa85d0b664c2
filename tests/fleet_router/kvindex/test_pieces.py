"""Keys of a prompt: equal keys are equal beginnings, however they were found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.kvindex.pieces import (
    BEGINNING_BYTES,
    BEGINNINGS_MOST,
    FINE_BYTES,
    LONG_BYTES,
    MAX_PIECES,
    MOST_BYTES,
    PIECE_BYTES,
    Beginnings,
    bytes_of,
    key_chain,
    piece_after,
    pieces_in,
    ring_key,
)


@given(st.binary(max_size=2000), st.binary(max_size=600), st.binary(max_size=600))
def test_equal_keys_mean_equal_prefixes(shared: bytes, left: bytes, right: bytes):
    a, b = key_chain(shared + left), key_chain(shared + right)
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    assert common >= min(len(shared) // 256, len(a), len(b))
    assert (shared + left)[: common * 256] == (shared + right)[: common * 256]


@pytest.mark.parametrize(
    "size", [0, 1, 255, 256, 5000, FINE_BYTES - 1, FINE_BYTES, FINE_BYTES + 5000, LONG_BYTES, LONG_BYTES + 2048, 5_000_000]
)
def test_a_chain_covers_what_it_says(size: int):
    prompt = bytes(i * 7 % 251 for i in range(min(size, 1000))) * (size // 1000 + 1)
    keys = key_chain(prompt[:size])
    assert len(set(keys)) == len(keys)
    covered = bytes_of(len(keys))
    assert covered <= max(size, 256)
    changed = bytearray(prompt[:size])
    if covered <= size and size:
        changed[covered - 1] ^= 1
        assert key_chain(bytes(changed))[-1] != keys[-1]
        assert key_chain(bytes(changed))[:-1] == keys[:-1]
    assert key_chain(prompt[:size], seed=5) != keys
    assert ring_key(keys) in keys


def test_pieces_and_bytes_agree_and_a_piece_is_small_beside_what_is_before_it():
    for pieces in range(1, MAX_PIECES + 1):
        size = bytes_of(pieces)
        assert len(key_chain(bytes(size))) == pieces_in(size) == pieces_in(size + piece_after(pieces) - 1) == pieces
        if pieces < MAX_PIECES:
            assert bytes_of(pieces + 1) - size == piece_after(pieces) <= max(PIECE_BYTES, size / 8)
    assert bytes_of(MAX_PIECES) == MOST_BYTES


SIZES = [0, 255, BEGINNING_BYTES - 1, BEGINNING_BYTES, BEGINNING_BYTES + 255, BEGINNING_BYTES + 256, 3_000, FINE_BYTES - 1]
SIZES += [FINE_BYTES, FINE_BYTES + 300, FINE_BYTES + 1024, LONG_BYTES, LONG_BYTES + 2048, LONG_BYTES + 5_000]


def test_what_prompts_begin_with_is_looked_up_and_nothing_else_changes():
    """Prompts of all sizes that have all, a part or nothing of their beginning in common, in any order, under several seeds."""
    rng, known = random.Random(7), Beginnings()
    shared = rng.randbytes(LONG_BYTES + 8_000)
    prompts = [shared[:size] for size in SIZES] + [shared[:at] + rng.randbytes(size) for at in SIZES for size in SIZES]
    for _ in range(3):
        rng.shuffle(prompts)
        for prompt in prompts:
            seed = rng.choice([0, 1, 2**64 - 1])
            assert known.key_chain(prompt, seed) == key_chain(prompt, seed)


def test_what_is_handed_out_is_the_callers_own():
    known, prompt = Beginnings(), bytes(3_000)
    for _ in range(3):
        keys = known.key_chain(prompt)
        assert keys == key_chain(prompt)
        keys[0] = 5
        keys.append(6)


def test_beginnings_are_bounded():
    rng, known = random.Random(1), Beginnings()
    for _ in range(3 * BEGINNINGS_MOST):
        known.key_chain(rng.randbytes(BEGINNING_BYTES))
        assert len(known._known) <= BEGINNINGS_MOST

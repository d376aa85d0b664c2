"""Tokenised prefixes: a prompt's blocks are those of the engine, and only what is new is encoded."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.kvindex.precise import key_of
from fleet_router.kvindex.tokenised import SEGMENT_CHARS, SEGMENT_TOKENS, TokenisedPrefixes, _place, cut, keys_of_ids
from fleet_wire.blocks import chain, root_hash

ROOT = root_hash("c", 4)
WORDS = ["the", "router", "moves", "blocks", "between", "two", "workers", "before", "noon", "42", "yes,", "no.\n"]


def prose(words: int, seed: int = 1) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def encode(text: str) -> list[int]:
    """A tokenizer that cuts before every space, as those in use do."""
    return [sum(piece.encode()) for piece in text.replace(" ", "\0 ").split("\0") if piece]


def keys(known: TokenisedPrefixes, text: str, lead=(7,)) -> tuple[list[int], int]:
    """(block keys, characters that were encoded for them)"""
    reading = known.read(text, lead)
    known.learn(reading, [encode(reading.segments[i]) for i in reading.missing], lead)
    return known.keys(reading, ROOT, 4), reading.missing_chars


def expected(text: str, lead=(7,)) -> list[int]:
    return [key_of(name) for name in chain(ROOT, [*lead, *encode(text)], 4)]


@given(st.text(max_size=6000))
def test_a_text_is_its_segments(text: str):
    assert "".join(cut(text)) == text


@pytest.mark.parametrize("text", [" " * 1_000_000, "1 " * 500_000, "a" * 1_000_000, "\u6771" * 1_000_000])
def test_a_text_without_a_place_to_cut_holds_nobody_up(text: str):
    """Each space of a megabyte of them was looked at by itself: 0.1 s in which no other stream went on."""
    began = time.thread_time()
    assert cut(text) == [text]
    assert time.thread_time() - began < 0.04


@given(st.lists(st.sampled_from(" a1.\n\u00e9\u6771"), max_size=60), st.integers(1, 40), st.integers(1, 60))
def test_the_place_to_cut_is_the_first_space_behind_a_letter(parts: list[str], low: int, more: int):
    text = "".join(parts)
    found = [at for at in range(low, min(len(text), low + more)) if text[at] == " " and text[at - 1].isalpha()]
    assert _place(text, low, low + more) == (found[0] if found else None)


@given(st.integers(0, 3000), st.integers(0, 800), st.integers(0, 800))
def test_texts_with_a_common_beginning_have_common_segments(shared: int, left: int, right: int):
    a, b = cut(prose(shared) + " a " + prose(left, 2)), cut(prose(shared) + " b " + prose(right, 3))
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert sum(map(len, a[:common])) >= len(prose(shared)) - 3 * SEGMENT_CHARS


@pytest.mark.parametrize("words", [0, 1, 50, 400, 5000])
def test_the_blocks_are_those_of_the_whole_text(words: int):
    known = TokenisedPrefixes(100_000)
    text = prose(words)
    assert keys(known, text)[0] == expected(text)
    assert keys(known, text) == (expected(text), 0)


def test_only_what_is_new_is_encoded():
    known, text = TokenisedPrefixes(100_000), prose(5000)
    keys(known, text)
    more = text + prose(100, 2)
    found, encoded = keys(known, more)
    assert found == expected(more)
    assert encoded < len(prose(100, 2)) + 3 * SEGMENT_CHARS
    other, whole = keys(known, text, lead=())
    assert other == expected(text, ())  # another beginning: nothing of it is used
    assert whole == len(text)


def test_another_root_has_other_blocks_from_the_same_tokens():
    known, text = TokenisedPrefixes(100_000), prose(2000)
    keys(known, text)
    reading = known.read(text, (7,))
    assert reading.missing == []
    other = root_hash("another", 8)
    assert known.keys(reading, other, 8) == [key_of(name) for name in chain(other, [7, *encode(text)], 8)]
    assert known.count(reading) == len(encode(text)) + 1


def test_a_tokenizer_that_is_not_cut_there_encodes_everything():
    known, text = TokenisedPrefixes(100_000, splits=False), prose(3000)
    assert keys(known, text) == (expected(text), len(text))
    assert keys(known, text + " more")[1] == len(text) + 5


def test_it_is_bounded_and_says_when_something_was_forgotten():
    known = TokenisedPrefixes(2_000)
    first = known.read(prose(3000, 1), ())
    known.learn(first, [encode(first.segments[i]) for i in first.missing], ())
    assert known.knows(first)
    for seed in range(2, 8):
        keys(known, prose(3000, seed))
        assert known.tokens <= 3000 + 500
    assert not known.knows(first)


@pytest.mark.parametrize("size", [0, 3, 4, 100])
def test_token_ids_need_no_tokenizer(size: int):
    assert keys_of_ids(range(size), ROOT, 4) == [key_of(name) for name in chain(ROOT, list(range(size)), 4)]


def test_text_without_a_place_to_cut_is_one_segment():
    assert cut("字" * 3000) == ["字" * 3000]
    assert len(cut("字" * 3000 + prose(2000))) > 3


def test_short_texts_are_bounded_by_what_remembering_them_takes():
    """Each takes half a KiB beside its tokens: two million words in a million prompts were half a GiB."""
    known = TokenisedPrefixes(100 * SEGMENT_TOKENS)
    for number in range(1_000):
        reading = known.read(f"q{number}", ())
        known.learn(reading, [[1, 2, 3]], ())
        assert known.knows(reading)
    assert 90 <= len(known._known) <= 100
    assert known.tokens == 3 * len(known._known)


def test_what_one_tenant_has_sent_is_new_of_another_and_names_are_not_to_be_guessed():
    """Whoever knows how a segment is named looks for another text with that name, and the first one is counted as his; and the
    time until an answer told a tenant what others had sent."""
    text = prose(2000)
    names = set[int]()
    for known in (TokenisedPrefixes(100_000, secret=1), TokenisedPrefixes(100_000, secret=2)):
        for salt in ("", "a", "b"):
            reading = known.read(text, (7,), salt)
            assert len(reading.missing) == len(reading.segments)
            known.learn(reading, [encode(segment) for segment in reading.segments], (7,))
            assert known.read(text, (7,), salt).missing == []
            assert known.keys(reading, ROOT, 4) == expected(text)
            assert names.isdisjoint(reading.names)
            names.update(reading.names)

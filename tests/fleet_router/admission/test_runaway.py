"""Streams that run away are found; those that only repeat themselves a little are not."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.admission.runaway import (
    CONTROL_MOST,
    JUDGED_READS,
    LEAST_EVENTS,
    LEAST_TURNS,
    MOST_PERIOD,
    SLACK,
    Runaway,
    Why,
)


def event(text: str) -> bytes:
    raw = b"data: " + json.dumps({"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None}]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(raw), raw)


def fed(words: list[str], most: int = 100_000) -> tuple[Why | None, int]:
    """(why, events until then)."""
    detector = Runaway(most)
    for number, word in enumerate(words, 1):
        if (why := detector.saw(event(word))) is not None:
            return why, number
    return None, len(words)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20, 64, MOST_PERIOD])
def test_a_loop_is_found_when_it_has_turned_often_enough(period: int):
    words = random.Random(period).choices([f"w{i}" for i in range(40)], k=period)
    why, events = fed(words * 3000)
    least = max(LEAST_EVENTS, LEAST_TURNS * period)
    assert why == "repetition"
    assert least < events <= least + period + JUDGED_READS


def test_a_loop_is_found_after_a_long_beginning():
    start = [f"word{i}" for i in range(5000)]
    why, events = fed(start + ["a", "b", "a", "b", "c"] * 500)
    assert why == "repetition"
    assert events > 5000


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12), st.integers(0, 30))
def test_whatever_the_loop_is_made_of(words: list[str], noise: int):
    assert fed([f"n{i}" for i in range(noise)] + words * 600)[0] == "repetition"


@pytest.mark.parametrize("length", range(1, 8))
def test_every_loop_of_two_words_is_found(length: int):
    """ "aaaabaab" was not: three events in a row stand at two places of it."""
    loops = ["".join(word) for word in itertools.product("ab", repeat=length)] + ["aaaabaab", "babbabbbb"]
    assert [loop for loop in loops if fed(list(loop) * 400)[0] != "repetition"] == []


def test_tables_and_lists_are_no_loops():
    rows = [word for i in range(500) for word in ("|", " ", f"{i}", " ", "|", " yes", " |", "\n")]
    assert fed(rows) == (None, len(rows))
    assert fed(["-"] * (LEAST_EVENTS - 1) + ["end"] + ["="] * (LEAST_EVENTS - 1))[0] is None
    few = [f"w{i}" for i in range(100)] * (LEAST_TURNS - 1) + ["end"]
    assert fed(few)[0] is None


@given(st.lists(st.integers(1, 400), max_size=40))
def test_how_the_bytes_are_cut_into_reads_changes_nothing(cuts: list[int]):
    data = b"".join(event(word) for word in ["x", "y", "z"] * 200) + event("end")
    detector, found, at = Runaway(100_000), set[Why | None](), 0
    for cut in [*cuts, len(data)]:
        found.add(detector.saw(data[at : at + cut]))
        at += cut
    assert found - {None} == {"repetition"}


def test_it_ends_only_behind_a_whole_event():
    detector, data = Runaway(100_000), event("x")
    for _ in range(LEAST_EVENTS + JUDGED_READS):
        assert detector.saw(data[:-5]) is None
        if (why := detector.saw(data[-5:])) is not None:
            break
    assert why == "repetition"


def test_no_stop():
    words = [f"w{i}" for i in range(1000)]
    why, events = fed(words, most=100)
    assert why == "no_stop"
    assert 100 + SLACK < events <= 100 + SLACK + JUDGED_READS
    assert fed(words, most=1000)[0] is None


def test_control_tokens_as_text():
    words = [f"w{i}" if i % 3 else "<|im_start|>" for i in range(200)]
    why, events = fed(words)
    assert why == "control_tokens"
    assert 3 * CONTROL_MOST < events <= 3 * CONTROL_MOST + JUDGED_READS
    assert fed(["the token <|im_start|> begins a turn"] + [f"w{i} < [x]" for i in range(300)])[0] is None


@given(st.lists(st.binary(max_size=80), max_size=30))
def test_any_bytes_can_be_watched(reads: list[bytes]):
    detector = Runaway(1000)
    for data in reads:
        assert detector.saw(data) in (None, "repetition", "no_stop", "control_tokens")

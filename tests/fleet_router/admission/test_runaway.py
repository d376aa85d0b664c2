"""Streams that run away are found; those that only repeat themselves a little are not."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.admission.runaway import (
    CONTROL_MOST,
    JUDGED_READS,
    KEPT_SYMBOLS,
    LEAST_EVENTS,
    LEAST_TURNS,
    MOST_PERIOD,
    SLACK,
    SPARE_SYMBOLS,
    SYMBOL_BYTES,
    Runaway,
    Why,
)


def event(text: str, end: bytes = b"\n\n") -> bytes:
    raw = b"data: " + json.dumps({"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None}]}).encode() + end
    return b"%x\r\n%b\r\n" % (len(raw), raw)


def fed(words: list[str], most: int = 100_000, end: bytes = b"\n\n") -> tuple[Why | None, int]:
    """(why, events until then)."""
    detector = Runaway(most)
    for number, word in enumerate(words, 1):
        if (why := detector.saw(event(word, end))) is not None:
            return why, number
    return None, len(words)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20, 64, MOST_PERIOD])
def test_a_loop_is_found_when_it_has_turned_often_enough(period: int):
    words = random.Random(period).choices([f"w{i}" for i in range(40)], k=period)
    why, events = fed(words * 3000)
    least = max(LEAST_EVENTS, LEAST_TURNS * period)
    assert why == "repetition"
    assert least < events <= least + period + JUDGED_READS


@pytest.mark.parametrize(
    ("words", "most", "expected"),
    [
        (["la"] * 400, 10_000, "repetition"), ([f"w{i}" for i in range(400)], 200, "no_stop"),
        ([f"w{i} <|im_start|>" for i in range(100)], 10_000, "control_tokens"), ([f"w{i}" for i in range(400)], 10_000, None),
    ],
)  # fmt: skip
def test_lines_may_end_as_some_engines_end_them(words: list[str], most: int, expected: Why | None):
    """None of it was found in streams whose lines end with CRLF."""
    found = fed(words, most, b"\r\n\r\n")
    assert found == fed(words, most)
    assert found[0] == expected
    reads = [event(word, b"\r\n\r\n") for word in words]
    for last in ([], [b"0\r\n\r\n"], [event("x" * 10_000, b"\r\n\r\n") + b"0\r\n\r\n"]):
        detector = Runaway(10_000)
        for read in (*reads, *last):
            detector.saw(read)
        assert detector.events == len(words) + sum(len(read) > 5 for read in last)


def test_a_loop_is_found_after_a_long_beginning():
    start = [f"word{i}" for i in range(5000)]
    why, events = fed(start + ["a", "b", "a", "b", "c"] * 500)
    assert why == "repetition"
    assert events > 5000


def test_a_large_read_is_looked_at_at_once():
    assert Runaway(100_000).saw(b"".join([event("la")] * 400)) == "repetition"


def test_of_a_long_stream_no_more_is_kept_than_is_looked_at():
    detector = Runaway(100_000)
    for number in range(3 * KEPT_SYMBOLS):
        detector.saw(event(f"w{number}"))
    assert len(detector._symbols) <= (KEPT_SYMBOLS + SPARE_SYMBOLS + JUDGED_READS) * SYMBOL_BYTES


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


def framed(words: list[str], sizes: list[int], separator: bytes = b"\n\n") -> list[bytes]:
    """Reads of a chunk each, of so many events in turn; 0: events without chunks."""
    chunks, at, turn = [], 0, 0
    while at < len(words):
        size = sizes[turn % len(sizes)]
        events = [event(word).split(b"\r\n")[1].replace(b"\n\n", separator) for word in words[at : at + max(1, size)]]
        data = b"".join(events)
        chunks.append(b"%x\r\n%b\r\n" % (len(data), data) if size else data)
        at, turn = at + max(1, size), turn + 1
    return chunks


FRAMINGS = {"one": [1], "none": [0], "two": [2], "five": [5], "mixed": [1, 1, 2, 1, 3], "seldom": [1] * 61 + [2]}


@pytest.mark.parametrize("sizes", FRAMINGS.values(), ids=FRAMINGS)
@pytest.mark.parametrize("period", [1, 3, 50])
def test_however_events_stand_in_chunks(sizes: list[int], period: int):
    detector, words = Runaway(100_000), [f"w{i}" for i in range(period)] * (6000 // period)
    for chunk in framed(words, sizes):
        detector.saw(chunk)
    assert detector.saw(b"data: x\n\n\r\n") == "repetition"


@pytest.mark.parametrize("seed", range(8))
def test_chunks_of_any_size(seed: int):
    """As behind a proxy that cuts by its own reads: found later, but found."""
    rng = random.Random(seed)
    chunks = framed(["a", "b", "c"] * 2000, [rng.choice([1, 1, 1, 2, 3]) for _ in range(997)])
    detector = Runaway(100_000)
    at = next(at for at, chunk in enumerate(chunks) if detector.saw(chunk))
    assert at < 3 * LEAST_EVENTS


@pytest.mark.parametrize("sizes", FRAMINGS.values(), ids=FRAMINGS)
@given(data=st.data())
def test_events_are_counted(sizes: list[int], data: st.DataObject):
    count = data.draw(st.integers(0, 700))
    detector = Runaway(100_000)
    for chunk in framed([f"w{i}" for i in range(count)], sizes):
        detector.saw(chunk)
    assert detector.events == count


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
    for more, expected in ((0, None), (1, "control_tokens")):
        few = ["<|im_start|>"] * (CONTROL_MOST + more) + [f"w{i}" for i in range(2 * JUDGED_READS)]
        assert fed(few)[0] == expected
    assert fed(["the token <|im_start|> begins a turn"] + [f"w{i} < [x]" for i in range(300)])[0] is None


LIKELY = {"token": "<|im_end|>", "logprob": -2.5, "bytes": [60]}
TOLD_WITH: dict[str, dict[str, Any]] = {
    "chat": {"delta": {"content": "W"}, "logprobs": {"content": [{"token": "W", "logprob": -0.1, "top_logprobs": [LIKELY]}]}},
    "text": {"text": "W", "logprobs": {"tokens": ["W"], "token_logprobs": [-0.1], "top_logprobs": [{"<|im_end|>": -2.5}]}},
}


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("kind", TOLD_WITH)
def test_tokens_that_might_have_been_are_no_text(kind: str, compact: bool):
    """An end is among the likely next tokens of every sentence: each answer with top_logprobs was cut after nine of them."""
    separators = (",", ":") if compact else (", ", ": ")

    def why_of(word: str) -> Why | None:
        detector, found = Runaway(100_000), set[Why | None]()
        for number in range(3 * JUDGED_READS):
            said = json.dumps({"choices": [{"index": 0, **TOLD_WITH[kind], "finish_reason": None}]}, separators=separators)
            raw = b"data: %b\n\n" % said.replace('"W"', json.dumps(f"{word}{number}")).encode()
            found.add(detector.saw(b"%x\r\n%b\r\n" % (len(raw), raw)))
        return next(iter(found - {None}), None)

    assert why_of("w") is None
    assert why_of("<|im_start|>") == "control_tokens"


@given(st.lists(st.binary(max_size=80), max_size=30))
def test_any_bytes_can_be_watched(reads: list[bytes]):
    detector = Runaway(1000)
    for data in reads:
        assert detector.saw(data) in (None, "repetition", "no_stop", "control_tokens")

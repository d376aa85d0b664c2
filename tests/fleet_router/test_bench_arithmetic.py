"""The benchmark's arithmetic, so that its ratios mean what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from e2e.bench.backend import BYTES_PER_TOKEN, CHUNK, END, LAST, STREAM_HEAD, Worker
from e2e.bench.client import wrong_stream
from e2e.bench.cpu import apart, cpu_s, family, pin, rss_mb
from e2e.bench.router import (
    FLOOD_LONG,
    HEAD,
    LONG,
    LONG_WORDS,
    SHORT_WORDS,
    USUAL_WORDS,
    p99,
    prompts,
    ratio,
    requests,
    slope,
    tails,
    wrong_pace,
)
from e2e.bench.table import table


def test_slope_is_the_cost_of_one_more_chunk():
    assert slope(100.0, 500.0, 4, 44) == 10.0


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_below_one_when_ours_is_cheaper():
    assert ratio([1.0, 2.0, 30.0], [2.0, 4.0, 10.0]) == 0.5


@pytest.mark.parametrize(("count", "expected"), [(1, 1.0), (100, 99.0), (200, 198.0)])
def test_p99_is_a_value_that_was_measured(count: int, expected: float):
    assert p99([float(i) for i in range(count, 0, -1)]) == expected


def test_the_ratio_of_tails_tells_what_one_round_does_to_it():
    quiet, held_up = [1.0] * 99 + [2.0], [1.0] * 90 + [8.0] * 10
    assert tails([quiet] * 4, [quiet] * 4) == (1.0, 1.0, 1.0)
    assert tails([quiet, quiet, held_up], [quiet] * 3) == (8.0, 1.0, 8.0)
    assert tails([quiet] * 3, [quiet, quiet, held_up]) == (0.125, 0.125, 1.0)


def test_cpu_time_grows_with_work_and_memory_is_ours():
    before = cpu_s(os.getpid())
    sum(range(3_000_000))
    assert cpu_s(os.getpid()) > before
    assert 5 < rss_mb(os.getpid()) < 5_000


@pytest.mark.parametrize(("cores", "measured", "rest"), [({0}, {0}, {0}), ({0, 1}, {1}, {0}), ({2, 5, 7}, {7}, {2, 5})])
def test_what_is_measured_has_a_core_of_its_own_where_there_are_two(cores: set[int], measured: set[int], rest: set[int]):
    assert apart(cores) == (measured, rest)


def test_a_process_and_its_children_are_pinned():
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE)
    try:
        assert shell.stdout is not None
        shell.stdout.readline()  # its child is there
        found = family(shell.pid)
        pin(shell.pid, {min(os.sched_getaffinity(0))})
        assert [os.sched_getaffinity(pid) for pid in found] == [{min(os.sched_getaffinity(0))}] * 2
    finally:
        for pid in reversed(family(shell.pid)):
            os.kill(pid, signal.SIGKILL)
        shell.communicate()


def test_a_table_lines_up():
    assert table(("router", "µs"), [("ours", 5.634), ("envoy", 128.2)]) == "router    µs\nours    5.63\nenvoy    128"


class Written:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.data.append(data)

    def is_closing(self) -> bool:
        return False


def answered(body: bytes) -> list[bytes]:
    """What a worker writes at once."""
    worker, transport = Worker(), Written()
    worker.connection_made(transport)  # type: ignore[arg-type]
    worker.data_received(HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body)
    return transport.data


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_every_router_gets_the_same_flood_however_it_writes_json(separators: tuple[str, str]):
    sent = requests(1, 0, 3, flood=True)[0].partition(b"\r\n\r\n")[2]
    anew = json.dumps(json.loads(sent), separators=separators).encode()
    assert answered(anew) == [STREAM_HEAD, CHUNK, CHUNK, LAST, END]


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_a_prefill_leg_gets_a_reference_however_it_is_written(separators: tuple[str, str]):
    body = {"prompt": "a", "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    (answer,) = answered(json.dumps(body, separators=separators).encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize(
    ("words", "least", "most"), [(SHORT_WORDS, 150, 250), (USUAL_WORDS, 3_000, 3_800), (LONG_WORDS, 16_000, 16_700)]
)
def test_prompts_have_the_sizes_that_the_table_says_and_answers_count_their_tokens(words: tuple[int, int], least: int, most: int):
    """Routers learn bytes per token from the counts: with fixed ones a long prompt made all others look short."""
    assert least <= sum(map(len, prompts(50, 1, words))) / 50 <= most
    sent = requests(1, 1, None, words=words)[0].partition(b"\r\n\r\n")[2]
    (answer,) = answered(sent)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["prompt_tokens"] == len(sent) // BYTES_PER_TOKEN


def test_a_router_that_was_given_another_load_is_an_error():
    assert wrong_pace(LONG * 0.005, 0.1) == []
    assert "paced" in wrong_pace(0.01, 0.1)[0]
    assert "flooded" in wrong_pace(LONG * 0.005, FLOOD_LONG * 0.005)[0]


def test_an_event_may_lie_in_two_chunks_but_may_not_be_missing():
    split = b"4\r\ndata\r\n5\r\n: 1\n\n\r\n" + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    assert wrong_stream(split, 1) == ""
    assert wrong_stream(split, 2) == "2 events, expected 3"
    assert "malformed" in wrong_stream(b"4\r\ndata: \r\n0\r\n\r\n", 1)

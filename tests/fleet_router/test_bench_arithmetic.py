"""The benchmark's arithmetic, so that its ratios mean what they say."""

from __future__ import annotations

import json
import os

import pytest

from e2e.bench.backend import CHUNK, END, PREFILLED, STREAM_HEAD, Worker
from e2e.bench.client import wrong_stream
from e2e.bench.cpu import cpu_s, rss_mb
from e2e.bench.router import FLOOD_LONG, HEAD, LONG, p99, ratio, requests, slope, wrong_pace
from e2e.bench.table import table


def test_slope_is_the_cost_of_one_more_chunk():
    assert slope(100.0, 500.0, 4, 44) == 10.0


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_below_one_when_ours_is_cheaper():
    assert ratio([1.0, 2.0, 30.0], [2.0, 4.0, 10.0]) == 0.5


@pytest.mark.parametrize(("count", "expected"), [(1, 1.0), (100, 99.0), (200, 198.0)])
def test_p99_is_a_value_that_was_measured(count: int, expected: float):
    assert p99([float(i) for i in range(count, 0, -1)]) == expected


def test_cpu_time_grows_with_work_and_memory_is_ours():
    before = cpu_s(os.getpid())
    sum(range(3_000_000))
    assert cpu_s(os.getpid()) > before
    assert 5 < rss_mb(os.getpid()) < 5_000


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
    assert answered(anew) == [STREAM_HEAD, CHUNK, CHUNK, CHUNK, END]


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_a_prefill_leg_gets_a_reference_however_it_is_written(separators: tuple[str, str]):
    body = {"prompt": "a", "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    assert answered(json.dumps(body, separators=separators).encode()) == [PREFILLED]


def test_a_router_that_was_given_another_load_is_an_error():
    assert wrong_pace(LONG * 0.005, 0.1) == []
    assert "paced" in wrong_pace(0.01, 0.1)[0]
    assert "flooded" in wrong_pace(LONG * 0.005, FLOOD_LONG * 0.005)[0]


def test_an_event_may_lie_in_two_chunks_but_may_not_be_missing():
    split = b"4\r\ndata\r\n5\r\n: 1\n\n\r\n" + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    assert wrong_stream(split, 1) == ""
    assert wrong_stream(split, 2) == "2 events, expected 3"
    assert "malformed" in wrong_stream(b"4\r\ndata: \r\n0\r\n\r\n", 1)

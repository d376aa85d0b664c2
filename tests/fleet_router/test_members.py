"""Answers of several processes as one."""

from __future__ import annotations

import signal

import pytest

from fleet_router.members import Member, summed
from fleet_router.supervisor import exit_code

ONE = """# TYPE fleet_router_requests_total counter
fleet_router_requests_total{code="200"} 3
# TYPE fleet_router_endpoints gauge
fleet_router_endpoints{role="decode"} 2
# TYPE fleet_router_ttft_seconds histogram
fleet_router_ttft_seconds_bucket{tier="a b",le="+Inf"} 3
fleet_router_ttft_seconds_sum{tier="a b"} 0.25
"""
OTHER = """# TYPE fleet_router_requests_total counter
fleet_router_requests_total{code="200"} 4
fleet_router_requests_total{code="503"} 1
# TYPE fleet_router_endpoints gauge
fleet_router_endpoints{role="decode"} 1
# TYPE fleet_router_ttft_seconds histogram
fleet_router_ttft_seconds_bucket{tier="a b",le="+Inf"} 1
fleet_router_ttft_seconds_sum{tier="a b"} 0.5
"""


def test_counters_are_added_and_what_all_have_in_common_is_not():
    assert (
        summed([ONE, OTHER])
        == """# TYPE fleet_router_requests_total counter
fleet_router_requests_total{code="200"} 7
fleet_router_requests_total{code="503"} 1
# TYPE fleet_router_endpoints gauge
fleet_router_endpoints{role="decode"} 2
# TYPE fleet_router_ttft_seconds histogram
fleet_router_ttft_seconds_bucket{tier="a b",le="+Inf"} 4
fleet_router_ttft_seconds_sum{tier="a b"} 0.75
"""
    )
    assert summed([ONE]) == ONE


def test_each_process_reads_every_workers_events_and_knows_the_same_blocks():
    """Three workers were twelve streams to a router of four processes."""
    known = '# TYPE fleet_router_kv_streams gauge\nfleet_router_kv_streams{state="live"} 3\n'
    known += "# TYPE fleet_router_kv_blocks gauge\nfleet_router_kv_blocks 20\n"
    assert summed([known] * 4) == known


@pytest.mark.parametrize("text", ["", "1/1/0123456789abcdef", "0/2/short", "x/2/0123456789abcdef", "0/2/0123456789abcdef/"])
def test_a_member_that_is_none_is_refused(text: str):
    with pytest.raises(ValueError, match="INDEX/SIZE/FAMILY"):
        Member.parse(text)


def test_siblings_are_all_others():
    member = Member.parse("1/3/0123456789abcdef")
    assert member.siblings("ask") == (member.name("ask", 0), member.name("ask", 2))


@pytest.mark.parametrize(("code", "ours"), [(0, 0), (1, 1), (-signal.SIGTERM, 0), (-signal.SIGKILL, 1), (-signal.SIGSEGV, 1)])
def test_a_process_that_is_killed_while_it_drains_is_no_drain(code: int, ours: int):
    """Incident: a router of several processes ended with 0 when the kernel had killed one of them, with its streams."""
    assert exit_code(code) == ours

"""What a process has counted outlives it."""

from __future__ import annotations

import asyncio
import os

import pytest

from fleet_router.kept import FIRST_AT, HALF_BYTES, Kept, cumulative
from fleet_router.members import summed
from fleet_router.process import Router, Settings
from tests.fleet_router.test_members import ONE, OTHER


def place() -> int:
    return os.memfd_create("counts", 0)


def test_the_sum_over_processes_does_not_go_down_when_one_of_them_dies():
    """It did, by all that the process had ever counted; alerts and the operator's sizes took the others' counts for new ones."""
    at = place()
    try:
        before = summed([Kept(None).with_before(OTHER), Kept(at).with_before(ONE)])
        fresh = ONE.replace('{code="200"} 3', '{code="200"} 1').replace("0.25", "0.5")
        after = summed([Kept(None).with_before(OTHER), Kept(at).with_before(fresh)])
    finally:
        os.close(at)
    assert 'requests_total{code="200"} 7\n' in before
    assert 'requests_total{code="200"} 8\n' in after  # 4 + 3 of the one that died + 1
    assert 'le="+Inf"} 7\n' in after
    assert '_sum{tier="a b"} 1.25\n' in after
    assert 'fleet_router_endpoints{role="decode"} 2\n' in after  # what is there now, and not what was


def test_what_all_of_a_place_have_counted_is_kept():
    at = place()
    try:
        for lives in range(1, 5):
            one = Kept(at)
            for _ in range(3):  # one life's own counts are told again and again
                told = one.with_before(ONE)
            assert f'requests_total{{code="200"}} {3 * lives}\n' in told
    finally:
        os.close(at)


@pytest.mark.parametrize("written", [b"x" * 40, b""])
def test_a_process_that_is_killed_while_it_writes_leaves_what_was_told_before(written: bytes):
    at = place()
    try:
        one = Kept(at)
        one.with_before(ONE)
        os.pwrite(at, written, FIRST_AT + (1 - one._half) * HALF_BYTES)
        assert 'requests_total{code="200"} 6\n' in Kept(at).with_before(ONE)
    finally:
        os.close(at)


def test_what_was_running_has_ended():
    assert "endpoints" not in cumulative(ONE)
    assert cumulative("# TYPE a counter\na 0\nb_sum 0.0\nc 10\n") == "# TYPE a counter\nc 10\n"


async def _told(router: Router) -> str:
    return (await router.answer(b"/metrics"))[1].decode()


def test_a_process_tells_what_those_before_it_had():
    at = place()
    try:
        first = Router(Settings("dir:/none", "127.0.0.1", 0, counts=at))
        first._context.metrics.arrivals = 5
        asyncio.run(_told(first))
        second = Router(Settings("dir:/none", "127.0.0.1", 0, counts=at))
        second._context.metrics.arrivals = 2
        told = asyncio.run(_told(second))
    finally:
        os.close(at)
    assert "fleet_router_arrivals_total 7\n" in told

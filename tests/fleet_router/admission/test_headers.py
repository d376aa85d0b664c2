"""The headers that admission reads, with any bytes in them: a request, or an error; never anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.config import HttpBounds
from fleet_router.inbound import ASKED_BY, Inbound

NAMES = st.sampled_from(sorted(name.decode() for name in ASKED_BY)).flatmap(
    lambda name: st.sampled_from([name, name.upper(), name.title()])
)
VALUES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"Bearer k", b"bearer k", b"k", b"Basic k", b"batch", b"250", b"-1", b"1e3", b"9" * 400]),
)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6))
def test_any_bytes_in_them_are_a_request_or_an_error(headers: list[tuple[str, bytes]]):
    inbound = Inbound()
    lines = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers)
    inbound.feed(b"GET /v1/models HTTP/1.1\r\nhost: h\r\n" + lines + b"\r\n", HttpBounds())
    if inbound.error is not None:
        assert 400 <= inbound.error.status < 500
    for request in inbound.requests:
        assert 0 <= request.slo_ttft_ms < 10**9
        assert isinstance(request.key, bytes)


@given(st.integers(1, 10**9 - 1))
def test_a_budget_is_a_number_of_milliseconds(milliseconds: int):
    inbound = Inbound()
    inbound.feed(b"GET / HTTP/1.1\r\nhost: h\r\nx-slo-ttft-ms: %d\r\n\r\n" % milliseconds, HttpBounds())
    assert inbound.requests[0].slo_ttft_ms == milliseconds


@pytest.mark.parametrize("said", [b"soon", b"0", b"1000000000", b"-5", b"1.5", b"", b"000"])
def test_what_is_no_budget_is_told_the_bounds(said: bytes):
    inbound = Inbound()
    inbound.feed(b"GET / HTTP/1.1\r\nhost: h\r\nx-slo-ttft-ms: " + said + b"\r\n\r\n", HttpBounds())
    assert inbound.error is not None
    assert (inbound.error.status, inbound.error.param) == (400, "x-slo-ttft-ms")
    assert str(inbound.error) == "x-slo-ttft-ms must be a number of milliseconds, 1 to 999999999"


@pytest.mark.parametrize("name", ["x-slo-class", "x-slo-ttft-ms", "x-api-key"])
@pytest.mark.parametrize(("first", "second", "told"), [(b"5", b"5", False), (b"5", b"6", True)])
def test_a_header_that_says_two_things_is_refused(name: str, first: bytes, second: bytes, told: bool):
    """The last one counted: whoever stands before us and reads the first one thought otherwise."""
    inbound = Inbound()
    lines = b"".join(b"%b: %b\r\n" % (name.encode(), value) for value in (first, second))
    inbound.feed(b"GET / HTTP/1.1\r\nhost: h\r\n" + lines + b"\r\n", HttpBounds())
    assert (inbound.error is not None) == told
    if inbound.error is not None:
        assert inbound.error.status == 400

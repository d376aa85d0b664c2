"""The election as arithmetic: a table of what to do, and bounds on its terms."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_operator.leader.lease import Lease, Sight, Terms, decide, parse_lease, render_lease, render_release, see

TERMS = Terms()
OTHERS = Lease("other", 15, 3, "2026-01-01T00:00:00.000000Z", "7")


@pytest.mark.parametrize(
    ("holder", "lease_s", "unchanged_s", "deed"),
    [
        ("", 15, 0.0, "take"),
        ("me", 15, 0.0, "renew"),
        ("me", 15, 100.0, "renew"),
        ("other", 15, 0.0, "wait"),
        ("other", 15, 14.9, "wait"),
        ("other", 15, 15.0, "take"),
        ("other", 60, 59.0, "wait"),
        ("other", 60, 60.0, "take"),
        # an absurd duration of somebody else must not make us faster than our own terms allow
        ("other", 0, 14.9, "wait"),
        ("other", 1, 14.9, "wait"),
    ],
)
def test_what_to_do(holder: str, lease_s: int, unchanged_s: float, deed: str):
    sight = Sight(Lease(holder, lease_s, 0, "", "7"), since=1_000.0)
    assert decide(sight, "me", TERMS, 1_000.0 + unchanged_s).deed == deed


def test_only_a_change_starts_the_time_anew():
    first = see(None, OTHERS, 10.0)
    assert see(first, OTHERS, 20.0) is first
    assert see(first, Lease("other", 15, 3, OTHERS.acquired_at, "8"), 20.0).since == 20.0


def test_the_holders_clock_does_not_matter():
    """The renewal time in the lease is in 1970 or in 2099: nobody looks."""
    for stamp in ("1970-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z"):
        spec = {"holderIdentity": "other", "leaseDurationSeconds": 15, "renewTime": stamp, "acquireTime": stamp}
        lease = parse_lease({"metadata": {"resourceVersion": "7"}, "spec": spec})
        assert decide(Sight(lease, 0.0), "me", TERMS, 14.0).deed == "wait"
        assert decide(Sight(lease, 0.0), "me", TERMS, 16.0).deed == "take"


@pytest.mark.parametrize(
    "spec",
    [None, {}, {"holderIdentity": None}, {"leaseDurationSeconds": "x", "leaseTransitions": -4}, {"leaseDurationSeconds": 10**9}],
)
def test_an_absurd_lease_is_nobodys(spec: Any):
    assert parse_lease({"metadata": {}, "spec": spec}) == Lease("", 0, 0, "", "")


def test_a_take_over_counts_and_a_renewal_does_not():
    taken = render_lease("l", "ns", Sight(OTHERS, 0.0), "me", TERMS, 1_000_000.0)
    assert taken["metadata"]["resourceVersion"] == "7"
    assert taken["spec"]["leaseTransitions"] == 4
    assert taken["spec"]["acquireTime"] == taken["spec"]["renewTime"] == "1970-01-12T13:46:40.000000Z"
    kept = render_lease("l", "ns", Sight(Lease("me", 15, 4, "earlier", "8"), 0.0), "me", TERMS, 1_000_001.0)
    assert kept["spec"]["leaseTransitions"] == 4
    assert kept["spec"]["acquireTime"] == "earlier"


def test_a_released_lease_names_nobody_and_is_bound_to_what_was_seen():
    given = render_release("l", "ns", Lease("me", 15, 4, "", "9"))
    assert "holderIdentity" not in given["spec"]
    assert given["metadata"]["resourceVersion"] == "9"


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"lease_s": 1}, "between 2 and 600"),
        ({"lease_s": 601}, "between 2 and 600"),
        ({"renew_s": 14.0}, "at most 0.9"),
        ({"renew_s": 3.0}, "two attempts"),
        ({"lease_s": 2, "renew_s": 1.0, "retry_s": 0.05}, "0.1 seconds"),
    ],
)
def test_terms_that_cannot_work_are_refused(terms: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        Terms(**terms)

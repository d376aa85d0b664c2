"""Decode workers that may come back, and what waits for them; pure."""

from __future__ import annotations

import msgspec
import pytest

from fleet_router.config import HoldBounds
from fleet_router.errors import RequestError
from fleet_router.health.absent import KEPT_S, Absent, awaited, followed
from fleet_router.holding import Holding
from fleet_wire.endpoints import AbsentWorker, AtZero, Endpoints
from tests.fleet_router.test_returning import document, endpoint


# -- who may come back ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("named", "back"),
    [
        pytest.param(document(), True, id="not ready: the document leaves it out"),
        pytest.param(document(endpoint("a", state="held")), True, id="held"),
        pytest.param(document(endpoint("a")), True, id="somebody else answers there for the moment"),
        pytest.param(document(endpoint("a", state="draining")), False, id="it goes"),
        pytest.param(document(endpoint("a", role="prefill")), False, id="it prefills now"),
        pytest.param(document(zero=("t",)), False, id="its tier rests"),
        pytest.param(document(zero=("u",)), True, id="another tier rests"),
    ],
)
def test_who_left_may_come_back_unless_it_was_said_to_go(named: Endpoints, back: bool):
    found = followed({}, named, {"a": (endpoint("a"), 5.0)}, (), 5.0)
    assert set(found) == ({"a"} if back else set())
    assert set(followed(found, document(endpoint("a", state="draining")), {}, (), 6.0)) == set()  # told later
    assert set(followed(found, document(endpoint("a")), {}, ("a",), 6.0)) == set()  # it is there again


def test_who_is_remembered_for_how_long():
    found = followed({}, document(endpoint("h", state="held"), endpoint("p", role="prefill", state="held")), {}, (), 5.0)
    assert {uid: one.since for uid, one in found.items()} == {"h": 5.0}
    later = followed(found, document(endpoint("h", state="held")), {"a": (endpoint("a"), 4.0)}, (), 900.0)
    # however long it is held, nobody waits for it again and again; nor for one that was not reached for so long
    assert {uid: one.since for uid, one in later.items()} == {"h": 5.0}
    assert set(followed({"a": Absent("t", {}, 5.0)}, document(), {}, (), 5.0 + KEPT_S)) == {"a"}
    assert set(followed({"a": Absent("t", {}, 5.0)}, document(), {}, (), 5.1 + KEPT_S)) == set()


def test_a_router_that_has_just_started_knows_who_is_not_ready_from_the_document():
    told = msgspec.structs.replace(document(), absent=(AbsentWorker(uid="a", tier="t", adapters={"l": "1"}),))
    found = followed({}, told, {}, (), 5.0)
    assert found == {"a": Absent("t", {"l": "1"}, 5.0)}
    # one that has been there for long is not taken for a new one when it is told of again and again
    later = followed(found, told, {}, (), 6.0 + KEPT_S)
    assert later == found
    assert followed({"a": Absent("t", {}, 2.0)}, told, {}, (), 5.0)["a"].since == 2.0  # as it was seen to go
    assert followed(found, document(endpoint("a", state="draining")), {}, (), 6.0) == {}
    assert followed(found, document(endpoint("a")), {}, ("a",), 6.0) == {}
    assert followed(found, msgspec.structs.replace(told, at_zero=(AtZero(tier="t"),)), {}, (), 6.0) == {}


@pytest.mark.parametrize(
    ("tier", "adapter", "since", "there"),
    [
        ("", "", 5.0, True),
        ("t", "", 5.0, True),
        ("u", "", 5.0, False),
        ("", "l", 5.0, True),
        ("", "m", 5.0, False),
        ("", "", 5.1, False),
    ],
)
def test_who_could_have_answered_is_awaited(tier: str, adapter: str, since: float, there: bool):
    assert awaited({"a": Absent("t", {"l": "1"}, 5.0)}, tier, adapter, since) is there


# -- holding ------------------------------------------------------------------------------------------------------------
class One:
    def __init__(self, holding: Holding) -> None:
        self.holding, self.ended = holding, ""

    def wait(self, now: float = 0.0, back_by: float = 10.0, bounds: HoldBounds = HoldBounds(), tenant: str = "") -> float:  # noqa: B008
        return self.holding.hold(self, 1, ("no decode worker is serving", "no_worker"), now, bounds, tenant, back_by=back_by)

    def begin(self) -> None:
        self.ended = "begun"

    def cut(self, error: RequestError) -> None:
        self.ended = f"{error.code}: {error}"


def test_one_that_waits_for_a_worker_waits_no_longer_than_it_may():
    holding = Holding()
    one, two = One(holding), One(holding)
    assert one.wait(1.0, 8.0) == 8.0
    assert two.wait(1.0, 8.0, HoldBounds(time_s=3.0)) == 4.0
    assert (len(holding), holding.returning) == (2, 2)
    error = holding.expired(one)
    assert error is not None
    assert (error.status, error.code, str(error)) == (
        503,
        "no_worker",
        "no decode worker is serving; no worker was there again within 7 s",
    )
    holding.follow((), 2.0, served=True, reached=False)
    assert two.ended == ""
    holding.follow((), 2.0, served=True)
    assert (two.ended, len(holding), holding.returning) == ("begun", 0, 0)
    assert (holding.outcomes, holding.reasons) == ({"expired": 1, "released": 1}, {"returning": 2})


def test_a_worker_that_is_back_lets_those_go_on_that_wait_for_one_and_nobody_else():
    holding = Holding((AtZero(tier="t"),))
    zero, back = One(holding), One(holding)
    zero.wait(back_by=0.0)
    holding.at_zero = ()
    back.wait()
    holding.returned(3.0)
    assert (zero.ended, back.ended, holding.returning) == ("", "begun", 0)


def test_at_the_bound_they_are_told_in_their_own_words():
    holding, bounds = Holding(), HoldBounds(requests=2)
    ones = [One(holding) for _ in range(4)]
    for one in ones[:2]:
        one.wait(bounds=bounds, tenant="flood")
    with pytest.raises(RequestError, match=r"^no decode worker is serving; 2 requests with 2 bytes wait for workers already$"):
        ones[2].wait(bounds=bounds, tenant="flood")
    ones[3].wait(bounds=bounds, tenant="other")
    assert ones[1].ended.startswith("hold_share: no decode worker is serving; others wait")
    assert holding.returning == len(holding) == 2

"""Changes of mind on the real API server: paused, changed, undone, rolled back, a tier more and less, each while another one is
under way, and the fleet deleted there. Nobody who serves goes before who takes its place, and what is asked for in the end is
what is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from e2e.faultproxy.census import Census
from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest, removed, running

pytestmark = FAMILY
STILL_S = 2.0
BROKEN = {"engine": {"image": "example.com/worker:broken"}}
OTHER = {"engine": {"image": "example.com/worker:b"}}
PAUSED = {"rollout": {"paused": True}}
CANARY = {"rollout": {"canary": {"steps": [50], "interval": "1s"}, "progressDeadline": "6s", "maxSurgeGpus": 2}}
H100 = {"tiers": [{"name": "t", "accelerator": {"type": "h100-sxm"}, "ratio": {"prefill": 1, "decode": 2}}]}


def wish(lab: Lab, **spec: Any) -> None:
    lab.apply(fleet_manifest(lab.namespace, **spec))


def tiers(*names: str) -> dict[str, Any]:
    return {"tiers": [{"name": name, "accelerator": {"type": "cpu"}} for name in names]}


def rolling(lab: Lab) -> str:
    return str(lab.condition("RollingOut")["reason"])


def two_revisions(lab: Lab) -> bool:
    return len(lab.revisions()) == 2


# -- where somebody changes their mind: each ends in a fleet that is on its way ------------------------------------------------
def paused(lab: Lab) -> None:
    """Another image, and nothing of it may come."""
    wish(lab, **PAUSED, **OTHER)
    lab.until("paused", lambda: rolling(lab) == "Paused")
    time.sleep(STILL_S)
    assert len(lab.revisions()) == 1


def paused_on_the_way(lab: Lab) -> None:
    wish(lab, **BROKEN)
    lab.until("half way", lambda: two_revisions(lab))
    wish(lab, **PAUSED, **BROKEN)
    lab.until("paused", lambda: rolling(lab) == "Paused")


def on_the_way(lab: Lab) -> None:
    wish(lab, **BROKEN)
    lab.until("half way", lambda: two_revisions(lab))


def twice_on_the_way(lab: Lab) -> None:
    """A third revision while the second one comes up."""
    on_the_way(lab)
    wish(lab, engine={"image": "example.com/worker:crashing"})
    time.sleep(STILL_S)


def one_tier_more_and_an_image(lab: Lab) -> None:
    wish(lab, **BROKEN, **tiers("t", "u"))
    lab.until("workers of the new tier", lambda: any("-u-" in pod["metadata"]["name"] for pod in lab.pods()))


def another_tier(lab: Lab) -> None:
    """Renamed: workers of a tier that left the spec serve on until the other one does."""
    wish(lab, **BROKEN, **tiers("u"))
    lab.until("workers of the new tier", lambda: any("-u-" in pod["metadata"]["name"] for pod in lab.pods()))


def rolled_back(lab: Lab) -> None:
    wish(lab, **CANARY, **BROKEN, **H100)
    lab.until("rolled back", lambda: rolling(lab) == "RolledBack", 60)


STATES = {
    how.__name__: how
    for how in (paused, paused_on_the_way, on_the_way, twice_on_the_way, one_tier_more_and_an_image, another_tier, rolled_back)
}


def first_of(how: Callable[[Lab], None]) -> dict[str, Any]:
    return H100 | CANARY if how is rolled_back else {}


def undone(lab: Lab, how: Callable[[Lab], None]) -> None:
    """The first spec again: every worker of then serves on, and nothing else is left."""
    running(lab, **first_of(how))
    before = lab.uids()
    with Census(lab) as census:
        how(lab)
        assert before <= lab.uids(), "one that serves went before its successor served"
        wish(lab, **first_of(how))
        lab.until("as it was", lambda: lab.serving(1, 2) and rolling(lab) == "Complete", 60)
    assert lab.uids() == before
    assert census.least["prefill"] >= 1
    assert census.least["decode"] >= 2
    assert len(lab.revisions()) == 1
    lab.at_rest()
    lab.honest()


def to_another(lab: Lab, how: Callable[[Lab], None]) -> None:
    """A good one instead: from wherever it was, nobody goes before its successor serves."""
    running(lab, **first_of(how))
    with Census(lab) as census:
        how(lab)
        goal = {"engine": {"image": "example.com/worker:c"}, **(H100 if how is rolled_back else {})}  # no request: no canary
        wish(lab, **goal)
        lab.until("the other one", lambda: lab.serving(1, 2) and rolling(lab) == "Complete" and len(lab.revisions()) == 1, 90)
    images = {pod["spec"]["containers"][0]["image"] for pod in lab.pods() if "router" not in pod["metadata"]["name"]}
    assert images == {"example.com/worker:c"}
    assert min(census.least.values()) >= 1
    lab.at_rest()
    lab.honest()


def deleted(lab: Lab, how: Callable[[Lab], None]) -> None:
    running(lab, **first_of(how))
    how(lab)
    removed(lab)


WAYS = (undone, to_another, deleted)
PLAYS = {f"{way.__name__}-{name}": partial(way, how=how) for way in WAYS for name, how in STATES.items()}


@pytest.mark.parametrize("row", PLAYS)
def test_a_change_of_mind_costs_nobody_who_serves(played: Played, row: str):
    played[row].result()

"""Parsing again only what changed, and never keeping what did."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fleet_api.parse import ManifestError, parse_fleet
from fleet_operator.audit import audit_kind
from fleet_operator.cluster.interface import FLEET, NotFoundError, WatchEvent
from fleet_operator.fleet_telling import Words
from fleet_operator.known_fleet import parse_again
from fleet_operator.recorder import present_status
from tests.fleet_operator.world import NAMESPACE, World, manifest, play


def raw(version: str = "1", **spec: Any) -> dict[str, Any]:
    made = manifest(**spec)
    made["metadata"] |= {"uid": "u", "generation": 1, "resourceVersion": version}
    return made


def with_status(fleet: dict[str, Any], version: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True", "reason": "R", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    out = copy.deepcopy(fleet)
    out["metadata"]["resourceVersion"] = version
    return {**out, "status": {"observedGeneration": 1, "conditions": [condition | {"observedGeneration": 1}]}}


def test_a_status_that_changed_leaves_the_wish_the_very_same():
    first = parse_again(None, raw(), Words())
    second = parse_again(first, with_status(raw(), "2"), Words())
    assert second.fleet.spec is first.fleet.spec
    assert second.fleet == parse_fleet(with_status(raw(), "2"))
    assert second.resolved is first.resolved
    assert parse_again(second, second.raw, Words()) is second


@pytest.mark.parametrize(
    "change",
    [
        lambda fleet: fleet["spec"].update(slo={"ttft": {"p99": "1s"}}),
        lambda fleet: fleet["metadata"].update(annotations={"inferencefleet.io/restarted-at": "now"}),
        lambda fleet: fleet["metadata"].update(generation=2),
        lambda fleet: fleet["metadata"].update(uid="another"),
    ],
    ids=["spec", "annotation", "generation", "another-fleet"],
)
def test_what_the_user_changed_is_parsed(change: Any):
    first, edited = parse_again(None, raw(), Words()), raw("2")
    change(edited)
    found = parse_again(first, edited, Words())
    assert found.fleet == parse_fleet(edited) != first.fleet
    assert found.resolved == found.fleet.resolved()


def test_a_spec_that_became_wrong_is_refused_every_time():
    first, wrong = parse_again(None, raw(), Words()), raw("2")
    wrong["spec"]["tiers"] = []
    for _ in range(2):
        with pytest.raises(ManifestError, match=r"spec\.tiers"):
            parse_again(first, wrong, Words())


@pytest.mark.parametrize("answer", [None, NotFoundError("no such fleet")])
def test_a_fleet_that_goes_during_its_pass_leaves_nothing_behind(answer: NotFoundError | None):
    """The watch told its end before the answer to the last write came, and what that wrote down stayed for ever."""

    async def go(world: World) -> None:
        operator, ended = world.operator, list[str]()
        last = await world.store.get(FLEET, NAMESPACE, "f")
        last["metadata"] = {**last["metadata"], "resourceVersion": "999999"}

        def told(verb: str, *_: object) -> NotFoundError | None:
            if verb != "status":
                return None
            ended.append(verb)
            operator.feed(FLEET, WatchEvent("DELETED", last))
            return answer

        world.api.refuse = told
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxBatch": 8}}})
        await world.look()
        await operator.drain()
        assert ended
        assert not operator._states
        assert not operator._recorder._fleets
        assert not operator._pace._written_at

    play(go)


def test_a_fleet_that_was_wrongly_said_to_be_gone_is_found_again():
    """One 404 to a write of its status (a proxy, a server that starts), and nobody looked at the fleet before it was edited."""

    async def go(world: World) -> None:
        answers = [NotFoundError("404 page not found")]
        world.api.refuse = lambda verb, *_: answers.pop() if verb == "status" and answers else None
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxBatch": 8}}})
        await world.step()
        assert not answers
        await audit_kind(world.store, world.operator, FLEET, NAMESPACE)
        await world.settle(40)
        assert (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["observedGeneration"] == 2
        assert (await world.condition("RollingOut"))["reason"] == "Complete"

    play(go)


def test_a_status_that_was_said_is_not_read_again_and_every_other_is():
    words, first = Words(), parse_again(None, raw(), Words())
    said = with_status(raw(), "2")
    wish = words.of(present_status(said).model_copy(update={"resolved": {"model": {"source": "file:///m"}}}))
    said["status"] = copy.deepcopy(wish)  # as it comes back
    assert words.spoken(said["status"]) == parse_again(first, said, words).fleet.status == present_status(said)
    assert words.is_ours(said["status"])
    edited = copy.deepcopy(said)
    edited["status"]["conditions"][0]["status"] = "False"
    edited["status"]["newerField"] = 1
    assert words.spoken(edited["status"]) is None
    assert not words.is_ours(edited["status"])
    assert parse_again(first, edited, words).fleet.status == present_status(edited)
    assert words.spoken(None) is None
    assert Words().spoken({}) is None

"""What is remembered between passes is used only where nothing changed."""

from __future__ import annotations

from typing import Any

from fleet_api.v1alpha1.status import FleetStatus
from fleet_operator.fleet_telling import Words
from fleet_operator.observe import PodsSeen, Published, Surroundings, observe_pods, observe_published
from fleet_operator.render.revision import RevisionsSeen, observe_revisions
from fleet_operator.settled import Settled, digest_of
from fleet_wire.endpoints import ENDPOINTS_KEY, Endpoint, Endpoints, encode

NAME = ("Service", "s")


def test_only_the_same_wish_and_the_very_same_object_are_settled():
    settled, wish, live = Settled(), {"spec": {"a": 1}}, {"spec": {"a": 1, "b": 2}}
    digest = digest_of(wish)
    assert not settled.holds(digest, NAME, live)
    settled.remember(digest, NAME, live)
    assert settled.holds(digest_of({"spec": {"a": 1}}), NAME, live)
    assert not settled.holds(digest_of({"spec": {"a": 2}}), NAME, live)
    assert not settled.holds(digest, NAME, dict(live))  # the cache shows another object: somebody wrote it
    assert not settled.holds(digest, NAME, None)
    assert not settled.holds(digest, ("Service", "other"), live)


def test_what_is_gone_is_forgotten():
    settled, live = Settled(), {"spec": {}}
    settled.remember(b"d", NAME, live)
    settled.keep({NAME})
    assert settled.holds(b"d", NAME, live)
    settled.keep(())
    assert not settled.holds(b"d", NAME, live)


def pod(**status: Any) -> dict[str, Any]:
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/tier": "t"}
    return {"metadata": {"name": "p-0", "uid": "u", "labels": labels}, "spec": {"nodeName": "n"}, "status": status}


def test_a_pod_is_observed_again_when_it_or_what_is_around_it_changed():
    before: PodsSeen = {}
    one = pod(phase="Running")
    (first,) = observe_pods([one], Surroundings(), before)
    assert observe_pods([one], Surroundings(), before)[0] is first
    for around in (
        Surroundings(serving=frozenset({"u"})), Surroundings(leaving={"n": "x"}), Surroundings(sick={"n": "x"}),
        Surroundings(accused={"n": ("x",)}),
        Surroundings(busy={"p-0": 1.0}), Surroundings(told=frozenset({"u"})),
    ):  # fmt: skip
        assert observe_pods([one], around, before) == observe_pods([one], around) != (first,)
    assert observe_pods([pod(phase="Failed")], Surroundings(), before)[0].phase == "Failed"
    assert observe_pods([], Surroundings(), before) == ()
    assert before == {}


def template(revision: str, compat: str) -> dict[str, Any]:
    labels = {"inferencefleet.io/revision": revision, "inferencefleet.io/tier": "t"}
    data = {"compat": compat, "gpus": [1, 1], "nodes": [1, 1], "pods": {"prefill": {}, "decode": {}}}
    return {"metadata": {"name": f"f-t-{revision}", "labels": labels}, "data": data}


def test_stored_templates_are_read_again_when_one_came_went_or_is_another():
    seen, one = RevisionsSeen(), template("r1", "c")
    first = seen.look([one])
    assert first == observe_revisions([one])
    assert seen.look([one]) is first
    for objects in ([one, template("r2", "c")], [template("r1", "d")], [], [one]):
        assert seen.look(objects) == observe_revisions(objects)


def test_a_status_is_dumped_again_only_where_it_says_something_else():
    words, one = Words(), FleetStatus(endpoint="http://a", resolved={"model": {"source": "file:///m"}})
    dumped = words.of(one)
    assert dumped == one.to_dict()
    assert words.of(one.model_copy()) is dumped
    assert dumped["resolved"] is one.resolved
    assert words.of(FleetStatus(endpoint="http://b")) == FleetStatus(endpoint="http://b").to_dict()


def test_words_stand_in_a_status_that_says_the_same():
    words = Words()
    wish = words.of(FleetStatus(endpoint="http://a"))
    present = {**wish}
    for _ in range(2):
        assert words.stand_in(present)
    assert not words.stand_in({**wish, "endpoint": "http://edited"})
    assert not words.stand_in(None)
    words.of(FleetStatus(endpoint="http://b"))
    assert not words.stand_in(present)


def test_the_routers_document_is_read_again_when_it_is_another_object():
    def document(state: str) -> dict[str, Any]:
        worker = Endpoint(
            name="w", uid="u", address="10.0.0.1", http_port=1, agent_port=2, role="decode", tier="t", revision="r", compat="c",
            state=state, adapters={"a": "d"},
        )  # fmt: skip
        return {"data": {ENDPOINTS_KEY: encode(Endpoints(fleet="f", namespace="n", workers=(worker,))).decode()}}

    first = document("serving")
    seen = observe_published(first)
    assert (seen.serving, [one.digest for one in seen.adapters["u"]]) == ({"u"}, ["d"])
    assert observe_published(first, seen) is seen
    assert observe_published(document("draining"), seen).serving == frozenset()
    assert observe_published(None, seen) == Published()

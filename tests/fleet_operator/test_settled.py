"""What is remembered between passes is used only where nothing changed."""

from __future__ import annotations

from typing import Any

from fleet_operator.observe import PodsSeen, Surroundings, observe_pods
from fleet_operator.settled import Settled, digest_of

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
        Surroundings(busy={"p-0": 1.0}), Surroundings(told=frozenset({"u"})),
    ):  # fmt: skip
        assert observe_pods([one], around, before) == observe_pods([one], around) != (first,)
    assert observe_pods([pod(phase="Failed")], Surroundings(), before)[0].phase == "Failed"
    assert observe_pods([], Surroundings(), before) == ()
    assert before == {}

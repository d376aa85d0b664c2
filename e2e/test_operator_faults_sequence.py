"""O11 and O12: the way to a spec does not show in what it gives, and a deleted fleet leaves nothing, whenever it is deleted."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest, path_of, removed, running
from e2e.faultproxy.prometheus import prometheus
from e2e.faultproxy.state import comparable, differences
from fleet_operator.cluster.interface import FLEET

pytestmark = FAMILY
ORDINAL = "inferencefleet.io/ordinal"


def spec(lab: Lab, **change: Any) -> None:
    lab.apply(fleet_manifest(lab.namespace, **change))
    lab.until(f"in order with {change}", lambda: lab.ready() and settled(lab), 60)


def settled(lab: Lab) -> bool:
    told = {c["type"]: c for c in lab.status().get("conditions") or []}
    return told.get("RollingOut", {}).get("reason") == "Complete" and told.get("Provisioned", {}).get("status") == "True"


def tiers(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "accelerator": {"type": "cpu"}} for name in names]


def broken_then_good(lab: Lab) -> None:
    lab.apply(fleet_manifest(lab.namespace, engine={"image": "example.com/worker:broken"}))
    lab.until("a rollout that cannot go on", lambda: any(broken(pod) for pod in lab.pods()), 30)
    assert lab.condition("Ready")["status"] == "True", "the old revision must go on serving"
    lab.until("the status is of the new spec", lab.ready, 10)
    spec(lab)


def broken(pod: dict[str, Any]) -> bool:
    return bool(pod["spec"]["containers"][0]["image"].endswith(":broken"))


def refused_then_good(lab: Lab) -> None:
    manifest = fleet_manifest(lab.namespace, tiers=[])
    answer = lab.admin("PATCH", path_of(FLEET, lab.namespace, "f"), manifest, "application/apply-patch+yaml",
                       fieldManager="user", force="true")  # fmt: skip
    assert answer.status_code == 422
    spec(lab)


def scaled_there_and_back(lab: Lab) -> None:
    lab.scale("decode", 4)
    lab.until("four", lambda: lab.serving(1, 4))
    lab.scale("decode", 2)
    lab.until("two", lambda: lab.serving(1, 2))


def deleted_and_made_again(lab: Lab) -> None:
    lab.admin("DELETE", path_of(FLEET, lab.namespace, "f")).raise_for_status()
    spec(lab)


def there_and_back(**change: Any) -> Callable[[Lab], None]:
    def go(lab: Lab) -> None:
        spec(lab, **change)
        spec(lab)

    return go


PATHS: dict[str, Callable[[Lab], None]] = {
    "image": there_and_back(engine={"image": "example.com/worker:b"}),
    "routers": there_and_back(routing={"replicas": 3}),
    "limits": there_and_back(limits={"maxOutputTokens": 7}),
    "targets": there_and_back(scaling={"targetInflight": {"prefill": 9, "decode": 9}}),
    "second-tier": there_and_back(tiers=tiers("t", "u")),
    "broken-image": broken_then_good,
    "refused": refused_then_good,
    "scaled": scaled_there_and_back,
    "deleted": deleted_and_made_again,
}


def the_long_way(lab: Lab, path: str) -> None:
    running(lab)
    in_order(lab)
    direct = bare(lab)
    removed(lab)
    spec(lab)
    PATHS[path](lab)
    in_order(lab)
    no_difference(direct, lab)


def no_difference(direct: dict[str, Any], lab: Lab) -> None:
    end = time.monotonic() + 20
    while wrong := differences(direct, bare(lab)):
        assert time.monotonic() < end, "\n".join(wrong[:10])
        time.sleep(0.2)


def to_zero_and_back(lab: Lab) -> None:
    """0 -> n -> 0: a fleet that somebody woke rests like one that nobody ever asked."""
    with prometheus(lab, decode=0.0, prefill=0.0) as source:
        wish = {"scaling": {"toZero": {"enabled": True, "idle": "5s"}},
                "telemetry": {"interval": "1s", "prometheus": {"url": source.url}}}  # fmt: skip
        lab.start()
        lab.apply(fleet_manifest(lab.namespace, **wish))
        lab.until("at rest for the first time", lambda: at_zero(lab), 60)
        lab.at_rest()
        lab.honest()
        direct = bare(lab)
        source.held = 1.0
        lab.until("somebody asks", lambda: lab.condition("Ready")["reason"] == "AllGood", 60)
        source.held = 0.0
        lab.until("at rest again", lambda: at_zero(lab), 60)
        lab.at_rest()
        lab.honest()
        no_difference(direct, lab)


def at_zero(lab: Lab) -> bool:
    return lab.serving(0, 0) and lab.condition("Ready")["reason"] == "AtZero"


def in_order(lab: Lab) -> None:
    lab.until("in order", lambda: lab.serving(1, 2) and settled(lab))
    lab.at_rest()
    lab.honest()


def bare(lab: Lab) -> dict[str, Any]:
    """Without the history of revisions, which is there to remember, and with the workers of a pool numbered from 0: each takes
    the lowest name that is free, and for a moment names are those of the fleet that was there before."""
    objects = {key: found for key, found in lab.objects().items() if key[0] != "ControllerRevision"}
    names: dict[str, str] = {}
    for found in objects.values():
        for tier in (found.get("status") or {}).get("tiers", []):
            tier.pop("rollout", None)
    pods = [pod for (kind, _), pod in objects.items() if kind == "Pod" and ORDINAL in pod["metadata"].get("annotations", {})]
    places: Counter[str] = Counter()
    for pod in sorted(pods, key=lambda pod: int(pod["metadata"]["annotations"][ORDINAL])):
        pool, notes = pod["metadata"]["labels"]["inferencefleet.io/pool"], pod["metadata"]["annotations"]
        names[pod["metadata"]["name"]] = f"{pool}-number-{places[pool]}"
        notes[ORDINAL] = str(places[pool])
        places[pool] += 1
    text = json.dumps([[*key, found] for key, found in objects.items()])
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    renamed = {(kind, name): found for kind, name, found in json.loads(text)}
    return comparable(renamed, {lab.namespace: "NAMESPACE"})


# -- O12: deletions at the wrong moment -----------------------------------------------------------------------------------
def delete_fleet(lab: Lab) -> None:
    lab.admin("DELETE", path_of(FLEET, lab.namespace, "f")).raise_for_status()


def in_mid_rollout(lab: Lab) -> None:
    lab.apply(fleet_manifest(lab.namespace, engine={"image": "example.com/worker:broken"}))
    lab.until("two revisions at once", lambda: {broken(pod) for pod in lab.pods("decode")} == {True, False}
              or {broken(pod) for pod in lab.pods("prefill")} == {True, False}, 30)  # fmt: skip
    delete_fleet(lab)


def with_its_namespace(lab: Lab) -> None:
    lab.admin("DELETE", f"/api/v1/namespaces/{lab.namespace}").raise_for_status()


def without_an_operator(lab: Lab) -> None:
    lab.kill()
    delete_fleet(lab)


def while_the_operator_is_killed(lab: Lab) -> None:
    delete_fleet(lab)
    lab.kill()
    lab.start()


def nothing_is_left(lab: Lab, how: Callable[[Lab], None]) -> None:
    running(lab)
    how(lab)
    lab.until_without_operator("everything is gone", lambda: not lab.objects(), 60)
    if how is with_its_namespace:
        path = f"/api/v1/namespaces/{lab.namespace}"
        lab.until_without_operator("the namespace is gone", lambda: lab.admin("GET", path).status_code == 404, 60)
    if lab.operator.poll() is not None:
        lab.start()
        time.sleep(2)
    lab.at_rest()
    assert not lab.objects()


DELETIONS = (in_mid_rollout, with_its_namespace, without_an_operator, while_the_operator_is_killed)
PLAYS = {
    **{path: partial(the_long_way, path=path) for path in PATHS},
    "to-zero-and-back": to_zero_and_back,
    **{how.__name__: partial(nothing_is_left, how=how) for how in DELETIONS},
}


@pytest.mark.parametrize("row", [*PATHS, "to-zero-and-back"])
def test_the_way_to_a_spec_does_not_show(played: Played, row: str):
    played[row].result()


@pytest.mark.parametrize("row", [how.__name__ for how in DELETIONS])
def test_a_deleted_fleet_leaves_nothing(played: Played, row: str):
    played[row].result()

"""O20: the operator and its CRDs are upgraded and downgraded in mid-rollout. Stage one: what the other version makes looks
different, so it is another version. Stage two: no worker or router was deleted or restarted by the change, a lost worker is
made again as its own revision's operator made it, and the rollout ends under either; routers are another version's when the
fleet asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest, path_of
from e2e.faultproxy.tomorrow import MARK, ROOT, Version, tomorrow
from fleet_operator.cluster.interface import FLEET, POD
from fleet_operator.render.kept_router import ROUTERS_RENEWED_AT
from fleet_operator.settings import Platform

pytestmark = FAMILY
ROUTER = Platform().router_image
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencefleets.inferencefleet.io"


def image(lab: Lab, name: str | None) -> None:
    """A rollout; None: the operator's default image, the revision that the fleet began with."""
    lab.apply(fleet_manifest(lab.namespace, **({"engine": {"image": name}} if name else {})))


def half_way(lab: Lab, name: str) -> None:
    """In mid-rollout: the new revision has pods that are not ready, the old one serves."""
    image(lab, name)
    lab.until("two revisions", lambda: len(lab.revisions()) == 2 and lab.condition("RollingOut")["reason"] == "Progressing")
    lab.until("at rest in between", lambda: lab.ready() and len(lab.uids()) > 3)
    lab.at_rest()


def rolled_out(lab: Lab) -> bool:
    return lab.serving(1, 2) and len(lab.revisions()) == 1 and lab.condition("RollingOut")["reason"] == "Complete"


def workers(lab: Lab) -> dict[str, dict[str, Any]]:
    found = [pod for role in ("prefill", "decode") for pod in lab.pods(role)]
    return {pod["metadata"]["uid"]: pod for pod in found}


def is_of_tomorrow(pod: dict[str, Any]) -> bool:
    return any(variable["name"] == MARK for variable in pod["spec"]["containers"][0]["env"])


def change(lab: Lab, version: Version) -> None:
    """Another version takes over; CRDs first, as the chart does."""
    before, routers, mark = workers(lab), {pod["metadata"]["uid"] for pod in lab.pods("router")}, lab.proxy.ledger.mark()
    assert lab.operator.stop() == 0, lab.operator.tail()
    install(lab, version.crds)
    lab.nursery = version.nursery
    lab.start()
    serving = [pod for pod in before.values() if not pod["spec"]["containers"][0]["image"].endswith(":broken")]
    victim = next(pod for pod in serving if "-decode-" in pod["metadata"]["name"])
    lab.admin("DELETE", path_of(POD, lab.namespace, victim["metadata"]["name"])).raise_for_status()
    lost = victim["metadata"]["uid"]
    lab.until("the lost worker is back", lambda: len(lab.uids() - {lost}) == len(before) and lab.ready())
    lab.at_rest(2.0)
    after = workers(lab)
    (anew,) = after.keys() - before.keys()
    assert before.keys() - after.keys() == {lost}, "a worker was restarted by the change of version"
    assert {pod["metadata"]["uid"] for pod in lab.pods("router")} == routers
    assert plain(after[anew]) == plain(victim)
    pods = [str(write) for write in lab.proxy.ledger.writes(mark) if write.kind == "pods"]
    assert [words.split()[0] for words in pods] == ["POST"], pods


def plain(pod: dict[str, Any]) -> dict[str, Any]:
    """What its revision decides."""
    return {key: value for key, value in pod["spec"].items() if key != "nodeName"}


def routers_of_tomorrow_when_asked(lab: Lab) -> None:
    """Stage one for routers: tomorrow's are another image, and a worker's rollout did not bring it."""
    assert router_images(lab) == {ROUTER}
    lab.admin.merge(path_of(FLEET, lab.namespace, "f"), {"metadata": {"annotations": {ROUTERS_RENEWED_AT: "now"}}})
    lab.until("routers of tomorrow", lambda: router_images(lab) == {ROUTER.replace("0.1.0", "0.2.0")} and rolled_out(lab), 60)
    lab.at_rest()


def router_images(lab: Lab) -> set[str]:
    pods = [pod for pod in lab.pods("router") if "deletionTimestamp" not in pod["metadata"]]
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


def install(lab: Lab, crds: Path) -> None:
    lab.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crds))


def knows_tomorrow(lab: Lab) -> bool:
    schema = lab.admin.get(CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return "tomorrow" in schema["properties"]["spec"]["properties"]["engine"]["properties"]


def there_and_back(lab: Lab) -> None:
    today = Version(lab.nursery, ROOT / "crds")
    image(lab, None)
    lab.start()
    lab.until("a running fleet", lambda: rolled_out(lab), 60)
    half_way(lab, "example.com/worker:broken")
    try:
        with tomorrow() as version:
            change(lab, version)
            assert knows_tomorrow(lab)
            assert not any(map(is_of_tomorrow, workers(lab).values()))
            image(lab, "example.com/worker:b")
            lab.until("rolled out by tomorrow's operator", lambda: rolled_out(lab), 60)
            assert all(map(is_of_tomorrow, workers(lab).values())), "stage one: it is another version"
            routers_of_tomorrow_when_asked(lab)
            half_way(lab, "example.com/other:broken")
            change(lab, today)
            assert not knows_tomorrow(lab)
            assert all(map(is_of_tomorrow, workers(lab).values()))
            image(lab, None)
            lab.until("back at the first revision", lambda: rolled_out(lab), 60)
            assert not any(map(is_of_tomorrow, workers(lab).values()))
            lab.at_rest()
            lab.honest()
    finally:
        install(lab, today.crds)


PLAYS = {"upgrade-and-downgrade": there_and_back}


@pytest.mark.parametrize("row", list(PLAYS))
def test_a_version_alone_restarts_nothing(played: Played, row: str):
    played[row].result()

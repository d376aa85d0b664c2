"""O1 and O2: SIGKILL at every write. Stage one: the process died of signal 9 at that very write (the proxy's ledger says which).
Stage two: the end equals that of a run in which nobody died, with nothing deleted that such a run keeps."""

from __future__ import annotations

import json
from functools import partial

import pytest

from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest, path_of, removed
from e2e.faultproxy.sweep import Scenario, sweep
from fleet_api.v1alpha1.fleet import DRAIN
from fleet_operator.cluster.interface import CONFIG_MAP, FLEET
from fleet_operator.names import router_name
from fleet_wire.endpoints import ENDPOINTS_KEY

pytestmark = FAMILY
KEEP_ALL = {"historyLimit": 100}
"""A sweep has more rollouts than a history keeps: one that forgets deletes what the undisturbed first rollout did not."""


def nobody(lab: Lab) -> None:
    """No operator, and nothing of a fleet."""
    if lab.lives:
        lab.kill()
    removed(lab)


def running_fleet(lab: Lab) -> None:
    if not lab.lives or lab.operator.poll() is not None:
        lab.start()
    if lab.get(FLEET, "f") is None:
        lab.apply(fleet_manifest(lab.namespace, rollout=KEEP_ALL))
    lab.until("a running fleet", lambda: rolled_out(lab), 60)


def create(lab: Lab, number: int) -> None:
    lab.apply(fleet_manifest(lab.namespace))


def new_image(lab: Lab, number: int) -> None:
    lab.apply(fleet_manifest(lab.namespace, rollout=KEEP_ALL, engine={"image": f"example.com/worker:{number:04}"}))


def rolled_out(lab: Lab) -> bool:
    """All workers that are there are of the present revision, and serve; and it is the present spec that this is said of."""
    told = {condition["type"]: condition["reason"] for condition in lab.status().get("conditions") or []}
    fleet = lab.get(FLEET, "f") or {"metadata": {"generation": "none"}}
    seen = lab.status().get("observedGeneration") == fleet["metadata"]["generation"]
    return seen and lab.serving(1, 2) and told.get("RollingOut") == "Complete" and len(lab.revisions()) == 1


def four_to_decode(lab: Lab) -> None:
    """One prefill and four decode workers."""
    running_fleet(lab)
    lab.scale("decode", 4)
    lab.until("four decode workers", lambda: lab.serving(1, 4), 60)


def fewer(lab: Lab, number: int) -> None:
    lab.scale("decode", 2)


def two_left(lab: Lab) -> bool:
    """Decode workers, none that is still on its way out, and all has been told of it: fleet, pool and routers."""
    if not rolled_out(lab) or len(lab.pods("decode")) != 2:
        return False
    documents = (lab.get(CONFIG_MAP, router_name("f")) or {}).get("data") or {}
    told = [worker["role"] for worker in json.loads(documents.get(ENDPOINTS_KEY, "{}")).get("workers", [])].count("decode")
    pools = [pool for (kind, name), pool in lab.objects().items() if kind == "WorkerPool" and "decode" in name]
    counts = [pool["status"].get("replicas") for pool in pools]
    return (lab.status()["tiers"][0]["decode"].get("ready"), counts, told) == (2, [2], 2)


def remove(lab: Lab, number: int) -> None:
    lab.admin("DELETE", path_of(FLEET, lab.namespace, "f")).raise_for_status()


def gone(lab: Lab) -> bool:
    return not lab.objects()


def fleet_with_a_finalizer(lab: Lab) -> None:
    """Nobody reads these workers' metrics: it ends when its wait is over."""
    if not lab.lives or lab.operator.poll() is not None:
        lab.start()
    lab.apply(fleet_manifest(lab.namespace, deletion={"wait": "3s"}))
    lab.until("a fleet with a finalizer", lambda: rolled_out(lab) and DRAIN in finalizers(lab), 60)


def finalizers(lab: Lab) -> list[str]:
    return (lab.get(FLEET, "f") or {"metadata": {}})["metadata"].get("finalizers") or []


def all_gone(lab: Lab) -> bool:
    return lab.get(FLEET, "f") is None and gone(lab)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("create", nobody, create, rolled_out, writes_least=18),
        Scenario("rollout", running_fleet, new_image, rolled_out, writes_least=20,
                 swaps=lambda number: {f"worker:{number:04}": "worker:NEW"}),
        # the documents, the pool, two deletions, the status: workers go only after the routers were told
        Scenario("shrink", four_to_decode, fewer, two_left, writes_least=5),
        # children go by garbage collection: there is no write to die at
        Scenario("delete", running_fleet, remove, gone, writes_least=0),
        # the document, the status, an event; when it is late: status, three workers, an event, the finalizer
        Scenario("delete-with-finalizer", fleet_with_a_finalizer, remove, all_gone, writes_least=8),
    )
}  # fmt: skip
PLAYS = {
    f"{name}-{when}{suffix}": partial(sweep, scenario=scenario, when=when, step=step)
    for name, scenario in SCENARIOS.items()
    for when in ("before", "after")
    for suffix, step in (("", 1), ("-some", 6))
}
SMOKE = ("create-before-some", "create-after-some")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.smoke] if row in SMOKE else [])
        for row in PLAYS
        if not row.endswith("-some") or row in SMOKE
    ],
)
def test_killed_at_every_write(played: Played, row: str):
    print(played[row].result())

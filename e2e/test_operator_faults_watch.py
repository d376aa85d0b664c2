"""O3, O4, O5: watch events that never come, come late, twice or in the wrong order; watches that freeze, expire or break; lists
that are older than the truth. Stage one: the ledger shows the fault. Stage two: the fleet is in order in time, and at rest.

The rows run side by side, each in a lab of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from e2e.faultproxy import machines, selected
from e2e.faultproxy.faults import EventFault
from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest, path_of
from fleet_operator.cluster.interface import (
    CLAIM_TEMPLATE,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    FLEET,
    NETWORK_POLICY,
    NODE,
    PDB,
    POD,
    POOL,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from fleet_operator.cluster.kinds import NAMESPACE

pytestmark = FAMILY
MISSED_S = 60.0
"""O3: an event that nobody told is made up for within this time."""
FROZEN_S = 90.0
SOON_S = 20.0


@dataclass(frozen=True)
class Row:
    """One fault on a running fleet."""

    name: str
    fault: Callable[[Lab], None]
    act: Callable[[Lab], None]
    """What happens in the cluster while the operator is deaf."""
    happened: Callable[[Lab], bool]
    right: Callable[[Lab], bool]
    within_s: float = MISSED_S
    smoke: bool = False
    before: Callable[[Lab], None] = lambda lab: None
    spec: Callable[[Lab], dict[str, Any]] = lambda lab: {}


def drop(kind: Kind, *types: str, count: int = 1_000) -> Callable[[Lab], None]:
    def fault(lab: Lab) -> None:
        lab.proxy.event_faults.append(EventFault("drop", kind.plural, types=frozenset(types), count=count))

    return fault


def dropped(kind: Kind, *types: str) -> Callable[[Lab], bool]:
    def happened(lab: Lab) -> bool:
        found = {event.type for event in lab.proxy.ledger.events if event.kind == kind.plural and event.done == "dropped"}
        return found >= set(types)

    return happened


def delete(kind: Kind, name: str) -> Callable[[Lab], None]:
    def act(lab: Lab) -> None:
        lab.admin("DELETE", path_of(kind, lab.namespace, name)).raise_for_status()

    return act


def delete_all(kind: Kind) -> Callable[[Lab], None]:
    def act(lab: Lab) -> None:
        for name in [name for found, name in lab.objects() if found == kind.kind]:
            delete(kind, name)(lab)

    return act


def there(kind: Kind, name: str = "f-router") -> Callable[[Lab], bool]:
    return lambda lab: lab.get(kind, name) is not None


def whole(lab: Lab) -> bool:
    """One prefill and two decode workers, all serving, the endpoints are theirs, and the status says so."""
    pods = [pod for pod in lab.pods() if "deletionTimestamp" not in pod["metadata"]]
    pods = [pod for pod in pods if pod["metadata"]["labels"]["inferencefleet.io/role"] != "fetch"]
    roles = sorted(pod["metadata"]["labels"]["inferencefleet.io/role"] for pod in pods)
    documents = lab.get(CONFIG_MAP, "f-router") or {"data": {}}
    uids = [pod["metadata"]["uid"] for pod in pods if pod["metadata"]["labels"]["inferencefleet.io/role"] != "router"]
    told = documents["data"].get("endpoints.json", "")
    return roles == ["decode", "decode", "prefill", "router"] and all(uid in told for uid in uids) and lab.ready()


def delete_a_decode_worker(lab: Lab) -> None:
    delete(POD, lab.pods("decode")[0]["metadata"]["name"])(lab)


def scale_decode(replicas: int) -> Callable[[Lab], None]:
    return lambda lab: lab.scale("decode", replicas)


def edit_port(lab: Lab) -> None:
    lab.admin.merge(path_of(SERVICE, lab.namespace, "f-router"), {"spec": {"ports": [{"name": "http", "port": 9999}]}})


def port_is_ours(lab: Lab) -> bool:
    service = lab.get(SERVICE, "f-router")
    return service is not None and [port["port"] for port in service["spec"]["ports"]] == [8080]


def two_routers(lab: Lab) -> None:
    lab.apply(fleet_manifest(lab.namespace, routing={"replicas": 2}))


def has_two_routers(lab: Lab) -> bool:
    return (lab.get(DEPLOYMENT, "f-router") or {"spec": {}})["spec"].get("replicas") == 2 and lab.ready()


def second_fleet(lab: Lab) -> None:
    lab.apply(fleet_manifest(lab.namespace, "g"))


def serving(prefill: int, decode: int) -> Callable[[Lab], bool]:
    return lambda lab: lab.serving(prefill, decode)


def nothing_left(lab: Lab) -> bool:
    return not lab.objects()


def act_nothing(lab: Lab) -> None:
    """The fault is all that happens."""


def children_dropped() -> Iterator[Row]:
    for kind in (DEPLOYMENT, CONFIG_MAP, SERVICE, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, PDB):
        name = "f-t-decode" if kind == PDB else "f-router"  # one router needs no budget
        yield Row(
            f"dropped-{kind.kind}-ADDED-DELETED", drop(kind, "ADDED", "DELETED", "MODIFIED"), delete(kind, name),
            dropped(kind, "ADDED", "DELETED"), there(kind, name),
        )  # fmt: skip
    yield Row(
        "dropped-NetworkPolicy-ADDED-DELETED", drop(NETWORK_POLICY, "ADDED", "DELETED", "MODIFIED"),
        delete(NETWORK_POLICY, "f-workers"), dropped(NETWORK_POLICY, "ADDED", "DELETED"), there(NETWORK_POLICY, "f-workers"),
    )  # fmt: skip
    yield Row(
        "dropped-ControllerRevision-ADDED-DELETED", drop(CONTROLLER_REVISION, "ADDED", "DELETED"),
        delete_all(CONTROLLER_REVISION), dropped(CONTROLLER_REVISION, "ADDED", "DELETED"),
        lambda lab: any(kind == "ControllerRevision" for kind, _ in lab.objects()),
    )  # fmt: skip


def another_node_and_cordon(lab: Lab) -> None:
    machines.add_node(lab, "b")
    machines.cordon(lab, "a")


def moved_over(lab: Lab) -> bool:
    """All workers serve on the second node."""
    workers = [pod for role in ("prefill", "decode") for pod in lab.pods(role)]
    return lab.serving(1, 2) and {pod["spec"].get("nodeName") for pod in workers} == {machines.node_name(lab, "b")}


def fetching_on(*letters: str) -> Callable[[Lab], bool]:
    """These nodes fetch the model or have it, and the status counts no other."""

    def right(lab: Lab) -> bool:
        nodes = {pod["metadata"]["annotations"]["inferencefleet.io/fetch-node"] for pod in lab.pods("fetch")}
        told = lab.condition("ModelCached").get("message", "")
        return nodes == {machines.node_name(lab, letter) for letter in letters} and f"of {len(letters)} nodes" in told

    return right


def two_nodes_the_second_for_one_pod(lab: Lab) -> None:
    machines.add_node(lab, "a")
    machines.add_node(lab, "b", pods=1)


def nodes_dropped() -> Iterator[Row]:
    def one(lab: Lab) -> None:
        machines.add_node(lab, "a")

    yield Row(
        "dropped-Node-MODIFIED", drop(NODE, "MODIFIED"), another_node_and_cordon, dropped(NODE, "MODIFIED"), moved_over,
        before=one, spec=machines.on_own_nodes,
    )  # fmt: skip
    yield Row(
        "dropped-Node-ADDED", drop(NODE, "ADDED", "MODIFIED"), lambda lab: machines.add_node(lab, "b"), dropped(NODE, "ADDED"),
        fetching_on("a", "b"), before=one, spec=machines.fetched_ahead,
    )  # fmt: skip
    yield Row(
        "dropped-Node-DELETED", drop(NODE, "DELETED", "MODIFIED"), lambda lab: machines.remove_node(lab, "b"),
        dropped(NODE, "DELETED"), fetching_on("a"), before=two_nodes_the_second_for_one_pod, spec=machines.fetched_ahead,
    )  # fmt: skip


def namespaces_dropped() -> Iterator[Row]:
    """Of an operator that is told a label (`--namespace-selector`)."""
    yield Row(
        "dropped-Namespace-ADDED", drop(NAMESPACE, "ADDED", "MODIFIED"), selected.another_namespace, dropped(NAMESPACE, "ADDED"),
        selected.serves_it, before=selected.by_label,
    )  # fmt: skip
    yield Row(
        "dropped-Namespace-DELETED", drop(NAMESPACE, "DELETED", "MODIFIED"), selected.unmark, dropped(NAMESPACE, "DELETED"),
        selected.let_go, before=selected.by_label,
    )  # fmt: skip


def lose_the_claims(lab: Lab) -> None:
    """A new worker's claims are held up by a quota, meanwhile their template is deleted."""
    claims = f"/apis/resource.k8s.io/v1/namespaces/{lab.namespace}/resourceclaims"
    quotas, hard = f"/api/v1/namespaces/{lab.namespace}/resourcequotas", {"count/resourceclaims.resource.k8s.io": "3"}
    lab.until("a claim for each worker", lambda: len(lab.admin.get(claims)["items"]) == 3)
    quota = {"metadata": {"name": "claims"}, "spec": {"hard": hard}}
    lab.admin("POST", quotas, quota).raise_for_status()
    lab.until("a quota that holds", lambda: lab.admin.get(f"{quotas}/claims").get("status", {}).get("used") == hard)
    lab.scale("decode", 3)
    lab.until("a third decode worker", lambda: len(lab.pods("decode")) == 3)
    (template,) = [pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] for pod in lab.pods("decode")[:1]]
    delete(CLAIM_TEMPLATE, template)(lab)
    lab.admin("DELETE", f"{quotas}/claims").raise_for_status()


def nobody_watches_claims(lab: Lab) -> bool:
    """Of this kind no event can be lost: a worker waited for a template that nobody told the operator of."""
    watched = {event.kind for event in lab.proxy.ledger.events}
    return POD.plural in watched and CLAIM_TEMPLATE.plural not in watched


def freeze(lab: Lab) -> None:
    lab.proxy.freeze()


def frozen(lab: Lab) -> bool:
    return lab.proxy.ledger.faults()["frozen"] > 0


def every_event(action: str) -> Callable[[Lab], None]:
    def fault(lab: Lab) -> None:
        lab.proxy.event_faults.append(EventFault(action, count=10_000, hold_s=1.0))  # type: ignore[arg-type]

    return fault


def faulted(word: str) -> Callable[[Lab], bool]:
    return lambda lab: lab.proxy.ledger.faults()[word] > 0


def expire_with_a_gap(lab: Lab) -> None:
    """A worker and the ConfigMap go while nothing is told, then every watch is told that its version is too old."""
    lab.proxy.hold_events.clear()
    delete_a_decode_worker(lab)
    delete(CONFIG_MAP, "f-router")(lab)
    time.sleep(1)
    lab.proxy.expire()
    lab.proxy.hold_events.set()


def ended_with(code: int) -> Callable[[Lab], None]:
    def fault(lab: Lab) -> None:
        lab.proxy.fail_watches(code)

    return fault


def no_bookmarks(lab: Lab) -> None:
    lab.proxy.event_faults.append(EventFault("drop", types=frozenset({"BOOKMARK"}), count=10_000))


def without_bookmark(lab: Lab) -> set[str]:
    """Kinds whose watch lost one."""
    return {event.kind for event in lab.proxy.ledger.events if event.type == "BOOKMARK" and event.done == "dropped"}


def scale_after_bookmarks(lab: Lab) -> None:
    """The API server sends one a minute; the versions that watches know are older than that when something happens again."""
    lab.until("bookmarks were due", lambda: {FLEET.plural, POD.plural, POOL.plural} <= without_bookmark(lab), 100)
    lab.scale("decode", 3)


ROWS = {
    row.name: row
    for row in (
        *children_dropped(),
        *nodes_dropped(),
        *namespaces_dropped(),
        Row("unseen-ResourceClaimTemplate-DELETED", act_nothing, lose_the_claims, nobody_watches_claims, serving(1, 3),
            before=machines.add_devices, spec=machines.with_claims),
        Row("dropped-Pod-DELETED", drop(POD, "DELETED", "MODIFIED"), delete_a_decode_worker, dropped(POD, "DELETED"), whole,
            smoke=True),
        Row("dropped-Pod-ADDED-DELETED", drop(POD, "ADDED", "DELETED"), delete_a_decode_worker,
            dropped(POD, "ADDED", "DELETED"), whole),
        Row("dropped-Pod-MODIFIED", drop(POD, "MODIFIED"), scale_decode(4), dropped(POD, "MODIFIED"), serving(1, 4)),
        Row("dropped-WorkerPool-MODIFIED", drop(POOL, "MODIFIED"), scale_decode(3), dropped(POOL, "MODIFIED"), serving(1, 3)),
        Row("dropped-WorkerPool-ADDED-DELETED", drop(POOL, "ADDED", "DELETED"), delete_all(POOL),
            dropped(POOL, "ADDED", "DELETED"), whole),
        Row("dropped-Service-MODIFIED", drop(SERVICE, "MODIFIED"), edit_port, dropped(SERVICE, "MODIFIED"), port_is_ours),
        Row("dropped-Deployment-MODIFIED", drop(DEPLOYMENT, "MODIFIED"), two_routers, dropped(DEPLOYMENT, "MODIFIED"),
            has_two_routers),
        Row("dropped-Fleet-MODIFIED", drop(FLEET, "MODIFIED"), two_routers, dropped(FLEET, "MODIFIED"), has_two_routers),
        Row("dropped-Fleet-ADDED", drop(FLEET, "ADDED"), second_fleet, dropped(FLEET, "ADDED"), lambda lab: lab.ready("g")),
        Row("dropped-Fleet-DELETED", drop(FLEET, "DELETED", "MODIFIED"), delete(FLEET, "f"), dropped(FLEET, "DELETED"),
            nothing_left),
        Row("late-events", every_event("delay"), scale_decode(3), faulted("delayed"), serving(1, 3)),
        Row("doubled-events", every_event("duplicate"), scale_decode(3), faulted("duplicated"), serving(1, 3), SOON_S),
        Row("replayed-events", every_event("replay"), scale_decode(3), faulted("replayed"), serving(1, 3), SOON_S),
        Row("frozen-watches", freeze, delete_a_decode_worker, frozen, whole, FROZEN_S),
        Row("410-with-a-gap", expire_with_a_gap, act_nothing, faulted("expired"), whole, FROZEN_S),
        Row("ERROR-500-event", ended_with(500), delete_a_decode_worker, faulted("failed"), whole, MISSED_S),
        Row("cut-watches", lambda lab: lab.proxy.cut() and None, delete_a_decode_worker, faulted("watch cut"), whole, SOON_S),
        Row("no-bookmarks", no_bookmarks, scale_after_bookmarks, lambda lab: lab.proxy.ledger.faults()["dropped"] > 2,
            serving(1, 3), SOON_S),
    )
}  # fmt: skip


def play(lab: Lab, row: Row) -> str:
    """What happened, in words."""
    row.before(lab)
    lab.start()
    lab.apply(fleet_manifest(lab.namespace, **row.spec(lab)))
    lab.until("a running fleet", lambda: lab.ready() and whole(lab), 60)
    time.sleep(0.5)
    lives = len(lab.lives)
    row.fault(lab)
    row.act(lab)
    took_s = lab.until(f"{row.name}: in order", lambda: row.right(lab), row.within_s)
    lab.until(f"{row.name}: the fault really happened", lambda: row.happened(lab), 5)
    assert len(lab.lives) == lives
    lab.proxy.heal()
    time.sleep(2)
    lab.at_rest()
    if lab.get(FLEET, "f") is not None:
        lab.honest()
    return f"{row.name}: in order after {took_s:.1f} s, faults {dict(lab.proxy.ledger.faults())}"


PLAYS = {name: partial(play, row=row) for name, row in ROWS.items()}


@pytest.mark.parametrize("row", [pytest.param(n, marks=[pytest.mark.smoke] if r.smoke else []) for n, r in ROWS.items()])
def test_a_watch_that_lies(played: Played, row: str):
    print(played[row].result())

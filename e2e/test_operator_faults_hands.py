"""O13 and O14: somebody else has the name of one of our objects, or edits them, once or without rest."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.faultproxy import machines
from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest, path_of, removed, running
from fleet_operator.cluster.interface import (
    CLAIM_TEMPLATE,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    NETWORK_POLICY,
    PDB,
    POD,
    POOL,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)

pytestmark = FAMILY
ROUTERS = (CONFIG_MAP, DEPLOYMENT, NETWORK_POLICY, PDB, ROLE, ROLE_BINDING, SERVICE, SERVICE_ACCOUNT)
ABSENT: dict[str, Any] = {
    "metadata": {},
    "spec": {"ports": [], "replicas": 0, "minAvailable": 0},
    "data": {"endpoints.json": ""},
}
"""While a Service is made anew there is none."""
HPA_ROUNDS_S = 40.0
"""More than two of an autoscaler's."""
README = Path(__file__).parents[1] / "operator/README.md"
NAMED = {PDB.kind: "f-t-decode", NETWORK_POLICY.kind: "f-workers"}
"""A child of each kind that every fleet has: one router needs no budget."""
HASHED = {kind.kind: kind for kind in (POD, POOL, CONTROLLER_REVISION)}
"""Their names end with a revision, which is the same for the same spec."""
KINDS = (*HASHED, *(kind.kind for kind in ROUTERS), CLAIM_TEMPLATE.kind)
"""A template of claims has its pool's name."""


def child_names(lab: Lab) -> dict[str, tuple[Kind, str]]:
    """Of a fleet `f` that runs elsewhere: kind to (kind, name)."""
    names = {kind: min(name for k, name in lab.objects() if k == kind and "router" not in name) for kind in HASHED}
    names[CLAIM_TEMPLATE.kind] = names[POOL.kind]
    kinds = HASHED | {CLAIM_TEMPLATE.kind: CLAIM_TEMPLATE}
    return {kind: (kinds[kind], name) for kind, name in names.items()} | {kind.kind: (kind, named(kind)) for kind in ROUTERS}


def named(kind: Kind) -> str:
    """The child of this kind that is taken or edited."""
    return NAMED.get(kind.kind, "f-router")


def stranger(model: dict[str, Any], kind: Kind, name: str, namespace: str) -> dict[str, Any]:
    """An object of somebody else: what ours says, without labels and owner, and with a mark of its own."""
    made = {key: value for key, value in model.items() if key in ("spec", "data", "revision", "rules", "roleRef", "subjects")}
    if kind == POD:
        made["spec"] = {"containers": [{"name": "theirs", "image": "example.com/theirs"}], "nodeSelector": {"no": "where"}}
    if kind == SERVICE:
        made["spec"] = {"ports": [{"port": 1}], "selector": {"a": "b"}}
    meta = {"name": name, "namespace": namespace, "annotations": {"whose": "theirs"}}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, **made}


def taken_name(lab: Lab, kind_name: str) -> None:
    spec: dict[str, Any] = {}
    if kind_name == CLAIM_TEMPLATE.kind:
        machines.add_devices(lab)
        spec = machines.with_claims(lab)
    running(lab, **spec)
    kind, name = child_names(lab)[kind_name]
    theirs = stranger(lab.get(kind, name) or {}, kind, name, lab.namespace)
    lab.kill()
    removed(lab)
    lab.admin("POST", path_of(kind, lab.namespace), theirs).raise_for_status()
    time.sleep(1)
    before = lab.get(kind, name)
    lab.start()
    lab.apply(fleet_manifest(lab.namespace, **spec))
    lab.until("the conflict is told", lambda: lab.condition("Provisioned")["reason"] == "NameConflict")
    assert f"{kind_name} {name}" in lab.condition("Provisioned")["message"]
    assert lab.condition("Ready")["status"] == "False"
    time.sleep(2)
    assert without_status(lab.get(kind, name)) == without_status(before), "the operator touched it"
    lab.admin("DELETE", path_of(kind, lab.namespace, name), {"gracePeriodSeconds": 0}).raise_for_status()
    lab.until("in order once the name is free", lambda: lab.serving(1, 2), 60)
    lab.at_rest()


def without_status(found: dict[str, Any] | None) -> dict[str, Any]:
    """What its owner wrote: controllers of the cluster write status and revisions."""
    assert found is not None
    meta = {
        key: value for key, value in found["metadata"].items() if key not in ("resourceVersion", "managedFields", "annotations")
    }
    return {**{key: value for key, value in found.items() if key != "status"}, "metadata": meta}


# -- O14: other hands ----------------------------------------------------------------------------------------------------
EDITS: dict[str, tuple[Kind, dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "service-port": (SERVICE, {"spec": {"ports": [{"name": "http", "port": 9999}]}},
                     lambda o: [p["port"] for p in o["spec"]["ports"]] == [8080]),
    "service-selector": (SERVICE, {"spec": {"selector": {"x": "y"}}}, lambda o: "x" not in o["spec"].get("selector", {"x": ""})),
    "router-replicas": (DEPLOYMENT, {"spec": {"replicas": 5}}, lambda o: o["spec"]["replicas"] == 1),
    "endpoints": (CONFIG_MAP, {"data": {"endpoints.json": "{}"}}, lambda o: len(o["data"]["endpoints.json"]) > 100),
    "budget": (PDB, {"spec": {"minAvailable": 9}}, lambda o: o["spec"]["minAvailable"] == 2),
    "budget-selector": (PDB, {"spec": {"selector": {"matchLabels": {"x": "y"}}}}, lambda o: selects(o["spec"].get("selector"))),
    "budget-bound": (PDB, {"spec": {"minAvailable": None, "maxUnavailable": "100%"}},
                     lambda o: o["spec"].get("minAvailable") == 2),
    "policy-selector": (NETWORK_POLICY, {"spec": {"podSelector": {"matchLabels": {"x": "y"}}}},
                        lambda o: selects(o["spec"].get("podSelector"))),
    "role": (ROLE, {"rules": []}, lambda o: len(o.get("rules") or []) == 1),
    "labels": (CONFIG_MAP, {"metadata": {"labels": None}}, lambda o: "fleet" in str(o["metadata"].get("labels"))),
    "owner": (SERVICE, {"metadata": {"ownerReferences": None}}, lambda o: bool(o["metadata"].get("ownerReferences"))),
}  # fmt: skip


def selects(selector: dict[str, Any] | None) -> bool:
    """By what we wrote, and no more."""
    return selector is not None and "x" not in selector["matchLabels"]


def edited(lab: Lab, edit: str) -> None:
    kind, patch, ours = EDITS[edit]
    running(lab)
    theirs = {"metadata": {"annotations": {"example.com/note": "theirs"}, "labels": {"example.com/team": "x"}}}
    path = path_of(kind, lab.namespace, named(kind))
    lab.admin.merge(path, theirs)
    lab.admin.merge(path, patch)
    took_s = lab.until(f"{edit} as we wish it", lambda: ours(lab.get(kind, named(kind)) or ABSENT), 60)
    print(f"{edit}: {took_s:.1f} s")
    assert took_s <= 30
    lab.until("ready", lab.ready)
    time.sleep(1)
    lab.at_rest()
    found = lab.get(kind, named(kind)) or {}
    assert found["metadata"]["annotations"]["example.com/note"] == "theirs"
    if edit != "labels":
        assert found["metadata"]["labels"]["example.com/team"] == "x"
    managers = [(m["manager"], m["operation"], m.get("subresource")) for m in found["metadata"]["managedFields"]]
    assert len(managers) == len(set(managers))


def nobodys(lab: Lab, restarted: bool = False) -> None:
    """The owners of all workers are taken away: none is restarted, and none outlives the fleet with its GPU."""
    running(lab)
    before = lab.uids()
    if restarted:
        lab.kill()
    for kind, name in [at for at in lab.objects() if at[0] in (POD.kind, POOL.kind, CONTROLLER_REVISION.kind)]:
        lab.admin.merge(path_of(HASHED[kind], lab.namespace, name), {"metadata": {"ownerReferences": None}})
    if restarted:
        lab.start()

    def owned() -> bool:
        return all(o["metadata"].get("ownerReferences") for (kind, _), o in lab.objects().items() if kind != "InferenceFleet")

    lab.until("everything has its owner", owned)
    lab.until("in order", lambda: lab.serving(1, 2))
    assert lab.uids() == before
    lab.at_rest()
    removed(lab)


def autoscaled(lab: Lab) -> None:
    running(lab)
    name = next(name for kind, name in lab.objects() if kind == "WorkerPool" and "-decode-" in name)
    scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": name, "namespace": lab.namespace}}
    for replicas in (3, 4):
        path = path_of(POOL, lab.namespace, name) + "/scale"
        lab.admin("PUT", path, {**scale, "spec": {"replicas": replicas}}, fieldManager="hpa").raise_for_status()
        lab.until(f"{replicas} decode workers", lambda n=replicas: lab.serving(1, n))
        lab.at_rest(2.5)
        assert (lab.get(POOL, name) or {})["spec"]["replicas"] == replicas


def autoscaler(lab: Lab, low: int = 3, name: str = "", high: int = 6, called: str = "theirs") -> tuple[str, str]:
    """The HorizontalPodAutoscaler of the real kube-controller-manager, for `low` to `high` workers: its collection, its pool
    (that of the revision's decode workers, unless one is named). There are no metrics: its own bounds are what moves it."""
    name = name or next(name for kind, name in lab.objects() if kind == "WorkerPool" and "-decode-" in name)
    autoscalers = f"/apis/autoscaling/v2/namespaces/{lab.namespace}/horizontalpodautoscalers"
    target = {"apiVersion": POOL.api_version, "kind": POOL.kind, "name": name}
    made = {"metadata": {"name": called}, "spec": {"scaleTargetRef": target, "minReplicas": low, "maxReplicas": high}}
    lab.admin("POST", autoscalers, made).raise_for_status()
    return autoscalers, name


def autoscaled_while_rolling(lab: Lab) -> None:
    """A rollout keeps the old revision's pool below what its autoscaler wants: one write answers one, and no worker moves."""
    sizes = {"ratio": {"prefill": 1, "decode": 2}, "prefill": {"replicas": 2}, "decode": {"replicas": 4}}
    tier = {"name": "t", "accelerator": {"type": "h100-sxm"}, **sizes}
    lab.start()
    lab.apply(fleet_manifest(lab.namespace, tiers=[tier]))
    lab.until("a running fleet", lambda: lab.serving(2, 4), 60)
    autoscalers, name = autoscaler(lab, low=4)
    in_place = {"maxSurgeGpus": 0, "maxUnavailable": 1}
    lab.apply(fleet_manifest(lab.namespace, tiers=[tier], rollout=in_place, engine={"image": "example.com/worker:broken"}))
    lab.until("half way", lambda: len(lab.revisions()) == 2 and (lab.get(POOL, name) or {})["spec"]["replicas"] == 3)
    time.sleep(1)
    pods, mark, scaled = lab.uids(), lab.proxy.ledger.mark(), set[str]()

    def wanted_twice() -> bool:
        scaled.add(lab.admin.get(f"{autoscalers}/theirs")["status"].get("lastScaleTime", ""))
        return len(scaled - {""}) >= 2

    lab.until("stage one: the autoscaler has scaled it twice", wanted_twice, 90)
    time.sleep(1)
    assert lab.uids() == pods
    assert (lab.get(POOL, name) or {})["spec"]["replicas"] == 3
    assert [lab.status()["tiers"][0][role]["desired"] for role in ("prefill", "decode")] == [2, 4]
    answered = [w for w in lab.proxy.ledger.writes(mark) if w.kind == POOL.plural and w.subresource != "status"]
    assert 1 <= len(answered) <= len(scaled) + 1, list(map(str, answered))
    lab.apply(fleet_manifest(lab.namespace, tiers=[tier], engine={"image": "example.com/worker:b"}))
    lab.until("rolled out", lambda: lab.serving(2, 4) and lab.condition("RollingOut")["reason"] == "Complete", 60)
    lab.at_rest()
    assert lab.get(POOL, name) is None, "an autoscaler's target goes with its revision: operator/README.md"

    def lost() -> bool:
        told = lab.admin.get(f"{autoscalers}/theirs")["status"].get("conditions") or []
        return ("AbleToScale", "False", "FailedGetScale") in [(one["type"], one["status"], one["reason"]) for one in told]

    lab.until("the autoscaler says that it has none", lost, 60)
    assert [lab.status()["tiers"][0][role]["desired"] for role in ("prefill", "decode")] == [2, 4], "the size stays"
    lab.admin.merge(f"{autoscalers}/theirs", {"spec": {"minReplicas": 5}})
    as_the_readme_says(lab, {"FLEET": "f", "TIER": "t", "HPA": "theirs"})
    lab.until("named anew it scales again", lambda: lab.status()["tiers"][0]["decode"]["serving"] == 5, 90)


def as_the_readme_says(lab: Lab, words: dict[str, str]) -> None:
    """Its lines that name an HPA's target anew, in a user's shell."""
    lines = README.read_text().partition("named anew, after every rollout (and undo):\n```\n")[2].partition("```")[0]
    for placeholder, word in words.items():
        lines, count = re.subn(rf"\b{placeholder}\b", word, lines)
        assert count == 1, placeholder
    config, place = yaml.safe_load(lab.plane.kubeconfig.read_text()), lab.plane.dir / f"user-{lab.namespace}.kubeconfig"
    config["contexts"][0]["context"]["namespace"] = lab.namespace
    place.write_text(yaml.safe_dump(config))
    program = Path(lab.plane.kubectl_argv()[0]).parent
    env = {**os.environ, "KUBECONFIG": str(place), "PATH": f"{program}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-eu", "-c", lines], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{lines}\n{done.stdout}{done.stderr}"


def autoscaled_to(lab: Lab, autoscalers: str) -> int:
    """What the autoscaler found its target to have."""
    return int(lab.admin.get(f"{autoscalers}/theirs")["status"].get("currentReplicas", 0))


def serving_now(lab: Lab) -> tuple[int, int]:
    """Prefill and decode workers that serve, whatever else is there."""
    tier = lab.status()["tiers"][0]
    return tier["prefill"]["serving"], tier["decode"]["serving"]


def autoscaled_over_rollouts(lab: Lab) -> None:
    """The target of a role lasts: the same HPA scales before, during and after rollouts, and never says that it cannot."""
    external = {"scaling": {"mode": "external"}}
    running(lab, **external)
    lab.at_rest()
    autoscalers, name = autoscaler(lab, name="f-t-decode")
    uid = (lab.get(POOL, name) or {})["metadata"]["uid"]
    lab.until("the autoscaler moves the role", lambda: lab.serving(1, 3), 90)
    for image, low, prefill, revisions in (("b", 4, 1, 1), ("broken", 5, 2, 2), ("c", 6, 2, 1)):
        lab.apply(fleet_manifest(lab.namespace, **external, engine={"image": f"example.com/worker:{image}"}))
        lab.until("half way", lambda: len(lab.revisions()) == 2)
        lab.admin.merge(f"{autoscalers}/theirs", {"spec": {"minReplicas": low}})
        wanted = prefill, low, revisions
        lab.until(f"{low} decode workers", lambda w=wanted: (*serving_now(lab), len(lab.revisions())) == w, 120)
        lab.until("the autoscaler has seen them", lambda n=low: autoscaled_to(lab, autoscalers) == n, 60)
        told = lab.admin.get(f"{autoscalers}/theirs")["status"]
        conditions = {(one["type"], one["status"]) for one in told["conditions"]}
        assert ("AbleToScale", "True") in conditions, told
        assert told["desiredReplicas"] == low, told
    lab.admin("DELETE", f"{autoscalers}/theirs").raise_for_status()
    lab.plane.kubectl("-n", lab.namespace, "scale", "wpool", name, "--replicas=3")
    lab.until("kubectl scale moves it as well", lambda: lab.serving(2, 3), 60)
    lab.at_rest(2.5)
    target = lab.get(POOL, name) or {}
    assert (target["metadata"]["uid"], target["spec"]["replicas"], target["status"]["replicas"]) == (uid, 3, 3)
    pods = lab.plane.kubectl("-n", lab.namespace, "get", "pods", "-o", "name", "-l", target["status"]["selector"]).stdout
    assert len(pods.split()) == 3
    lab.apply(fleet_manifest(lab.namespace, scaling={"mode": "manual"}, engine={"image": "example.com/worker:c"}))
    lab.until("the targets go with the mode", lambda: lab.get(POOL, name) is None)
    lab.at_rest()
    assert lab.serving(2, 3)
    removed(lab)


def autoscaled_against_the_ratio(lab: Lab) -> None:
    """Two HPAs ask for what the ratio does not allow: each finds what it asked for, and for two and a half of their rounds nobody
    writes anything. Who comes round ends it."""
    tier = {"name": "t", "accelerator": {"type": "cpu"}, "ratio": {"prefill": 1, "decode": 2, "min": "1:3", "max": "1:1"}}
    running(lab, scaling={"mode": "external"}, tiers=[tier | {role: {"maxReplicas": 8} for role in ("prefill", "decode")}])
    autoscalers, _ = autoscaler(lab, name="f-t-decode", low=6)
    autoscaler(lab, name="f-t-prefill", low=1, high=1, called="other")
    lab.until("they disagree", lambda: lab.condition("WithinRatio")["reason"] == "WishesDisagree", 90)
    lab.until("both are met with more workers", lambda: lab.serving(2, 6), 60)
    lab.at_rest()
    before, mark = lab.uids(), lab.proxy.ledger.mark()
    versions = [(lab.get(POOL, f"f-t-{role}") or {})["metadata"]["resourceVersion"] for role in ("prefill", "decode")]
    begun = [lab.admin.get(f"{autoscalers}/{name}")["status"]["conditions"] for name in ("theirs", "other")]
    time.sleep(HPA_ROUNDS_S)
    assert lab.proxy.ledger.writes(mark, carried_out=True) == [], "the operator's"
    assert [(lab.get(POOL, f"f-t-{role}") or {})["metadata"]["resourceVersion"] for role in ("prefill", "decode")] == versions
    assert lab.uids() == before
    told = [lab.admin.get(f"{autoscalers}/{name}")["status"] for name in ("theirs", "other")]
    assert [one["currentReplicas"] for one in told] == [one["desiredReplicas"] for one in told] == [6, 1], (begun, told)
    print(lab.condition("WithinRatio")["message"])
    lab.admin.merge(f"{autoscalers}/other", {"spec": {"minReplicas": 2, "maxReplicas": 2}})
    lab.until("nobody disagrees", lambda: lab.condition("WithinRatio")["reason"] == "InRatio", 90)
    assert lab.uids() == before
    lab.at_rest()


def autoscaled_by_kubernetes(lab: Lab) -> None:
    running(lab)
    autoscalers, name = autoscaler(lab)
    for low, high, replicas in ((3, 6, 3), (4, 6, 4), (2, 3, 3)):
        lab.admin.merge(f"{autoscalers}/theirs", {"spec": {"minReplicas": low, "maxReplicas": high}})
        lab.until(f"{replicas} decode workers", lambda n=replicas: lab.serving(1, n), 90)
        told = lab.admin.get(f"{autoscalers}/theirs")["status"]
        assert told["desiredReplicas"] == replicas, told
        assert told["lastScaleTime"], "stage one: it was the autoscaler"
        lab.apply(fleet_manifest(lab.namespace, routing={"replicas": high % 3 + 1}))  # the operator has something to write
        lab.until("ready", lab.ready)
        lab.at_rest(2.5)
        pool = lab.get(POOL, name) or {}
        assert pool["spec"]["replicas"] == replicas
        owners = [one for one in pool["metadata"]["managedFields"] if "f:replicas" in one["fieldsV1"].get("f:spec", {})]
        assert ("kube-controller-manager", "scale") in {(one["manager"], one.get("subresource")) for one in owners}
        lab.at_rest(2.5)
        assert (lab.get(POOL, name) or {})["metadata"] == pool["metadata"], "managedFields and versions stand still"


def replaced(lab: Lab, name: str, role: str) -> None:
    """`kubectl replace --force --cascade=orphan` of a pool whose manifest has the wrong role: the API lets nobody edit it."""
    path, was = path_of(POOL, lab.namespace, name), lab.get(POOL, name) or {}
    refused = lab.admin("PATCH", path, {"spec": {"role": role}}, "application/merge-patch+json")
    assert (refused.status_code, "only replicas may change" in refused.text) == (422, True), refused.text
    meta = {part: was["metadata"][part] for part in ("name", "namespace", "labels", "annotations", "ownerReferences")}
    made = {"apiVersion": POOL.api_version, "kind": POOL.kind, "metadata": meta, "spec": {**was["spec"], "role": role}}
    lab.admin("DELETE", path, {"propagationPolicy": "Orphan"}).raise_for_status()
    lab.until_without_operator("gone", lambda: (lab.get(POOL, name) or was)["metadata"]["uid"] != was["metadata"]["uid"]
                               or lab.get(POOL, name) is None, 30)  # fmt: skip
    answer = lab.admin("POST", path_of(POOL, lab.namespace), made)
    assert answer.status_code in (201, 409), answer.text  # 409: the operator was faster


def misnamed_target(lab: Lab) -> None:
    """Made anew with another role: put right at once, no worker is touched; and by a hand that does it again and again."""
    running(lab, scaling={"mode": "external"})
    name, before = "f-t-decode", lab.uids()
    right = (lab.get(POOL, name) or {})["spec"]
    lab.kill()
    replaced(lab, name, "prefill")
    assert (lab.get(POOL, name) or {})["spec"]["role"] == "prefill"
    lab.start()
    lab.until("put right", lambda: (lab.get(POOL, name) or {}).get("spec") == right)
    lab.until("ready", lab.ready)
    mark, begun, edits = lab.proxy.ledger.mark(), time.monotonic(), 0
    while time.monotonic() - begun < 20:
        if ((lab.get(POOL, name) or {}).get("spec") or {}).get("role") == "decode":
            edits += 1
            replaced(lab, name, "prefill")
        time.sleep(0.2)
    deleted = [write for write in lab.proxy.ledger.writes(mark) if (write.method, write.kind) == ("DELETE", POOL.plural)]
    print(f"{edits} edits, deleted {len(deleted)} times in 20 s")
    assert len(deleted) <= 6, list(map(str, deleted))
    assert lab.uids() == before
    lab.until("right in the end", lambda: (lab.get(POOL, name) or {}).get("spec") == right, 60)
    lab.until("ready", lab.ready)
    lab.at_rest()
    assert lab.uids() == before


def misnamed_pool(lab: Lab) -> None:
    """Of a pool that has workers it is told, and they stay; deleted as the message says it is made anew."""
    running(lab, scaling={"mode": "external"})
    name, before = next(one for kind, one in lab.objects() if kind == "WorkerPool" and "-decode-" in one), lab.uids()
    right = (lab.get(POOL, name) or {})["spec"]
    lab.kill()
    replaced(lab, name, "prefill")
    lab.start()
    lab.until(
        "it is told", lambda: f"wpool {name} -n {lab.namespace} --cascade=orphan" in lab.condition("Provisioned")["message"]
    )
    time.sleep(3)
    assert lab.uids() == before
    assert [lab.status()["tiers"][0][role]["serving"] for role in ("prefill", "decode")] == [1, 2]
    lab.plane.kubectl("-n", lab.namespace, "delete", "wpool", name, "--cascade=orphan")
    lab.until("made anew", lambda: (lab.get(POOL, name) or {}).get("spec") == right, 60)
    lab.until("in order", lambda: lab.serving(1, 2), 60)
    assert lab.uids() == before
    lab.at_rest()


def never_at_rest(lab: Lab) -> None:
    running(lab)
    mark, begun, edits = lab.proxy.ledger.mark(), time.monotonic(), 0
    while (took_s := time.monotonic() - begun) < 8 or (edits <= 100 and took_s < 20):
        edits += 1
        lab.admin.merge(path_of(PDB, lab.namespace, named(PDB)), {"spec": {"minAvailable": edits % 2}})
        time.sleep(0.02)
    answered = [request for request in lab.proxy.ledger.writes(mark) if request.kind == "poddisruptionbudgets"]
    assert edits > max(100, 5 * took_s), "stage one: more than may be answered"
    assert 5 <= len(answered) <= 5 * took_s + 12, len(answered)
    lab.until("ours in the end", lambda: (lab.get(PDB, named(PDB)) or {})["spec"]["minAvailable"] == 2)
    time.sleep(1)
    lab.at_rest()


def orphaned(lab: Lab) -> None:
    """`kubectl delete --cascade=orphan`, which takes the owner off every child: of a stored template the API refuses each write
    after which its data would be spelled in another way."""
    marked = {"podTemplate": {"env": [{"name": "URL", "value": "http://a/?b=<c>&d=\u2028"}]}}
    tier = {"name": "t", "accelerator": {"type": "cpu"}, "cost": {"perGpuHour": 2.0}, "decode": marked}
    running(lab, tiers=[tier])
    removed(lab)  # so the garbage collector has found the new kinds: what it does not know it cannot leave
    lab.apply(fleet_manifest(lab.namespace, tiers=[tier]))
    lab.until("a running fleet", lambda: lab.serving(1, 2), 60)
    before, revision = lab.uids(), child_names(lab)[CONTROLLER_REVISION.kind][1]
    lab.plane.kubectl("-n", lab.namespace, "label", "controllerrevision", revision, "inferencefleet.io/tier-")
    lab.until(
        "its mark is back", lambda: "inferencefleet.io/tier" in lab.get(CONTROLLER_REVISION, revision)["metadata"]["labels"]
    )
    lab.plane.kubectl("-n", lab.namespace, "delete", "ifleet", "f", "--cascade=orphan", "--timeout=60s")
    assert lab.uids() == before
    assert "ownerReferences" not in lab.get(CONTROLLER_REVISION, revision)["metadata"]


PLAYS = {
    **{f"taken-{kind}": partial(taken_name, kind_name=kind) for kind in KINDS},
    **{f"edited-{edit}": partial(edited, edit=edit) for edit in EDITS},
    "nobodys": nobodys,
    "nobodys-and-restarted": partial(nobodys, restarted=True),
    "autoscaled": autoscaled,
    "autoscaled-by-kubernetes": autoscaled_by_kubernetes,
    "autoscaled-while-rolling": autoscaled_while_rolling,
    "autoscaled-over-rollouts": autoscaled_over_rollouts,
    "autoscaled-against-the-ratio": autoscaled_against_the_ratio,
    "misnamed-target": misnamed_target,
    "misnamed-pool": misnamed_pool,
    "never-at-rest": never_at_rest,
    "orphaned": orphaned,
}


def rows(prefix: str) -> list[Any]:
    smoke = ("taken-ConfigMap", "never-at-rest")
    return [pytest.param(row, marks=[pytest.mark.smoke] if row in smoke else []) for row in PLAYS if row.startswith(prefix)]


@pytest.mark.parametrize("row", rows("taken-"))
def test_somebody_elses_object_of_our_name_is_left_alone_and_told(played: Played, row: str):
    played[row].result()


@pytest.mark.parametrize("row", rows("edited-"))
def test_our_field_comes_back_and_theirs_stays(played: Played, row: str):
    played[row].result()


@pytest.mark.parametrize("row", rows("nobodys"))
def test_workers_whose_owner_was_taken_away_get_it_back_and_go_with_their_fleet(played: Played, row: str):
    played[row].result()


@pytest.mark.parametrize("row", rows("autoscaled"))
def test_an_autoscaler_that_owns_replicas_is_followed_and_not_fought(played: Played, row: str):
    played[row].result()


@pytest.mark.parametrize("row", rows("misnamed"))
def test_a_pool_whose_spec_says_what_it_is_not_is_put_right(played: Played, row: str):
    played[row].result()


@pytest.mark.parametrize("row", rows("never-at-rest"))
def test_a_hand_that_never_rests_is_answered_five_times_a_second_at_most(played: Played, row: str):
    played[row].result()


@pytest.mark.parametrize("row", rows("orphaned"))
def test_a_fleet_that_is_deleted_without_its_children_goes_and_they_stay(played: Played, row: str):
    played[row].result()

"""What every `Cluster` promises of statuses and selectors: on the in-memory store and on a real API server."""

from __future__ import annotations

import pytest

from fleet_operator.cluster.interface import NETWORK_POLICY, PDB, POD, SERVICE, ConflictError, NotFoundError
from tests.fleet_operator.cluster.contract import Promise, Store, pod


async def status_is_a_subresource(store: Store) -> None:
    made = await store.cluster.apply({**pod(store, "status"), "status": {"message": "smuggled"}})
    assert "message" not in made.get("status", {})
    condition = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"phase": "Running", "podIP": "127.0.0.9", "podIPs": [{"ip": "127.0.0.9"}], "conditions": [condition]}
    written = await store.cluster.patch_status(POD, store.namespace, "status", status)
    assert written["metadata"].get("generation") == made["metadata"].get("generation")
    again = await store.cluster.patch_status(POD, store.namespace, "status", {"phase": "Running"})
    assert again["status"]["podIP"] == "127.0.0.9"
    assert again["metadata"]["resourceVersion"] == written["metadata"]["resourceVersion"]
    kept = await store.cluster.apply(pod(store, "status"))
    assert kept["status"]["phase"] == "Running"


async def a_status_is_written_only_on_top_of_the_version_that_is_named(store: Store) -> None:
    seen = await store.cluster.apply(pod(store, "version"))
    version = seen["metadata"]["resourceVersion"]
    written = await store.cluster.patch_status(POD, store.namespace, "version", {"phase": "Running"}, version=version)
    assert written["status"]["phase"] == "Running"
    with pytest.raises(ConflictError, match="the object has been modified"):
        await store.cluster.patch_status(POD, store.namespace, "version", {"phase": "Failed"}, version=version)
    assert (await store.cluster.get(POD, store.namespace, "version"))["status"]["phase"] == "Running"
    with pytest.raises(NotFoundError):
        await store.cluster.patch_status(POD, store.namespace, "absent", {"phase": "Running"}, version=version)


async def a_selector_is_applied_whole(store: Store) -> None:
    """What others added to it goes with an apply, unlike what they add to other maps."""
    meta, labels = {"name": "selects", "namespace": store.namespace}, {"app": "a"}
    specs = {
        SERVICE: {"ports": [{"port": 80}], "selector": labels},
        PDB: {"minAvailable": 1, "selector": {"matchLabels": labels}},
        NETWORK_POLICY: {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"]},
    }
    for kind, spec in specs.items():
        wish = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": spec}
        await store.cluster.apply(wish)
        field = "podSelector" if kind == NETWORK_POLICY else "selector"
        more = {"x": "y"} if kind == SERVICE else {"matchLabels": {"x": "y"}}
        await store.other.patch(kind, store.namespace, "selects", {"spec": {field: more}})
        assert (await store.cluster.apply(wish))["spec"][field] == spec[field]


PROMISES: list[Promise] = [
    status_is_a_subresource,
    a_status_is_written_only_on_top_of_the_version_that_is_named,
    a_selector_is_applied_whole,
]

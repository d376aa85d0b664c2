"""What every `Cluster` promises of statuses: on the in-memory store and on a real API server."""

from __future__ import annotations

import pytest

from fleet_operator.cluster.interface import POD, ConflictError, NotFoundError
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


PROMISES: list[Promise] = [status_is_a_subresource, a_status_is_written_only_on_top_of_the_version_that_is_named]

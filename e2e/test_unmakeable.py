"""A real API server's own judgement of what fleet_api/unmakeable.py says: it refuses a pod of every fleet that is refused for its
pods, and takes all pods of the neighbours that are not.

All of it is a dry run: no pod is stored, and no operator runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.dry_run import asked, fresh, tried
from e2e.kube.controlplane import ControlPlane
from fleet_api.compat import refusals_applied
from fleet_api.structure import normalised
from fleet_api.unmakeable_annotations import MIRROR
from fleet_api.validate import validate
from tests.fleet_api.bad_manifests import GOOD_CHANGES, manifest
from tests.fleet_api.unmakeable_rows import GOOD_ROWS, ROWS, UNLIMITED, UNPLACED, UNPULLED, Changes
from tests.fleet_operator.test_conversions import rendered
from tests.fleet_operator.world import NAMESPACE

REFUSED_HERE = [changes for changes, _ in (*UNPULLED, *UNPLACED)]
TAKEN = [*GOOD_ROWS, *(changes for _, changes in GOOD_CHANGES), *REFUSED_HERE]


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    with asked(control_plane) as client:
        yield client


def answers(api: httpx.Client, changes: Changes, namespace: str = NAMESPACE) -> list[httpx.Response]:
    """To all pods that the operator would make of the fleet."""
    fleet: dict[str, Any] = manifest(changes)
    fleet["metadata"]["namespace"] = NAMESPACE  # the one that the stand-in of a cluster has
    assert validate(fleet) == []
    pods, _ = rendered(fleet)
    assert pods
    mine = [fresh(pod) for pod in pods]
    return [tried(api, {**pod, "metadata": {**pod["metadata"], "namespace": namespace}}) for pod in mine]


@pytest.mark.parametrize(("changes", "words"), ROWS, ids=[f"{number}: {words}" for number, (_, words) in enumerate(ROWS)])
def test_who_is_refused_here_is_refused_there(
    api: httpx.Client,
    changes: Changes,
    words: str,
):
    refused = [answer.json() for answer in answers(api, changes) if answer.status_code != 201]
    assert refused, f"the API server takes all pods of a fleet that is refused: {words}"
    reason = "Forbidden" if MIRROR in words else "Invalid"  # admission speaks first of a pod that only a kubelet makes
    assert {answer["reason"] for answer in refused} == {reason}, refused[0]["message"]


@pytest.mark.parametrize("changes", TAKEN)
def test_who_is_not_refused_here_is_taken_there(
    api: httpx.Client,
    changes: Changes,
):
    assert (refusals_applied(normalised(manifest(changes))) == []) == (changes not in REFUSED_HERE)
    refused = [answer.json()["message"] for answer in answers(api, changes) if answer.status_code != 201]
    assert refused == []


def test_a_namespace_may_set_the_limit_that_a_fleet_leaves_out(api: httpx.Client, control_plane: ControlPlane, namespace: str):
    def taken() -> bool:
        return all(answer.status_code == 201 for answer in answers(api, UNLIMITED, namespace))

    assert refusals_applied(manifest(UNLIMITED)) == []
    assert not taken()
    range_of = {"limits": [{"type": "Container", "default": {"hugepages-2Mi": "2Mi"}}]}
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "pages"}, "spec": range_of}
    assert api.post(f"/api/v1/namespaces/{namespace}/limitranges", json=body).status_code == 201
    control_plane.wait("pods with the LimitRange's limit", taken)

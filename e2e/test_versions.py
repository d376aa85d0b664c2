"""A second version of the API beside v1alpha1, and operators of both ages: nothing is lost, and no worker restarts.

Conversion is None: all served versions have one schema, and a version is another name for it until a webhook converts. A field is
added to every served version at once, so that neither side drops what the other wrote.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.operators import Plane, fleet, operator, plane

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[1]
GROUP = "/apis/inferencefleet.io"
QUIET_S = 4.0
KINDS = (
    "pods,workerpools,deployments,services,configmaps,poddisruptionbudgets,roles,rolebindings,serviceaccounts,controllerrevisions"
)


@pytest.fixture(scope="module")
def served() -> Iterator[Plane]:
    with plane() as made:
        yield made


def next_crd(storage: str) -> str:
    """The CRD with v1beta1, both with fields of tomorrow; `storage` is the version that etcd gets."""
    crd = yaml.safe_load((ROOT / "crds/inferencefleets.yaml").read_text())
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    schema["status"]["properties"]["futureField"] = {"type": "string"}
    schema["spec"]["properties"]["futureKnob"] = {"type": "integer"}
    versions = []
    for name in ("v1alpha1", "v1beta1"):
        versions.append({**copy.deepcopy(version), "name": name, "storage": name == storage})
    crd["spec"] |= {"versions": versions, "conversion": {"strategy": "None"}}
    return yaml.safe_dump(crd)


def apply_crd(served: Plane, text: str) -> None:
    served.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


def objects(served: Plane) -> dict[str, str]:
    """Everything that the operator made: name to version."""
    found = json.loads(served.kubectl("get", KINDS, "-n", "v", "-l", "inferencefleet.io/fleet", "-o", "json").stdout)["items"]
    return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in found}


def get(served: Plane, version: str, name: str) -> dict[str, Any]:
    return served.get(f"{GROUP}/{version}/namespaces/v/inferencefleets/{name}")


def accepted(served: Plane, name: str) -> str:
    conditions = (get(served, "v1alpha1", name).get("status") or {}).get("conditions") or []
    return next((one["status"] for one in conditions if one["type"] == "Accepted"), "")


def rests(served: Plane, expected: int) -> dict[str, str]:
    """The objects, once nobody has written any of them for a while."""
    seen: dict[str, str] = {}
    since = time.monotonic()

    def still() -> bool:
        nonlocal seen, since
        if (now := objects(served)) != seen:
            seen, since = now, time.monotonic()
        return len(seen) >= expected and time.monotonic() - since >= QUIET_S

    served.wait("rest", still, 60)
    return seen


def test_a_new_version_and_the_way_back(served: Plane):
    served.kubectl("create", "namespace", "v")
    account = served.account("operator-a")
    served.wait("account", lambda: served.exists("/api/v1/namespaces/v/serviceaccounts/default"))
    with operator(served, "old", account) as one:
        served.wait("ready", one.up, 60)
        served.kubectl("apply", "-f", "-", stdin=fleet("v", "one"))
        before = rests(served, 12)

        apply_crd(served, next_crd("v1beta1"))
        served.wait("v1beta1", lambda: served.exists(f"{GROUP}/v1beta1/namespaces/v/inferencefleets/one"), 30)
        spec = get(served, "v1alpha1", "one")["spec"]
        assert get(served, "v1beta1", "one")["spec"] == spec
        # a newer operator wrote something that this one does not know
        patch = '{"status":{"futureField":"tomorrow"}}'
        served.kubectl("patch", "ifleet", "one", "-n", "v", "--subresource=status", "--type=merge", "-p", patch)
        # a fleet of the new version is served like any other
        two = json.loads(fleet("v", "two")) | {"apiVersion": "inferencefleet.io/v1beta1"}
        served.kubectl("apply", "-f", "-", stdin=json.dumps(two))
        served.wait("its workers", lambda: sum(name.startswith("Pod/two-t-") for name in objects(served)) == 3, 60)
        assert {name: objects(served)[name] for name in before} == before
    # the operator restarts: still nothing to do, and the unknown word is still there
    before = rests(served, 24)
    with operator(served, "old-again", account) as one:
        served.wait("ready", one.up, 60)
        served.wait("passes", lambda: one.metric('fleet_operator_reconciles_total{outcome="ok"}') >= 2, 60)
        assert objects(served) == before
        assert get(served, "v1beta1", "one")["status"]["futureField"] == "tomorrow"
        assert accepted(served, "one") == "True"

        # a spec of tomorrow: said, and what runs goes on
        served.kubectl("patch", "ifleet", "one", "-n", "v", "--type=merge", "-p", '{"spec":{"futureKnob":1}}')
        served.wait("Accepted=False", lambda: accepted(served, "one") == "False", 30)
        assert objects(served) == before
        served.kubectl("patch", "ifleet", "one", "-n", "v", "--type=merge", "-p", '{"spec":{"futureKnob":null}}')
        served.wait("Accepted=True", lambda: accepted(served, "one") == "True", 30)

        # and back: every object is rewritten in v1alpha1 before v1beta1 may go
        stored = served.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencefleets.inferencefleet.io")
        assert set(stored["status"]["storedVersions"]) == {"v1alpha1", "v1beta1"}
        apply_crd(served, next_crd("v1alpha1"))
        for name in ("one", "two"):
            served.kubectl("annotate", "--overwrite", "ifleet", name, "-n", "v", "migrated=yes")
        crd = ("crd", "inferencefleets.inferencefleet.io")
        served.kubectl("patch", *crd, "--subresource=status", "--type=merge", "-p", '{"status":{"storedVersions":["v1alpha1"]}}')
        apply_crd(served, (ROOT / "crds/inferencefleets.yaml").read_text())
        served.wait("v1beta1 is gone", lambda: not served.exists(f"{GROUP}/v1beta1/namespaces/v/inferencefleets/one"), 30)
        assert get(served, "v1alpha1", "one")["spec"] == spec
        assert objects(served) == before
        one.service.check()

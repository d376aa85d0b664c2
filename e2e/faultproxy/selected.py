"""A lab whose operator is told a label of namespaces instead of a name, and what happens to such labels."""

from __future__ import annotations

import json

from e2e.faultproxy.lab import Lab, fleet_manifest, path_of
from e2e.operators import MORE_RIGHTS, SYSTEM
from fleet_operator.cluster.interface import FLEET
from fleet_operator.cluster.kinds import LEASE
from fleet_operator.territory import CLAIM

LABEL = "example.com/selected"
ACCOUNT = "inferencefleet-operator"


def by_label(lab: Lab) -> None:
    """The lab's operator serves the namespaces that carry the lab's label; its own is the first."""
    lab.plane.kubectl("apply", "-f", "-", stdin=MORE_RIGHTS)
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": SYSTEM}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "several-operators"}
    made = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "several-operators"}}
    lab.plane.kubectl("apply", "-f", "-", stdin=json.dumps({**made, "roleRef": role, "subjects": [subject]}))
    lab.selection = ("--installation", lab.namespace, "--namespace-selector", f"{LABEL}={lab.namespace}")
    mark(lab, lab.namespace)


def mark(lab: Lab, namespace: str) -> None:
    lab.admin.merge(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": {LABEL: lab.namespace}}})


def unmark(lab: Lab) -> None:
    """The lab's namespace is no longer its operator's."""
    lab.admin.merge(f"/api/v1/namespaces/{lab.namespace}", {"metadata": {"labels": {LABEL: None}}})


def other(lab: Lab) -> str:
    """Name of a second namespace."""
    return f"{lab.namespace}-more"


def another_namespace(lab: Lab) -> None:
    """With the label from its beginning, and a fleet."""
    name = other(lab)
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {LABEL: lab.namespace}}}
    lab.admin("POST", "/api/v1/namespaces", made).raise_for_status()
    lab.until("a service account", lambda: lab.admin("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default").is_success)
    lab.apply(fleet_manifest(name))


def serves_it(lab: Lab) -> bool:
    """The fleet in the second namespace is ready."""
    conditions = lab.admin.get(path_of(FLEET, other(lab), "f")).get("status", {}).get("conditions", [])
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


def let_go(lab: Lab) -> bool:
    """Nobody claims the lab's namespace, and its fleet runs on."""
    claim = lab.admin("GET", path_of(LEASE, lab.namespace, CLAIM))
    return claim.status_code == 404 and len(lab.uids()) == 3

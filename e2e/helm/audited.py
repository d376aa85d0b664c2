"""A control plane that writes down what service accounts ask for, and enforces owner references as OpenShift does."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from e2e.kube.controlplane import ControlPlane

Right = tuple[str, str, str]
"""(API group, resource with its subresource, verb)."""


class AuditedControlPlane(ControlPlane):
    """`asked` and `refused` read the audit log."""

    @property
    def _log(self) -> Path:
        return self.dir / "audit.log"

    def _apiserver_flags(self) -> list[str]:
        policy = self.dir / "audit-policy.yaml"
        rules = [
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"], "omitStages": ["RequestReceived", "ResponseStarted"]},
            {"level": "None"},
        ]
        policy.write_text(yaml.safe_dump({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
        return [
            *super()._apiserver_flags(),
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self._log}",
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        ]

    def asked(self, namespace: str, account: str) -> set[Right]:
        """What the service account was allowed to do. A server-side apply that made an object needed both verbs."""
        rights = set()
        for event in self._events(namespace, account):
            if event["responseStatus"]["code"] == 403:
                continue
            group, resource, verb = _right(event)
            rights.add((group, resource, verb))
            if verb == "patch" and event["responseStatus"]["code"] == 201:
                rights.add((group, resource, "create"))
        return rights

    def refused(self, namespace: str, account: str) -> list[str]:
        """What it asked for and did not get, in the API server's words. Owners of a kind that the admission plugin has not heard
        of yet (it looks every half minute) are no matter of rights: the operator tries again."""
        refusals = [
            event
            for event in self._events(namespace, account)
            if event["responseStatus"]["code"] == 403
            and "cannot find RESTMapping" not in event["responseStatus"].get("message", "")
        ]
        return sorted({f"{event['verb']} {event['requestURI']}: {event['responseStatus'].get('message')}" for event in refusals})

    def _events(self, namespace: str, account: str) -> list[dict]:
        """Finished requests for resources. A watch counts when it ends: stop the client first."""
        user = f"system:serviceaccount:{namespace}:{account}"
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        events = [json.loads(line) for line in lines]
        return [event for event in events if event["user"]["username"] == user and "objectRef" in event]


def _right(event: dict) -> Right:
    reference = event["objectRef"]
    resource = reference["resource"] + (f"/{reference['subresource']}" if "subresource" in reference else "")
    return reference.get("apiGroup", ""), resource, event["verb"]

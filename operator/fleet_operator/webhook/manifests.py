"""The webhook configurations as the API server wants them: what the chart installs, and what e2e applies.

`python -m fleet_operator.webhook.manifests --service NAMESPACE/NAME` prints them. caBundle is left out: the operator fills it in.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

import yaml

from fleet_api.v1alpha1.base import GROUP, VERSION

NAME = "inferencefleet"


def configurations(
    client: dict[str, Any], *, name: str = NAME, failure_policy: str = "Ignore", timeout_s: int = 5, **selectors: Any
) -> list[dict[str, Any]]:
    """[mutating, validating]. `client` is {"url": "https://host:port"} or {"service": {"name", "namespace", "port"}};
    `selectors` may hold namespaceSelector, for an installation that owns some namespaces only."""

    def hook(short: str, path: str, resource: str, operations: list[str], **more: Any) -> dict[str, Any]:
        target = {"url": client["url"] + path} if "url" in client else {"service": {**client["service"], "path": path}}
        return {
            "name": f"{short}.{GROUP}",
            "clientConfig": target,
            "rules": [
                {
                    "apiGroups": [GROUP], "apiVersions": [VERSION], "operations": operations, "resources": [resource],
                    "scope": "Namespaced",
                }
            ],
            "failurePolicy": failure_policy,
            "matchPolicy": "Equivalent",
            "sideEffects": "None",
            "timeoutSeconds": timeout_s,
            "admissionReviewVersions": ["v1"],
            **more,
            **selectors,
        }  # fmt: skip

    changes = ["CREATE", "UPDATE"]
    mutating = [hook("mark", "/mutate/fleet", "inferencefleets", changes, reinvocationPolicy="Never")]
    validating = [
        hook("fleet", "/validate/fleet", "inferencefleets", changes),
        hook("scale", "/validate/scale", "workerpools/scale", ["UPDATE"]),
    ]
    root = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    return [
        {**root, "kind": "MutatingWebhookConfiguration", "webhooks": mutating},
        {**root, "kind": "ValidatingWebhookConfiguration", "webhooks": validating},
    ]


def main(argv: list[str] | None = None) -> int:
    """Print them as YAML."""
    parser = argparse.ArgumentParser(prog="python -m fleet_operator.webhook.manifests", description="webhook configurations")
    parser.add_argument("--service", required=True, metavar="NAMESPACE/NAME", help="the Service of the webhook port")
    parser.add_argument("--port", type=int, default=443)
    parser.add_argument("--failure-policy", choices=["Ignore", "Fail"], default="Ignore")
    given = parser.parse_args(argv)
    namespace, slash, name = given.service.partition("/")
    if not (namespace and slash and name):
        parser.error("--service must be NAMESPACE/NAME")
    client = {"service": {"namespace": namespace, "name": name, "port": given.port}}
    yaml.safe_dump_all(configurations(client, failure_policy=given.failure_policy), sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whose reader left ends without a word, as other programs do
    sys.exit(main())

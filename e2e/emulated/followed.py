"""An emulated fleet whose router follows its ConfigMap on a real API server, through a proxy that a test programs."""

from __future__ import annotations

from pathlib import Path

from e2e.emulated.fleet import Emulated
from e2e.faultproxy.lab import Admin
from e2e.faultproxy.proxy import FaultProxy
from e2e.kube.controlplane import ControlPlane

NAME = "f-router"
RBAC = "rbac.authorization.k8s.io"
RULES = [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [NAME], "verbs": ["get", "list", "watch"]}]
"""Those that the operator gives routers."""


class Followed(Emulated):
    """Documents are written past the proxy; the router has a router's rights in a namespace that is there already."""

    def __init__(self, folder: Path, net: int, decode: int, plane: ControlPlane, proxy: FaultProxy, namespace: str) -> None:
        super().__init__(folder, net, 0, decode)
        self._plane, self._proxy, self._namespace = plane, proxy, namespace
        self._admin = Admin(plane)
        self._token = folder / "token"
        self._path = f"/api/v1/namespaces/{namespace}/configmaps"
        self._may_read()
        self._admin("POST", self._path, {"metadata": {"name": NAME}}).raise_for_status()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            super().__exit__(kind, *rest)
        finally:
            self._admin.close()

    def _may_read(self) -> None:
        rbac, meta = f"/apis/{RBAC}/v1/namespaces/{self._namespace}", {"metadata": {"name": NAME}}
        binding = {
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": self._namespace}],
        }
        self._admin("POST", f"/api/v1/namespaces/{self._namespace}/serviceaccounts", meta).raise_for_status()
        self._admin("POST", f"{rbac}/roles", {**meta, "rules": RULES}).raise_for_status()
        self._admin("POST", f"{rbac}/rolebindings", {**meta, **binding}).raise_for_status()
        self._token.write_text(self._plane.kubectl("create", "token", NAME, "-n", self._namespace).stdout.strip())

    def write(self, key: str, data: bytes) -> None:
        self._admin.merge(f"{self._path}/{NAME}", {"data": {key: data.decode()}})

    def follows(self) -> tuple[str, dict[str, str]]:
        env = {
            "FLEET_KUBE_URL": f"https://127.0.0.1:{self._proxy.port}",
            "FLEET_KUBE_TOKEN_FILE": str(self._token),
            "FLEET_KUBE_CA_FILE": str(self._plane.ca_file),
        }
        return f"kube:{self._namespace}/{NAME}", env

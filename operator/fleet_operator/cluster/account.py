"""The pod's own service account: where the API server is and who we are. The same variables as the router's: pods that run
as local processes find an account that lies elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_operator.cluster.interface import ClusterError

MOUNTED: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NotInClusterError(ClusterError):
    """No kubeconfig was given and this is no pod."""

    reason = "NotInCluster"
    retry = False


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """Credentials as a kubelet mounts them. The token file is replaced before the token expires: read it again."""

    url: str
    token_file: Path
    ca_file: Path | None

    def token(self) -> str:
        """The token of this moment; NotInClusterError."""
        try:
            return self.token_file.read_text().strip()
        except OSError as error:
            raise NotInClusterError(f"no service account token: {error.strerror}: {self.token_file}") from error


def service_account(env: Mapping[str, str]) -> ServiceAccount:
    """From what every pod has, each part of which FLEET_KUBE_URL, _TOKEN_FILE or _CA_FILE overrides; NotInClusterError."""
    url = env.get("FLEET_KUBE_URL")
    if not url:
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise NotInClusterError(
                "give --kubeconfig: this is no pod, neither FLEET_KUBE_URL nor KUBERNETES_SERVICE_HOST is set"
            )
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    ca = env.get("FLEET_KUBE_CA_FILE", str(MOUNTED / "ca.crt"))
    return ServiceAccount(url, Path(env.get("FLEET_KUBE_TOKEN_FILE", str(MOUNTED / "token"))), Path(ca) if ca else None)

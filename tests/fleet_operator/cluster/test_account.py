"""Who a pod is: what every pod has, overridden one by one; no pod is a named error, not a stack trace."""

import asyncio
from pathlib import Path

import pytest

from fleet_operator.cluster.account import MOUNTED, NotInClusterError, ServiceAccount, service_account
from fleet_operator.cluster.kube_http import configuration_from

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (POD, ServiceAccount("https://10.0.0.1:6443", MOUNTED / "token", MOUNTED / "ca.crt")),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1"}, ServiceAccount("https://[fd00::1]:443", MOUNTED / "token", MOUNTED / "ca.crt")),
        ({**POD, "FLEET_KUBE_URL": "https://k"}, ServiceAccount("https://k", MOUNTED / "token", MOUNTED / "ca.crt")),
        ({**POD, "FLEET_KUBE_TOKEN_FILE": "/t"}, ServiceAccount("https://10.0.0.1:6443", Path("/t"), MOUNTED / "ca.crt")),
        ({**POD, "FLEET_KUBE_CA_FILE": ""}, ServiceAccount("https://10.0.0.1:6443", MOUNTED / "token", None)),
    ],
)
def test_where_the_api_server_is(env, expected):
    assert service_account(env) == expected


def test_outside_of_a_pod_the_error_says_what_to_give():
    with pytest.raises(NotInClusterError, match="--kubeconfig"):
        service_account({})


def test_an_account_without_a_token_is_named(tmp_path):
    with pytest.raises(NotInClusterError, match=r"No such file or directory: .*/token"):
        ServiceAccount("https://k", tmp_path / "token", None).token()


async def keys(monkeypatch, tmp_path) -> list[str | None]:
    token = tmp_path / "token"
    token.write_text("first\n")
    monkeypatch.setenv("FLEET_KUBE_URL", "https://k")
    monkeypatch.setenv("FLEET_KUBE_TOKEN_FILE", str(token))
    monkeypatch.setenv("FLEET_KUBE_CA_FILE", "")
    configuration = await configuration_from(None)
    before = await configuration.get_api_key_with_prefix("BearerToken")
    token.write_text("second\n")
    return [before, await configuration.get_api_key_with_prefix("BearerToken")]


def test_a_renewed_token_is_used_at_once(monkeypatch, tmp_path):
    assert asyncio.run(keys(monkeypatch, tmp_path)) == ["Bearer first", "Bearer second"]

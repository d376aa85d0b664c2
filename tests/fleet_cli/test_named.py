"""What only a cluster has is asked for before anything starts."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_cli.errors import InputError
from fleet_cli.up.bundled import bundled_manifest
from fleet_cli.up.named import check_named, hub_secrets

HUB = {"source": "hf://acme/model"}
SECRET_ENV = {"env": [{"name": "K", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "k"}}}]}
MAP_ENV = {"env": [{"name": "A", "value": "1"}, {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "mine", "key": "k"}}}]}


def volume(**source: dict[str, str]) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **source}], "volumeMounts": [{"name": "v", "mountPath": "/v"}]}


def fleet(model: dict[str, Any] | None = None, **template: Any):
    manifest = bundled_manifest(Path("/m"))
    manifest["spec"]["model"] = model or manifest["spec"]["model"]
    manifest["spec"]["tiers"][0]["decode"] |= {"podTemplate": template}
    return parse_fleet(manifest)


AT = "spec.tiers[0].decode.podTemplate."
MISSING = [
    pytest.param(fleet(**SECRET_ENV), f"{AT}env[0].valueFrom.secretKeyRef: there is no Secret mine with a key k ", id="secret"),
    pytest.param(fleet(**MAP_ENV), f"{AT}env[1].valueFrom.configMapKeyRef: there is no ConfigMap mine with a key k ", id="map"),
    pytest.param(fleet(**volume(secret={"secretName": "s"})), f"{AT}volumes[0].secret: there is no Secret s ", id="secret-files"),
    pytest.param(fleet(**volume(configMap={"name": "c"})), f"{AT}volumes[0].configMap: there is no ConfigMap c ", id="map-files"),
    pytest.param(
        fleet(**volume(persistentVolumeClaim={"claimName": "c"})),
        f"{AT}volumes[0].persistentVolumeClaim: claim c has no folder on this machine: give --pvc c=DIR",
        id="claim",
    ),
    pytest.param(fleet(HUB | {"cache": {"type": "pvc", "claim": "c"}}), "spec.model.cache.claim: claim c has no ", id="cache"),
    pytest.param(fleet(HUB | {"adapterRoot": "pvc://c/lora"}), "spec.model.adapterRoot: claim c has no folder ", id="adapters"),
]


@pytest.mark.parametrize(("asked", "words"), MISSING)
def test_what_is_not_here_is_named_before_pods_wait_for_it(asked, words: str):
    """They waited for ever, with --once for ten minutes, and nothing said that --pvc gives a claim its folder."""
    with pytest.raises(InputError) as refused:
        check_named(asked, {}, [])
    assert str(refused.value).startswith(words)


def test_what_is_here_is_taken(tmp_path: Path):
    secret = {"metadata": {"name": "mine"}, "data": {"k": ""}}
    check_named(fleet(**SECRET_ENV), {}, [secret])
    check_named(fleet(**volume(secret={"secretName": "mine"})), {}, [secret])
    check_named(fleet(**volume(persistentVolumeClaim={"claimName": "c"})), {"c": tmp_path}, [])
    check_named(fleet(HUB | {"cache": {"type": "pvc", "claim": "c"}}), {"c": tmp_path}, [])
    check_named(fleet(**volume(emptyDir={})), {}, [])


def test_the_token_of_the_hub_comes_from_the_environment():
    """`fleet up` of README.md's second fleet waited for a Secret that nobody could give it."""
    asked = fleet(HUB | {"tokenSecretRef": {"name": "hf-token", "key": "t"}})
    [secret] = hub_secrets(asked, {"HF_TOKEN": " hf_secret\n"})
    assert secret["metadata"] == {"name": "hf-token", "namespace": "default"}
    assert base64.b64decode(secret["data"]["t"]) == b"hf_secret"
    for environment in ({}, {"HF_TOKEN": ""}):
        with pytest.raises(InputError, match=r"^spec\.model\.tokenSecretRef: there is no Secret hf-token .*: set HF_TOKEN$"):
            hub_secrets(asked, environment)
    assert hub_secrets(fleet(HUB), {}) == []

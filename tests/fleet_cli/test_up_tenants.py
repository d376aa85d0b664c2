"""Tenants of a fleet on one machine: the Secret comes from a file, and `fleet up` has a key of its own."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from fleet_api.parse import parse_fleet
from fleet_cli.errors import InputError
from fleet_cli.up.bundled import bundled_manifest
from fleet_cli.up.tenants import OWN_TENANT, local_tenants
from fleet_router.admission.keys import KeyTable
from fleet_router.admission.tenants import parse_tenants

FILE = b'{"salt": "0123456789abcdef0123456789abcdef", "tenants": [{"name": "acme"}, {"name": "fleet-up"}]}'


def fleet(*, tenants: bool):
    manifest = bundled_manifest(Path("/m"))
    if tenants:
        manifest["spec"]["tenants"] = {"secretRef": {"name": "who", "key": "t.json"}}
    return parse_fleet(manifest)


def test_a_fleet_that_everybody_may_ask_needs_nothing(tmp_path: Path):
    assert local_tenants(fleet(tenants=False), None) is None
    with pytest.raises(InputError, match="everybody may ask"):
        local_tenants(fleet(tenants=False), tmp_path)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot read"), (b"sk-secret", "not valid JSON"), (b'{"salt": 1}', "salt")]
)
def test_a_file_that_is_wrong_is_named_and_not_shown(tmp_path: Path, content: bytes | None, words: str):
    file = tmp_path / "t.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=words) as told:
        local_tenants(fleet(tenants=True), file)
    assert "sk-secret" not in str(told.value)


def test_a_missing_file_is_asked_for():
    with pytest.raises(InputError, match="no Secret who on this machine; give its file with --tenants FILE"):
        local_tenants(fleet(tenants=True), None)


def test_the_secret_is_the_file_and_a_key_of_our_own(tmp_path: Path):
    file = tmp_path / "t.json"
    file.write_bytes(FILE)
    found = local_tenants(fleet(tenants=True), file)
    assert found is not None
    assert (found.secret["metadata"]["name"], list(found.secret["data"])) == ("who", ["t.json"])
    held = parse_tenants(base64.b64decode(found.secret["data"]["t.json"]))
    assert [tenant.name for tenant in held.tenants] == ["acme", OWN_TENANT]
    assert KeyTable([(key, t.name) for t in held.tenants for key in t.keys]).find(found.key.encode()) == OWN_TENANT
    assert found.key not in repr(found) + json.dumps(found.secret)

"""kopf as we set it up: it follows fleets and writes nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import kopf
import pytest
from kopf._cogs.structs.references import Resource
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event

from fleet_operator.cluster.interface import FLEET, Kind, WatchEvent
from fleet_operator.shell_kopf import build_registry


class Fed:
    def __init__(self) -> None:
        self.events: list[tuple[Kind, WatchEvent]] = []

    def feed(self, kind: Kind, event: WatchEvent) -> None:
        self.events.append((kind, event))


def resource(kind: Kind) -> Resource:
    group, _, version = kind.api_version.rpartition("/")
    verbs = frozenset({"list", "watch", "patch"})
    return Resource(
        group=group, version=version, plural=kind.plural, kind=kind.kind, namespaced=True, preferred=True, verbs=verbs
    )


def set_up() -> tuple[kopf.OperatorRegistry, kopf.OperatorSettings, Fed]:
    fed, settings = Fed(), kopf.OperatorSettings()
    registry = build_registry(fed, Path("unused"))
    for handler in registry._activities.get_all_handlers():
        if "set_up" in handler.id:
            handler.fn(settings=settings)
    return registry, settings, fed


def test_an_event_is_fed_once_and_nothing_is_written():
    """A write would need a connection, which is not there."""
    registry, settings, fed = set_up()
    fleet: dict[str, Any] = {"metadata": {"name": "f", "namespace": "ml", "uid": "u"}, "spec": {"tiers": [{"name": "t"}]}}

    async def go(kind: str | None) -> None:
        await process_resource_event(
            lifecycle=kopf.lifecycles.all_at_once,
            indexers=OperatorIndexers(),
            registry=registry,
            settings=settings,
            memories=ResourceMemories(),
            memobase=kopf.Memo(),
            resource=resource(FLEET),
            raw_event={"type": kind, "object": fleet},
            event_queue=asyncio.Queue(),
        )

    for kind in (None, "MODIFIED", "DELETED"):
        asyncio.run(go(kind))
    assert [(kind, event.type) for kind, event in fed.events] == [(FLEET, "ADDED"), (FLEET, "MODIFIED"), (FLEET, "DELETED")]
    assert all(event.object == fleet for _, event in fed.events)


PLUGIN = {"apiVersion": "client.authentication.k8s.io/v1"}


def kubeconfig(user: dict[str, Any], cluster: dict[str, Any]) -> str:
    """JSON is YAML."""
    named = {"users": [{"name": "u", "user": user}], "clusters": [{"name": "c", "cluster": cluster}]}
    return json.dumps({"current-context": "x", "contexts": [{"name": "x", "context": {"user": "u", "cluster": "c"}}], **named})


@pytest.mark.parametrize(
    ("user", "header"),
    [
        pytest.param({"token": "t"}, "Bearer t", id="token"),
        pytest.param({"tokenFile": "token"}, "Bearer from a file", id="file"),
        pytest.param({"username": "u", "password": "p"}, "Basic dTpw", id="password"),
        pytest.param({"exec": {**PLUGIN, "command": ""}}, "Bearer p", id="plugin"),
    ],
)
def test_a_kubeconfig_says_the_same_to_kopf_as_to_us(
    user: dict[str, Any], header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """kopf's own reading of it knows no plugin (EKS, GKE, AKS), no token file, and takes a relative path for one of where the
    process runs: it followed fleets as nobody, and a change of one was seen by the audit alone, 40 seconds late."""
    for name, text in {"token": "from a file", "ca.crt": "pem"}.items():
        (tmp_path / name).write_text(text)
    plugin = tmp_path / "plugin"
    plugin.write_text("#!/bin/sh\necho '" + json.dumps({**PLUGIN, "kind": "ExecCredential", "status": {"token": "p"}}) + "'\n")
    plugin.chmod(0o755)
    if "exec" in user:
        user = {"exec": {**user["exec"], "command": str(plugin)}}
    file = tmp_path / "config"
    file.write_text(kubeconfig(user, {"server": "https://k:1", "certificate-authority": "ca.crt"}))
    monkeypatch.setenv("KUBECONFIG", str(file))  # whoever reads it by himself finds it there
    registry = build_registry(Fed(), file)
    (login,) = [one for one in registry._activities.get_all_handlers() if "login" in one.id]
    found = asyncio.run(login.fn(settings=kopf.OperatorSettings()))
    assert (found.server, found.ca_path) == ("https://k:1", str(tmp_path / "ca.crt"))
    assert found.as_http_headers() == {"Authorization": header}

"""TLS, gossip and processes of a fleet's routers: what becomes of the fields in pods, documents, status and scrapes."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.validate import validate
from fleet_cli.errors import InputError
from fleet_cli.up.routerport import router_secrets
from fleet_operator.names import FLEET, ROLE, ROUTER_ROLE
from fleet_operator.picture import router_urls
from fleet_operator.render.fleet import render_router
from fleet_operator.render.port import requests, routers_of
from fleet_operator.settings import Platform
from fleet_router.__main__ import arguments, gossip_of, tls_of
from fleet_wire.peerkey import PEER_KEY_ENV, PEER_SCOPE_ENV
from tests.fleet_operator.test_routing_config import OWNER, manifest

TLS = {"secretRef": {"name": "web"}, "clientCaSecretRef": {"name": "clients", "key": "roots.pem"}}
GOSSIP = {"keySecretRef": {"name": "gossip"}}


def fleet(**routing: object) -> InferenceFleet:
    return InferenceFleet.model_validate(manifest(**routing))


def pod(**routing: object) -> dict[str, Any]:
    spec: dict[str, Any] = render_router(fleet(**routing), OWNER, Platform())[-1]["spec"]["template"]["spec"]
    return spec


def test_the_router_takes_the_arguments_that_it_is_given():
    command = pod(tls=TLS, gossip=GOSSIP, processes=3)["containers"][0]["command"]
    given = arguments(command[1:])
    tls, gossip = tls_of(given), gossip_of(given)
    assert tls is not None
    assert gossip is not None
    assert (str(tls.cert), str(tls.key), str(tls.client_ca)) == (
        "/etc/fleet-tls/tls.crt", "/etc/fleet-tls/tls.key", "/etc/fleet-client-ca/ca.crt",
    )  # fmt: skip
    assert (str(gossip.key), gossip.port, gossip.first_port, given.processes) == ("/etc/fleet-gossip/key", 8082, 8082, 3)
    assert given.admin_port == 8081


def test_secrets_are_mounted_and_probes_go_where_no_certificate_is_needed():
    spec = pod(tls=TLS, gossip=GOSSIP)
    container = spec["containers"][0]
    volumes = {volume["name"]: volume["secret"] for volume in spec["volumes"]}
    assert volumes["tls"] == {"secretName": "web", "defaultMode": 0o444}
    assert volumes["client-ca"]["items"] == [{"key": "roots.pem", "path": "ca.crt"}]
    assert volumes["gossip"]["items"] == [{"key": "gossip.key", "path": "key"}]
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {"admin"}
    assert [(p["name"], p["containerPort"], p["protocol"]) for p in container["ports"]] == [
        ("http", 8080, "TCP"), ("admin", 8081, "TCP"), ("gossip", 8082, "UDP"),
    ]  # fmt: skip


@pytest.mark.parametrize(("routing", "port"), [({}, 8080), ({"tls": TLS}, 8081)])
def test_the_operator_scrapes_where_no_certificate_is_needed(routing: dict[str, object], port: int):
    status = {"podIP": "10.0.0.1", "phase": "Running"}
    live = {("Pod", "r"): {"metadata": {"labels": {ROLE: ROUTER_ROLE}}, "spec": pod(**routing), "status": status}}
    assert router_urls(live, Platform()) == [f"http://10.0.0.1:{port}"]
    status["podIP"] = "fd00::1"  # nobody could be asked there, so that sizes were held for ever
    assert router_urls(live, Platform()) == [f"http://[fd00::1]:{port}"]


@pytest.mark.parametrize(("phase", "asked"), [("Running", True), ("Pending", False), ("Failed", False), ("Succeeded", False)])
def test_a_router_pod_that_does_not_run_is_not_asked(phase: str, asked: bool):
    """One that its node's shutdown or an eviction ended stays, with its address: the load was never read in full any more, so
    that no fleet went to zero, and who got the address was read as this fleet's router. One whose image still comes has its
    address, too: so long nothing was known, and then, because it had been silent for long, for as long again."""
    status = {"podIP": "10.0.0.1", "phase": phase}
    live = {("Pod", "r"): {"metadata": {"labels": {ROLE: ROUTER_ROLE}}, "spec": pod(), "status": status}}
    assert router_urls(live, Platform()) == (["http://10.0.0.1:8080"] if asked else [])


def test_without_any_of_it_nothing_is_there_but_a_place_for_the_fleets_key():
    spec = pod()
    assert [(volume["name"], volume["secret"]["optional"]) for volume in spec["volumes"]] == [("fleet-peer-key", True)]
    assert [p["name"] for p in spec["containers"][0]["ports"]] == ["http", "gossip"]
    assert spec["containers"][0]["command"][3:] == []


def test_routers_gossip_by_the_fleets_key_where_they_have_none_of_their_own(monkeypatch: pytest.MonkeyPatch):
    for spec, own in ((pod(replicas=2), False), (pod(), False), (pod(replicas=2, gossip=GOSSIP), True)):
        for name in (PEER_KEY_ENV, PEER_SCOPE_ENV):
            monkeypatch.delenv(name, raising=False)
        container = spec["containers"][0]
        for variable in container["env"]:
            if variable["name"] in (PEER_KEY_ENV, PEER_SCOPE_ENV):
                monkeypatch.setenv(variable["name"], variable["value"])
        found = gossip_of(arguments(container["command"][1:]))
        assert found is not None
        assert found.port == 8082
        assert (found.key is not None, found.shared is None) == (own, own)
        if not own:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            (volume,) = spec["volumes"]
            assert str(found.shared) == f"{mounts[volume['name']]}/{volume['secret']['items'][0]['path']}"
            assert found.scope == "n/f"


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        (["--gossip-key", "/k", "--gossip-port", "8082"], False),
        (["--gossip-key", "/k", "--gossip-peers", "r:8082"], False),
        (["--gossip-key", "/proc/self/fd/9", "--member", "0/2/0123456789abcdef"], True),
        (["--gossip-key", "/proc/self/fd/9", "--gossip-port", "8082", "--member", "0/2/0123456789abcdef"], True),
        (["--gossip-port", "8082"], True),
    ],
)
def test_other_pods_are_told_by_the_key_that_they_have(given: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch):
    """A port of one's own made the supervisor's key, which no other pod has, the one that all were told by; peers without a port
    were told by the fleet's key, though they were named together with another one."""
    monkeypatch.setenv(PEER_KEY_ENV, "/shared")
    found = gossip_of(arguments(["--follow", "dir:/x", *given]))
    assert found is not None
    assert (found.shared is not None) == shared


def test_another_number_of_routers_and_a_later_key_make_no_other_template():
    assert pod(replicas=1) == pod(replicas=3)


@pytest.mark.parametrize(
    ("processes", "wanted"),
    [(1, ("250m", "256Mi")), (3, ("750m", "768Mi")), (4, ("1", "1Gi")), (6, ("1500m", "1536Mi")), (64, ("16", "16Gi"))],
)
def test_requests_are_spelt_as_the_api_server_does(processes: int, wanted: tuple[str, str]):
    assert tuple(requests(processes).values()) == wanted


def test_routers_are_told_of_each_other_where_they_gossip():
    def router(name: str, ip: str | None, **labels: str) -> tuple[tuple[str, str], dict[str, Any]]:
        found = {"metadata": {"labels": {FLEET: "f", ROLE: ROUTER_ROLE, **labels}}, "status": {"podIP": ip} if ip else {}}
        return ("Pod", name), found

    live = dict([
        router("a", "10.0.0.2"), router("b", "10.0.0.1"), router("c", None), router("d", "10.0.0.9", **{ROLE: "decode"}),
        router("e", "10.0.0.8", **{FLEET: "other"}),
    ])  # fmt: skip
    assert routers_of(fleet(gossip=GOSSIP), live) == ("10.0.0.1", "10.0.0.2")
    assert routers_of(fleet(replicas=2), live) == ("10.0.0.1", "10.0.0.2")
    assert routers_of(fleet(), live) == ()


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        ({"processes": 0}, "processes"), ({"processes": 65}, "processes"), ({"tls": {}}, "secretRef"),
        ({"tls": {"secretRef": {"name": "Not_A_Name"}}}, "name"), ({"gossip": {}}, "keySecretRef"),
        ({"gossip": {"keySecretRef": {"name": "a", "key": "../b"}}}, "key"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(routing: dict[str, object], words: str):
    assert any(words in str(problem) for problem in validate(manifest(**routing)))


def test_fleet_up_makes_a_gossip_key_and_refuses_tls_and_several_routers():
    (secret,) = router_secrets(fleet(gossip=GOSSIP))
    assert (secret["metadata"]["name"], list(secret["data"])) == ("gossip", ["gossip.key"])
    assert router_secrets(fleet()) == []
    with pytest.raises(InputError, match=r"spec\.routing\.tls"):
        router_secrets(fleet(tls=TLS))
    with pytest.raises(InputError, match=r"spec\.routing\.replicas"):
        router_secrets(fleet(replicas=2))


@pytest.mark.parametrize(
    ("spec", "most_s", "drain_s"),
    [
        ({}, 3600.0, 235),  # 30 s of lease and 50 ms for each of 4096 tokens, as for workers
        ({"limits": {"maxOutputTokens": 512}}, 3600.0, 56),
        ({"limits": {"maxOutputTokens": 1_000_000}}, 3600.0, 600),
        ({"rollout": {"drainTimeout": "90s"}}, 3600.0, 90),
        ({"rollout": {"drainTimeout": "90s"}}, 20.0, 20),
    ],
)
def test_b14_routers_may_drain_as_long_as_an_answer_takes(spec: dict[str, Any], most_s: float, drain_s: int):
    """Part of the pod, like its grace period: a router learns neither from documents that may change while it lives."""
    wish = manifest()
    wish["spec"] |= spec
    found = InferenceFleet.model_validate(wish)
    pod = render_router(found, OWNER, Platform(drain_most_s=most_s))[-1]["spec"]["template"]["spec"]
    env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert env["FLEET_DRAIN_TIMEOUT_S"] == str(drain_s)
    leaving_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == leaving_s + drain_s + 5


@pytest.mark.parametrize("names", [(), ("registry",), ("registry", "mirror")])
def test_routers_have_the_installations_pull_secrets(names: tuple[str, ...]):
    """Their image comes from where the operator's does, and no field of a fleet could name credentials for it."""
    template = render_router(fleet(), OWNER, Platform(router_pull_secrets=names))[-1]["spec"]["template"]
    assert [one["name"] for one in template["spec"].get("imagePullSecrets", [])] == list(names)
    if not names:
        assert template == render_router(fleet(), OWNER, Platform())[-1]["spec"]["template"], "an upgrade restarts no router"
        assert "imagePullSecrets" not in template["spec"]

"""Routers stay as they were made until their fleet's own word about them changes, or somebody asks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.fleet import FleetSpec
from fleet_operator.cluster.interface import DEPLOYMENT, FLEET, POD, SERVICE_ACCOUNT
from fleet_operator.names import FLEET as FLEET_LABEL
from fleet_operator.names import MANAGED_BY, MANAGER, ROLE, ROUTER_ROLE
from fleet_operator.render import fleet as rendering
from fleet_operator.render.kept_router import (
    NOT_OF_ROUTERS,
    ROUTER_ACCOUNT,
    ROUTER_MADE,
    ROUTER_PARTS,
    ROUTERS_RENEWED_AT,
    asked_of,
)
from fleet_operator.render.revision import RESTARTED_AT
from fleet_operator.settings import Platform
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

TOMORROW = Platform(router_image="inferencefleet/router:0.2.0")
Spec = dict[str, Any]


async def router(world: World) -> dict[str, Any]:
    return await world.store.get(DEPLOYMENT, NAMESPACE, "f-router")


def image_of(deployment: dict[str, Any]) -> str:
    return deployment["spec"]["template"]["spec"]["containers"][0]["image"]


def upgraded(world: World, monkeypatch: pytest.MonkeyPatch, platform: Platform = TOMORROW) -> None:
    """An operator whose image is another one, and that renders routers differently."""
    monkeypatch.setattr(rendering, "ROUTER_LIVENESS_FAILURES", 99)
    world.platform = platform
    world.operator = world.new_operator()


async def edit(world: World, **parts: Any) -> None:
    spec = (await world.store.get(FLEET, NAMESPACE, "f"))["spec"]
    await world.user.apply({**manifest(), "spec": {**manifest()["spec"], **spec, **parts}})
    await world.settle()


def test_a_version_with_another_router_restarts_none(monkeypatch: pytest.MonkeyPatch):
    """Every upgrade of the chart rolled the routers of all fleets: its image has the chart's version as its tag."""

    async def scenario(world: World) -> None:
        before = await router(world)
        upgraded(world, monkeypatch)
        assert await world.step() == []
        assert await world.touch() == []
        assert await router(world) == before
        world.operator = world.new_operator()  # and once more
        assert await world.step() == []

    play(scenario)


def test_what_somebody_edits_is_undone_as_it_was(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        before = await router(world)
        upgraded(world, monkeypatch)
        for edited in (_another_image, _another_note):
            await world.user.apply(edited(await router(world)))
            await world.settle()
            found = await router(world)
            kept = found["spec"]["template"] == before["spec"]["template"]
            assert kept is (edited is _another_image)
        assert image_of(found) == TOMORROW.router_image, "a note that somebody edited is no note: made as this version does"

    play(scenario)


async def routers_pod(world: World, name: str) -> None:
    marks = {FLEET_LABEL: "f", MANAGED_BY: MANAGER, ROLE: ROUTER_ROLE}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE, "labels": marks}}
    await world.user.apply({**pod, "spec": {"containers": [{"name": "router", "image": "r"}]}})


def test_routers_whose_account_was_made_again_are_made_anew_once():
    """The API server knows no token of an account that was deleted, also when there is one of its name again: they were deaf to
    every change of their fleet until the kubelet brought another token, 48 minutes later."""

    async def scenario(world: World) -> None:
        await routers_pod(world, "f-router-a")
        await world.settle()
        before = await router(world)
        world.now += 3_600
        await world.user.delete(SERVICE_ACCOUNT, NAMESPACE, "f-router")
        await world.settle()
        account = await world.store.get(SERVICE_ACCOUNT, NAMESPACE, "f-router")
        template = (await router(world))["spec"]["template"]
        assert template["metadata"]["annotations"] == {ROUTER_ACCOUNT: account["metadata"]["uid"]}
        assert template["spec"] == before["spec"]["template"]["spec"]
        await routers_pod(world, "f-router-b")
        await world.user.delete(POD, NAMESPACE, "f-router-a", grace_s=0)
        await world.settle()
        assert (await router(world))["spec"]["template"] == template
        world.operator = world.new_operator()
        assert await world.step() == []

    play(scenario)


def test_what_two_api_servers_make_at_once_may_be_seconds_apart():
    """Their clocks are: the pods of a new fleet's routers may seem to be older than their account."""

    async def scenario(world: World) -> None:
        await routers_pod(world, "f-router-a")
        world.now += 5
        await world.user.delete(SERVICE_ACCOUNT, NAMESPACE, "f-router")
        await world.settle()
        assert "annotations" not in (await router(world))["spec"]["template"]["metadata"]

    play(scenario)


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    meta = {key: found["metadata"][key] for key in ("name", "namespace", "labels", "annotations", "ownerReferences")}
    return json.loads(json.dumps({**{key: found[key] for key in ("apiVersion", "kind", "spec")}, "metadata": meta}))


def _another_image(found: dict[str, Any]) -> dict[str, Any]:
    edited = _plain(found)
    edited["spec"]["template"]["spec"]["containers"][0]["image"] = "example.com/mine"
    return edited


def _another_note(found: dict[str, Any]) -> dict[str, Any]:
    edited = _plain(found)
    note = edited["metadata"]["annotations"][ROUTER_MADE]
    edited["metadata"]["annotations"][ROUTER_MADE] = note.replace("inferencefleet/router:0.1.0", "example.com/mine")
    return edited


EDITS: list[tuple[str, dict[str, Any], bool]] = [
    ("another policy", {"routing": {"policy": "leastLoad"}}, True),
    ("processes", {"routing": {"processes": 2}}, True),
    ("more routers", {"routing": {"replicas": 3}}, False),
    ("longer answers", {"limits": {"maxOutputTokens": 99}}, True),
    ("drain time", {"rollout": {"drainTimeout": "9s"}}, True),
    ("surge", {"rollout": {"maxSurgeGpus": 3}}, False),
    ("objective of decoding", {"slo": {"itl": {"p99": "1s"}}}, False),
    ("objective of the first token", {"slo": {"ttft": {"p99": "1s"}}}, True),
    ("keys", {"tenants": {"secretRef": {"name": "keys"}}}, True),
    ("interval", {"telemetry": {"interval": "9s"}}, False),
    ("traces", {"telemetry": {"traces": {"endpoint": "http://c"}}}, True),
    ("headers of traces", {"telemetry": {"traces": {"endpoint": "http://c", "headersSecretRef": {"name": "s"}}}}, True),
    ("an adapter", {"model": {"source": "file:///m", "adapters": [{"name": "a", "source": "hf://a/b"}]}}, False),
    ("scaling", {"scaling": {"mode": "manual"}}, False),
    ("workers", {"engine": {"image": "example.com/worker:2"}}, False),
]


@pytest.mark.parametrize(("parts", "renewed"), [row[1:] for row in EDITS], ids=[row[0] for row in EDITS])
def test_what_the_user_says_about_routers_makes_them_anew(monkeypatch: pytest.MonkeyPatch, parts: Spec, renewed: bool):
    """A field may be newer than the image that runs, and a router passes over what it does not know."""

    async def scenario(world: World) -> None:
        upgraded(world, monkeypatch)
        await edit(world, **parts)
        assert (image_of(await router(world)) == TOMORROW.router_image) is renewed

    play(scenario)


@pytest.mark.parametrize("note", [RESTARTED_AT, ROUTERS_RENEWED_AT])
def test_routers_are_renewed_when_their_fleet_is_asked(monkeypatch: pytest.MonkeyPatch, note: str):
    async def scenario(world: World) -> None:
        upgraded(world, monkeypatch)
        asked = manifest()
        asked["metadata"]["annotations"] = {note: "now"}
        await world.user.apply(asked)
        await world.settle()
        assert image_of(await router(world)) == TOMORROW.router_image

    play(scenario)


def test_or_all_of_them_by_a_flag(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        upgraded(world, monkeypatch, replace(TOMORROW, renew_routers=True))
        await world.settle()
        assert image_of(await router(world)) == TOMORROW.router_image
        assert await world.touch() == []

    play(scenario)


def test_routers_of_before_this_note_are_made_as_this_version_does(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        old = _plain(await router(world))
        del old["metadata"]["annotations"][ROUTER_MADE]
        await world.store.delete(DEPLOYMENT, NAMESPACE, "f-router")
        await world.store.apply(old)
        upgraded(world, monkeypatch)
        await world.settle()
        assert image_of(await router(world)) == TOMORROW.router_image

    play(scenario)


def test_a_fleet_without_a_word_has_the_digest_of_any_version():
    """What equals its default is left out: a version with one more field, or another default, restarts nothing."""
    plain = InferenceFleet.model_validate(manifest())
    said = manifest(routing={"policy": "kvAware", "replicas": 1}, limits={"maxOutputTokens": 4096}, telemetry={"interval": "5s"})
    assert asked_of(InferenceFleet.model_validate(said)) == asked_of(plain)


def test_every_part_of_a_spec_is_one_of_routers_or_is_not():
    """A new part has to be named here or there: routers of before would not act on it."""
    others = {"model", "engine", "tiers", "scaling", "rollout", "network_policy", "deletion", "healing"}
    assert set(FleetSpec.model_fields) == set(ROUTER_PARTS) | others
    for part, names in NOT_OF_ROUTERS.items():
        known = FleetSpec.model_fields[part].annotation
        assert names <= set(known.model_fields), part  # type: ignore[union-attr]

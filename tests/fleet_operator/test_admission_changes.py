"""An admission webhook or a policy of the cluster changes, or refuses, what the operator writes: what is there stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet_operator.cluster.interface import (
    DEPLOYMENT,
    FLEET,
    PDB,
    POD,
    SERVICE,
    ClusterError,
    InvalidError,
    Kind,
    WatchEvent,
)
from fleet_operator.cluster.kinds import kind_of
from fleet_operator.cluster.merge import clone
from fleet_operator.names import MANAGED_BY
from fleet_operator.render.kept_router import ROUTERS_RENEWED_AT
from tests.fleet_operator.world import NAMESPACE, Api, World, manifest

RUNBOOK = Path(__file__).parents[2] / "operator/RUNBOOK.md"
Change = Callable[[dict[str, Any]], dict[str, Any]]


class Changing(Api):
    """What is written to objects of one kind is changed on its way into the store."""

    kind = ""
    change: Change = staticmethod(lambda obj: obj)

    async def apply(self, obj: dict[str, Any], *, created: bool = False) -> dict[str, Any]:
        return await super().apply(self._changed(obj), created=created)

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        return await super().create(self._changed(obj))

    async def patch(self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        changed = self.change(patch) if kind.kind == self.kind and "spec" in patch else patch
        return await super().patch(kind, namespace, name, changed)

    def _changed(self, obj: dict[str, Any]) -> dict[str, Any]:
        return self.change(obj) if obj["kind"] == self.kind else obj


def with_port(obj: dict[str, Any]) -> dict[str, Any]:
    ports = obj["spec"]["ports"]
    more = [] if any(port["name"] == "extra" for port in ports) else [{"name": "extra", "port": 99}]
    return {**obj, "spec": {**obj["spec"], "ports": [*ports, *more]}}


def from_mirror(obj: dict[str, Any]) -> dict[str, Any]:
    template = obj["spec"]["template"]
    containers = [{**one, "image": f"mirror.local/{one['image']}"} for one in template["spec"]["containers"]]
    return {**obj, "spec": {**obj["spec"], "template": {**template, "spec": {**template["spec"], "containers": containers}}}}


def mirrored(obj: dict[str, Any]) -> dict[str, Any]:
    has = obj["spec"]["template"]["spec"]["containers"][0]["image"]
    return obj if has.startswith("mirror.local/") else from_mirror(obj)


async def changed(kind: str, change: Change) -> World:
    world = World()
    world.api = api = Changing(world.store)
    api.kind, api.change = kind, change  # type: ignore[method-assign]
    world.operator = world.new_operator()
    await world.user.apply(manifest())
    return world


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def uid(world: World) -> str:
    found = await world.store.find(SERVICE, NAMESPACE, "f-router")
    return found["metadata"]["uid"] if found is not None else ""


def test_a_service_that_a_webhook_changes_is_not_made_anew_for_ever():
    """Incident: a policy added a port to Services. The router's was deleted and made again about twice a second, with another
    address each time, and the fleet said that it serves."""

    async def go() -> None:
        world = await changed("Service", with_port)
        await world.step()
        first = await uid(world)
        for _ in range(40):
            await world.step()
        assert await uid(world) == first
        found = await world.condition("Provisioned")
        assert (found["status"], found["reason"]) == ("False", "ApplyFailed")
        assert "Service f-router: spec.ports is not as it was written" in found["message"]
        assert "admission webhook" in found["message"]

    play(go)


def test_a_service_is_put_right_where_it_is_when_the_webhook_is_gone():
    """What the webhook, or somebody else, added stays in an apply. Incident: the Service had to be deleted by hand, and got
    another address, as it did after every such edit."""

    async def go() -> None:
        world = await changed("Service", with_port)
        for _ in range(5):
            await world.step()
        world.api.kind = ""  # type: ignore[attr-defined]
        assert "Service f-router: spec.ports" in (await world.condition("Provisioned"))["message"]
        first = await uid(world)
        for extra in ({}, {"spec": {"ports": [{"name": "http", "port": 8080}, {"name": "extra", "port": 99}]}}):
            await world.user.patch(SERVICE, NAMESPACE, "f-router", extra)
            for _ in range(20):
                await world.step()
            assert (await world.condition("Ready"))["status"] == "True"
            found = await world.store.get(SERVICE, NAMESPACE, "f-router")
            assert (found["metadata"]["uid"], [port["name"] for port in found["spec"]["ports"]]) == (first, ["http"])

    play(go)


def test_a_webhook_that_changes_a_service_costs_few_requests():
    async def go() -> None:
        world = await changed("Service", with_port)
        for _ in range(5):
            await world.step()
        world.operator, before = world.new_operator(), await uid(world)
        asked = 0
        for _ in range(100):
            world.operator.touch((NAMESPACE, "f"))
            asked += sum(kind == "Service" for _, kind, _ in await world.step())
        assert (await uid(world), asked <= 210) == (before, True), asked

    play(go)


@pytest.mark.parametrize("denied", [False, True])
def test_a_service_that_cannot_be_applied_is_written_whole_and_stays(denied: bool):
    """Incident: somebody gave a second port the name of ours, which makes what is applied invalid. The Service was deleted to be
    made anew, a policy refused that, and the fleet had no address."""
    words = 'admission webhook "policy.example.com" denied the request: no team'

    async def go() -> None:
        world = await changed("", with_port)
        for _ in range(5):
            await world.step()
        before = await uid(world)

        def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
            if kind != SERVICE or verb == "delete":
                return None
            double = InvalidError('Service "f-router" is invalid: spec.ports[1].name: Duplicate value: "http"')
            return double if verb == "apply" else InvalidError(words) if denied else None

        world.api.refuse = refuse
        ports = [{"name": "http", "port": 8080}, {"name": "http", "port": 99}]
        await world.user.patch(SERVICE, NAMESPACE, "f-router", {"spec": {"ports": ports}})
        for _ in range(10):
            await world.step()
        found = await world.store.get(SERVICE, NAMESPACE, "f-router")
        assert (found["metadata"]["uid"], len(found["spec"]["ports"])) == (before, 2 if denied else 1)
        assert (await world.condition("Ready"))["status"] == str(not denied)
        assert (words in (await world.condition("Provisioned"))["message"]) is denied
        told = "PutBack Service f-router: undid somebody else's edit of spec.ports"
        assert any(told in line for line in await world.events()) is not denied

    play(go)


@pytest.mark.parametrize("refused", [False, True], ids=["in-place", "anew"])
def test_a_budget_that_somebody_gave_another_bound_is_put_right(refused: bool):
    """Somebody who drained nodes wrote maxUnavailable in the place of our minAvailable. An apply leaves it, and the API takes
    no budget of both: it stayed so, and the fleet was not Ready, until somebody deleted the budget by hand."""

    async def go() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.settle()
        before = await world.store.get(PDB, NAMESPACE, "f-t-decode")
        both = InvalidError(
            'PodDisruptionBudget.policy "f-t-decode" is invalid: minAvailable and maxUnavailable cannot be both set'
        )
        verbs = ("apply", "patch") if refused else ("apply",)
        world.api.refuse = lambda verb, kind, name: both if name == "f-t-decode" and verb in verbs else None
        theirs = {"minAvailable": None, "maxUnavailable": "100%"}
        await world.user.patch(PDB, NAMESPACE, "f-t-decode", {"spec": theirs})
        for _ in range(10):
            await world.step()
        after = await world.store.get(PDB, NAMESPACE, "f-t-decode")
        assert (after["spec"], after["metadata"]["uid"] == before["metadata"]["uid"]) == (before["spec"], not refused)
        assert (await world.condition("Ready"))["status"] == "True"

    play(go)


def test_one_that_the_api_refuses_to_change_in_place_is_made_anew():
    async def go() -> None:
        world = await changed("", with_port)
        for _ in range(5):
            await world.step()
        before = await uid(world)
        fixed = InvalidError('Service "f-router" is invalid: spec.clusterIP: Invalid value: "": field is immutable')
        world.api.refuse = lambda verb, kind, name: fixed if kind == SERVICE and verb in ("apply", "patch") else None
        await world.user.patch(SERVICE, NAMESPACE, "f-router", {"spec": {"ports": [{"name": "http", "port": 99}]}})
        for _ in range(10):
            await world.step()
        assert await uid(world) not in ("", before)
        assert any("PutBack Service f-router: deleted, to be made anew" in line for line in await world.events())

    play(go)


def test_the_field_that_a_webhook_changes_is_named():
    """It said that somebody else's entries stand in the lists of the Deployment."""

    async def go() -> None:
        world = await changed("Deployment", from_mirror)
        for _ in range(20):
            await world.step()
        assert "spec.template.spec.containers[0].image is not as it was written" in (await world.condition("Ready"))["message"]

    play(go)


def test_what_was_not_undone_is_not_told_as_undone():
    """Beside the Warning that the image is not as written stood that an edit of it was undone, again and again in the log."""

    async def go() -> None:
        world = await changed("Deployment", mirrored)
        for _ in range(60):
            await world.step()
        told = await world.events()
        assert sum("Warning Refused Deployment f-router" in line for line in told) == 1
        assert [line for line in told if "PutBack" in line] == []

    play(go)


def test_what_the_runbook_says_of_a_routers_image_that_a_webhook_changes_helps():
    """It said to set the image in the fleet, which has no field for it."""

    async def go() -> None:
        world = await changed("Deployment", mirrored)
        for _ in range(5):
            await world.step()
        assert (await world.condition("Ready"))["status"] == "False"
        world.platform = replace(world.platform, router_image=f"mirror.local/{world.platform.router_image}")
        world.operator = world.new_operator()
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"annotations": {ROUTERS_RENEWED_AT: "now"}}})
        for _ in range(20):
            await world.step()
        assert (await world.condition("Ready"))["status"] == "True"
        row = next(line for line in RUNBOOK.read_text().splitlines() if line.startswith("| `Refused`"))
        assert all(word in row for word in (ROUTERS_RENEWED_AT, "routerImage"))

    play(go)


@pytest.mark.parametrize(
    "words",
    [
        "services \"f-router\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no team",
        'admission webhook "policy.example.com" denied the request: no team',
    ],
)
def test_a_service_of_which_a_policy_refuses_the_change_stays(words: str):
    """Incident: it was deleted to be made anew, and that was refused just so: the fleet had no address until somebody had
    mended the policy."""

    async def go() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.settle()
        before = await uid(world)

        def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
            return InvalidError(words) if kind == kind_of({"apiVersion": "v1", "kind": "Service"}) and verb != "delete" else None

        world.api.refuse = refuse
        patch = {"spec": {"ports": [{"name": "http", "port": 9999}]}}
        await world.user.patch(SERVICE, NAMESPACE, "f-router", patch)
        for _ in range(10):
            await world.step()
        assert await uid(world) == before
        assert words in (await world.condition("Provisioned"))["message"]

    play(go)


def test_a_policy_that_takes_our_label_from_pods_costs_few_requests():
    """Incident: each of them was asked for again in every pass, some three times a second."""

    def relabelled(obj: dict[str, Any]) -> dict[str, Any]:
        meta = obj["metadata"]
        return {**obj, "metadata": {**meta, "labels": {**meta["labels"], MANAGED_BY: "platform"}}}

    async def go() -> None:
        world = await changed("Pod", relabelled)
        await world.step()
        made = await world.store.list(POD, NAMESPACE)
        for pod in made:  # as the audit tells: they are not among those with our label
            world.operator.feed(POD, WatchEvent("DELETED", pod))
        world.look = idle  # type: ignore[method-assign]
        asked = 0
        for _ in range(300):
            world.operator.touch((NAMESPACE, "f"))
            asked += sum(verb == "create" and kind == "Pod" for verb, kind, _ in await world.step())
        assert (len(made), asked) == (3, 3 * len((0, 1, 2, 4, 8, 16, 32, *range(62, 300, 30))))

    play(go)


async def idle() -> None:
    """Nothing of it is told."""


def injected(obj: dict[str, Any]) -> dict[str, Any]:
    """What meshes, Reloader, Kyverno's and Gatekeeper's rules for whole workloads add to a Deployment, with each write."""
    template = obj["spec"]["template"]
    spec = template["spec"]
    router, *others = spec["containers"]
    if others:
        return obj
    variables = [{"name": "STAKATER_TENANTS_SECRET", "value": "x"}, *router["env"], {"name": "OTEL_SERVICE_NAME", "value": "y"}]
    mounts = [*router.get("volumeMounts", []), {"name": "more", "mountPath": "/more"}]
    spread = {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 1}
    more = {
        "containers": [{"name": "a-proxy", "image": "p"}, {**router, "env": variables, "volumeMounts": mounts}],
        "volumes": [{"name": "more", "emptyDir": {}}, *spec.get("volumes", [])],
        "topologySpreadConstraints": [spread, *spec["topologySpreadConstraints"]],
        "tolerations": [{"operator": "Exists"}],
    }
    return {**obj, "spec": {**obj["spec"], "template": {**template, "spec": {**spec, **more}}}}


def test_what_a_policy_adds_to_the_routers_pods_stays_and_is_no_fault():
    """A variable or a container more, by a policy or Reloader, and the fleet was not Ready for ever, though it serves; and its
    Deployment was written again four times a minute, which changed nothing."""

    async def go() -> None:
        world = await changed("Deployment", injected)
        await world.settle()
        found = await world.store.get(DEPLOYMENT, NAMESPACE, "f-router")
        spec = found["spec"]["template"]["spec"]
        assert [one["name"] for one in spec["containers"]] == ["a-proxy", "router"]
        assert (await world.condition("Ready"))["status"] == "True"
        assert await world.touch() == []
        world.operator = world.new_operator()
        await world.settle()
        assert await world.touch() == []
        assert [line for line in await world.events() if line.startswith("Warning") or "PutBack" in line] == []

    play(go)


OTHERS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("the image", lambda router: router.update(image="mine")),
    ("a variable of ours", lambda router: router["env"][1].update(value="9")),
    ("a variable of ours is away", lambda router: router["env"].pop(1)),
    ("a variable of ours twice", lambda router: router["env"].append({**router["env"][1], "value": "9"})),
]


@pytest.mark.parametrize("edit", [edit for _, edit in OTHERS], ids=[name for name, _ in OTHERS])
def test_what_is_ours_is_put_back_beside_what_others_added(edit: Callable[[dict[str, Any]], Any]):
    async def go() -> None:
        world = await changed("Deployment", injected)
        await world.settle()
        before = (await world.store.get(DEPLOYMENT, NAMESPACE, "f-router"))["spec"]
        theirs = clone(before["template"]["spec"]["containers"])
        edit(theirs[1])
        await world.user.patch(DEPLOYMENT, NAMESPACE, "f-router", {"spec": {"template": {"spec": {"containers": theirs}}}})
        written = await world.step()
        assert ("apply", "Deployment", "f-router") in written
        told = "PutBack Deployment f-router: undid somebody else's edit of spec.template.spec.containers"
        assert any(told in line for line in await world.events())

    play(go)

"""The Secret with the key that a fleet's pods share: who gets one, once, and what is said where there is none."""

from __future__ import annotations

import asyncio
import base64
import copy
from itertools import pairwise
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_operator import peer_keys
from fleet_operator.cluster.interface import (
    DEPLOYMENT,
    EVENT,
    FLEET,
    POD,
    POOL,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Kind,
    UnavailableError,
)
from fleet_operator.cluster.kinds import SECRET
from fleet_operator.names import COMPAT
from fleet_operator.peer_keys import AGAIN_S, EACH_S, LOOK_S
from fleet_operator.render import port, revision, worker
from fleet_operator.render.peerkey import KEY, MOUNT, VOLUME, peer_key_name
from fleet_operator.render.revision import compat_of, revision_of
from fleet_operator.settings import Platform
from fleet_wire.peerkey import HANDOFF_PROOF_ENV, HANDOFF_REQUIRED, PEER_KEY_ENV, parse_lines
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

CPU = {"name": "t", "accelerator": {"type": "cpu"}}
NO_SEED = {"tiers": [{**CPU, "kvTransfer": {"seed": {"enabled": False}}}]}
VLLM = {
    "engine": {"type": "vllm", "image": "registry.example/vllm:1"},
    "tiers": [{"name": "t", "accelerator": {"type": "h100-sxm"}}],
}
GIVEN = {"peerKey": {"secretRef": {"name": "mine", "key": "k"}}}


async def secrets(world: World) -> list[dict[str, Any]]:
    return await world.store.list(SECRET, NAMESPACE)


async def condition(world: World) -> str:
    (fleet,) = await world.store.list(FLEET, NAMESPACE)
    found = [one for one in fleet["status"]["conditions"] if one["type"] == "PeerKey"]
    return f"{found[0]['status']} {found[0]['reason']}" if found else ""


async def another_worker(world: World) -> None:
    pool = await world.pool("decode")
    await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": pool["spec"]["replicas"] + 1}})
    await world.settle()


def asked(world: World) -> list[tuple[str, str]]:
    return [(verb, kind) for verb, kind, *_ in (*world.api.writes, *world.api.looks) if kind == "Secret"]


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        ({}, 1),
        (NO_SEED, 1),
        ({**NO_SEED, "routing": {"replicas": 2}}, 1),
        ({**NO_SEED, "routing": {"replicas": 2, "gossip": {"keySecretRef": {"name": "g"}}}}, 1),
        ({"networkPolicy": {"enabled": False}}, 1),
        ({"networkPolicy": {"enabled": False}, "tiers": [{**CPU, "kvTransfer": {"seed": {"enabled": True}}}]}, 1),
        (VLLM, 0),
        ({**VLLM, "routing": {"replicas": 2}}, 1),
        ({**VLLM, "routing": {"replicas": 2, "gossip": {"keySecretRef": {"name": "g"}}}}, 0),
        (GIVEN, 0),
    ],
)
@pytest.mark.parametrize("makes", [True, False])
def test_who_needs_one_has_one_or_is_told(spec: dict[str, Any], made: int, makes: bool):
    async def go(world: World) -> None:
        world.platform = Platform(makes_keys=makes)
        world.operator = world.new_operator()
        await world.user.apply(manifest(**spec))
        await world.settle()
        assert len(await secrets(world)) == (made if makes else 0)
        assert await condition(world) == ("" if makes or not made else "False NoPeerKey")

    in_an_empty_world(go)


def in_an_empty_world(go: Any) -> None:
    asyncio.run(go(World()))


def test_it_is_random_its_fleets_alone_and_in_nothing_else(caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")

    async def scenario(world: World) -> None:
        (found,) = await secrets(world)
        (line,) = parse_lines(base64.b64decode(found["data"][KEY]))
        assert len(bytes.fromhex(line.decode())) == 32
        (fleet,) = await world.store.list(FLEET, NAMESPACE)
        (owner,) = found["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (fleet["metadata"]["uid"], True), "it goes with its fleet"
        assert found["metadata"]["name"] == peer_key_name(parse_fleet(fleet))
        others = [obj for kind in (FLEET, POD, POOL, DEPLOYMENT, EVENT) for obj in await world.store.list(kind, NAMESPACE)]
        assert len(others) > 4
        assert line.decode() not in f"{others}{caplog.text}"
        assert base64.b64encode(line).decode() not in f"{others}{caplog.text}"
        await world.user.apply(manifest("g"))
        await world.settle()
        assert len({one["data"][KEY] for one in await secrets(world)}) == 2, "each fleet has another"

    play(scenario)


def test_it_is_made_once_and_never_changed():
    """By whatever operator: one that was killed after it, one that knows nothing, in the face of what a user put into it."""

    async def scenario(world: World) -> None:
        (first,) = await secrets(world)
        data = {"data": {KEY: base64.b64encode(b"n" * 64 + b"\n" + base64.b64decode(first["data"][KEY])).decode()}}
        await world.user.patch(SECRET, NAMESPACE, first["metadata"]["name"], data)
        mine = await secrets(world)
        for _ in range(3):
            world.operator = world.new_operator()
            await another_worker(world)
            assert await secrets(world) == mine
        world.now += AGAIN_S
        await another_worker(world)
        assert await secrets(world) == mine

    play(scenario)


def test_it_is_there_before_the_first_pod_and_little_is_asked_at_rest():
    async def go(world: World) -> None:
        await world.user.apply(manifest(routing={"replicas": 2}))
        written = list[str]()
        for _ in range(4):
            written += [kind for _, kind, *_ in await world.step()]
        assert written.count("Secret") == 1, "one write"
        assert written.index("Secret") < written.index("Deployment") < written.index("Pod")
        await world.settle()
        world.api.looks.clear()
        await world.touch()
        assert asked(world) == []
        for looked in (1, 2):
            world.now += LOOK_S
            for _ in range(3):
                assert await world.touch() == [], "it is there: nothing is written"
            assert asked(world) == [("create", "Secret")] * looked
        world.operator = world.new_operator()
        await world.settle()
        assert all(verb == "create" for verb, _ in asked(world)), "never read, never listed"

    in_an_empty_world(go)


@pytest.mark.parametrize("spec", [{}, {**VLLM, "routing": {"replicas": 2}}, {**NO_SEED, "routing": {"replicas": 2}}])
@pytest.mark.parametrize("restarted", [False, True])
def test_one_that_was_deleted_comes_back_with_the_next_look_at_the_fleet(spec: dict[str, Any], restarted: bool):
    """Whatever the engine, and though nothing is made: that of a vLLM fleet came with its next worker, which may be next year."""

    async def scenario(world: World) -> None:
        (first,) = await secrets(world)
        await world.user.delete(SECRET, NAMESPACE, first["metadata"]["name"])
        await world.touch()
        assert await secrets(world) == [], "it was asked for just now"
        if restarted:
            world.operator = world.new_operator()
        world.now += LOOK_S
        written = await world.touch()
        (second,) = await secrets(world)
        assert [verb for verb, kind, _ in written if kind == "Secret"] == ["create"]
        assert second["data"] != first["data"]
        assert await world.touch() == []

    play(scenario, **spec)


def test_of_many_fleets_one_is_asked_about_each_second(monkeypatch: pytest.MonkeyPatch):
    """Each question passes the admission of the API server, and a thousand fleets ask many."""
    count = 45
    monkeypatch.setattr(peer_keys, "LOOK_S", 10.0)

    async def go(world: World) -> None:
        for number in range(count):
            await world.user.apply(manifest(f"f{number}", scaling={"mode": "manual"}, routing={"replicas": 2}, **NO_SEED))
        await world.settle()
        made = len(await secrets(world))
        world.api.looks.clear()
        for _ in range(4):
            world.now += 29
            await world.touch()
        assert made == count
        assert count <= len(asked(world)) <= 4 * 30 / EACH_S

    in_an_empty_world(go)


def test_a_fleet_that_is_made_again_waits_for_no_old_secret():
    async def scenario(world: World) -> None:
        (first,) = await secrets(world)
        kept = {**copy.deepcopy(first), "metadata": {"name": first["metadata"]["name"], "namespace": NAMESPACE}}
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.settle()
        if not await secrets(world):
            await world.user.create(kept)  # the garbage collector is late
        await world.user.apply(manifest())
        await world.settle()
        assert len(await secrets(world)) == 2

    play(scenario)


@pytest.mark.parametrize("whole", [False, True], ids=["secrets-alone", "everything"])
def test_secrets_that_are_out_of_order_keep_nobody_from_serving(whole: bool):
    """Their encryption (KMS) or an admission webhook is down: 500 for each. No pod was made, and none in the place of one that
    failed, for as long as that lasted."""

    async def go(world: World) -> None:
        words = "Internal error occurred: failed calling webhook"
        world.api.refuse = lambda verb, kind, name: UnavailableError(words) if whole or kind == SECRET else None
        await world.user.apply(manifest())
        for _ in range(6):
            world.now += 15
            await world.step()
        assert await world.workers() == ({"prefill": 0, "decode": 0} if whole else {"prefill": 1, "decode": 2})
        if not whole:
            assert words in (await world.condition("Provisioned"))["message"]
            assert (await world.condition("Available"))["status"] == "True"
            world.api.writes.clear()
            assert [at for at in await world.step() if at[0] == "create"] == [], "it is tried, and nothing else is made again"
        world.api.refuse = lambda verb, kind, name: None
        for _ in range(4):
            world.now += 15
            await world.step()
        assert len(await secrets(world)) == 1
        assert (await world.condition("Ready"))["status"] == "True"

    in_an_empty_world(go)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("error", [ForbiddenError("secrets is forbidden"), InvalidError("denied: no label team")], ids=str)
def test_without_the_right_to_make_it_the_fleet_serves_and_says_so(error: ClusterError, restarts: bool):
    async def go(world: World) -> None:
        def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
            return error if kind == SECRET else None

        world.api.refuse = refuse
        await world.user.apply(manifest())
        await world.settle()
        await world.touch()
        assert (await condition(world), await secrets(world)) == ("False NoPeerKey", [])
        (fleet,) = await world.store.list(FLEET, NAMESPACE)
        states = {one["type"]: (one["status"], one.get("message", "")) for one in fleet["status"]["conditions"]}
        assert states["Available"][0] == states["Ready"][0] == states["Provisioned"][0] == "True"
        assert "spec.peerKey.secretRef" in states["PeerKey"][1]
        if restarts:
            world.operator = world.new_operator()
            await world.settle()
            assert await condition(world) == "False NoPeerKey", "a restart is no news"
        world.api.refuse = lambda verb, kind, name: None
        world.now += AGAIN_S
        await world.settle()
        for _ in range(2):
            await world.touch()
        assert (await condition(world), len(await secrets(world))) == ("", 1)

    in_an_empty_world(go)


def test_a_right_that_is_taken_away_is_not_told_as_a_key_that_is_gone():
    """The Secret was there, and everybody had it: the status said that nobody gossips, and to make another one."""

    async def scenario(world: World) -> None:
        world.platform = Platform(makes_keys=False)
        world.operator = world.new_operator()
        await world.settle()
        assert len(await secrets(world)) == 1
        (fleet,) = await world.store.list(FLEET, NAMESPACE)
        (found,) = [one for one in fleet["status"]["conditions"] if one["type"] == "PeerKey"]
        assert "unless the Secret f-peers-... of before is still there" in found["message"]
        assert (await world.condition("Ready"))["status"] == "True"

    play(scenario)


def test_a_refusal_that_passes_costs_a_moment_and_one_that_lasts_few_requests():
    """An API server's admission that did not know our kinds yet, for half a minute: the key came ten minutes later."""

    async def go(world: World) -> None:
        tries = list[float]()

        def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
            if kind == SECRET:
                tries.append(world.now)
                return ForbiddenError("cannot find RESTMapping")
            return None

        world.api.refuse = refuse
        await world.user.apply(manifest())
        await world.settle()
        for _ in range(20):
            world.now += 29
            await world.touch()
        waits = [round(after - before) for before, after in pairwise(tries)]
        assert waits[0] < 60
        assert waits[1:4] == [30, 60, 120]
        assert len(tries) <= 8
        world.api.refuse = lambda verb, kind, name: None
        world.now += AGAIN_S
        await world.touch()
        assert len(await secrets(world)) == 1

    in_an_empty_world(go)


def test_a_conflict_about_something_else_is_no_secret():
    """A quota that others change at the same moment is a conflict, too: it was taken for a Secret that is there."""

    async def go(world: World) -> None:
        refused = list[str]()

        def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
            if kind != SECRET or refused:
                return None
            refused.append(name)
            return ConflictError("Operation cannot be fulfilled on resourcequotas: the object has been modified")

        world.api.refuse = refuse
        await world.user.apply(manifest())
        await world.settle()
        assert refused
        assert len(await secrets(world)) == 1

    in_an_empty_world(go)


@pytest.mark.parametrize("spec", [{}, GIVEN, NO_SEED, {**NO_SEED, **GIVEN}], ids=["plain", "named", "no-seed", "no-seed-named"])
def test_an_upgrade_restarts_nothing(monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]):
    """Workers and routers that an older operator made stay as they are, also when more come; new revisions have the key. They
    never pair with those of before, of which one may have none: their compatibility is another one."""

    async def go(world: World) -> None:
        with monkeypatch.context() as older:
            older.setattr(worker, "guard_hand_off", lambda fleet, container, spec: None)
            older.setattr(port, "mount_peer_key", lambda fleet, container, spec: None)
            older.setattr(revision, "hands_over", lambda fleet: False)
            await world.user.apply(manifest(**{**spec, "routing": {"replicas": 2}}))
            await world.settle()
            before = await made(world)
        world.operator = world.new_operator()
        await world.settle()
        world.now += AGAIN_S
        await world.settle()
        assert await made(world) == before
        await another_worker(world)
        pods = await world.store.list(POD, NAMESPACE)
        assert not any(VOLUME in str(pod) or HANDOFF_PROOF_ENV in str(pod) for pod in pods), "of the stored template"
        old = {pod["metadata"]["annotations"][COMPAT] for pod in pods}
        assert len(old) == 1
        tiers = [{**CPU, "kvTransfer": {"leaseDuration": "31s"}}]
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"tiers": manifest(tiers=tiers)["spec"]["tiers"]}})
        for _ in range(40):
            await world.step()
        pods = await world.store.list(POD, NAMESPACE)
        asked = {"name": HANDOFF_PROOF_ENV, "value": HANDOFF_REQUIRED}
        assert all(VOLUME in str(pod) and asked in pod["spec"]["containers"][0]["env"] for pod in pods)
        assert old.isdisjoint(pod["metadata"]["annotations"][COMPAT] for pod in pods)

    async def made(world: World) -> list[Any]:
        pods = [(pod["metadata"]["uid"], pod["spec"]) for pod in await world.store.list(POD, NAMESPACE)]
        return [*pods, *(one["spec"]["template"] for one in await world.store.list(DEPLOYMENT, NAMESPACE))]

    in_an_empty_world(go)


def test_a_named_secret_is_mounted_and_naming_another_one_is_another_revision():
    fleets = {name: parse_fleet(manifest(**spec)) for name, spec in
              {"none": {}, "given": GIVEN, "vllm": {**VLLM, **GIVEN}, "off": {**NO_SEED, **GIVEN}}.items()}  # fmt: skip
    tiers = {name: fleet.spec.tiers[0] for name, fleet in fleets.items()}
    assert revision_of(fleets["none"], tiers["none"]) != revision_of(fleets["given"], tiers["given"])
    for spec in (VLLM, NO_SEED):
        plain, named = (parse_fleet(manifest(**one)) for one in (spec, {**spec, **GIVEN}))
        assert revision_of(plain, plain.spec.tiers[0]) == revision_of(named, named.spec.tiers[0]), "its workers had no key"

    async def scenario(world: World) -> None:
        for pod in await world.store.list(POD, NAMESPACE):
            (container,) = pod["spec"]["containers"]
            (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == VOLUME]
            wanted = {"secretName": "mine", "optional": True, "items": [{"key": "k", "path": "key"}], "defaultMode": 0o444}
            assert volume["secret"] == wanted
            assert {"name": PEER_KEY_ENV, "value": f"{MOUNT}/key"} in container["env"]

    play(scenario, **GIVEN)


def test_workers_of_another_secret_are_another_compatibility():
    """They would greet each other in vain while one revision takes the place of the other. vLLM knows no key."""

    def compat(**spec: Any) -> str:
        fleet = parse_fleet(manifest(**spec))
        return compat_of(fleet, fleet.spec.tiers[0], Platform())

    other = {"peerKey": {"secretRef": {"name": "next", "key": "k"}}}
    assert len({compat(), compat(**GIVEN), compat(**other)}) == 3
    assert compat(**NO_SEED) == compat()
    assert compat(**VLLM) == compat(**VLLM, **GIVEN)


def test_a_new_operator_asks_of_fleets_at_rest_one_after_the_other():
    """A thousand of them asked at once: an operator that came back had as many requests more before it was at rest."""
    count = 40

    async def go(world: World) -> None:
        for number in range(count):
            await world.user.apply(manifest(f"f{number}", scaling={"mode": "manual"}))
        await world.settle()
        world.operator = world.new_operator()
        world.api.looks.clear()
        await world.settle()
        assert asked(world) == []
        for _ in range(4):
            world.now += EACH_S * count / 4
            await world.touch()
        assert asked(world) == [("create", "Secret")] * count

    in_an_empty_world(go)

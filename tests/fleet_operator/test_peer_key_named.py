"""spec.peerKey that is written, changed or taken away while workers run: they get what it says, once, and the status says who has
not yet."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_operator.cluster.interface import FLEET, POD
from fleet_operator.names import REVISION, ROLE
from fleet_operator.render import revision, worker
from fleet_operator.render.peerkey import VOLUME
from fleet_operator.render.revision import RESTARTED_AT
from fleet_operator.settings import Platform
from tests.fleet_operator.test_peer_keys import GIVEN, NO_SEED, condition, in_an_empty_world, secrets
from tests.fleet_operator.world import NAMESPACE, World, manifest, play


async def keys_of(world: World) -> set[str]:
    """Secrets that its workers have."""
    pods = await world.store.list(POD, NAMESPACE)
    workers = [pod for pod in pods if pod["metadata"]["labels"].get(ROLE) in ("prefill", "decode")]
    return {one["secret"]["secretName"] for pod in workers for one in pod["spec"]["volumes"] if one["name"] == VOLUME}


async def name_key(world: World, name: str | None) -> None:
    peer_key = {"secretRef": {"name": name, "key": "k"}} if name is not None else None
    await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"peerKey": peer_key}})


async def revisions(world: World) -> set[str]:
    return {pod["metadata"]["labels"][REVISION] for pod in await world.store.list(POD, NAMESPACE)
            if REVISION in pod["metadata"]["labels"]}  # fmt: skip


@pytest.mark.parametrize("spec", [{}, NO_SEED], ids=["seed", "no-seed"])
@pytest.mark.parametrize("makes", [True, False], ids=["made", "not-made"])
def test_a_key_that_is_named_guards_the_workers_that_run(spec: dict[str, Any], makes: bool):
    """Without seeding it came with the next revision, which may be next year; and of a fleet without a key, whose status said to
    name one, the status said from then on that all was well."""

    async def go(world: World) -> None:
        world.platform = Platform(makes_keys=makes)
        world.operator = world.new_operator()
        await world.user.apply(manifest(**spec))
        await world.settle()
        own, before = await keys_of(world), await revisions(world)
        assert await condition(world) == ("" if makes else "False NoPeerKey")
        await name_key(world, "mine")
        said, serving = set[str](), list[int]()
        for _ in range(60):
            await world.step()
            said.add(await condition(world))
            serving.append(sum((await world.workers()).values()))
        assert await keys_of(world) == {"mine"}
        assert "False PeerKeyPending" in said
        assert await condition(world) == ""
        assert min(serving) >= 3, "one after the other"
        await name_key(world, None)
        await world.settle(60)
        assert (await keys_of(world), await revisions(world)) == (own, before), "back to what it was"

    in_an_empty_world(go)


def test_whatever_its_history_forgets_a_named_key_restarts_nobody_again():
    async def scenario(world: World) -> None:
        for name in ("mine", "next", "third", "mine", "next", None, "mine"):
            seen = await revisions(world)
            await name_key(world, name)
            for _ in range(40):
                await world.step()
                seen |= await revisions(world)
            assert len(seen) == 2, "one rollout"
            assert await keys_of(world) == {name or (await secrets(world))[0]["metadata"]["name"]}
            world.operator = world.new_operator()
            uids = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}
            await world.settle()
            assert [await world.touch() for _ in range(2)] == [[], []]
            assert {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)} == uids

    play(scenario, **NO_SEED, rollout={"historyLimit": 1})


def test_workers_from_before_there_were_keys_are_told_of_and_go_on_until_somebody_says_so(monkeypatch: pytest.MonkeyPatch):
    async def go(world: World) -> None:
        with monkeypatch.context() as older:
            older.setattr(worker, "guard_hand_off", lambda fleet, container, spec: None)
            older.setattr(revision, "hands_over", lambda fleet: False)
            await world.user.apply(manifest(**NO_SEED, **GIVEN))
            await world.settle()
        before = await revisions(world)
        world.operator = world.new_operator()
        await world.settle()
        assert (await revisions(world), await keys_of(world)) == (before, set())
        (fleet,) = await world.store.list(FLEET, NAMESPACE)
        (found,) = [one for one in fleet["status"]["conditions"] if one["type"] == "PeerKey"]
        assert found["reason"] == "PeerKeyPending"
        assert found["message"] == (
            "of 3 workers 3 have none and give KV to whoever reaches them, not the one that spec.peerKey names; the revision of "
            "tier t is older than keys: another value of the annotation inferencefleet.io/restarted-at replaces its workers"
        )
        anew = {"metadata": {"annotations": {RESTARTED_AT: "now"}}}
        await world.user.patch(FLEET, NAMESPACE, "f", anew)
        await world.settle(60)
        assert (await keys_of(world), await condition(world)) == ({"mine"}, "")

    in_an_empty_world(go)


def test_a_fleet_that_is_restored_under_another_uid_restarts_nobody_for_its_secrets_name():
    def stored_of(**spec: Any) -> tuple[str, dict[str, Any]]:
        fleet = parse_fleet({**manifest(**spec), "metadata": {**manifest()["metadata"], "uid": "first"}})
        tier = fleet.spec.tiers[0]
        made = revision.template_of(fleet, tier, {}, Platform())
        kept = revision.render_revision(fleet, tier, made, Platform(), {**manifest(), "metadata": {"name": "f", "uid": "first"}})
        return made.revision, revision.observe_revisions([kept])["t"]

    for spec in (NO_SEED, {}):
        name, stored = stored_of(**spec)
        again = parse_fleet({**manifest(**spec), "metadata": {**manifest()["metadata"], "uid": "second"}})
        assert revision.template_of(again, again.spec.tiers[0], stored, Platform()).revision == name
    name, stored = stored_of(**NO_SEED)
    named = parse_fleet(manifest(**NO_SEED, **GIVEN))
    assert revision.template_of(named, named.spec.tiers[0], stored, Platform()).revision != name


def test_an_operator_that_has_just_begun_takes_a_key_that_is_on_its_way_for_no_missing_one():
    """It took any word about the key for the one that it may not make it."""

    async def scenario(world: World) -> None:
        await name_key(world, "mine")
        for _ in range(3):
            await world.step()
        assert await condition(world) == "False PeerKeyPending"
        await name_key(world, None)
        world.operator = world.new_operator()
        await world.step()
        assert await condition(world) == ""

    play(scenario, **NO_SEED)

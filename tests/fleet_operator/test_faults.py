"""Old pictures, taken names, an API that does not answer, a fleet that nobody foresaw: on the in-memory store."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from fleet_operator import audit as audits
from fleet_operator.audit import audit_kind
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    EVENT,
    FLEET,
    POD,
    POOL,
    SERVICE,
    ClusterError,
    ConflictError,
    ForbiddenError,
    Kind,
    Listed,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.fleet_objects import FleetObjects
from fleet_operator.fleet_state import FleetState
from fleet_operator.names import MANAGED_BY, MANAGER
from fleet_operator.pace import ASKED_MOST_S, HELD_MOST_S, MOST_S, VAIN_BURST, VAIN_PER_S, Pace
from tests.fleet_operator.world import NAMESPACE, World, manifest, play


# -- names that are taken ------------------------------------------------------------------------------------------------
def test_an_object_without_our_labels_is_seen_before_it_is_overwritten():
    async def scenario() -> None:
        world = World()
        theirs = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "f-router", "namespace": NAMESPACE},
            "data": {"a": "b"},
        }
        await world.user.apply(theirs)
        before = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        await world.user.apply(manifest())
        for _ in range(4):
            await world.step()
        assert await world.store.get(CONFIG_MAP, NAMESPACE, "f-router") == before
        told = await world.condition("Provisioned")
        assert (told["status"], told["reason"]) == ("False", "NameConflict")
        assert "ConfigMap f-router exists and belongs to somebody else" in told["message"]
        assert (await world.condition("Ready"))["status"] == "False"
        await world.user.delete(CONFIG_MAP, NAMESPACE, "f-router")
        world.now += MOST_S
        await world.touch()
        await world.settle()
        assert (await world.condition("Provisioned"))["status"] == "True"

    asyncio.run(scenario())


def test_a_pod_of_somebody_else_is_left_alone():
    async def scenario(world: World) -> None:
        name = (await world.pool("decode"))["metadata"]["name"] + "-2"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE},
               "spec": {"containers": [{"name": "theirs", "image": "theirs"}]}}  # fmt: skip
        await world.user.apply(pod)
        await world.user.patch(POOL, NAMESPACE, (await world.pool("decode"))["metadata"]["name"], {"spec": {"replicas": 3}})
        for _ in range(4):
            await world.step()
        assert (await world.store.get(POD, NAMESPACE, name))["spec"]["containers"][0]["image"] == "theirs"
        assert (await world.condition("Provisioned"))["reason"] == "NameConflict"

    play(scenario)


# -- old pictures --------------------------------------------------------------------------------------------------------
async def forget_and_show(world: World, pictures: list[tuple[Any, dict[str, Any]]]) -> list[tuple[str, str, str]]:
    """A restarted operator that is shown `pictures`, and nothing newer; what it wrote with success."""
    world.operator = world.new_operator()
    for kind, obj in pictures:
        world.operator.feed(kind, WatchEvent("ADDED", obj))
    world.api.writes.clear()
    await world.operator.drain()
    return [write for write in world.api.writes if write[1] not in ("Event", "InferenceFleet")]


async def picture(world: World) -> list[tuple[Any, dict[str, Any]]]:
    from fleet_operator.reconciler import CHILDREN

    return [(kind, obj) for kind in (FLEET, *CHILDREN) for obj in await world.store.list(kind, NAMESPACE)]


@pytest.mark.parametrize(("shown", "true"), [(8, 2), (2, 8)], ids=["a-wish-to-grow", "a-wish-to-shrink"])
def test_an_old_wish_of_a_user_moves_nothing(shown: int, true: int):
    async def scenario(world: World) -> None:
        pool = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": true}})
        await world.settle()
        pods = await world.store.list(POD, NAMESPACE)
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": shown}})
        old = await picture(world)
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": true}})
        await forget_and_show(world, old)
        assert await world.store.list(POD, NAMESPACE) == pods
        await world.settle()
        assert (await world.workers())["decode"] == true
        assert {pod["metadata"]["uid"] for pod in pods} == {p["metadata"]["uid"] for p in await world.store.list(POD, NAMESPACE)}

    play(scenario)


def test_a_fleet_that_is_gone_is_not_raised_from_an_old_picture():
    async def scenario(world: World) -> None:
        old = await picture(world)
        await world.user.delete(FLEET, NAMESPACE, "f")
        assert await world.store.list(SERVICE, NAMESPACE) == []
        assert await forget_and_show(world, [(kind, obj) for kind, obj in old if kind == FLEET]) == []
        assert await world.store.list(SERVICE, NAMESPACE) == []
        world.api.writes.clear()
        world.now += MOST_S
        await world.operator.drain()
        assert world.api.writes == []  # what a pass reads is news as well: the fleet is forgotten

    play(scenario)


def test_late_and_repeated_news_change_nothing():
    async def scenario(world: World) -> None:
        before = await world.store.list(POD, NAMESPACE)
        await world.user.delete(POD, NAMESPACE, before[0]["metadata"]["name"])
        await world.settle()
        for pod in before:  # a watch that tells an old story again
            world.operator.feed(POD, WatchEvent("MODIFIED", pod))
        world.api.writes.clear()
        await world.operator.drain()
        assert world.api.writes == []

    play(scenario)


@pytest.mark.parametrize("kind", [POD, POOL, CONFIG_MAP, FLEET], ids=lambda kind: kind.kind)
def test_an_audit_tells_of_deletions_that_no_watch_told(kind: Any):
    async def scenario(world: World) -> None:
        name = (await world.store.list(kind, NAMESPACE))[0]["metadata"]["name"]
        await world.user.delete(kind, NAMESPACE, name, **({"grace_s": 0} if kind == POD else {}))
        world.api.writes.clear()
        await world.operator.drain()
        assert world.api.writes == []  # nobody told
        assert await audit_kind(world.store, world.operator, kind, NAMESPACE) == 1
        assert await audit_kind(world.store, world.operator, kind, NAMESPACE) == 0
        await world.settle()
        assert await world.exists(FLEET, "f") == (kind != FLEET)
        assert (await world.workers())["decode"] == (0 if kind == FLEET else 2)

    play(scenario)


def test_what_is_of_no_fleet_was_not_missed():
    """An object with our label of all objects and no fleet's: the log said every 40 s, for ever, that the watch had not told of
    it, and who read that looked for what was wrong with the API server."""

    async def scenario(world: World) -> None:
        labels = {MANAGED_BY: MANAGER}
        copy = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": NAMESPACE, "labels": labels}}
        await world.user.apply(copy)
        assert [await audit_kind(world.store, world.operator, CONFIG_MAP, NAMESPACE) for _ in range(2)] == [0, 0]

    play(scenario)


def test_a_namespace_that_was_taken_from_us_does_not_end_the_audit_of_the_others(monkeypatch: pytest.MonkeyPatch):
    """403 of the first of several: nobody looked at the rest of them, for as long as it lasted."""
    monkeypatch.setattr(audits, "AUDIT_S", 0.0)

    async def scenario(world: World) -> None:
        versions, told = world.store.versions, asyncio.Event()

        async def asked(kind: Kind, namespace: str | None, *rest: Any) -> Listed:
            if namespace == "other":
                raise ForbiddenError("403")
            return await versions(kind, namespace, *rest)

        monkeypatch.setattr(world.store, "versions", asked)
        monkeypatch.setattr(world.operator, "feed", lambda kind, event: told.set())
        pod = (await world.store.list(POD, NAMESPACE))[0]
        await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
        running = asyncio.create_task(audits.audit(world.store, world.operator, [POD], ["other", NAMESPACE]))
        await asyncio.wait_for(told.wait(), 5)
        running.cancel()

    play(scenario)


def test_an_audit_tells_of_changes_that_no_watch_told():
    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"routing": {"replicas": 2}}})
        assert await audit_kind(world.store, world.operator, FLEET, NAMESPACE) == 1
        await world.operator.drain()
        assert ("apply", "Deployment", "f-router") in world.api.writes

    play(scenario)


def test_an_operator_whose_cluster_was_restored_from_a_backup_begins_anew(monkeypatch: pytest.MonkeyPatch):
    """Its caches and watches were of a future that there was no more: it took no change of any fleet until the versions had come
    as far again, hours or days later, and said nothing."""
    monkeypatch.setattr(audits, "AUDIT_S", 0.0)
    answers = ["500", "499", "501", "opaque", "300", "301", "502", "303", "304", "305"]

    async def scenario(world: World) -> None:
        async def versions(*_: Any) -> Listed:
            return Listed({}, answers.pop(0))

        monkeypatch.setattr(world.store, "versions", versions)
        with pytest.raises(audits.RestoredError, match=r"Lists of pods have version 305, and had 502"):
            async with asyncio.timeout(5):
                await audits.audit(world.store, world.operator, [POD], [NAMESPACE])

    play(scenario)


def test_a_list_that_is_older_than_the_watch_tells_nothing():
    objects, labels = FleetObjects(), {"inferencefleet.io/fleet": "f"}
    meta = {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "9", "labels": labels}
    objects.take(POD, WatchEvent("ADDED", {"metadata": meta, "spec": {}}))
    assert objects.missed(POD, Listed({}, "8")) == ([], [])
    assert objects.missed(POD, Listed({("n", "p"): "7"}, "8")) == ([], [])
    assert objects.missed(POD, Listed({("n", "p"): "10"}, "10")) == ([("n", "p")], [])
    assert objects.missed(POD, Listed({("n", "q"): "11"}, "12"))[0] == [("n", "q")]
    (gone,) = objects.missed(POD, Listed({}, "12"))[1]
    assert gone["metadata"]["uid"] == "u"
    assert objects.missed(POD, Listed({}, "12"), within=("m",)) == ([], [])
    assert objects.missed(POOL, Listed({}, "12")) == ([], [])


def test_a_size_and_an_image_that_were_wished_while_the_operator_was_away_both_count():
    async def scenario(world: World) -> None:
        pool = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 3}})
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxBatch": 8}}})
        world.operator = world.new_operator()
        await world.settle(most=30)
        assert await world.workers() == {"prefill": 1, "decode": 3}
        assert (await world.pool("decode"))["metadata"]["name"] != pool

    play(scenario)


# -- an API that does not answer -------------------------------------------------------------------------------------------
def test_a_pass_stops_where_the_api_stops_answering():
    async def scenario(world: World) -> None:
        tried: list[str] = []

        def away(verb: str, kind: Any, name: str) -> UnavailableError:
            tried.append(f"{verb} {kind.kind}")
            return UnavailableError("away")

        for kind in (SERVICE, CONFIG_MAP):
            await world.user.delete(kind, NAMESPACE, "f-router")
        world.api.refuse = away
        for _ in range(3):
            await world.step()
        assert len([attempt for attempt in tried if attempt != "create Event"]) <= 3 * 2
        world.api.refuse = lambda verb, kind, name: None
        world.now += MOST_S
        await world.settle()
        assert await world.exists(SERVICE, "f-router")

    play(scenario)


def test_retry_after_is_obeyed_though_events_come():
    async def scenario(world: World) -> None:
        asked = UnavailableError("too many requests")
        asked.retry_after_s = 10.0
        tried: list[float] = []

        def refuse(verb: str, kind: Any, name: str) -> Any:
            tried.append(world.now)
            return asked

        await world.user.delete(SERVICE, NAMESPACE, "f-router")
        world.api.refuse = refuse
        for _ in range(25):
            await world.user.patch(POD, NAMESPACE, (await world.store.list(POD, NAMESPACE))[0]["metadata"]["name"],
                                   {"metadata": {"annotations": {"n": str(world.now)}}})  # fmt: skip
            await world.step()
        moments = sorted(set(tried))
        assert 2 <= len(moments) <= 3
        assert all(b - a >= 10 for a, b in pairwise(moments))

    play(scenario)


def test_a_conflict_is_told_only_when_it_does_not_end():
    async def scenario(world: World) -> None:
        world.api.refuse = lambda verb, kind, name: ConflictError("again") if kind == SERVICE else None
        await world.user.delete(SERVICE, NAMESPACE, "f-router")
        await world.step()
        await world.step()
        assert (await world.condition("Provisioned"))["status"] == "True"
        for _ in range(30):
            await world.step()
        assert "Service f-router: again" in (await world.condition("Provisioned"))["message"]
        assert [line for line in await world.events() if "Conflict" in line] == ["Warning Conflict Service f-router: again"]
        world.api.refuse = lambda verb, kind, name: None
        world.now += MOST_S
        await world.settle()
        assert (await world.condition("Provisioned"))["status"] == "True"

    play(scenario)


def test_a_fleet_that_nobody_foresaw_ends_no_other(monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        from fleet_operator import reconciler

        world, plan = World(), reconciler.reconcile

        def fails(fleet: Any, *args: Any) -> Any:
            if fleet.metadata.name == "bad":
                raise RuntimeError("nobody thought of this")
            return plan(fleet, *args)

        monkeypatch.setattr(reconciler, "reconcile", fails)
        for name in ("bad", "good"):
            await world.user.apply(manifest(name))
        for _ in range(4):
            await world.step()
        assert (await world.condition("Ready", "good"))["status"] == "True"
        assert any("InternalError" in line for line in await world.events())

    asyncio.run(scenario())


def test_a_fleet_that_cannot_even_be_told_of_ends_no_other(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """What failed was the telling; it failed again when the failure was told, and all passes ended."""

    async def scenario() -> None:
        from fleet_operator import recorder

        world, events_of = World(), recorder.events_of

        def fails(before: Any, after: Any, done: Any) -> Any:
            if done.fleet == "bad":
                raise RuntimeError("nobody thought of this")
            return events_of(before, after, done)

        monkeypatch.setattr(recorder, "events_of", fails)
        for name in ("bad", "good"):
            await world.user.apply(manifest(name))
        for _ in range(4):
            await world.step()
        assert (await world.condition("Ready", "good"))["status"] == "True"
        assert "fleet=ml/bad" in caplog.text

    asyncio.run(scenario())


# -- pace ------------------------------------------------------------------------------------------------------------------
def after(pace: Pace, now: float, **change: Any) -> float | None:
    return pace.after(now, **{"troubled": True, "stopped": False, "vain": 0, "asked_s": None, **change})


def test_delays_grow_to_a_bound_and_end_with_success():
    pace = Pace()
    delays = [after(pace, 0.0) for _ in range(8)]
    assert delays == [0.5, 1, 2, 4, 8, MOST_S, MOST_S, MOST_S]
    assert after(pace, 0.0, troubled=False) is None
    assert after(pace, 0.0) == 0.5
    assert pace.wait_s(0.0) == 0.0  # events come through


def test_an_api_that_is_away_is_left_alone_for_a_moment_and_one_that_asks_for_as_long_as_it_asks():
    pace = Pace()
    for _ in range(6):
        after(pace, 0.0, stopped=True)
    assert pace.wait_s(0.0) == HELD_MOST_S
    after(pace, 0.0, stopped=True, asked_s=7.0)
    assert pace.wait_s(0.0) == 7.0
    after(pace, 0.0, stopped=True, asked_s=86_400.0)
    assert pace.wait_s(0.0) == ASKED_MOST_S


@pytest.mark.parametrize("each", [1, 3, 9, 25], ids=lambda each: f"{each}-per-pass")
def test_writes_in_vain_are_bounded_at_any_time(each: int):
    pace, now, written = Pace(), 0.0, 0
    while now < 100.0:
        wait_s = pace.wait_s(now)
        if wait_s == 0.0:
            after(pace, now, troubled=False, vain=each)
            written += each
            assert written <= now * VAIN_PER_S + max(VAIN_BURST, each) + 1e-6
        now += max(0.01, wait_s)
    assert written >= 100 * VAIN_PER_S * 0.9


@pytest.mark.parametrize(
    ("settled", "verbs"), [(False, {"create"}), (True, {"create", "patch", "apply"})], ids=["new", "changed"]
)
def test_every_refused_request_counts_as_one_in_vain(settled: bool, verbs: set[str]):
    async def scenario() -> None:
        world, refused = World(), []

        def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
            if verb == "status" or kind == EVENT:
                return None
            refused.append((verb, kind.kind, name))
            return ConflictError("not now")

        await world.user.apply(manifest())
        if settled:
            await world.settle()
            limits = {"limits": {"maxOutputTokens": 7}, "routing": {"replicas": 2}}
            await world.user.patch(FLEET, NAMESPACE, "f", {"spec": limits})
        await world.look()
        world.api.refuse = refuse
        (raw,) = await world.store.list(FLEET, NAMESPACE)
        outcome = await world.operator.reconcile_once((NAMESPACE, "f"), raw, FleetState())
        assert {verb for verb, _, _ in refused} == verbs
        assert outcome.vain == len(refused)

    asyncio.run(scenario())


def test_a_clock_that_jumped_back_holds_nobody_up():
    pace = Pace()
    after(pace, 10_000.0, stopped=True, asked_s=30.0)
    assert pace.wait_s(10_000.0 - 3_600.0) == 0.0

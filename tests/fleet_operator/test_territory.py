"""Two installations never own a fleet together, whatever they were told; who holds a namespace is said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fleet_operator.cluster.guarded import GuardedCluster
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    ClusterError,
    ForbiddenError,
    Listed,
    NotFoundError,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.cluster.kinds import LEASE
from fleet_operator.cluster.kinds import NAMESPACE as NAMESPACE_KIND
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.health.fleets import readiness
from fleet_operator.territory import CLAIM, NotOursError, Selection, Territory, parse_labels
from tests.fleet_operator.world import NAMESPACE, World, play


def territory(store: MemoryCluster, installation: str, *names: str, **labels: str) -> Territory:
    return Territory(store, store.writer("births"), installation, Selection(names, labels))


def namespace(name: str, **labels: str) -> dict:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def played(scenario: Callable[[MemoryCluster], Awaitable[None]]) -> None:
    asyncio.run(scenario(MemoryCluster()))


async def until(check: Callable[[], bool]) -> None:
    for _ in range(200):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def test_overlap_is_the_firsts_and_said_once(caplog: pytest.LogCaptureFixture):
    async def scenario(store: MemoryCluster) -> None:
        a, b = territory(store, "one/a", "x", "y"), territory(store, "two/b", "y", "z")
        for name in "xyz":
            assert not a.owns(name)
            assert not b.owns(name)
        with caplog.at_level(logging.WARNING):
            await a.claim_all()
            for _ in range(3):
                await b.claim_all()
        assert [a.owns(name) for name in "xyz"] == [True, True, False]
        assert [b.owns(name) for name in "xyz"] == [False, False, True]
        assert b.foreign == {"y": "one/a"}
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "namespace y belongs to installation one/a: its fleets are left alone" in said[0]

    played(scenario)


def test_two_that_claim_at_once_are_one():
    async def scenario(store: MemoryCluster) -> None:
        all_of_them = [territory(store, name) for name in "abcdef"]
        for one in all_of_them:
            one.owns("x")
        for _ in range(2):
            await asyncio.gather(*(one.claim_all() for one in all_of_them))
        assert sum(one.owns("x") for one in all_of_them) == 1

    played(scenario)


def test_a_restarted_installation_keeps_what_it_had_and_writes_nothing():
    async def scenario(store: MemoryCluster) -> None:
        before = territory(store, "one/a")
        before.owns("x")
        await before.claim_all()
        version = (await store.get(LEASE, "x", CLAIM))["metadata"]["resourceVersion"]
        after = territory(store, "one/a")
        after.owns("x")
        await after.claim_all()
        assert after.owns("x")
        assert (await store.get(LEASE, "x", CLAIM))["metadata"]["resourceVersion"] == version

    played(scenario)


def test_writes_elsewhere_are_refused():
    async def scenario(store: MemoryCluster) -> None:
        a = territory(store, "one/a", "x")
        a.owns("x")
        await a.claim_all()
        cluster = GuardedCluster(store, a)
        await cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "x"}})
        with pytest.raises(NotOursError, match="namespace y does not belong to installation one/a"):
            await cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "y"}})
        assert [obj["metadata"]["namespace"] for obj in await store.list(CONFIG_MAP)] == ["x"]
        assert not a._writing  # of every namespace that there ever was one entry stayed

    played(scenario)


def test_labels_hand_a_namespace_over():
    """A namespace whose label changes leaves one installation, which lets go of it, and enters the other."""

    async def scenario(store: MemoryCluster) -> None:
        await store.apply(namespace("x", team="a"))
        a, b = territory(store, "one/a", team="a"), territory(store, "two/b", team="b")
        told: list[str] = []
        b.changed = told.append
        running = [asyncio.create_task(one.run()) for one in (a, b)]
        for one in (a, b):
            one.owns("x")
        await until(lambda: a.owns("x"))
        assert not b.owns("x")
        await store.apply(namespace("x", team="b"))
        await until(lambda: b.owns("x") or bool(b.foreign))
        b.owns("x")
        b._wake.set()
        await until(lambda: b.owns("x"))
        assert not a.owns("x")
        assert told == ["x"]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    played(scenario)


class Deaf:
    """A store whose watch of namespaces tells what is there, and then loses every event."""

    def __init__(self, store: MemoryCluster) -> None:
        self._store = store
        self.listed: Listed | None = None
        """What a list answers instead of the truth."""

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    async def watch(self, *where: object) -> AsyncIterator[WatchEvent]:
        async for event in self._store.watch(*where):  # type: ignore[arg-type]
            yield event
            if event.type == "SYNCED":
                await asyncio.get_running_loop().create_future()

    async def versions(self, *where: object) -> Listed:
        return self.listed or await self._store.versions(*where)  # type: ignore[arg-type]


def test_a_label_whose_event_is_lost_is_seen_by_the_audit(monkeypatch: pytest.MonkeyPatch):
    """A namespace that gained or lost our label was served, or left alone, until the watch was opened anew."""
    monkeypatch.setattr("fleet_operator.territory.RECHECK_S", 0.02)

    async def scenario(store: MemoryCluster) -> None:
        for name, team in (("x", "a"), ("y", "b"), ("z", "a")):
            await store.apply(namespace(name, team=team))
        a = Territory(Deaf(store), store.writer("births"), "one/a", Selection((), {"team": "a"}))
        for name in "xyz":
            a.owns(name)
        running = asyncio.create_task(a.run())
        await until(lambda: [a.owns(name) for name in "xyz"] == [True, False, True])
        await store.apply(namespace("y", team="a"))
        await store.apply(namespace("x", team="b"))
        await store.delete(NAMESPACE_KIND, None, "z")
        await until(lambda: [a.owns(name) for name in "xyz"] == [False, True, False])
        with pytest.raises(NotFoundError):
            await store.get(LEASE, "x", CLAIM)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    played(scenario)


def test_a_list_that_is_older_than_what_the_watch_told_changes_nothing():
    async def scenario(store: MemoryCluster) -> None:
        api = Deaf(store)
        api.listed = await store.versions(NAMESPACE_KIND, None, {"team": "a"})
        await store.apply(namespace("x", team="a"))
        a = Territory(api, store.writer("births"), "one/a", Selection((), {"team": "a"}))
        a.owns("x")
        running = asyncio.create_task(a.run())
        await until(lambda: a.owns("x"))
        await a.audit_labels()
        assert a.owns("x")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    played(scenario)


def test_while_nobody_lists_namespaces_what_was_selected_stays(caplog: pytest.LogCaptureFixture):
    async def scenario(store: MemoryCluster) -> None:
        class Mute(Deaf):
            async def versions(self, *where: object) -> Listed:
                raise UnavailableError("not now")

        await store.apply(namespace("x", team="a"))
        a = Territory(Mute(store), store.writer("births"), "one/a", Selection((), {"team": "a"}))
        a.owns("x")
        running = asyncio.create_task(a.run())
        await until(lambda: a.owns("x"))
        await a.audit_labels()
        assert a.owns("x")
        assert "audit of namespaces: not now" in caplog.text
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    played(scenario)


def test_a_claim_from_before_the_labels_changed_is_released():
    async def scenario(store: MemoryCluster) -> None:
        await store.apply(namespace("x", team="b"))
        old = territory(store, "one/a")
        old.owns("x")
        await old.claim_all()
        now = territory(store, "one/a", team="a")
        task = asyncio.create_task(now.run())
        for _ in range(200):
            try:
                await store.get(LEASE, "x", CLAIM)
            except ClusterError:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("the claim is still there")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    played(scenario)


def test_a_claim_that_could_not_be_released_is_released_later():
    """The API could not answer at that moment: the namespace stayed ours for every other installation, until we began anew."""

    async def scenario(store: MemoryCluster) -> None:
        class Busy(Deaf):
            async def delete(self, *where: object, **options: object) -> None:
                raise UnavailableError("not now")

        await store.apply(namespace("x", team="a"))
        a, b = territory(store, "one/a", team="a"), territory(store, "two/b")
        running = asyncio.create_task(a.run())
        a.owns("x")
        await until(lambda: a.owns("x"))
        a._cluster = Busy(store)  # type: ignore[assignment]
        await store.apply(namespace("x", team="b"))
        await until(lambda: not a.owns("x"))
        await a.audit_labels()
        a._cluster = store
        await a.audit_labels()
        b.owns("x")
        await b.claim_all()
        assert b.owns("x")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    played(scenario)


def test_old_claims_that_could_not_be_listed_are_released_later():
    async def scenario(store: MemoryCluster) -> None:
        class Busy(Deaf):
            error: ClusterError | None = UnavailableError("not now")

            async def list(self, *where: object) -> list[dict]:
                if self.error is not None:
                    raise self.error
                return await store.list(*where)  # type: ignore[arg-type]

        await store.apply(namespace("x", team="b"))
        old = territory(store, "one/a")
        old.owns("x")
        await old.claim_all()
        api = Busy(store)
        now = Territory(api, store.writer("births"), "one/a", Selection((), {"team": "a"}))
        await now._release_strays()
        api.error = None
        await now.audit_labels()
        with pytest.raises(NotFoundError):
            await store.get(LEASE, "x", CLAIM)

    played(scenario)


def test_a_namespace_that_lost_our_label_while_it_was_claimed_is_let_go_of():
    """The claim came after the label was gone, and nothing looked at it again: fleets there were served for ever."""

    async def scenario(store: MemoryCluster) -> None:
        class Slow:
            def __getattr__(self, name: str):
                return getattr(store, name)

            async def apply(self, obj: dict, *, created: bool = False) -> dict:
                await a._unselect("x")
                return await store.apply(obj)

        a = Territory(Slow(), store.writer("births"), "one/a", Selection((), {"team": "a"}))
        await store.apply(namespace("x", team="b"))
        a._selected.add("x")
        a.owns("x")
        await a.claim_all()
        await a.audit_labels()
        assert not a.owns("x")
        with pytest.raises(NotFoundError):
            await store.get(LEASE, "x", CLAIM)

    played(scenario)


def test_a_namespace_is_let_go_of_only_after_the_last_write():
    async def scenario(store: MemoryCluster) -> None:
        a = territory(store, "one/a", "x")
        a.owns("x")
        await a.claim_all()
        gate = asyncio.Event()

        class Slow:
            def __getattr__(self, name: str):
                return getattr(store, name)

            async def apply(self, obj: dict, *, created: bool = False) -> dict:
                await gate.wait()
                return await store.apply(obj)

        wish = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "x"}}
        writing = asyncio.create_task(GuardedCluster(Slow(), a).apply(wish))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(a._release("x"))
        await asyncio.sleep(0.1)
        assert (await store.get(LEASE, "x", CLAIM))["spec"]["holderIdentity"] == "one/a"
        gate.set()
        await asyncio.gather(writing, leaving)
        with pytest.raises(ClusterError):
            await store.get(LEASE, "x", CLAIM)

    played(scenario)


def test_a_namespace_that_was_made_again_is_the_firsts_who_claims_it():
    """Its claim went with it: two installations owned the new one together, for as long as the first of them ran."""

    async def scenario(store: MemoryCluster) -> None:
        a, b = territory(store, "one/a"), territory(store, "two/b")
        a.owns("x")
        await a.claim_all()
        await store.delete(LEASE, "x", CLAIM)
        b.owns("x")
        await b.claim_all()
        assert b.owns("x")
        await a.check_owned()
        assert not a.owns("x")
        with pytest.raises(NotOursError):
            await GuardedCluster(store, a).apply(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "x"}}
            )
        await a.claim_all()
        assert a.foreign == {"x": "two/b"}
        await b.check_owned()
        assert b.owns("x")

    played(scenario)


def test_a_claim_that_somebody_deleted_is_made_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fleet_operator.territory.RECHECK_S", 0.02)

    async def scenario(store: MemoryCluster) -> None:
        a = territory(store, "one/a", "x")
        told: list[str] = []
        a.changed = told.append
        a.owns("x")
        running = asyncio.create_task(a.run())
        await until(lambda: told == ["x"])
        await store.delete(LEASE, "x", CLAIM)
        await until(lambda: told == ["x", "x"])
        assert (await store.get(LEASE, "x", CLAIM))["spec"]["holderIdentity"] == "one/a"
        assert a.owns("x")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    played(scenario)


class Failing:
    """A store whose reads, or whose births, fail."""

    def __init__(self, store: MemoryCluster) -> None:
        self._store = store
        self.error: ClusterError | None = None
        self.reads = 0

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    async def get(self, *where: object) -> dict:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return await self._store.get(*where)  # type: ignore[arg-type]

    async def apply(self, obj: dict, *, created: bool = False) -> dict:
        if self.error is not None:
            raise self.error
        return await self._store.apply(obj, created=created)


def test_what_we_have_stays_ours_while_nobody_answers_and_few_are_asked_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fleet_operator.territory.CHECKS_MOST", 2)

    async def scenario(store: MemoryCluster) -> None:
        api = Failing(store)
        a = Territory(api, store.writer("births"), "one/a", Selection())
        for name in "xyz":
            a.owns(name)
        await a.claim_all()
        api.error, api.reads = UnavailableError("not now"), 0
        await a.check_owned()
        assert (api.reads, a.owned) == (1, 3)
        api.error, api.reads = None, 0
        await store.delete(LEASE, "z", CLAIM)
        await a.check_owned()
        assert (api.reads, a.owned) == (2, 3)
        await a.check_owned()
        assert (api.reads, a.owned) == (4, 2)

    played(scenario)


def test_one_claim_that_may_not_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch):
    """A RoleBinding was taken away: its namespace stood at the head for ever, and no other claim was looked at again."""

    async def scenario(store: MemoryCluster) -> None:
        class Barred(Failing):
            async def get(self, *where: object) -> dict:
                if where[1] == "x":
                    raise ForbiddenError("leases is forbidden")
                return await super().get(*where)

        a = Territory(store, store.writer("births"), "one/a", Selection())
        for name in "xyz":
            a.owns(name)
        await a.claim_all()
        monkeypatch.setattr(a, "_cluster", Barred(store))
        await store.delete(LEASE, "z", CLAIM)
        await a.check_owned()
        assert a.owned == 2
        assert a.owns("x")

    played(scenario)


def test_a_namespace_that_is_gone_is_not_asked_for_again(caplog: pytest.LogCaptureFixture):
    async def scenario(store: MemoryCluster) -> None:
        api = Failing(store)
        api.error = NotFoundError('namespaces "x" not found')
        a = Territory(api, api, "one/a", Selection())
        a.owns("x")
        for _ in range(3):
            await a.claim_all()
        assert api.reads == 1
        assert not caplog.records
        api.error = None
        assert not a.owns("x")
        await a.claim_all()
        assert a.owns("x")

    played(scenario)


def test_fleets_of_others_are_not_counted():
    """Every installation that sees a namespace counted its fleets; one that is told labels sees all namespaces."""

    async def scenario(world: World) -> None:
        assert readiness(world.operator.ours()) == {"True": 1, "False": 0, "Unknown": 0}
        world.operator._owns = lambda namespace: namespace != NAMESPACE
        assert readiness(world.operator.ours()) == {"True": 0, "False": 0, "Unknown": 0}

    play(scenario)


def test_labels_are_parsed_or_refused():
    assert parse_labels("team=a, tier=gold") == {"team": "a", "tier": "gold"}
    for text in ("", "team", "team=", "=a", "team=a,"):
        with pytest.raises(ValueError, match="key=value"):
            parse_labels(text)
    with pytest.raises(ValueError, match="not both"):
        Selection(("a",), {"team": "a"})

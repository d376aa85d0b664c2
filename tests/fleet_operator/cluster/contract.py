"""What every `Cluster` promises, as one suite: run on the in-memory store here and on a real API server in e2e."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    FLEET,
    POD,
    ConflictError,
    InvalidError,
    NotFoundError,
    WatchEvent,
)
from fleet_operator.cluster.kinds import LEASE, kind_of
from fleet_operator.leader.elector import Candidate, Elector
from fleet_operator.leader.fence import Fence
from fleet_operator.recorder import render_event
from fleet_planner.events import Event


@dataclass(frozen=True)
class Store:
    """One implementation under test: ours, a second field manager on the same objects, and a namespace to use."""

    cluster: Any
    other: Any
    namespace: str
    pause_s: float
    """Between two looks at something that happens by itself: 0 where it happens at once."""


Promise = Callable[[Store], Awaitable[None]]
PROMISES: list[Promise] = []


def promise(check: Promise) -> Promise:
    PROMISES.append(check)
    return check


def config_map(store: Store, name: str, data: dict[str, str], **metadata: Any) -> dict[str, Any]:
    where = {"name": name, "namespace": store.namespace, **metadata}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": where, "data": data}


def pod(store: Store, name: str, **spec: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "none", "command": ["true"]}]
    where = {"name": name, "namespace": store.namespace}
    # nobody schedules it, so that only the test writes to it
    spec = {"schedulerName": "nobody", "containers": containers, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": where, "spec": spec}


def deployment(store: Store, name: str, **template: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "env": [{"name": "A", "value": "1"}], **template}
    spec = {
        "replicas": 0,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}},
    }
    where = {"name": name, "namespace": store.namespace}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": where, "spec": spec}


def fleet(store: Store, name: str, **spec: Any) -> dict[str, Any]:
    where = {"name": name, "namespace": store.namespace}
    least = {"model": {"source": "file:///m"}, "tiers": [{"name": "t", "accelerator": {"type": "cpu"}}]}
    return {"apiVersion": FLEET.api_version, "kind": FLEET.kind, "metadata": where, "spec": {**least, **spec}}


def owner(obj: dict[str, Any]) -> dict[str, Any]:
    reference = {"apiVersion": obj["apiVersion"], "kind": obj["kind"]}
    return {**reference, "name": obj["metadata"]["name"], "uid": obj["metadata"]["uid"], "controller": True}


async def eventually(store: Store, check: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(400):
        if await check():
            return
        await asyncio.sleep(store.pause_s)
    raise AssertionError("it did not happen")


async def is_gone(store: Store, kind: Any, name: str) -> bool:
    try:
        await store.cluster.get(kind, store.namespace, name)
    except NotFoundError:
        return True
    return False


@contextlib.asynccontextmanager
async def watching(store: Store, labels: dict[str, str] | None = None) -> AsyncIterator[Callable[[], Awaitable[WatchEvent]]]:
    events = store.cluster.watch(CONFIG_MAP, store.namespace, labels)

    async def following() -> WatchEvent:
        while True:
            event = await asyncio.wait_for(anext(events), 10)
            # a real namespace has a ConfigMap of its own
            if event.type == "SYNCED" or event.object["metadata"]["name"] != "kube-root-ca.crt":
                return event

    try:
        yield following
    finally:
        await events.aclose()


def told(event: WatchEvent) -> tuple[str, str]:
    return event.type, event.object["metadata"]["name"] if event.object else ""


@promise
async def an_object_that_is_not_there_is_not_found(store: Store) -> None:
    with pytest.raises(NotFoundError, match='configmaps "absent" not found'):
        await store.cluster.get(CONFIG_MAP, store.namespace, "absent")
    with pytest.raises(NotFoundError):
        await store.cluster.delete(CONFIG_MAP, store.namespace, "absent")
    with pytest.raises(NotFoundError):
        await store.cluster.patch_status(POD, store.namespace, "absent", {"phase": "Running"})


@promise
async def apply_creates_and_the_server_fills_in_identity(store: Store) -> None:
    made = await store.cluster.apply(config_map(store, "made", {"a": "1"}, labels={"app": "x"}))
    metadata = made["metadata"]
    assert metadata["uid"]
    assert metadata["resourceVersion"]
    assert metadata["creationTimestamp"].endswith("Z")
    read = await store.cluster.get(CONFIG_MAP, store.namespace, "made")
    assert (read["apiVersion"], read["kind"], read["data"]) == ("v1", "ConfigMap", {"a": "1"})
    assert read["metadata"]["uid"] == metadata["uid"]


@promise
async def an_equal_apply_writes_nothing(store: Store) -> None:
    first = await store.cluster.apply(config_map(store, "equal", {"a": "1"}))
    second = await store.cluster.apply(config_map(store, "equal", {"a": "1"}))
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


@promise
async def a_field_that_is_no_longer_applied_is_removed(store: Store) -> None:
    await store.cluster.apply(config_map(store, "shrinks", {"a": "1", "b": "2"}))
    after = await store.cluster.apply(config_map(store, "shrinks", {"a": "1"}))
    assert after["data"] == {"a": "1"}


@promise
async def another_managers_fields_stay_and_ours_come_back(store: Store) -> None:
    await store.cluster.apply(config_map(store, "shared", {"a": "ours"}))
    await store.other.patch(CONFIG_MAP, store.namespace, "shared", {"data": {"a": "theirs", "b": "theirs"}})
    after = await store.cluster.apply(config_map(store, "shared", {"a": "ours"}))
    assert after["data"] == {"a": "ours", "b": "theirs"}


@promise
async def a_field_of_two_managers_outlives_one_of_them(store: Store) -> None:
    await store.cluster.apply(config_map(store, "both", {"a": "1", "b": "2"}))
    await store.other.apply(config_map(store, "both", {"b": "2"}))
    after = await store.cluster.apply(config_map(store, "both", {"a": "1"}))
    assert after["data"] == {"a": "1", "b": "2"}


@promise
async def keyed_lists_merge_item_by_item(store: Store) -> None:
    await store.cluster.apply(deployment(store, "keyed", env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]))
    theirs = deployment(store, "keyed")
    theirs["spec"] = {"template": {"spec": {"containers": [{"name": "main", "env": [{"name": "C", "value": "3"}]}]}}}
    await store.other.apply(theirs)
    after = await store.cluster.apply(deployment(store, "keyed", env=[{"name": "A", "value": "9"}]))
    container = after["spec"]["template"]["spec"]["containers"][0]
    assert sorted((env["name"], env["value"]) for env in container["env"]) == [("A", "9"), ("C", "3")]


@promise
async def other_lists_are_replaced_whole(store: Store) -> None:
    await store.cluster.apply(deployment(store, "atomic", command=["a", "b"]))
    after = await store.cluster.apply(deployment(store, "atomic", command=["c"]))
    assert after["spec"]["template"]["spec"]["containers"][0]["command"] == ["c"]


@promise
async def generation_follows_the_spec_only(store: Store) -> None:
    made = await store.cluster.apply(fleet(store, "counted"))
    labelled = fleet(store, "counted")
    labelled["metadata"]["labels"] = {"a": "b"}
    same = await store.cluster.apply(labelled)
    changed = await store.cluster.apply({**labelled, "spec": {**labelled["spec"], "limits": {"maxOutputTokens": 9}}})
    generations = [obj["metadata"]["generation"] for obj in (made, same, changed)]
    assert generations == [1, 1, 2]
    assert same["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]


@promise
async def a_running_pods_command_cannot_be_edited(store: Store) -> None:
    await store.cluster.apply(pod(store, "fixed"))
    edited = pod(store, "fixed", containers=[{"name": "main", "image": "none", "command": ["false"]}])
    with pytest.raises(InvalidError, match='Pod "fixed" is invalid: spec: Forbidden: pod updates may not change fields'):
        await store.cluster.apply(edited)


@promise
async def list_filters_by_labels_in_name_order(store: Store) -> None:
    for name, app in [("l-c", "x"), ("l-a", "x"), ("l-b", "y")]:
        await store.cluster.apply(config_map(store, name, {}, labels={"listed": app}))
    found = await store.cluster.list(CONFIG_MAP, store.namespace, {"listed": "x"})
    assert [obj["metadata"]["name"] for obj in found] == ["l-a", "l-c"]
    assert {obj["kind"] for obj in found} == {"ConfigMap"}
    everywhere = await store.cluster.list(CONFIG_MAP, None, {"listed": "y"})
    assert "l-b" in [obj["metadata"]["name"] for obj in everywhere]
    assert await store.cluster.list(CONFIG_MAP, store.namespace, {"listed": "nobody"}) == []


@promise
async def delete_checks_the_uid(store: Store) -> None:
    made = await store.cluster.apply(config_map(store, "precious", {}))
    with pytest.raises(ConflictError, match="the UID in the precondition"):
        await store.cluster.delete(CONFIG_MAP, store.namespace, "precious", uid="00000000-0000-0000-0000-000000000000")
    await store.cluster.delete(CONFIG_MAP, store.namespace, "precious", uid=made["metadata"]["uid"])
    assert await is_gone(store, CONFIG_MAP, "precious")


@promise
async def apply_checks_a_uid_that_it_names(store: Store) -> None:
    await store.cluster.apply(config_map(store, "named", {}))
    wrong = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(InvalidError, match=f'ConfigMap "named" is invalid: metadata.uid: Invalid value: "{wrong}": field is'):
        await store.cluster.apply(config_map(store, "named", {}, uid=wrong))
    with pytest.raises(ConflictError):
        await store.cluster.apply(config_map(store, "never-made", {}, uid=wrong))
    with pytest.raises(ConflictError, match="the object has been modified"):
        await store.cluster.apply(config_map(store, "named", {"a": "b"}, resourceVersion="999999999"))


@promise
async def an_unbound_pod_leaves_at_once_and_a_bound_one_after_its_grace(store: Store) -> None:
    await store.cluster.apply(pod(store, "unbound"))
    await store.cluster.delete(POD, store.namespace, "unbound")
    assert await is_gone(store, POD, "unbound")
    await store.cluster.apply(pod(store, "bound", nodeName="nowhere", terminationGracePeriodSeconds=300))
    await store.cluster.delete(POD, store.namespace, "bound")
    leaving = await store.cluster.get(POD, store.namespace, "bound")
    assert leaving["metadata"]["deletionTimestamp"]
    assert leaving["metadata"]["deletionGracePeriodSeconds"] == 300
    await store.cluster.delete(POD, store.namespace, "bound", grace_s=0, uid=leaving["metadata"]["uid"])
    assert await is_gone(store, POD, "bound")


@promise
async def children_leave_with_their_owner(store: Store) -> None:
    parent = await store.cluster.apply(config_map(store, "parent", {}))
    child = await store.cluster.apply(config_map(store, "child", {}, ownerReferences=[owner(parent)]))
    await store.cluster.apply(config_map(store, "grandchild", {}, ownerReferences=[owner(child)]))
    await store.cluster.delete(CONFIG_MAP, store.namespace, "parent")
    await eventually(store, lambda: is_gone(store, CONFIG_MAP, "child"))
    await eventually(store, lambda: is_gone(store, CONFIG_MAP, "grandchild"))


@promise
async def a_child_of_two_owners_stays_with_the_other(store: Store) -> None:
    one = await store.cluster.apply(config_map(store, "one", {}))
    two = await store.cluster.apply(config_map(store, "two", {}))
    references = [owner(one), {**owner(two), "controller": False}]
    await store.cluster.apply(config_map(store, "of-both", {}, ownerReferences=references))
    await store.cluster.delete(CONFIG_MAP, store.namespace, "one")

    async def has_one_owner() -> bool:
        child = await store.cluster.get(CONFIG_MAP, store.namespace, "of-both")
        return [ref["name"] for ref in child["metadata"]["ownerReferences"]] == ["two"]

    await eventually(store, has_one_owner)


@promise
async def a_child_of_a_dead_owner_is_collected(store: Store) -> None:
    parent = await store.cluster.apply(config_map(store, "dead", {}))
    await store.cluster.delete(CONFIG_MAP, store.namespace, "dead")
    await store.cluster.apply(config_map(store, "orphan", {}, ownerReferences=[owner(parent)]))
    await eventually(store, lambda: is_gone(store, CONFIG_MAP, "orphan"))


@promise
async def a_finalizer_holds_the_object(store: Store) -> None:
    held = config_map(store, "held", {}, finalizers=["inferencefleet.io/test"])
    await store.cluster.apply(held)
    await store.cluster.delete(CONFIG_MAP, store.namespace, "held")
    leaving = await store.cluster.get(CONFIG_MAP, store.namespace, "held")
    assert leaving["metadata"]["deletionTimestamp"]
    await store.cluster.patch(CONFIG_MAP, store.namespace, "held", {"metadata": {"finalizers": None}})
    assert await is_gone(store, CONFIG_MAP, "held")


@promise
async def a_list_of_finalizers_is_written_on_top_of_what_was_seen(store: Store) -> None:
    seen = await store.cluster.apply(config_map(store, "listed", {}, finalizers=["inferencefleet.io/test"]))
    meta = {key: seen["metadata"][key] for key in ("uid", "resourceVersion")}
    await store.other.patch(
        CONFIG_MAP, store.namespace, "listed", {"metadata": {"finalizers": ["a/b", "inferencefleet.io/test"]}}
    )
    with pytest.raises(ConflictError):
        await store.cluster.patch(CONFIG_MAP, store.namespace, "listed", {"metadata": {**meta, "finalizers": []}})
    await store.cluster.delete(CONFIG_MAP, store.namespace, "listed")
    for left in (["a/b"], []):
        now = (await store.cluster.get(CONFIG_MAP, store.namespace, "listed"))["metadata"]
        meta = {key: now[key] for key in ("uid", "resourceVersion")}
        made = await store.cluster.patch(CONFIG_MAP, store.namespace, "listed", {"metadata": {**meta, "finalizers": left}})
        assert (made["metadata"].get("finalizers") or []) == left
    assert await is_gone(store, CONFIG_MAP, "listed")


@promise
async def a_watch_tells_what_is_there_then_every_change(store: Store) -> None:
    await store.cluster.apply(config_map(store, "before", {}, labels={"watch": "1"}))
    async with watching(store, {"watch": "1"}) as following:
        assert told(await following()) == ("ADDED", "before")
        assert told(await following()) == ("SYNCED", "")
        await store.cluster.apply(config_map(store, "unseen", {}))
        await store.cluster.apply(config_map(store, "after", {"a": "1"}, labels={"watch": "1"}))
        added = await following()
        assert told(added) == ("ADDED", "after")
        assert added.object["data"] == {"a": "1"}
        await store.cluster.apply(config_map(store, "after", {"a": "2"}, labels={"watch": "1"}))
        assert told(await following()) == ("MODIFIED", "after")
        await store.cluster.delete(CONFIG_MAP, store.namespace, "before")
        assert told(await following()) == ("DELETED", "before")


@promise
async def leaving_the_selector_is_a_deletion_for_the_watch(store: Store) -> None:
    await store.cluster.apply(config_map(store, "mover", {}, labels={"team": "blue"}))
    async with watching(store, {"team": "blue"}) as following:
        assert told(await following()) == ("ADDED", "mover")
        assert told(await following()) == ("SYNCED", "")
        await store.cluster.apply(config_map(store, "mover", {}, labels={"team": "red"}))
        assert told(await following()) == ("DELETED", "mover")


@promise
async def what_a_reader_does_to_an_answer_stays_with_the_reader(store: Store) -> None:
    made = await store.cluster.apply(config_map(store, "mine", {"a": "1"}))
    made["data"]["a"] = "spoiled"
    assert (await store.cluster.get(CONFIG_MAP, store.namespace, "mine"))["data"] == {"a": "1"}


@promise
async def an_object_of_an_unknown_kind_is_refused(store: Store) -> None:
    with pytest.raises(InvalidError, match='no matches for kind "Nothing" in version "v1"'):
        await store.cluster.apply({"apiVersion": "v1", "kind": "Nothing", "metadata": {"name": "x"}})


@promise
async def items_of_lists_carry_their_kind(store: Store) -> None:
    await store.cluster.apply(deployment(store, "listed"))
    [found] = [d for d in await store.cluster.list(DEPLOYMENT, store.namespace) if d["metadata"]["name"] == "listed"]
    assert (found["kind"], found["apiVersion"]) == ("Deployment", "apps/v1")


@promise
async def a_fleet_is_kept_as_it_was_written_and_has_a_status(store: Store) -> None:
    made = await store.cluster.apply(fleet(store, "good"))
    assert made["spec"] == fleet(store, "good")["spec"]
    written = await store.cluster.patch_status(FLEET, store.namespace, "good", {"endpoint": "http://127.0.0.1:1"})
    assert (written["metadata"]["generation"], written["status"]["endpoint"]) == (1, "http://127.0.0.1:1")
    edited = fleet(store, "good", limits={"maxOutputTokens": 7})
    assert (await store.other.apply(edited))["metadata"]["generation"] == 2


@promise
async def a_bad_fleet_is_refused_with_the_fields_path(store: Store) -> None:
    bad = fleet(store, "bad", limits={"maxOutputTokens": 0})
    words = re.escape('InferenceFleet.inferencefleet.io "bad" is invalid: spec.limits.maxOutputTokens: Invalid value: 0: ')
    with pytest.raises(InvalidError, match=f"^{words}"):
        await store.cluster.apply(bad)
    assert await is_gone(store, FLEET, "bad")


@promise
async def an_unknown_field_of_a_fleet_is_refused(store: Store) -> None:
    with pytest.raises(InvalidError, match="colour"):
        await store.cluster.apply(fleet(store, "painted", colour="red"))


@promise
async def an_event_is_written_once_and_keeps_its_words(store: Store) -> None:
    told = await store.cluster.apply(fleet(store, "told"))
    news = Event("Warning", "Forbidden", "Pod told-0: quota → exceeded", "Apply")
    wish = render_event(told, news, 1_700_000_000.25, "operator-0")
    first = await store.cluster.apply(wish)
    again = await store.cluster.apply(wish)
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    kept = await store.cluster.get(EVENT, store.namespace, wish["metadata"]["name"])
    assert (kept["type"], kept["reason"], kept["note"]) == ("Warning", "Forbidden", "Pod told-0: quota → exceeded")
    assert kept["regarding"]["uid"] == told["metadata"]["uid"]
    assert kept["eventTime"] == "2023-11-14T22:13:20.250000Z"


@promise
async def a_lease_has_one_holder_and_can_be_handed_over(store: Store) -> None:
    now = [1_000.0]
    fences = [Fence(lambda: now[0]) for _ in range(3)]
    electors = [
        Elector(store.cluster, store.other, Candidate(store.namespace, "election", name), fence)
        for name, fence in zip("abc", fences, strict=True)
    ]
    await asyncio.gather(*(elector.attempt() for elector in electors))
    assert sum(elector.leading for elector in electors) == 1
    leader = next(elector for elector in electors if elector.leading)
    other = next(elector for elector in electors if not elector.leading)
    now[0] += 5.0
    await leader.attempt()
    await other.attempt()
    now[0] += 14.9
    await other.attempt()
    assert not other.leading
    now[0] += 0.2
    await other.attempt()
    assert other.leading
    await leader.attempt()  # it wrote on top of a version that is no longer there
    await leader.attempt()
    assert not leader.leading
    await other.release()
    await leader.attempt()
    assert leader.leading
    lease = await store.cluster.get(LEASE, store.namespace, "election")
    assert lease["spec"]["leaseTransitions"] == 3


@promise
async def create_makes_what_is_not_there_and_nothing_else(store: Store) -> None:
    made = await store.cluster.create(pod(store, "made"))
    assert made["metadata"]["uid"]
    with pytest.raises(ConflictError, match="already exists"):
        await store.other.create(pod(store, "made", terminationGracePeriodSeconds=1))
    assert (await store.cluster.get(POD, store.namespace, "made"))["spec"] == made["spec"]
    await store.cluster.delete(POD, store.namespace, "made", grace_s=0)


@promise
async def what_was_created_and_is_not_applied_goes(store: Store) -> None:
    wish = deployment(store, "taken", env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}])
    wish["metadata"]["annotations"] = {"one": "1", "two": "2"}
    made = await store.cluster.create(wish)
    await store.other.patch(DEPLOYMENT, store.namespace, "taken", {"metadata": {"annotations": {"theirs": "3"}}})
    less = deployment(store, "taken", env=[{"name": "A", "value": "1"}])
    less["metadata"]["annotations"] = {"one": "1"}
    for _ in range(2):  # the second time nothing is left to take over
        after = await _changed(store, less)
        [container] = after["spec"]["template"]["spec"]["containers"]
        assert [variable["name"] for variable in container["env"]] == ["A"]
        kept = {name: after["metadata"]["annotations"].get(name) for name in ("one", "two", "theirs")}
        assert kept == {"one": "1", "two": None, "theirs": "3"}
    assert after["metadata"]["uid"] == made["metadata"]["uid"]
    less["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
    with pytest.raises(ConflictError):  # planned from what was there before
        await store.cluster.apply({**less, "spec": {**less["spec"], "paused": True}}, created=True)


async def _changed(store: Store, wish: dict[str, Any]) -> dict[str, Any]:
    """Applied to the version that is there; again when a controller was faster."""
    for _ in range(20):
        now = await store.cluster.get(kind_of(wish), store.namespace, wish["metadata"]["name"])
        planned = {**wish["metadata"], "resourceVersion": now["metadata"]["resourceVersion"]}
        with contextlib.suppress(ConflictError):
            changed: dict[str, Any] = await store.cluster.apply({**wish, "metadata": planned}, created=True)
            return changed
        await asyncio.sleep(store.pause_s)
    raise AssertionError("every apply came too late")


@promise
async def find_gives_the_object_or_none(store: Store) -> None:
    await store.cluster.apply(config_map(store, "sought", {"a": "1"}))
    found = await store.cluster.find(CONFIG_MAP, store.namespace, "sought")
    assert found == await store.cluster.get(CONFIG_MAP, store.namespace, "sought")
    assert await store.cluster.find(CONFIG_MAP, store.namespace, "sough") is None


@promise
async def versions_are_those_of_a_list(store: Store) -> None:
    for name in ("one", "two"):
        await store.cluster.apply(config_map(store, name, {}, labels={"a": "b"}))
    listed = await store.cluster.versions(CONFIG_MAP, store.namespace, {"a": "b"})
    objects = await store.cluster.list(CONFIG_MAP, store.namespace, {"a": "b"})
    assert listed.versions == {(store.namespace, o["metadata"]["name"]): o["metadata"]["resourceVersion"] for o in objects}
    assert int(listed.version) >= max(map(int, listed.versions.values()))
    assert (await store.cluster.versions(CONFIG_MAP, store.namespace, {"a": "nobody-has-this"})).versions == {}

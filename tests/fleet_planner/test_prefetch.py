"""Which nodes fetch ahead, how many at once, who waits for them and for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.podtemplate import Toleration
from fleet_api.v1alpha1.routing import ToZeroSpec
from fleet_api.v1alpha1.status import Condition, FleetStatus, RoleStatus, TierStatus, ZeroStatus
from fleet_planner.memory import ScaleMemory
from fleet_planner.prefetch import RETRY_S, fetch_name, model_keys, plan_prefetch, repairs, suits, tolerated
from fleet_planner.reconcile import reconcile
from fleet_planner.replicas import Replica
from fleet_planner.types import Demand, FetchPod, Observed, ObservedNode, ObservedPod, ObservedPool, Template
from fleet_planner.wanted import PodWanted
from tests.fleet_planner.test_adapters import pod

GPU = "nvidia.com/gpu"
NOW = 1_000_000.0


def fleet(tier: dict[str, Any] | None = None, *, prefetch: dict[str, Any] | None = None, **model: Any) -> InferenceFleet:
    cache = {"type": "nodeLocal", "path": "/cache", **({"prefetch": prefetch} if prefetch is not None else {})}
    return InferenceFleet.model_validate(
        {
            "metadata": {"name": "f", "namespace": "n", "uid": "u"},
            "spec": {
                "model": {"source": "hf://org/name", "cache": cache, **model},
                "tiers": [{"name": "t", "accelerator": {"type": "h100-sxm"}, **(tier or {})}],
                "scaling": {"mode": "manual"},
            },
        }
    )


def node(name: str, **changes: Any) -> ObservedNode:
    return replace(ObservedNode(name, devices=frozenset({GPU})), **changes)


KEY = model_keys(fleet())["t"]


def fetching(where: str, phase: str = "Running", **changes: Any) -> FetchPod:
    name = fetch_name("f", KEY, where)
    return replace(FetchPod(name, f"u-{where}", where, KEY, phase, NOW - 10), **changes)


def seen(*nodes: str, fetching: tuple[FetchPod, ...] = (), **more: Any) -> Observed:
    template = Template("aaaaaaaa", "c", gpus=(1, 1))
    return Observed(templates={"t": template}, nodes=tuple(node(name) for name in nodes), fetching=fetching, **more)


# -- where ----------------------------------------------------------------------------------------------------------------
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "no-device": ({}, {"devices": frozenset()}, False),
    "leaving": ({}, {"leaving": True}, False),
    "a-taint": ({}, {"taints": (("team", "a", "NoSchedule"),)}, False),
    "a-mild-taint": ({}, {"taints": (("team", "a", "PreferNoSchedule"),)}, True),
    "the-devices-taint": ({}, {"taints": ((GPU, "present", "NoSchedule"),)}, True),
    "a-tolerated-taint": (
        {"decode": {"podTemplate": {"tolerations": [{"key": "team", "value": "a"}]}}},
        {"taints": (("team", "a", "NoExecute"),)},
        True,
    ),
    "another-label": ({"accelerator": {"type": "h100-sxm", "nodeSelector": {"zone": "a"}}}, {"labels": {"zone": "b"}}, False),
    "the-label": ({"accelerator": {"type": "h100-sxm", "nodeSelector": {"zone": "a"}}}, {"labels": {"zone": "a"}}, True),
    "the-label-of-one-role": ({"decode": {"podTemplate": {"nodeSelector": {"zone": "a"}}}}, {"labels": {"zone": "b"}}, True),
    "cpu": ({"accelerator": {"type": "cpu"}}, {"devices": frozenset()}, True),
}


@pytest.mark.parametrize("name", PLACES)
def test_nodes_that_may_get_workers(name: str):
    tier, changes, expected = PLACES[name]
    assert suits(fleet(tier).spec.tiers[0], node("n1", **changes)) is expected


@pytest.mark.parametrize(
    ("taint", "toleration", "expected"),
    [
        (("k", "v", "NoSchedule"), {"key": "k", "value": "v"}, True),
        (("k", "v", "NoSchedule"), {"key": "k", "value": "w"}, False),
        (("k", "v", "NoSchedule"), {"key": "k", "operator": "Exists"}, True),
        (("k", "v", "NoSchedule"), {"operator": "Exists"}, True),
        (("k", "v", "NoSchedule"), {"key": "k", "operator": "Exists", "effect": "NoExecute"}, False),
        (("k", "", "NoSchedule"), {"key": "k"}, True),
    ],
)
def test_kubernetes_rule_of_tolerations(taint: tuple[str, str, str], toleration: dict[str, Any], expected: bool):
    assert tolerated(taint, [Toleration.model_validate(toleration)]) is expected


# -- what -----------------------------------------------------------------------------------------------------------------
def test_only_a_nodes_own_cache_of_a_hub_model_is_filled_ahead():
    assert model_keys(fleet(cache={"type": "none"})) == {}
    assert model_keys(fleet(cache={"type": "pvc", "claim": "c"})) == {}
    assert model_keys(fleet(revision="v2"))["t"] != KEY
    found = plan_prefetch(fleet(cache={"type": "none"}), seen("n1", fetching=(fetching("n1"),)), NOW)
    assert ([gone.name for gone in found.delete], found.create, found.verdict) == ([fetch_name("f", KEY, "n1")], (), None)


def test_nodes_that_cannot_be_read_hold_up_nobody():
    found = plan_prefetch(fleet(), replace(seen(), nodes=None), NOW)
    assert (found.create, found.waiting, found.verdict) == (
        (), frozenset(), ("Unknown", "NodesUnknown", "the operator may not read nodes: workers fetch by themselves"),
    )  # fmt: skip


def test_so_many_at_once_in_order_of_names():
    wish = fleet(prefetch={"parallel": 2})
    found = plan_prefetch(wish, seen("n3", "n1", "n2", "n4"), NOW)
    assert [wanted.node for wanted in found.create] == ["n1", "n2"]
    assert (found.waiting, found.verdict) == ({"t"}, ("False", "Prefetching", "0 of 4 nodes have the model"))
    found = plan_prefetch(wish, seen("n1", "n2", "n3", "n4", fetching=(fetching("n1", "Succeeded"), fetching("n2"))), NOW)
    assert [wanted.node for wanted in found.create] == ["n3"]
    assert found.verdict == ("False", "Prefetching", "1 of 4 nodes have the model")


@pytest.mark.parametrize(
    ("was", "stays"),
    [
        (fetching("n1", "Pending"), False),
        (fetching("n1", "Pending", placed=True), True),
        (fetching("n1", "Failed"), False),
        (fetching("n1", "Running"), True),
        (fetching("n1", "Succeeded"), True),
        (fetching("n1", "Pending", terminating=True), True),
    ],
    ids=["waits", "begins", "failed", "runs", "has-it", "goes"],
)
def test_what_cannot_fetch_does_not_stay_on_a_node_that_gets_no_workers_any_more(was: FetchPod, stays: bool):
    """A node was cordoned or given to others: its pod was Pending, or Failed, until the node itself was gone."""
    there = replace(seen(fetching=(was,)), nodes=(node("n1", leaving=True),))
    found = plan_prefetch(fleet(), there, NOW)
    assert ([gone.reason for gone in found.delete], found.create) == ([] if stays else ["its node gets no workers now"], ())


def test_a_node_with_a_ready_worker_has_it():
    worker = pod("w", node="n1", revision="aaaaaaaa")
    assert plan_prefetch(fleet(), seen("n1", pods=(worker,)), NOW).verdict == ("True", "Cached", "1 of 1 nodes have the model")
    other = replace(worker, revision="bbbbbbbb")
    assert plan_prefetch(fleet(), seen("n1", pods=(other,)), NOW).waiting == {"t"}, "of another revision: who knows"


# -- tiers with models of their own ---------------------------------------------------------------------------------------
def two(own: dict[str, Any], **more: Any) -> InferenceFleet:
    """Tier t as ever, and `large` with a model of its own, on nodes of zone b."""
    wish = fleet(**more).model_dump(mode="json", by_alias=True, exclude_none=True)
    device = {"type": "h200", "nodeSelector": {"zone": "b"}}
    wish["spec"]["tiers"].append({"name": "large", "accelerator": device, "model": own})
    return InferenceFleet.model_validate(wish)


LARGE = {"source": "hf://org/large"}
ZONES = (node("n1", labels={"zone": "a"}), node("n2", labels={"zone": "b"}))


def of_two(fetching: tuple[FetchPod, ...] = (), **more: Any) -> Observed:
    templates = {"t": Template("aaaaaaaa", "c", gpus=(1, 1)), "large": Template("bbbbbbbb", "d", gpus=(1, 1))}
    return Observed(templates=templates, nodes=ZONES, fetching=fetching, **more)


def record(key: str, where: str, phase: str = "Succeeded", **changes: Any) -> FetchPod:
    return fetching(where, phase, key=key, name=fetch_name("f", key, where), **changes)


def test_each_tiers_nodes_fetch_its_model_and_the_first_tiers_goes_first():
    wish = two(LARGE)
    keys = model_keys(wish)
    assert (keys["t"], keys["large"] != KEY) == (KEY, True)
    found = plan_prefetch(wish, of_two(), NOW)
    assert [(one.key, one.node, one.tier) for one in found.create] == [
        (KEY, "n1", "t"), (KEY, "n2", "t"), (keys["large"], "n2", "large"),
    ]  # fmt: skip
    assert len({one.name for one in found.create}) == 3
    assert (found.waiting, found.verdict) == (
        {"t", "large"}, ("False", "Prefetching", "0 of 2 nodes have the models of their tiers"),
    )  # fmt: skip


def test_so_many_at_once_of_all_models_together():
    wish = two(LARGE, prefetch={"parallel": 2})
    assert [one.node for one in plan_prefetch(wish, of_two(), NOW).create] == ["n1", "n2"]
    running = plan_prefetch(wish, of_two((record(KEY, "n1", "Running"),)), NOW)
    assert [(one.key, one.node) for one in running.create] == [(KEY, "n2")]


def test_a_tier_waits_for_its_own_model_only():
    wish = two(LARGE)
    large = model_keys(wish)["large"]
    done = (record(KEY, "n1"), record(KEY, "n2"))
    found = plan_prefetch(wish, of_two(done), NOW)
    assert ([one.key for one in found.create], found.delete, found.waiting) == ([large], (), {"large"})
    assert found.verdict == ("False", "Prefetching", "1 of 2 nodes have the models of their tiers")
    found = plan_prefetch(wish, of_two((*done, record(large, "n2"))), NOW)
    assert (found.waiting, found.verdict) == (
        frozenset(), ("True", "Cached", "2 of 2 nodes have the models of their tiers"),
    )  # fmt: skip


def test_a_worker_has_the_model_of_its_own_tier_only():
    worker = pod("w", tier="t", node="n2", revision="aaaaaaaa")
    found = plan_prefetch(two(LARGE), of_two(pods=(worker,)), NOW)
    assert [(one.key == KEY, one.node) for one in found.create] == [(True, "n1"), (False, "n2")]
    worker = pod("w", tier="large", node="n2", revision="bbbbbbbb")
    found = plan_prefetch(two(LARGE), of_two(pods=(worker,)), NOW)
    assert [(one.key, one.node) for one in found.create] == [(KEY, "n1"), (KEY, "n2")]


def test_what_one_model_failed_with_says_its_node_once():
    wish = two(LARGE)
    failed = tuple(record(key, "n2", "Failed", message="the disk is too small") for key in model_keys(wish).values())
    found = plan_prefetch(wish, of_two((*failed, record(KEY, "n1"))), NOW)
    assert found.verdict == (
        "False", "PrefetchFailed", "1 of 2 nodes have the models of their tiers; node n2: the disk is too small",
    )  # fmt: skip


def test_a_model_that_no_tier_has_any_more_is_forgotten_and_one_from_a_folder_is_not_fetched():
    before = model_keys(two(LARGE))["large"]
    wish = two({"source": "file:///models/large"})
    assert model_keys(wish) == {"t": KEY}
    found = plan_prefetch(wish, of_two((record(KEY, "n1"), record(KEY, "n2"), record(before, "n2"))), NOW)
    assert [(gone.name, gone.reason) for gone in found.delete] == [(fetch_name("f", before, "n2"), "another model is served")]
    assert (found.create, found.waiting) == ((), frozenset())
    assert found.verdict == ("True", "Cached", "2 of 2 nodes have the model")


def test_tiers_of_one_model_share_what_nodes_fetched():
    same = two({"source": "hf://org/name"})
    assert set(model_keys(same).values()) == {KEY}
    found = plan_prefetch(same, of_two(), NOW)
    assert [(one.node, one.tier) for one in found.create] == [("n1", "t"), ("n2", "t")]


def lacking(since: float, wish: InferenceFleet) -> InferenceFleet:
    from fleet_api.conditions import rfc3339

    condition = Condition(type="ModelCached", status="False", reason="Prefetching", last_transition_time=rfc3339(since))
    return wish.model_copy(update={"status": FleetStatus(conditions=(condition,))})


@pytest.mark.parametrize(("waited_s", "waits"), [(0, True), (59, True), (60, False), (1e6, False)])
def test_waiting_has_an_end(waited_s: float, waits: bool):
    wish = lacking(NOW - waited_s, fleet(prefetch={"wait": "1m"}))
    assert bool(plan_prefetch(wish, seen("n1"), NOW).waiting) is waits


def test_a_node_that_can_never_fetch_takes_no_time_from_the_next_model():
    """Its failure kept ModelCached False, and the waiting for every later model was counted from there."""
    broken, wish, now = fetching("n3", "Failed", message="BadModel"), fleet(), NOW
    observed = seen("n1", "n3", fetching=(fetching("n1", "Succeeded"), broken))
    first = reconcile(wish, observed, now)
    now += 86_400
    wish = fleet(revision="v2").model_copy(update={"status": first.status})
    rows = [(0, {"t"}), (299, {"t"}), (300, set())]
    for later_s, waits in rows:
        observed = replace(observed, memory=first.memory if later_s == 0 else observed.memory)
        assert plan_prefetch(wish, observed, now + later_s).waiting == waits
        plan = reconcile(wish, observed, now + later_s)
        wish = wish.model_copy(update={"status": plan.status})
        observed = replace(observed, memory=plan.memory)


def test_a_model_that_every_node_had_is_waited_for_again_when_a_node_joins():
    done = (fetching("n1", "Succeeded"),)
    memory = reconcile(fleet(), seen("n1", fetching=done), NOW).memory
    assert memory["t"].lacking is None
    for later_s, waits in ((1e6, {"t"}), (1e6 + 299, {"t"}), (1e6 + 300, set())):
        observed = seen("n1", "n2", fetching=done, memory=memory)
        assert plan_prefetch(fleet(), observed, NOW + later_s).waiting == waits
        memory = reconcile(fleet(), observed, NOW + later_s).memory


@pytest.mark.parametrize(("generation", "waits"), [(0, False), (1, True)])
def test_an_operator_that_starts_goes_on_waiting_for_the_same_spec_only(generation: int, waits: bool):
    wish = lacking(NOW - 400, fleet())
    wish = wish.model_copy(update={"metadata": wish.metadata.model_copy(update={"generation": generation})})
    assert bool(plan_prefetch(wish, seen("n1"), NOW).waiting) is waits


def test_a_clock_that_was_set_back_does_not_lengthen_the_waiting():
    memory = {"t": ScaleMemory(lacking=(KEY, NOW + 3600))}
    for later_s, waits in ((0, True), (299, True), (300, False)):
        observed = seen("n1", memory=memory)
        assert bool(plan_prefetch(fleet(), observed, NOW + later_s).waiting) is waits
        memory = reconcile(fleet(), observed, NOW + later_s).memory


# -- in the plan ------------------------------------------------------------------------------------------------------------
def test_growth_waits_and_repairs_do_not():
    wish = fleet({"ratio": {"prefill": 1, "decode": 2}})
    plan = reconcile(wish, seen("n1"), NOW)
    assert (plan.create, [wanted.node for wanted in plan.fetch]) == ((), ["n1"])
    assert {pool.role: pool.replicas for pool in plan.pools} == {"prefill": 1, "decode": 2}
    done = reconcile(wish, seen("n1", fetching=(fetching("n1", "Succeeded"),)), NOW)
    assert len(done.create) == 3
    late = reconcile(lacking(NOW - 301, wish), seen("n1"), NOW)
    assert len(late.create) == 3
    workers = tuple(pod(f"w-{role}", role=role, node="n1", revision="aaaaaaaa") for role in ("prefill", "decode"))
    grown = {"t": ScaleMemory(reached=(1, 2))}
    repaired = reconcile(wish, seen("n1", "n2", pods=workers, memory=grown), NOW)
    assert [one.role for one in repaired.create] == ["decode"], "n2 still fetches, but a lost worker is replaced at once"
    assert repaired.memory["t"].reached == (1, 2)
    both = reconcile(wish, seen("n1", "n2", pods=workers, memory=grown, pools=pools(1, 2, scaled=4)), NOW)
    assert [pool.replicas for pool in both.pools] == [1, 4], "it grows, and that waits"
    assert [one.role for one in both.create] == ["decode"], "the lost one of the 2 that were there does not"
    first = reconcile(wish, seen("n1", "n2", pods=workers), NOW)
    assert (first.create, first.memory["t"].reached) == ((), (1, 1))


@pytest.mark.parametrize("known", ["AtZero", "Waking"])
def test_a_tier_that_wakes_does_not_wait_for_a_model(known: Any):
    """A node that joined meanwhile lacked the model: requests were held for 5 minutes and refused before a worker began."""
    spec = fleet({"ratio": {"prefill": 1, "decode": 2}})
    scaling = spec.spec.scaling.model_copy(update={"to_zero": ToZeroSpec(enabled=True)})
    wish = spec.model_copy(update={"spec": spec.spec.model_copy(update={"scaling": scaling})})
    zero = ZeroStatus(state=known, since="2001-09-09T01:46:40Z")
    role = RoleStatus(desired=0)
    status = FleetStatus(tiers=(TierStatus(name="t", prefill=role, decode=role, zero=zero),))
    at_zero = seen("n1", "n2", fetching=(fetching("n1", "Succeeded"),), pools=pools(0, 0), heard=Demand(1, None, NOW))
    plan = reconcile(wish.model_copy(update={"status": status}), at_zero, NOW)
    assert sorted(one.role for one in plan.create) == ["decode", "prefill"]
    assert [wanted.node for wanted in plan.fetch] == ["n2"]


OLD, NEW = "aaaaaaaa", "bbbbbbbb"


def running(*counts: tuple[str, int], revision: str = OLD, **more: Any) -> tuple[ObservedPod, ...]:
    names = [(f"f-t-{role}-{revision}-{number}", role) for role, count in counts for number in range(count)]
    return tuple(pod(name, uid=name, role=role, node="n1", revision=revision, **more) for name, role in names)


def pools(prefill: int, decode: int, *, scaled: int | None = None) -> tuple[ObservedPool, ...]:
    """As planned, and what somebody made of the decode pool's size since."""
    return tuple(
        ObservedPool(
            f"f-t-{role}-{OLD}", role, role, "t", OLD, size if scaled is None or role == "prefill" else scaled, size, size
        )
        for role, size in (("prefill", prefill), ("decode", decode))
    )


BOTH = (("prefill", 1), ("decode", 2))
LOSSES: dict[str, tuple[tuple[ObservedPod, ...], list[str]]] = {
    "nobody": (running(*BOTH), []),
    "one": (running(*BOTH)[:-1], [f"f-t-decode-{OLD}-1"]),
    "the-only-prefill": (running(*BOTH)[1:], [f"f-t-prefill-{OLD}-0"]),
    "all": ((), [f"f-t-decode-{OLD}-0", f"f-t-decode-{OLD}-1", f"f-t-prefill-{OLD}-0"]),
    "one-ended": (
        (*running(*BOTH)[:-1], replace(running(*BOTH)[-1], phase="Failed", ready=False)), [f"f-t-decode-{OLD}-2"],
    ),
    "one-still-terminates": (
        (*running(*BOTH)[:-1], replace(running(*BOTH)[-1], terminating=True, ready=False)), [f"f-t-decode-{OLD}-2"],
    ),
    "a-drained-node": ((*running(*BOTH)[:-1], replace(running(*BOTH)[-1], leaving="cordoned")), [f"f-t-decode-{OLD}-2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_workers_that_were_there_come_back_while_more_wait(name: str):
    """Growth from 2 to 4 decode workers waits for n2's model (up to 5 min); nothing was repaired meanwhile."""
    left, made = LOSSES[name]
    memory = {"t": ScaleMemory(reached=(1, 2))}
    observed = replace(seen("n1", "n2", fetching=(fetching("n1", "Succeeded"), fetching("n2"))), memory=memory)
    plan = reconcile(fleet(), replace(observed, pods=left, pools=pools(1, 2, scaled=4)), NOW)
    assert {pool.role: pool.replicas for pool in plan.pools} == {"prefill": 1, "decode": 4}
    assert sorted(one.name for one in plan.create) == made


def test_a_plan_that_makes_few_at_a_time_makes_those_that_were_there_first():
    """One of five is made in this pass: it is for the one of three that was lost, not for growth that waits."""
    workers = [Replica((one,)) for one in running(("prefill", 1), ("decode", 2))]
    one = PodWanted("w", "f-t-decode", "t", "decode", OLD, 2)
    assert repairs([one], set(), workers, (1, 5), (1, 3)) == (one,)
    assert repairs([one], set(), workers, (1, 5), (1, 2)) == ()


def test_an_operator_that_starts_after_everything_was_lost_makes_it_anew_at_once():
    roles = [RoleStatus(desired=count, ready=count) for count in (1, 2)]
    before = FleetStatus(tiers=(TierStatus(name="t", prefill=roles[0], decode=roles[1]),))
    wish = fleet().model_copy(update={"status": before})
    assert len(reconcile(wish, seen("n1", "n2", pools=pools(1, 2, scaled=4)), NOW).create) == 3


def test_a_worker_over_several_nodes_comes_back_with_all_of_its_pods_while_more_wait():
    template = Template(OLD, "c", gpus=(1, 2), nodes=(1, 2))
    observed = replace(
        seen("n1", "n2"), pods=running(("prefill", 1)), pools=pools(1, 1, scaled=3), templates={"t": template},
        memory={"t": ScaleMemory(reached=(1, 1))},
    )  # fmt: skip
    made = [one.name for one in reconcile(fleet(), observed, NOW).create]
    assert made == [f"f-t-decode-{OLD}-0", f"f-t-decode-{OLD}-0-1"]


@given(
    states=st.dictionaries(st.sampled_from(["n1", "n2", "n3", "n5"]), st.sampled_from(["", "Pending", "Running", "Failed"])),
    parallel=st.integers(1, 3),
)  # fmt: skip
def test_every_node_gets_it_in_the_end_and_never_too_many_at_once(states: dict[str, str], parallel: int):
    wish, nodes = fleet(prefetch={"parallel": parallel}), ("n1", "n2", "n3", "n4", "n5")
    pods = {name: fetching(name, phase) for name, phase in states.items() if phase}
    now = NOW
    for _ in range(40):
        found = plan_prefetch(wish, seen(*nodes, fetching=tuple(pods.values())), now)
        busy = sum(one.phase in ("Pending", "Running") for one in pods.values())
        assert len(found.create) + busy <= max(parallel, busy)
        for gone in found.delete:
            pods = {name: one for name, one in pods.items() if one.name != gone.name}
        for wanted in found.create:
            pods[wanted.node] = fetching(wanted.node, "Running", created_at=now)
        again = plan_prefetch(wish, seen(*nodes, fetching=tuple(pods.values())), now)
        assert not found.delete or again.delete == ()
        running = [name for name, one in pods.items() if one.phase in ("Pending", "Running")]
        for name in running[:1]:
            pods[name] = replace(pods[name], phase="Succeeded")
        now += RETRY_S / 4
        if found.verdict == ("True", "Cached", "5 of 5 nodes have the model"):
            return
    raise AssertionError(found.verdict)


def test_names_are_short_enough():
    assert len(fetch_name("f" * 30, KEY, "node" * 60)) <= 63
    assert isinstance(ObservedPod, type)

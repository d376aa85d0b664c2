"""Whatever is written of the key, of seeding, of replicas and of the model, in whatever order: in the end workers have the key of
the spec, and nobody was replaced for anything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_operator.cluster.interface import FLEET, POD
from fleet_operator.names import ROLE, TIER
from fleet_operator.render.peerkey import VOLUME
from tests.fleet_operator.test_peer_keys import condition
from tests.fleet_operator.world import NAMESPACE, World, play

NAMES = ("s", "u")
OPERATIONS = st.one_of(
    st.tuples(st.just("key"), st.sampled_from([None, "mine", "next"])),
    st.tuples(st.just("seed"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("replicas"), st.integers(1, 2)),
    st.tuples(st.just("model"), st.sampled_from([100, 200])),
    st.tuples(st.just("operator"), st.none()),
)


@dataclass
class Spec:
    key: str | None = None
    tokens: int = 100
    replicas: int = 1
    seeds: dict[str, bool] = field(default_factory=lambda: {"s": True, "u": False})

    def written(self) -> dict[str, Any]:
        tiers = [
            {
                "name": name, "accelerator": {"type": "cpu"}, "kvTransfer": {"seed": {"enabled": self.seeds[name]}},
                "decode": {"replicas": self.replicas + 1}, "prefill": {"replicas": 1}, "ratio": {"min": "1:3", "max": "1:1"},
            }
            for name in NAMES
        ]  # fmt: skip
        peer_key = {"secretRef": {"name": self.key, "key": "k"}} if self.key is not None else None
        return {
            "tiers": tiers, "peerKey": peer_key, "limits": {"maxOutputTokens": self.tokens}, "scaling": {"mode": "manual"},
            "rollout": {"historyLimit": 1},
        }  # fmt: skip

    def take(self, operation: tuple[Any, ...]) -> None:
        match operation:
            case ("key", key):
                self.key = key
            case ("seed", name, on):
                self.seeds[name] = on
            case ("replicas", count):
                self.replicas = count
            case ("model", tokens):
                self.tokens = tokens


async def workers(world: World, tier: str) -> dict[str, str]:
    """Which Secret each has, by uid."""
    found = {}
    for pod in await world.store.list(POD, NAMESPACE):
        labels = pod["metadata"]["labels"]
        if labels.get(ROLE) in ("prefill", "decode") and labels.get(TIER) == tier:
            (mounted,) = [one for one in pod["spec"]["volumes"] if one["name"] == VOLUME]
            found[pod["metadata"]["uid"]] = mounted["secret"]["secretName"]
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(OPERATIONS, min_size=1, max_size=8))
def test_workers_have_the_key_of_the_spec_and_nobody_is_replaced_for_less(operations: list[tuple[Any, ...]]):
    async def scenario(world: World) -> None:
        spec = Spec()
        for operation in operations:
            before = {name: await workers(world, name) for name in NAMES}
            was = (spec.key, spec.tokens, dict(spec.seeds))
            spec.take(operation)
            if operation[0] == "operator":
                world.operator = world.new_operator()
            await world.user.patch(FLEET, NAMESPACE, "f", {"spec": spec.written()})
            await world.settle(80)
            assert await condition(world) == ""
            for name in NAMES:
                after = await workers(world, name)
                assert {key if key in ("mine", "next") else None for key in after.values()} == {spec.key}
                if (spec.key, spec.tokens, spec.seeds[name]) == (was[0], was[1], was[2][name]):
                    assert before[name].keys() <= after.keys() or after.keys() <= before[name].keys(), operation
            assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **Spec().written())

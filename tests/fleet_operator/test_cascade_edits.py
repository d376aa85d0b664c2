"""A fleet gets a cascade, another tier for it, or another name for one: what routers are told at each step."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_operator.cluster.interface import CONFIG_MAP, POD
from fleet_operator.observe import workers_told
from fleet_router.config import Cascade, RouterConfig, TierRule, decode
from fleet_wire.endpoints import ROUTER_CONFIG_KEY
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

CPU = {"accelerator": {"type": "cpu"}}
Names = tuple[str, ...]


def wish(*tiers: str, rule: str = "", more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Each tier but `small` has a model of its own; all of them are the cascade, from two on."""
    routing: dict[str, Any] = {"cascade": {"tiers": list(tiers), **(more or {})}} if len(tiers) > 1 else {}
    if rule:
        routing["tierRules"] = [{"when": {"header": {"x-large": "1"}}, "tier": rule}]
    own = [{"name": name, **CPU, **({"model": {"source": f"file:///{name[0]}"}} if name != "small" else {})} for name in tiers]
    return {"tiers": own, "routing": routing}


class Loading(set[str]):
    """Pods of a tier whose model takes its time: none of them finds a node."""

    def __init__(self, tier: str) -> None:
        super().__init__()
        self._tier = tier

    def __contains__(self, name: object) -> bool:
        return f"-{self._tier}-" in str(name)


async def told(world: World) -> tuple[RouterConfig, set[str]]:
    """The routers' configuration, and the tiers of which they may use workers of both roles."""
    document = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
    roles: dict[str, set[str]] = {}
    for one in workers_told(document) or ():
        roles.setdefault(one.tier, set()).update([one.role] if one.state == "serving" else [])
    return decode(document["data"][ROUTER_CONFIG_KEY]), {tier for tier, found in roles.items() if len(found) == 2}


async def answered_in_any_case(world: World) -> Names:
    """Whichever way a request goes, there is a worker at its end. The cascade's tiers."""
    config, serving = await told(world)
    if config.cascade is None:
        assert len(serving) == 1, "it would be chance which model answers"
        return ()
    assert config.cascade.tiers[-1] in serving
    assert {rule.tier for rule in config.tier_rules} <= serving
    return config.cascade.tiers


@pytest.mark.parametrize(
    ("before", "after", "late", "meanwhile"),
    [
        pytest.param(wish("small"), wish("small", "large"), "large", (), id="a-cascade-is-begun"),
        pytest.param(wish("small", "large"), wish("small", "large", "xl"), "xl", ("small", "large"), id="a-larger-tier-comes"),
        pytest.param(wish("small", "large"), wish("small", "larger"), "larger", ("small", "large"), id="a-tier-is-renamed"),
        pytest.param(
            wish("small", "large", rule="large"), wish("small", "larger", rule="larger"), "larger", ("small", "large"),
            id="a-tier-with-a-rule-is-renamed",
        ),
    ],
)  # fmt: skip
def test_routers_send_nobody_to_a_tier_that_never_served(
    before: dict[str, Any], after: dict[str, Any], late: str, meanwhile: Names
) -> None:
    """Incident: while the model of the new tier was loaded, all requests whose draft was not good enough, and all that only the
    last tier may answer, were refused, though workers that had answered them until then were there."""

    async def scenario(world: World) -> None:
        world.late = Loading(late)
        await world.user.apply(manifest(**after))
        for _ in range(15):
            await world.step()
            assert await answered_in_any_case(world) == meanwhile
        world.late = set()
        for _ in range(15):
            await world.step()
            found = await answered_in_any_case(world)
        assert found == tuple(after["routing"]["cascade"]["tiers"])
        assert (await told(world))[0].tier_rules == tuple(decoded_rules(after))

    play(scenario, **before)


def decoded_rules(spec: dict[str, Any]) -> list[TierRule]:
    rules = spec["routing"].get("tierRules", ())
    return [TierRule(tier=rule["tier"], headers=rule["when"]["header"]) for rule in rules]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_tier_that_is_lost_for_a_moment_stays_in_the_cascade(role: str) -> None:
    """A draft that is not good enough is no answer."""

    async def scenario(world: World) -> None:
        world.late = Loading("large")
        await lose(world, f"-large-{role}-")
        for _ in range(5):
            await world.step()
            assert (await told(world))[0].cascade == Cascade(tiers=("small", "large"))

    play(scenario, **wish("small", "large"))


async def lose(world: World, part: str) -> None:
    """All pods with this in their names."""
    for pod in await world.store.list(POD, NAMESPACE):
        if part in pod["metadata"]["name"]:
            await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)

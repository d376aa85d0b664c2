"""Routers stay when the operator is upgraded, so they read what a newer one writes, and a newer router what an older one wrote.

What is pinned here may be changed only together with a way for routers of before.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleet_operator.cluster.interface import CONFIG_MAP
from fleet_router import config as router_config
from fleet_router.config import RouterConfig
from fleet_wire import endpoints as wire
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, Endpoints
from tests.fleet_operator.world import NAMESPACE, World, play

REQUIRED = {
    "Endpoints": {"fleet", "namespace"},
    "Endpoint": {"name", "uid", "address", "http_port", "agent_port", "role", "tier", "revision", "compat"},
    "Split": {"tier", "revision", "percent"},
    "AtZero": {"tier"},
    "AbsentWorker": {"uid", "tier"},
    "RouterConfig": {"fleet", "served_name"},
    "TierRule": {"tier"},
    "Cascade": {"tiers"},
    "SloClass": {"name"},
}
"""A field more would be one that an older operator does not write."""
WORDS = {"role": {"prefill", "decode"}, "state": {"serving", "held", "draining"}, "resume": {"off", "prefill", "replay"}}
"""What the operator says by itself: a word more would be one that routers of before refuse, and with it the document. Other words
are the user's, who changes the routers with them."""


def schemas() -> dict[str, dict[str, Any]]:
    return {name: made for kind in (Endpoints, RouterConfig) for name, made in msgspec.json.schema_components([kind])[1].items()}


def test_no_field_became_necessary():
    found = {name: set(made.get("required", ())) for name, made in schemas().items()}
    assert {name: fields for name, fields in found.items() if fields} == REQUIRED


@pytest.mark.parametrize("field", WORDS)
def test_no_word_was_added_that_routers_of_before_refuse(field: str):
    told = [set(made["properties"][field]["enum"]) for made in schemas().values() if field in made["properties"]]
    assert told
    assert all(words == WORDS[field] for words in told)


def test_fields_of_a_newer_operator_are_passed_over():
    async def scenario(world: World) -> None:
        (document,) = [one for one in await world.store.list(CONFIG_MAP, NAMESPACE) if ENDPOINTS_KEY in one["data"]]
        for key, decode in ((ENDPOINTS_KEY, wire.decode), (ROUTER_CONFIG_KEY, router_config.decode)):
            plain = msgspec.json.decode(document["data"][key])
            newer = msgspec.json.encode(with_more(plain))
            assert decode(newer) == decode(document["data"][key])
            assert b"tomorrow" in newer

    play(scenario)


def with_more(value: Any) -> Any:
    """A field that nobody knows, in every object with fields; those that map names are empty here."""
    if isinstance(value, dict):
        return {**{key: with_more(item) for key, item in value.items()}, "tomorrow": {"a": [1]}} if value else value
    return [with_more(item) for item in value] if isinstance(value, list) else value

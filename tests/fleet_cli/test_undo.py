"""`fleet rollout undo` of fleets with adapters, prefetching, keys and tiers that have a model of their own: what it writes is a
spec that the API server takes, that gives the old revision again, and that takes nothing along that was no part of it."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_api.validate import validate
from fleet_cli.rollout.history import returned
from fleet_operator.render.revision import revision_inputs
from tests.fleet_operator.world import manifest

CPU = {"accelerator": {"type": "cpu"}}
HUB = {"source": "hf://o/n"}


def tier(name: str = "t", **more: Any) -> dict[str, Any]:
    return {"name": name, **CPU, **more}


def inputs(fleet: dict[str, Any], name: str = "t") -> dict[str, Any]:
    parsed = parse_fleet(fleet)
    return revision_inputs(parsed, parsed.tier(name))


def undone(old: dict[str, Any], new: dict[str, Any], name: str = "t") -> dict[str, Any]:
    """The spec after an undo; it is accepted, and gives the old revision."""
    back = returned(new, name, inputs(old, name))
    assert validate(back) == []
    assert inputs(back, name) == inputs(old, name)
    spec: dict[str, Any] = back["spec"]
    return spec


def adapter(name: str, source: str) -> dict[str, str]:
    return {"name": name, "source": source}


def test_adapters_stay_they_belong_to_no_revision() -> None:
    """Incident: an undo took all adapters out of the spec, and requests for them were refused."""
    adapters = [adapter("a", "hf://o/a"), adapter("b", "hf://o/b")]
    new = manifest(model={**HUB, "adapters": adapters}, engine={"maxBatch": 3})
    assert undone(manifest(model=HUB), new)["model"] == {**HUB, "adapters": adapters}
    one = manifest(model={**HUB, "adapters": adapters[:1]})
    assert undone(one, new)["model"]["adapters"] == adapters


def test_adapters_that_lie_below_another_model_cannot_stay() -> None:
    adapters = [adapter("a", "hf://o/a"), adapter("b", "file:///new/b")]
    new = manifest(model={"source": "file:///new", "adapters": adapters})
    assert undone(manifest(model={"source": "file:///old"}), new)["model"] == {"source": "file:///old", "adapters": adapters[:1]}


def test_how_nodes_fetch_stays() -> None:
    cache = {"type": "nodeLocal", "path": "/c"}
    new = manifest(model={**HUB, "revision": "v2", "cache": {**cache, "prefetch": {"parallel": 2}}})
    found = undone(manifest(model={**HUB, "revision": "v1", "cache": cache}), new)["model"]
    assert found == {**HUB, "revision": "v1", "cache": {**cache, "prefetch": {"parallel": 2}}}


ROUTED: dict[str, Any] = {"routing": {"cascade": {"tiers": ["small", "large"]}}}


def two(own: dict[str, str], **more: Any) -> dict[str, Any]:
    return manifest(tiers=[tier("small"), tier("large", model=own)], **ROUTED, **more)


def test_a_model_of_a_tiers_own_goes_back_and_no_other_tier_gets_it() -> None:
    """Incident: the large model became spec.model: the small tier was rolled out with it, and the large one kept the bad one."""
    old, new = two({"source": "hf://o/large", "revision": "v1"}), two({"source": "hf://o/large", "revision": "v2"})
    found = undone(old, new, "large")
    assert found["model"] == new["spec"]["model"]
    assert found["tiers"][1]["model"] == {"source": "hf://o/large", "revision": "v1"}
    assert found["tiers"][0] == new["spec"]["tiers"][0]


def test_an_undo_of_a_tier_with_the_fleets_model_leaves_the_others_alone() -> None:
    old = two({"source": "file:///large"}, model={"source": "file:///a"})
    new = two({"source": "file:///large"}, model={"source": "file:///b"})
    found = undone(old, new, "small")
    assert found["model"] == {"source": "file:///a"}
    assert found["tiers"][1]["model"] == {"source": "file:///large"}


def test_a_token_and_a_cache_that_other_tiers_need_stay() -> None:
    """Of a tier whose model comes from a folder, neither is a part of the revision."""
    model = {**HUB, "tokenSecretRef": {"name": "hub"}, "cache": {"type": "pvc", "claim": "c"}}
    old, new = two({"source": "file:///v1"}, model=model), two({"source": "file:///v2"}, model=model)
    assert undone(old, new, "large")["model"] == model


def key(name: str) -> dict[str, Any]:
    return {"peerKey": {"secretRef": {"name": name, "key": "k"}}}


@pytest.mark.parametrize(
    ("old", "new", "after"),
    [
        pytest.param(key("one"), key("two"), key("one"), id="another"),
        pytest.param({}, key("two"), {}, id="named-since"),
        pytest.param(key("one"), {}, key("one"), id="taken-away-since"),
        pytest.param(
            {"engine": {"type": "vllm"}},
            {"engine": {"type": "vllm", "maxBatch": 3}, **key("two")},
            key("two"),
            id="no-part-of-it",
        ),
    ],
)
def test_a_key_goes_back_where_it_is_part_of_the_revision(
    old: dict[str, Any], new: dict[str, Any], after: dict[str, Any]
) -> None:
    """Incident: it was written into the tier, where no field is called so, and the fleet's own stayed."""
    found = undone(manifest(**old), manifest(**new))
    assert {part: value for part, value in found.items() if part == "peerKey"} == after

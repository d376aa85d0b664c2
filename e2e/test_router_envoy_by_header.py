"""The Endpoint Picker behind an Envoy that goes wherever the picker's header says (ORIGINAL_DST), as Envoy AI Gateway configures
it: that header is one address there, and of who served nothing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.envoy_picker import DESTINATION, config
from e2e.test_router_envoy import Gateway, behind

pytestmark = pytest.mark.timeout(300)


def by_header(*given: Any, **more: Any) -> dict[str, Any]:
    """Envoy's configuration."""
    made = config(*given, **more)
    pool, filters = (
        made["static_resources"]["clusters"][0],
        made["static_resources"]["listeners"][0]["filter_chains"][0]["filters"],
    )
    del pool["load_balancing_policy"], pool["load_assignment"]
    pool |= {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
    pool["original_dst_lb_config"] = {"use_http_header": True, "http_header_name": DESTINATION}
    del filters[0]["typed_config"]["http_filters"][0]["typed_config"]["metadata_options"]
    return made


def test_a_gateway_that_takes_one_endpoint_is_told_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was told two more to fall back to, and found nobody there: each request was 503, and counted against a worker."""

    async def go(at: Gateway) -> None:
        async with at.client() as client:
            for i in range(6):
                got = await client.post("/v1/completions", json={"model": "m", "prompt": f"{i} short"})
                assert got.status_code == 200, got.text
        await at.idle()
        assert await at.metric('fleet_router_revision_errors_total{tier="t",revision="r"}') == 0

    monkeypatch.setattr("e2e.test_router_envoy.config", by_header)
    behind(go, tmp_path, decode=3)

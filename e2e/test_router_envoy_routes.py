"""The Endpoint Picker behind an Envoy that chose its route by a header that no worker is to see."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from e2e.envoy_picker import config
from e2e.test_router_envoy import Gateway, behind

pytestmark = pytest.mark.timeout(300)


def by_session(*given: Any, **more: Any) -> dict[str, Any]:
    """Envoy's configuration: whoever has no session comes to another backend, as by an HTTPRoute with `matches.headers`."""
    made = config(*given, **more)
    manager = made["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    mine = copy.deepcopy(route)
    mine["match"]["headers"] = [{"name": "x-session-id", "present_match": True}]
    host["routes"] = [mine, {"match": {"prefix": "/"}, "direct_response": {"status": 404}}]
    return made


@pytest.mark.parametrize("body", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
def test_a_request_stays_on_the_route_on_which_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str):
    """Envoy was told to look for its route once more, when the headers by which it had been found were gone."""

    async def go(at: Gateway) -> None:
        async with at.client() as client:
            got = await client.post("/v1/completions", json={"model": "m", "prompt": "short"}, headers={"x-session-id": "s"})
            assert got.status_code == 200, got.text
        assert "x-session-id" not in {name for worker in at.decode for one in worker.asked() for name in one}

    monkeypatch.setattr("e2e.test_router_envoy.config", by_session)
    behind(go, tmp_path, body=body)

"""Admission as users meet it: keys that are reloaded, a whole fleet with tenants.

Key reload runs on a real router process in front of emulated workers, isolation between tenants on real engines. Overload and
fairness: `test_router_overload.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.bench.proxies import ours, workers
from e2e.emulated.fleet import log_of, stumbles
from e2e.fleet_up import END_S, READY_S, free_port, running
from e2e.test_up import finished
from fleet_cli.up.bundled import bundled_manifest, tiny_model
from fleet_router.config import RouterConfig, SloClass

pytestmark = pytest.mark.timeout(400)
WORKERS = ["127.85.0.1:8000", "127.85.0.2:8000"]
SLOTS_EACH = 4
BATCH = (SloClass(name="batch", ttft_budget_s=30.0),)
CONFIG = RouterConfig(fleet="bench", served_name="tiny", worker_slots=SLOTS_EACH, classes=BATCH, policy="leastLoad")


def key_of(name: str) -> str:
    return "sk-" + hashlib.sha256(f"e2e {name}".encode()).hexdigest()


def tenants_file(path: Path, **tenants: dict[str, Any]) -> Path:
    rows = [
        {"name": name, "keys": ["sha256:" + hashlib.sha256(key_of(name).encode()).hexdigest()], **more}
        for name, more in tenants.items()
    ]
    path.write_text(json.dumps({"salt": "e2e salt " * 5, "tenants": rows}))
    return path


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(name)}"}


@contextmanager
def router(tmp_path: Path, **tenants: dict[str, Any]) -> Iterator[str]:
    """URL of a router process with two workers."""
    file = tenants_file(tmp_path / "tenants.json", **tenants)
    with workers(WORKERS, tmp_path), ours("ours", "127.85.1.1:8080", [], WORKERS, tmp_path, CONFIG, file) as proxy:
        yield f"http://{proxy.address}"
    assert (odd := stumbles(log_of(tmp_path, proxy.address))) == [], odd


def test_s1_keys_are_reloaded_and_a_revoked_one_is_nobodys(tmp_path: Path):
    with router(tmp_path, acme={}, other={}) as url, httpx.Client(base_url=url, trust_env=False) as client:

        def status(name: str) -> int:
            return client.get("/v1/models", headers=bearer(name)).status_code

        assert [status("acme"), status("other"), status("new")] == [200, 200, 401]
        tenants_file(tmp_path / "tenants.json", other={}, new={})
        end = time.monotonic() + 10
        while status("new") != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert [status("acme"), status("other")] == [401, 200]
        (tmp_path / "tenants.json").write_text("{")
        end = time.monotonic() + 10
        while "fleet_router_follow_errors_total 0" in client.get("/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert [status("acme"), status("other")] == [401, 200]  # the last good file stays in force
        log = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert '"tenants":2' in log
        assert not any(key_of(name) in log for name in ("acme", "other", "new"))


@pytest.fixture
def tenants_fleet(tmp_path: Path) -> list[str]:
    """Arguments of `fleet up` for a fleet with two tenants."""
    manifest = bundled_manifest(tiny_model())
    manifest["spec"] |= {
        "tenants": {"secretRef": {"name": "tenants"}},
        "classes": [{"name": "interactive", "priority": 100, "slo": {"ttft": {"p99": "30s"}}}],
        "limits": {"runawayPatterns": "default"},
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(manifest))
    file = tenants_file(tmp_path / "t.json", acme={"class": "interactive", "requestsPerSecond": 100}, other={})
    return [str(path), "--tenants", str(file), "--port", str(free_port()), "--state", str(tmp_path / "state")]


def test_fleet_up_proves_a_fleet_with_tenants(tenants_fleet: list[str]):
    done = finished("--once", *tenants_fleet)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "KV hand-off: KV moved" in done.stdout
    assert "sk-" not in done.stdout + done.stderr


def test_s2_a_tenant_finds_its_own_prefixes_and_nobody_elses(tenants_fleet: list[str]):
    with running(*tenants_fleet) as fleet:
        fleet.until("authorization: Bearer KEY")
        url = f"http://127.0.0.1:{tenants_fleet[tenants_fleet.index('--port') + 1]}"
        prompt = "a long prompt of one tenant that must stay its own " * 12
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}

        def cached(name: str) -> int:
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=bearer(name), timeout=READY_S + END_S)
            assert answer.status_code == 200, answer.text
            assert ("x-ratelimit-limit-requests" in answer.headers) == (name == "acme")
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        cached("acme")
        again = max(cached("acme") for _ in range(4))
        assert again > 0
        assert cached("other") == 0
        text = httpx.get(f"{url}/metrics").text
        assert 'fleet_router_tenant_tokens_total{tenant="acme",direction="output"} 20' in text
        assert key_of("acme") not in text


PROBES = int(os.environ.get("FLEET_S2_PROBES", "120"))
"""Of each kind of prober; the list says 500, and of 1,200 its bound of 0.05 is three standard errors (`make e2e-router-full`)."""


def auc(hits: list[float], misses: list[float]) -> float:
    """How often a hit is faster than a miss: 0.5 tells nothing, 1.0 everything."""
    return sum((hit < miss) + 0.5 * (hit == miss) for hit in hits for miss in misses) / (len(hits) * len(misses))


@pytest.mark.timeout(120 + 3 * PROBES)
def test_s2_time_tells_a_tenant_of_its_own_prefixes_and_of_nobody_elses(tenants_fleet: list[str]):
    """A prober asks for prompts of which every other one was asked for by the victim a moment ago, and looks at the clock. Stage
    one: inside one tenant the clock tells which. Stage two: across tenants it does not. The bound across is the list's 0.05, or
    three standard errors where the probes are fewer."""
    with running(*tenants_fleet) as fleet:
        fleet.until("authorization: Bearer KEY")
        url = f"http://127.0.0.1:{tenants_fleet[tenants_fleet.index('--port') + 1]}"
        numbers = random.Random(11)

        with httpx.Client(base_url=url, timeout=READY_S + END_S, trust_env=False) as client:

            def took(name: str, prompt: list[int]) -> float:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
                begun = time.perf_counter()
                answer = client.post("/v1/completions", json=body, headers=bearer(name))
                assert answer.status_code == 200, answer.text
                return time.perf_counter() - begun

            def probed(victim: str, prober: str) -> tuple[list[float], list[float]]:
                hits: list[float] = []
                misses: list[float] = []
                for turn in range(PROBES):
                    prompt = [numbers.randrange(10, 900) for _ in range(900)]
                    other = [numbers.randrange(10, 900) for _ in range(900)]
                    took(victim, prompt if turn % 2 else other)  # the machine has done the same before either probe
                    (hits if turn % 2 else misses).append(took(prober, prompt))
                return hits, misses

            took("acme", [5] * 900)
            inside, across = auc(*probed("acme", "acme")), auc(*probed("acme", "other"))
    error = math.sqrt((PROBES + 1) / (12 * (PROBES / 2) ** 2))
    print(f"AUC inside {inside:.3f}, across {across:.3f}; one standard error {error:.3f}")
    assert inside > 0.9
    assert abs(across - 0.5) <= max(0.05, 3 * error)

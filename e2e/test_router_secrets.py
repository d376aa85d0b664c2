"""S5 in a cluster: what users send and what their Secrets hold stands in nothing that others may read: objects of the API other
than the Secrets, events, status, metrics, logs of operator, routers and workers. The router's own part, with spans and records,
is in test_router_explain.py."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.fleet import Fleet, manifest
from fleet_cli.up.bundled import tiny_model

KEY, SALT, TOKEN = "sk-canary-key-41c7", "canary-salt-90de" * 3, "hf_canary-token-7a15"
PROMPT, WRONG = "canary-prompt-63fb", "sk-canary-wrong-2e08"
HASH = hashlib.sha256(KEY.encode()).hexdigest()
CANARIES = ("canary-key", "canary-salt", "canary-token", "canary-prompt", "canary-wrong", HASH)
KINDS = (
    "inferencefleets,workerpools,pods,deployments,replicasets,configmaps,services,controllerrevisions,poddisruptionbudgets,"
    "roles,rolebindings,serviceaccounts,networkpolicies,endpointslices,events,events.events.k8s.io"
)
LONG = " that is long enough for a prefill worker" * 16
pytestmark = pytest.mark.timeout(400)


def secrets() -> list[dict[str, Any]]:
    tenants = {"salt": SALT, "tenants": [{"name": "acme", "keys": [f"sha256:{HASH}"], "requestsPerSecond": 50}]}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
        for name, data in {"tenants": {"tenants.json": json.dumps(tenants)}, "hub": {"token": TOKEN}}.items()
    ]


def with_tenants(namespace: str) -> dict[str, Any]:
    made = manifest(namespace, tiny_model())
    made["spec"]["tiers"][0] |= {"ratio": {"prefill": 1, "decode": 1, "min": "1:1", "max": "1:1"}}
    made["spec"] |= {"scaling": {"mode": "manual"}, "tenants": {"secretRef": {"name": "tenants"}}}
    return made


def with_token(namespace: str) -> dict[str, Any]:
    """Its model is nowhere: the workers say so, and the operator says what they say."""
    made = with_tenants(namespace)
    made["metadata"]["name"] = "hub"
    made["spec"]["model"] = {
        "source": "hf://inferencefleet-e2e/is-not-there", "servedName": "tiny", "tokenSecretRef": {"name": "hub", "key": "token"},
    }  # fmt: skip
    return made


def asked(url: str, key: str, body: dict[str, Any] | bytes, path: str = "/v1/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return httpx.post(f"{url}{path}", content=content, headers=headers, timeout=60, trust_env=False)


def use(fleet: Fleet) -> dict[str, int]:
    """Good and bad requests; status codes by what was wrong."""
    url, good = fleet.router(), {"model": "tiny", "prompt": PROMPT + LONG, "max_tokens": 4}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=good | {"stream": True, "max_tokens": 400},
        headers={"authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False,
    ) as left:  # fmt: skip
        next(left.iter_raw())
    return {
        "nothing": asked(url, KEY, good).status_code,
        "key": asked(url, WRONG, good).status_code,
        "json": asked(url, KEY, b'{"prompt": "' + PROMPT.encode()).status_code,
        "type": asked(url, KEY, good | {"max_tokens": PROMPT}).status_code,
        "field": asked(url, KEY, chat | {"messages": PROMPT}, "/v1/chat/completions").status_code,
        "chat": asked(url, KEY, chat, "/v1/chat/completions").status_code,
    }


def shown(fleet: Fleet, nodes: Path, operator_port: int) -> dict[str, str]:
    """Everything that somebody without the right to read Secrets sees, by where it stands."""
    kinds = {kind: fleet.kubectl("get", kind, "-o", "yaml", "--show-managed-fields") for kind in KINDS.split(",")}
    names = {pod["metadata"]["name"] for pod in fleet.objects("pods")}
    logs = [path for path in nodes.glob("*/logs/*/*.log") if path.parent.name in names]
    assert {path.parent.name for path in logs} == names
    router = fleet.router().removesuffix(":8080")
    metrics = {url: httpx.get(f"{url}/metrics", trust_env=False).text for url in (f"http://127.0.0.1:{operator_port}",)}
    metrics["the router's metrics"] = _first_metrics([f"{router}:8081", f"{router}:8080"])
    told = {str(path.relative_to(nodes)): path.read_text(errors="replace") for path in logs}
    return kinds | told | metrics | {"the operator's log": fleet.operator.tail(10_000_000)}


def _first_metrics(urls: list[str]) -> str:
    """Where a router has a port for it, it stands there."""
    for url in urls:
        with suppress(httpx.HTTPError):
            answer = httpx.get(f"{url}/metrics", trust_env=False, timeout=10)
            if answer.status_code == 200:
                return answer.text
    raise AssertionError(f"no metrics at {urls}")


def test_s5_nothing_of_secrets_and_prompts_is_in_the_cluster(fleet: Fleet, gpu_nodes: Path, operator_port: int):
    """Stage one: keys open, prompts are served, the token reaches a worker that fails with it. Stage two: nobody sees them."""
    for one in secrets():
        fleet.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(one))
    fleet.apply(with_tenants(fleet.namespace))
    fleet.wait_serving(1, 1)
    fleet.wait("keys are known", lambda: asked(fleet.router(), KEY, {"model": "tiny", "prompt": "x"}).status_code == 200, 30)
    assert use(fleet) == {"nothing": 200, "key": 401, "json": 400, "type": 400, "field": 400, "chat": 200}
    fleet.apply(with_token(fleet.namespace))
    fleet.wait("the failing worker is told", lambda: "inferencefleet-e2e/is-not-there" in _events(fleet), 120)
    seen = shown(fleet, gpu_nodes, operator_port)
    assert "fleet_router_requests_total" in seen["the router's metrics"]
    leaks = {f"{canary} in {where}" for where, text in seen.items() for canary in CANARIES if canary in text}
    assert leaks == set()
    fleet.kubectl("delete", "ifleet", "hub", "--timeout=60s")
    fleet.delete_and_leave_nothing()


def _events(fleet: Fleet) -> str:
    """With what the operator says of the fleet that fails."""
    status = fleet.kubectl("get", "ifleet", "hub", "-o", "yaml").partition("status:")[2]
    return fleet.kubectl("get", "events", "-o", "yaml") + status

"""Admission on a real API server: bad specs are refused in words, risks are told, nothing depends on the webhook alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from aiohttp import web
from aiohttp.typedefs import Handler

from e2e.kube.service import free_ports
from e2e.operators import SYSTEM, Plane, fleet, operator, plane
from fleet_operator.certs.issue import carry_out
from fleet_operator.certs.keeper import Keeper, Place
from fleet_operator.certs.plan import Lifetimes
from fleet_operator.cluster.kube import KubeCluster
from fleet_operator.webhook.manifests import configurations
from fleet_operator.webhook.server import admission_app, admission_server

pytestmark = pytest.mark.timeout(300)
BAD = {"engine": {"type": "vllm", "args": ["--config", "/etc/vllm.yaml"]}}
CHANGED_BY = "inferencefleet.io/changed-by"


@pytest.fixture(scope="module")
def served() -> Iterator[Plane]:
    with plane() as made:
        yield made


def install(served: Plane, port: int, failure_policy: str, host: str = "127.0.0.1") -> None:
    made = configurations({"url": f"https://{host}:{port}"}, failure_policy=failure_policy)
    served.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(made))


def apply(served: Plane, manifest: str, *flags: str) -> tuple[int, str]:
    done = served.kubectl("apply", "--server-side", *flags, "-f", "-", stdin=manifest, check=False)
    return done.returncode, done.stdout + done.stderr


def get(served: Plane, namespace: str, name: str) -> dict[str, Any]:
    return served.get(f"/apis/inferencefleet.io/v1alpha1/namespaces/{namespace}/inferencefleets/{name}")


def condition(served: Plane, namespace: str, name: str, kind: str) -> dict[str, Any]:
    conditions = (get(served, namespace, name).get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == kind), {})


def test_the_webhook_refuses_warns_and_is_never_the_only_guard(served: Plane):
    """One life: with the webhook, without the operator, and with it again."""
    served.kubectl("create", "namespace", "adm")
    account = served.account("operator-a")
    (port,) = free_ports(1)
    install(served, port, "Ignore")
    flags = ("--webhook-port", str(port), "--webhook-name", "127.0.0.1", "--installation", "here")
    with operator(served, "operator", account, *flags) as one:
        served.wait("ready", one.up, 60)
        served.wait("the webhook", lambda: refuses(served), 60)
        with_the_webhook(served)
        assert b"PRIVATE KEY" not in one.service.log.read_bytes()
    without_the_operator(served)
    with operator(served, "operator-2", account, *flags) as one:
        served.wait("ready", one.up, 60)
        served.wait("Accepted=False", lambda: condition(served, "adm", "good", "Accepted").get("status") == "False", 30)
        assert "--config" in condition(served, "adm", "good", "Accepted")["message"]
        assert pools(served) == 2  # what ran goes on
        served.wait("the webhook", lambda: refuses(served), 60)
        assert apply(served, fleet("adm", "good"), "--force-conflicts")[0] == 0
        served.wait("accepted again", lambda: condition(served, "adm", "good", "Accepted").get("status") == "True", 30)


def refuses(served: Plane) -> bool:
    code, words = apply(served, fleet("adm", "bad", **BAD), "--dry-run=server")
    return code != 0 and "--config" in words


def pools(served: Plane) -> int:
    return len(served.get("/apis/inferencefleet.io/v1alpha1/namespaces/adm/workerpools")["items"])


def with_the_webhook(served: Plane) -> None:
    code, words = apply(served, fleet("adm", "bad", **BAD))
    assert code != 0
    assert 'admission webhook "fleet.inferencefleet.io" denied the request' in words
    assert 'InferenceFleet.inferencefleet.io "bad" is invalid: spec.engine.args[0]: Forbidden: --config' in words
    assert not served.exists("/apis/inferencefleet.io/v1alpha1/namespaces/adm/inferencefleets/bad")

    risky = fleet("adm", "risky", engine={"type": "vllm", "image": "vllm:latest"})
    code, words = apply(served, risky)
    assert code == 0
    assert "Warning: spec.engine.image: vllm:latest may change" in words

    # who changed the spec, and a second diff that is empty
    assert apply(served, fleet("adm", "good"))[0] == 0
    assert get(served, "adm", "good")["metadata"]["annotations"][CHANGED_BY] == "admin"
    diff = served.kubectl("diff", "--server-side", "-f", "-", stdin=fleet("adm", "good"), check=False)
    assert (diff.returncode, diff.stdout) == (0, "")
    version = get(served, "adm", "good")["metadata"]["resourceVersion"]
    served.wait("status", lambda: condition(served, "adm", "good", "Accepted").get("status") == "True", 30)
    assert apply(served, fleet("adm", "good"))[0] == 0
    someone = ("--as", "bob", "--as-group", "system:masters")
    served.kubectl(
        *someone, "annotate", "--overwrite", "ifleet", "good", "-n", "adm", f"{CHANGED_BY}=root"
    )  # nobody can forge it
    assert get(served, "adm", "good")["metadata"]["annotations"][CHANGED_BY] == "admin"
    served.kubectl(*someone, "patch", "ifleet", "good", "-n", "adm", "--type=merge", "-p", '{"spec":{"routing":{"replicas":2}}}')
    assert get(served, "adm", "good")["metadata"]["annotations"][CHANGED_BY] == "bob"
    assert get(served, "adm", "good")["metadata"]["generation"] == 2
    assert version

    served.wait("pools", lambda: pools(served) == 4, 30)
    found = served.get("/apis/inferencefleet.io/v1alpha1/namespaces/adm/workerpools")["items"]
    (pool,) = [p["metadata"]["name"] for p in found if p["spec"]["fleet"] == "good" and p["spec"]["role"] == "decode"]
    done = served.kubectl("scale", "wpool", pool, "-n", "adm", "--replicas=99", check=False)
    assert done.returncode != 0
    assert "between 1 (minReplicas) and 4 (maxReplicas) workers" in done.stderr
    served.kubectl("scale", "wpool", pool, "-n", "adm", "--replicas=3")
    served.kubectl("delete", "ifleet", "risky", "-n", "adm")
    served.wait("its pools gone", lambda: pools(served) == 2, 90)  # the garbage collector looks for new kinds each 30 s


def without_the_operator(served: Plane) -> None:
    """A fleet can still be applied; what the webhook would have refused is stored."""
    begun = time.monotonic()
    assert apply(served, fleet("adm", "later"))[0] == 0
    assert time.monotonic() - begun < 15
    served.kubectl("delete", "ifleet", "later", "-n", "adm")
    code, words = apply(served, fleet("adm", "good", **BAD), "--force-conflicts")
    assert code == 0, words


LIFE = Lifetimes(authority_s=30.0, serving_s=12.0, settle_s=1.2)


def test_certificates_are_rotated_under_load_without_one_failure(served: Plane, monkeypatch: pytest.MonkeyPatch):
    """failurePolicy Fail: one handshake that is not trusted is one failed apply. Authorities of 30 s, certificates of 12 s, and
    every review on a connection of its own, so that the API server shakes hands again and again."""
    served.kubectl("create", "namespace", "rot")
    served.kubectl("delete", "mutatingwebhookconfiguration,validatingwebhookconfiguration", "--all")
    served.kubectl("create", "secret", "generic", "rotated", "-n", SYSTEM)
    steps: list[str] = []
    failures: list[str] = []
    monkeypatch.setattr("fleet_operator.certs.keeper.carry_out", noting(steps))
    done = asyncio.run(rotate(served, failures))
    assert failures == []
    assert done >= 200
    assert steps.count("authority") >= 2, steps
    assert steps.count("prune") >= 1, steps
    assert steps.count("serving") >= 3, steps


@web.middleware
async def last_of_its_connection(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    response.force_close()
    return response


async def rotate(served: Plane, failures: list[str]) -> int:
    (port,) = free_ports(1)
    cluster = await KubeCluster.connect(served.kubeconfig)
    place = Place(SYSTEM, "rotated", "inferencefleet", frozenset({"127.0.0.1"}), LIFE, look_s=0.3)
    keeper = Keeper(cluster, place)
    await asyncio.to_thread(install, served, port, "Ignore")
    keeping = asyncio.create_task(keeper.run())
    app = admission_app(cluster)
    app.middlewares.append(last_of_its_connection)
    try:
        await keeper.ready.wait()
        async with admission_server(app, keeper.context, port, "127.0.0.1"):
            await asyncio.to_thread(served.wait, "the webhook", lambda: refuses_in(served, "rot"), 30)
            await asyncio.to_thread(fail_closed, served)
            return await load(served, failures, seconds=55.0)
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await cluster.close()


def refuses_in(served: Plane, namespace: str) -> bool:
    code, words = apply(served, fleet(namespace, "bad", **BAD), "--dry-run=server")
    return code != 0 and "--config" in words


def fail_closed(served: Plane) -> None:
    for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
        found = json.loads(served.kubectl("get", kind, "inferencefleet", "-o", "json").stdout)
        patch = [
            {"op": "replace", "path": f"/webhooks/{index}/failurePolicy", "value": "Fail"}
            for index in range(len(found["webhooks"]))
        ]
        served.kubectl("patch", kind, "inferencefleet", "--type=json", "-p", json.dumps(patch))


def noting(steps: list[str]) -> Any:
    """`carry_out` that writes down which steps it takes."""

    def noted(work: Any, *rest: Any) -> Any:
        steps.append(work.step)
        return carry_out(work, *rest)

    return noted


async def load(served: Plane, failures: list[str], seconds: float) -> int:
    """Applies, one after the other, each of which the webhooks judge; the number that succeeded."""
    url = f"{served.url}/apis/inferencefleet.io/v1alpha1/namespaces/rot/inferencefleets/f"
    headers = {"Authorization": f"Bearer {served.token}", "Content-Type": "application/apply-patch+yaml"}
    done, end = 0, time.monotonic() + seconds
    trust = ssl.create_default_context(cafile=str(served.ca_file))
    async with httpx.AsyncClient(verify=trust, headers=headers, timeout=20) as client:
        while time.monotonic() < end:
            manifest = fleet("rot", "f", limits={"maxOutputTokens": 1 + done % 1000})
            answer = await client.patch(url, params={"fieldManager": "load", "force": "true"}, content=manifest)
            if answer.status_code >= 300:
                failures.append(answer.text)
            done += answer.status_code < 300
            await asyncio.sleep(0.05)
    return done


def test_secrets_are_reachable_by_one_name_only(served: Plane):
    """The operator's rights: its own Secret, and no other, and no list; where fleets are it makes their keys and sees none."""
    asked = ["auth", "can-i", "--as", f"system:serviceaccount:{SYSTEM}:operator-a", "-n", SYSTEM]
    for question, expected in [
        (["get", "secret/inferencefleet-webhook"], "yes"),
        (["patch", "secret/inferencefleet-webhook"], "yes"),
        (["get", "secret/other"], "no"),
        (["list", "secrets"], "no"),
        (["watch", "secrets"], "no"),
        (["create", "secrets"], "yes"),
        (["patch", "secret/other"], "no"),
        (["delete", "secret/other"], "no"),
        (["delete", "secret/inferencefleet-webhook"], "no"),
    ]:
        assert served.kubectl(*asked, *question, check=False).stdout.strip() == expected, question

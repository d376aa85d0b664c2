"""Several operator processes on a real API server: one writer at a time whatever stops one, and never two owners of a namespace.

Who wrote what is read from the API server's audit log: each operator has a service account of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from e2e.operators import SYSTEM, Operator, Plane, fleet, operator, plane

pytestmark = pytest.mark.timeout(300)
FROZEN_S = 60.0


@pytest.fixture(scope="module")
def audited() -> Iterator[Plane]:
    with plane() as made:
        yield made


@pytest.fixture(scope="module")
def accounts(audited: Plane) -> dict[str, Path]:
    return {name: audited.account(name) for name in ("operator-a", "operator-b")}


def namespaces(audited: Plane, *names: str) -> None:
    for name in names:
        audited.kubectl("create", "namespace", name)
        audited.wait("service account", lambda path=f"/api/v1/namespaces/{name}/serviceaccounts/default": audited.exists(path))


def children(audited: Plane, namespace: str, name: str) -> bool:
    return audited.exists(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}-router")


def lease_holder(audited: Plane, namespace: str, lease: str) -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}"
    try:
        return audited.get(path)["spec"].get("holderIdentity", "")
    except HTTPError as error:  # a claim that is given back is deleted
        if error.code != 404:
            raise
        return ""


def holder(audited: Plane) -> str:
    return lease_holder(audited, SYSTEM, "inferencefleet-operator")


def test_one_writer_at_a_time(audited: Plane, accounts: dict[str, Path]):
    namespaces(audited, "one")
    flags = ("--leader-elect", "--installation", "here", "--namespace", "one")
    with (
        operator(audited, "operator-a", accounts["operator-a"], *flags) as a,
        operator(audited, "operator-b", accounts["operator-b"], *flags) as b,
    ):
        audited.wait("both ready: one leads, one stands by", lambda: a.up() and b.up(), 60)
        audited.wait("a leader", lambda: bool(holder(audited)), 30)
        audited.wait("one leader", lambda: a.metric("fleet_operator_leader") + b.metric("fleet_operator_leader") == 1, 10)
        first, second = (a, b) if a.metric("fleet_operator_leader") else (b, a)
        audited.kubectl("apply", "-f", "-", stdin=fleet("one", "f1"))
        audited.wait("children", lambda: children(audited, "one", "f1"), 30)
        assert audited.writes(first.name)
        assert audited.writes(second.name) == []
        healthy(first, second)

        frozen(audited, first, second)

        with operator(audited, f"{first.name}-again", accounts[first.name], *flags) as again:
            audited.wait("it stands by", again.up, 60)
            noted = len(audited.writes(first.name))
            os.kill(second.service.pid, signal.SIGTERM)
            begun = time.monotonic()
            audited.wait("a hand-over", lambda: again.metric("fleet_operator_leader") == 1, 15)
            assert time.monotonic() - begun < 8, "the lease was not given back"
            audited.kubectl("apply", "-f", "-", stdin=fleet("one", "f3"))
            audited.wait("children", lambda: children(audited, "one", "f3"), 30)
            assert len(audited.writes(first.name)) > noted


def frozen(audited: Plane, first: Operator, second: Operator) -> None:
    """The leader stops for a minute in the middle of work: the other takes over, the first one writes nothing ever again."""
    os.kill(first.service.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    noted = len(audited.writes(first.name, leases=True))
    audited.kubectl("delete", "service", "f1-router", "-n", "one")  # what a stale leader would put back
    audited.kubectl("apply", "-f", "-", stdin=fleet("one", "f2"))
    audited.wait("the other leads", lambda: second.metric("fleet_operator_leader") == 1, 40)
    took_s = time.monotonic() - stopped
    audited.wait("children", lambda: children(audited, "one", "f2"), 30)
    audited.wait("the service", lambda: audited.exists("/api/v1/namespaces/one/services/f1-router"), 30)
    assert took_s >= 4, "the lease was taken before it was over"
    time.sleep(max(0.0, FROZEN_S - (time.monotonic() - stopped)))
    audited.kubectl("delete", "configmap", "f1-router", "-n", "one")
    os.kill(first.service.pid, signal.SIGCONT)
    audited.wait("it ends", lambda: ended(first), 30)
    assert first.service.exit_code() == 3, first.service.tail()
    since = [f"{event['verb']} {event['requestURI']}" for event in audited.writes(first.name, leases=True)[noted:]]
    assert since == []
    audited.wait("the config", lambda: audited.exists("/api/v1/namespaces/one/configmaps/f1-router"), 30)


def ended(one: Operator) -> bool:
    return one.service.exit_code() is not None


def healthy(first: Operator, second: Operator) -> None:
    """What each says about itself."""
    for one in (first, second):
        assert one.get("/healthz").text == "ok"
    assert first.metric('fleet_operator_api_writes_total{kind="Deployment",outcome="ok",verb="create"}') == 1
    assert first.metric('fleet_operator_reconciles_total{outcome="ok"}') >= 1
    assert first.metric("fleet_operator_queue_depth") == 0
    assert first.metric('fleet_operator_namespaces{owner="this"}') == 1
    assert "fleet_operator_reconciles_total{" not in second.get("/metrics").text
    ages = [line for line in second.get("/metrics").text.splitlines() if line.startswith("fleet_operator_watch_age_seconds{")]
    assert len(ages) >= 10
    assert all(float(line.rsplit(" ", 1)[1]) < 120 for line in ages)


def test_two_installations_with_an_overlap(audited: Plane, accounts: dict[str, Path]):
    """Both were told namespace y: the one that came first owns it, the other says so, and serves its own."""
    namespaces(audited, "x", "y", "z")
    for name in "xyz":
        audited.kubectl("apply", "-f", "-", stdin=fleet(name, "f"))
    a_flags = ("--installation", "team-a", "--namespace", "x", "--namespace", "y")
    b_flags = ("--installation", "team-b", "--namespace", "y", "--namespace", "z")
    noted = {name: len(audited.writes(name)) for name in accounts}
    with operator(audited, "a-shard", accounts["operator-a"], *a_flags):
        audited.wait("x and y", lambda: children(audited, "x", "f") and children(audited, "y", "f"), 60)
        with operator(audited, "b-shard", accounts["operator-b"], *b_flags) as b:
            audited.wait("z", lambda: children(audited, "z", "f"), 60)
            audited.wait("it is said", lambda: b"namespace y belongs to installation team-a" in b.service.log.read_bytes(), 30)
            audited.kubectl("delete", "deployment", "f-router", "-n", "y")
            audited.wait("y again", lambda: children(audited, "y", "f"), 60)
            assert b.metric('fleet_operator_namespaces{owner="other"}') == 1
    wrote = {name: {event["objectRef"].get("namespace") for event in audited.writes(name)[noted[name] :]} for name in accounts}
    assert wrote == {"operator-a": {"x", "y"}, "operator-b": {"z"}}


def test_a_namespace_without_a_role_binding_is_served_once_it_has_one(audited: Plane):
    """The operator ended (exit 2) and served the other one neither."""
    namespaces(audited, "m", "n")
    account = "operator-narrow"
    audited.kubectl("create", "serviceaccount", account, "-n", SYSTEM)
    rights = ("--clusterrole", "inferencefleet-operator", f"--serviceaccount={SYSTEM}:{account}")
    audited.kubectl("create", "rolebinding", account, "-n", "m", *rights)
    for name in "mn":
        audited.kubectl("apply", "-f", "-", stdin=fleet(name, "f"))
    mine = audited.service_account_kubeconfig(SYSTEM, account)
    with operator(audited, "narrow", mine, "--namespace", "n", "--namespace", "m") as one:
        audited.wait("m", lambda: children(audited, "m", "f"), 60)
        assert one.metric("fleet_operator_namespaces_closed") == 1
        assert b"namespace n may not be read" in one.service.log.read_bytes()
        assert not children(audited, "n", "f")
        audited.kubectl("create", "rolebinding", account, "-n", "n", *rights)
        audited.wait("n", lambda: children(audited, "n", "f"), 60)
        assert one.metric("fleet_operator_namespaces_closed") == 0
        audited.kubectl("delete", "deployment", "f-router", "-n", "n")
        audited.wait("n again", lambda: children(audited, "n", "f"), 30)


def test_labels_of_namespaces_decide_and_may_change(audited: Plane, accounts: dict[str, Path]):
    namespaces(audited, "p", "q")
    audited.kubectl("label", "namespace", "p", "shard=a")
    audited.kubectl("label", "namespace", "q", "shard=b")
    for name in "pq":
        audited.kubectl("apply", "-f", "-", stdin=fleet(name, "f"))
    with (
        operator(audited, "a-labels", accounts["operator-a"], "--installation", "la", "--namespace-selector", "shard=a"),
        operator(audited, "b-labels", accounts["operator-b"], "--installation", "lb", "--namespace-selector", "shard=b"),
    ):
        audited.wait("p and q", lambda: children(audited, "p", "f") and children(audited, "q", "f"), 60)
        audited.kubectl("label", "--overwrite", "namespace", "p", "shard=b")
        audited.wait("the claim changes hands", lambda: claim(audited, "p") == "lb", 60)
        noted = {name: len(audited.writes(name)) for name in accounts}  # until then the first may go on with what it began
        audited.kubectl("delete", "deployment", "f-router", "-n", "p")
        audited.wait("p again", lambda: children(audited, "p", "f"), 60)
        after = {name: [e["objectRef"].get("namespace") for e in audited.writes(name)[noted[name] :]] for name in accounts}
        assert "p" in after["operator-b"]
        assert "p" not in after["operator-a"]


def claim(audited: Plane, namespace: str) -> str:
    return lease_holder(audited, namespace, "inferencefleet-owner")

"""The Secret with the key that a fleet's pods share, on a real API server: made once, by an operator that may make Secrets and
see none. Stage one: it died at that very write. Stage two: there is one Secret, and what is in it was never changed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from e2e.faultproxy.fixtures import FAMILY, SYSTEM, World
from e2e.faultproxy.lab import Lab, fleet_manifest, path_of, removed, running
from e2e.faultproxy.sweep import settled
from fleet_operator.cluster.interface import FLEET
from fleet_operator.cluster.kinds import SECRET
from fleet_operator.names import MANAGED_BY, MANAGER
from fleet_wire.peerkey import parse_lines

pytestmark = FAMILY


def secrets(lab: Lab) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lab.admin(
        "GET", path_of(SECRET, lab.namespace), labelSelector=f"{MANAGED_BY}={MANAGER}"
    ).json()["items"]
    return found


def key_of(lab: Lab) -> str:
    """Of the one that there is."""
    (found,) = secrets(lab)
    (line,) = parse_lines(base64.b64decode(found["data"]["key"]))
    return line.decode()


def test_it_is_made_once_and_never_touched_again(new_lab: Callable[[], Lab]):
    lab = new_lab()
    running(lab)
    settled(lab)
    made = [str(write) for write in lab.proxy.ledger.writes(carried_out=True) if write.kind == "secrets"]
    assert len(made) == 1, "one write for it"
    first = key_of(lab)
    assert len(bytes.fromhex(first)) == 32
    (found,) = secrets(lab)
    fleet = lab.get(FLEET, "f")
    assert fleet is not None
    assert found["metadata"]["ownerReferences"][0]["uid"] == fleet["metadata"]["uid"]
    mounted = {v["secret"]["secretName"] for pod in lab.pods() for v in pod["spec"]["volumes"] if v["name"] == "fleet-peer-key"}
    assert mounted == {found["metadata"]["name"]}
    assert first not in lab.operator.tail()
    two = f"{first}\n{'n' * 64}\n"  # as operator/README.md has it
    patch = json.dumps({"stringData": {"key": two}})
    lab.plane.kubectl("patch", f"secret/{found['metadata']['name']}", "-n", lab.namespace, "-p", patch)
    lab.kill()
    lab.start()
    lab.scale("decode", 3)
    lab.until("one more worker", lambda: lab.serving(1, 3), 60)
    assert [base64.b64decode(one["data"]["key"]).decode() for one in secrets(lab)] == [two], "the user's next key is there"
    removed(lab)
    lab.until("it went with its fleet", lambda: not secrets(lab))


def test_one_that_was_deleted_comes_back_though_nothing_is_made(new_lab: Callable[[], Lab]):
    """With the first look of an operator that has just begun (of one that runs within five minutes: `LOOK_S`, with
    the clock passed in tests/fleet_operator). While it is there such a question is refused, and changes nothing."""
    lab = new_lab()
    running(lab)
    settled(lab)
    first = key_of(lab)
    (found,) = secrets(lab)
    mark, pods = lab.proxy.ledger.mark(), {pod["metadata"]["uid"] for pod in lab.pods()}
    lab.plane.kubectl("delete", f"secret/{found['metadata']['name']}", "-n", lab.namespace)
    lab.kill()
    lab.start()
    lab.until("another one", lambda: bool(secrets(lab)), 70)
    assert key_of(lab) != first
    lab.kill()
    lab.start()
    lab.until(
        "it was asked for once more", lambda: ("secrets", 409) in [(w.kind, w.status) for w in lab.proxy.ledger.writes(mark)], 70
    )
    written = [write.kind for write in lab.proxy.ledger.writes(mark, carried_out=True)]
    assert written.count("secrets") == 1
    assert set(written) <= {"secrets", "events", "inferencefleets"}, "one write, and what tells of it"
    assert {pod["metadata"]["uid"] for pod in lab.pods()} == pods


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_operator_that_is_killed_at_it_makes_no_second_one(new_lab: Callable[[], Lab], when: Any):
    lab = new_lab()
    running(lab)
    settled(lab)
    kinds = [write.kind for write in lab.proxy.ledger.writes()]
    lab.kill()
    removed(lab)
    lab.until("nothing of it", lambda: not secrets(lab))
    crash = lab.proxy.crash_at(kinds.index("secrets") + 1, when, lab.kill)
    lab.apply(fleet_manifest(lab.namespace))
    lab.start()
    lab.until_without_operator("the operator died", lambda: crash.hit is not None, 60)
    lab.proxy.crash = None
    assert crash.hit is not None
    assert crash.hit.kind == "secrets", f"it died at another write: {crash.hit}"
    there = key_of(lab) if when == "after" else None
    assert when == "after" or not secrets(lab)
    lab.start()
    lab.until("a running fleet", lambda: lab.serving(1, 2), 60)
    assert there in (None, key_of(lab))
    assert len(secrets(lab)) == 1


def test_the_operator_makes_secrets_and_sees_none(fault_world: World, new_lab: Callable[[], Lab]):
    lab = new_lab()
    asked = ["auth", "can-i", "--as", f"system:serviceaccount:{SYSTEM}:inferencefleet-operator", "-n", lab.namespace]
    for verb, expected in (("create", "yes"), *((verb, "no") for verb in ("get", "list", "watch", "patch", "update", "delete"))):
        assert fault_world.plane.kubectl(*asked, verb, "secrets", check=False).stdout.strip() == expected, verb
